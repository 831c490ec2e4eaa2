"""The user's cache folder, which holds what can be fetched or computed again."""

from __future__ import annotations

import os
from pathlib import Path

from cohort.system.paths import expand_home


def cache_root() -> Path:
    """Returns the path of the cache folder: $COHORT_CACHE if set and not empty, else ~/.cache/cohort.

    The folder need not exist.
    """
    return expand_home(os.environ.get("COHORT_CACHE") or "~/.cache/cohort")
