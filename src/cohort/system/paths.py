"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """Returns the path with ~ and ~USER replaced by home folders. It stays as it is if there is no such user.

    `Path.expanduser` would raise RuntimeError then, and the user's mistake would look like one of ours.

    >>> str(expand_home("~unknown-user/x"))
    '~unknown-user/x'
    """
    return Path(os.path.expanduser(path))
