"""How samples are brought together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cohort.config.section import Section


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """The order in which rejected groups are replaced and conversations go on."""

    order: Literal["auto", "rounds", "continuous"] = "auto"
    """rounds = when all under way is scored, so that how quick graders are changes no bit; continuous = at once, so
    that a slow grader delays nobody else. auto = rounds on a CPU, continuous on a GPU."""
