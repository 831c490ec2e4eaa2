"""Evaluation: sampling and scoring answers to held-out problems, in a run or alone, and comparing two evaluations."""
