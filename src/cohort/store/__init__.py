"""The run directory and everything in it that is read by more than the run itself."""
