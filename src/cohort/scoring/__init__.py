"""Scoring: runs the graders of tasks, which may be foreign code, in worker processes that can be killed. See `pool`."""
