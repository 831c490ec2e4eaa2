"""Algorithms: advantages over groups, losses over flat vectors."""

from __future__ import annotations

from cohort.algos import families
from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.algos.surrogates import registered

__all__ = ["Algorithm", "build_algorithm", "families", "registered"]
