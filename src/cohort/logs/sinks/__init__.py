"""Sinks: views that send metrics to another program. Each program's package is imported in one module only."""
