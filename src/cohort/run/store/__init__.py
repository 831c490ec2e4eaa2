"""The records of a run: run.db and rollout files, with their writers and readers."""
