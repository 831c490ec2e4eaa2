"""Algorithms: advantages over groups, losses over flat vectors. Importing this registers every algorithm."""

from __future__ import annotations

from cohort.algos import grpo as grpo
from cohort.algos.algorithm import Algorithm, build_algorithm, registered

__all__ = ["Algorithm", "build_algorithm", "registered"]
