"""The tables of renamed settings (keys of config.yaml and flags) and metrics: old name to new name.

Files and scripts of users contain names that may have changed since. They must stay readable, so a commit that renames
a setting or a metric adds a line here. The readers of config.yaml and run.db translate old names with these tables. The
command line refuses an old flag and names the new one.

    SETTINGS = {"learner.lora_rank": "learner.lora.rank"}     # full names; or a whole section: {"opt": "optim"}
    METRICS = {"kl": "kl/mean"}
"""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, str] = {"turns.workers": "scoring.workers"}
METRICS: dict[str, str] = {}


def get_current_setting_name(name: str) -> str:
    """Returns the present name of a setting, given its present or an old full name, by the table SETTINGS.

    The settings of a renamed section are renamed with it. An unknown name is returned unchanged.

    >>> get_current_setting_name("optim.lr")
    'optim.lr'
    """
    for old, new in SETTINGS.items():
        if name == old or name.startswith(old + "."):
            return new + name.removeprefix(old)
    return name


def get_current_metric_name(name: str) -> str:
    """Returns the present name of a metric, given its present or an old name, by the table METRICS.

    An unknown name is returned unchanged.
    """
    return METRICS.get(name, name)


def list_metric_names(name: str) -> list[str]:
    """Returns a list of the present name `name` of a metric, followed by its old names.

    Whether there is such a metric is not checked.
    """
    return [name, *(old for old, new in METRICS.items() if new == name)]


def move_old_settings(tree: dict[str, Any]) -> dict[str, Any]:
    """Moves every old key in the nested dicts of a config file to its present place. Changes and returns `tree`.

    The table SETTINGS says which keys are old. If the present place already has a value, that value is kept and the old
    one is dropped. A section that becomes empty is removed.
    """
    for old, new in SETTINGS.items():
        *path, last = old.split(".")
        section = _find_section(tree, path, make=False)
        if section is None or last not in section:
            continue
        value = section.pop(last)
        # An old section that is empty now would be refused as an unknown setting.
        if path and not section:
            (_find_section(tree, path[:-1], make=False) or {}).pop(path[-1], None)
        *path, last = new.split(".")
        target = _find_section(tree, path, make=True)
        if target is not None:
            target.setdefault(last, value)
    return tree


def _find_section(tree: dict[str, Any], path: list[str], make: bool) -> dict[str, Any] | None:
    """Returns the dict at `path`, a list of keys, inside the nested dicts of `tree`, not a copy; [] gives `tree`.

    With `make`, missing dicts on the way are created in `tree`. Returns None if there is something else than a dict on
    the way or, without `make`, nothing.
    """
    for part in path:
        inner = tree.setdefault(part, {}) if make else tree.get(part)
        if not isinstance(inner, dict):
            return None
        tree = inner
    return tree
