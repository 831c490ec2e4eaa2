"""`cohort check RECIPE [--a.b value ...] [--json]`."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from cohort.config import flags, load
from cohort.errors import ConfigError
from cohort.recipes import RECIPES

if TYPE_CHECKING:
    from cohort.inspect.check.findings import Finding

HELP = """usage: cohort check RECIPE [--a.b value ...] [--json]

Check a recipe before it costs anything, on its own model, task and settings and a few real prompts: whether the update
trains what was sampled, whether the reward can be trusted, what memory and time the run will take.

RECIPE and its settings are those of cohort train. One line a check: ok, warn or FAIL. Exit code 1 if one failed.

  --json   One JSON object instead, for programs.

cohort train RECIPE --help lists every setting of a recipe."""


def run(args: list[str]) -> None:
    as_json = "--json" in args
    rest = [arg for arg in args if arg != "--json"]
    if flags.wants_help(rest):
        print(HELP)
        return
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"name a recipe: cohort check RECIPE [--flags]. Recipes: {', '.join(sorted(RECIPES))}.")
    config = load.load(rest[0], rest[1:])
    from cohort.inspect.check.run import check

    found = []
    for finding in check(config, _progress):
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    counts = Counter(f.status for f in found)
    if as_json:
        report = {"recipe": config.recipe, "ok": not counts["FAIL"], "findings": [_record(f) for f in found]}
        print(json.dumps(report, allow_nan=False))
    else:
        print(f"{len(found)} checks: {counts['FAIL']} failed, {counts['warn']} with a warning")
        print("".join(f"{f}\n" for f in found if f.status == "FAIL"), end="")  # once more, where the eye is
    if counts["FAIL"]:
        raise SystemExit(1)


def _record(finding: Finding) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    details = {k: v if math.isfinite(v) else str(v) for k, v in finding.details.items()}
    return {"name": finding.name, "status": finding.status, "text": finding.text, "details": details}


def _progress(text: str) -> None:
    """What is under way: for a terminal, and on stderr, so that stdout is the findings alone."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)
