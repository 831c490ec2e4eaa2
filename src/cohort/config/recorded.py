"""Variants as they were recorded: classes made of the settings in a config file, where their own code is not run.

`explain` and `export` open other people's runs. A task or an algorithm in a file of its own is for them a name
with settings.
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Mapping
from typing import Any

from cohort.config.algos import Policy
from cohort.errors import ConfigError

_MARK = "_recorded_name"  # the class attribute that has the name in the config file


def make_recorded_class(field: str, name: str, settings: Mapping[str, Any]) -> type[Any]:
    """Returns a new dataclass for the variant `name` of the field `field`, with one field per recorded setting.

    An algorithm has the fields of `Policy` with their types; any other field has the type of its recorded value. The
    recorded values are the defaults. Raises a ConfigError for a key that cannot be the name of a field.
    """
    bases = (Policy,) if field == "algo" else ()
    inherited = {f.name for f in dataclasses.fields(Policy)} if bases else set()
    fields: list[Any] = []
    for key, value in settings.items():
        if (
            not isinstance(key, str)
            or not key.isidentifier()
            or keyword.iskeyword(key)
            or key.startswith(("__", _MARK))
        ):
            raise ConfigError(f"{field} has the setting {key!r}, which is no name; restore config.yaml from a copy.")
        if key not in inherited:
            fields.append((key, type(value), dataclasses.field(default_factory=lambda value=value: value)))  # type: ignore[misc]
    short = name.rpartition(":")[2]
    attributes = {_MARK: name} | ({} if bases else {"name": short})
    made: type[Any] = dataclasses.make_dataclass(
        "Recorded", fields, bases=bases, namespace=attributes, frozen=True, kw_only=True
    )
    return made


def get_recorded_name(value: Any) -> str:
    """Returns the name in the config file of a value whose class `make_recorded_class` made; "" for any other value."""
    return str(getattr(type(value), _MARK, ""))
