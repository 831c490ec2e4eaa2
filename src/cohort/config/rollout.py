"""The settings of the rollout: how samples are collected into groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cohort.config.section import Section


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """When rejected groups are replaced and further turns of conversations are sampled."""

    order: Literal["auto", "rounds", "continuous"] = "auto"
    """When rejected groups are replaced and further turns begin: rounds = only after all running samples are scored, so
    that the speed of graders cannot change any result; continuous = at once, so that a slow grader delays only its
    group; auto = rounds on a CPU, continuous on a GPU."""
