"""Evaluation: sampling and grading held-out problems, in a run or alone, and comparing two results."""
