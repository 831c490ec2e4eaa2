"""Old names and what they became: settings (keys of config.yaml and flags) and metrics.

A name that users have in their files and scripts may change; what they have must stay readable. So whoever renames a
setting or a metric adds a line here. The reader of config.yaml and that of run.db apply the table to what earlier
versions wrote; the command line refuses an old flag and names the new one.

    SETTINGS = {"learner.lora_rank": "learner.lora.rank"}     # by dotted name, a whole section too: {"opt": "optim"}
    METRICS = {"kl": "kl/mean"}
"""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, str] = {}
METRICS: dict[str, str] = {}


def current_setting(name: str) -> str:
    """The name that a setting has now.

    >>> current_setting("optim.lr")
    'optim.lr'
    """
    for old, new in SETTINGS.items():
        if name == old or name.startswith(old + "."):
            return new + name.removeprefix(old)
    return name


def current_metric(name: str) -> str:
    """The name that a metric has now."""
    return METRICS.get(name, name)


def former_metrics(name: str) -> list[str]:
    """The names that a metric has had, with its own."""
    return [name, *(old for old, new in METRICS.items() if new == name)]


def with_current_settings(tree: dict[str, Any]) -> dict[str, Any]:
    """A config file's sections with every old key moved to where it is now; a key that is there already stays."""
    for old, new in SETTINGS.items():
        *path, last = old.split(".")
        section = _section(tree, path, make=False)
        if section is None or last not in section:
            continue
        value = section.pop(last)
        if path and not section:  # all of it has moved
            (_section(tree, path[:-1], make=False) or {}).pop(path[-1], None)
        *path, last = new.split(".")
        target = _section(tree, path, make=True)
        if target is not None:
            target.setdefault(last, value)
    return tree


def _section(tree: dict[str, Any], path: list[str], make: bool) -> dict[str, Any] | None:
    """The section at `path`, made where asked for; None where there is none."""
    for part in path:
        inner = tree.setdefault(part, {}) if make else tree.get(part)
        if not isinstance(inner, dict):
            return None
        tree = inner
    return tree
