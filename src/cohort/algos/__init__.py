"""Algorithms: advantages of the samples of groups, and losses on flat vectors over tokens."""

from __future__ import annotations

from cohort.algos import families
from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.algos.surrogates import algorithm_names

__all__ = ["Algorithm", "algorithm_names", "build_algorithm", "families"]
