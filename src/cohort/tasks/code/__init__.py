"""The task code: programs that a model writes, run against tests in a sandbox."""
