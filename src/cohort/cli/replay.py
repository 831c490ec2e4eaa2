"""`cohort replay RUN --step N [--algo.x value ...] [--optim.x value ...] [--learner.x value ...] [--json]`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.arguments import read
from cohort.cli.output import table
from cohort.config import flags
from cohort.errors import ConfigError

if TYPE_CHECKING:
    from cohort.inspect.replay import Replayed, Row


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which step, and how its result is told."""

    step: int | None = None
    """The step to do again, counted from 1; needed."""
    json: bool = False
    """One JSON object instead, for programs."""


ABOUT = (
    "Do the update of a step of the run in RUN again, from its stored rollouts and the nearest checkpoint before it. "
    "As it was, it gives the stored metrics, on a CPU to the last bit. With settings of --algo, --optim and --learner, "
    "written as for cohort train, it shows what these change in that one update. The run is only read."
)


def run(args: list[str]) -> None:
    own, settings = _divided(args)
    (where,), options = read("replay", ["RUN"], ABOUT, Options(), own)
    if options.step is None:
        raise ConfigError("--step is missing: cohort replay RUN --step N.")
    from cohort.inspect.replay import replay
    from cohort.logs.jsonlines import finite

    replayed = replay(Path(where), options.step, settings, _progress)
    if options.json:
        print(json.dumps(finite({"run": where, **replayed.to_json()})))
    else:
        print(_report(replayed))


def _divided(args: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words and flags, and the settings."""
    own: list[str] = []
    settings: list[str] = []
    to = own
    for arg in args:
        if arg.startswith("--"):
            to = own if arg in flags.HELP or arg.partition("=")[0] in ("--step", "--json") else settings
        to.append(arg)
    return own, settings


def _progress(text: str) -> None:
    """On stderr, so that stdout is the result."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def _report(replayed: Replayed) -> str:
    lines = [f"step {replayed.step} from {_origin(replayed)}"]
    lines += [f"changed: {name} {old} -> {new}" for name, (old, new) in replayed.changed.items()]
    differing, num_same = replayed.differing, len(replayed.rows) - len(replayed.differing)
    if not differing:
        verdict = "no effect on this step" if replayed.changed else "reproduced exactly"
        lines.append(f"{verdict}: {num_same} metrics are equal to the last bit, {_gist(replayed)}")
    else:
        if not replayed.changed:
            lines.append(f"not reproduced: {len(differing)} of {len(replayed.rows)} metrics differ")
        lines += ["", table(["metric", "stored", "replayed", "difference"], [_cells(row) for row in differing]), ""]
        lines.append(f"equal to the last bit: {num_same} other metrics")
    return "\n".join([*lines, *replayed.notes])


def _gist(replayed: Replayed) -> str:
    return ", ".join(f"{r.name} {_number(r.replayed)}" for r in replayed.rows if r.name in ("loss", "grad_norm", "lr"))


def _origin(replayed: Replayed) -> str:
    base, last = replayed.base, replayed.step - 1
    origin = f"the checkpoint of step {base}" if base else "the initial model"
    if base == last:
        return origin
    return f"{origin}, step {last} re-applied" if base + 1 == last else f"{origin}, steps {base + 1}-{last} re-applied"


def _cells(row: Row) -> list[str]:
    return [row.name, _number(row.stored), _number(row.replayed), _number(row.difference, "+.3g")]


def _number(value: float | None, form: str = ".6g") -> str:
    return "-" if value is None else format(value, form)
