"""What a run records: run.db and rollout files, and readers for both."""
