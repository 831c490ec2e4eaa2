"""The table of runs: which ones it has, in which order, and what it shows."""
