"""Metrics for other programs: each sink is a view, and its package is imported in its one module only."""
