"""`cohort models`."""

from __future__ import annotations

from dataclasses import dataclass

from cohort.cli.arguments import read
from cohort.cli.output import table


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


def run(args: list[str]) -> None:
    about = "List the models that can be loaded by name. A folder in Hugging Face format can be named too."
    read("models", [], about, Options(), args)
    from cohort.models.catalog import catalog

    rows = [
        [m.name, "ready" if m.state == "available" else f"cohort pull {m.name}", m.size, m.source] for m in catalog()
    ]
    print(table(["model", "state", "size", "source"], rows))
