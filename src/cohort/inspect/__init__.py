"""Tools that look at runs, configs and machines: check, explain, replay, bench, export."""
