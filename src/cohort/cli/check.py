"""`cohort check RECIPE [--a.b value ...] [--ranks N] [--json]`."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cohort.cli.ranks import MAX_RANKS
from cohort.config import flags, load
from cohort.errors import ConfigError
from cohort.logs.printing import print_note, print_result, show_grader_output
from cohort.recipes import RECIPES

if TYPE_CHECKING:
    from cohort.inspect.check.findings import Finding

HELP = """usage: cohort check RECIPE [--a.b value ...] [--ranks N] [--json]

Check a recipe before a run, with its own model, task and settings and a few real prompts: whether the update trains
what was sampled, whether the reward can be trusted, and how much memory and time the run will take. For runs on given
answers (sft, dpo): what is left of the rows, where the answers begin and end, whether the update trains these alone,
and, of pairs, whether both answers are scored alike.

RECIPE and its settings are those of cohort train. Prints one line per check: ok, warn or FAIL. The exit code is 1 if a
check failed.

  --ranks N   Say what each of N ranks would need of memory. The checks themselves run in one process.
  --json      Print one JSON object instead, for programs.

cohort train RECIPE --help lists every setting of a recipe."""


def run(args: list[str]) -> None:
    """Runs `cohort check` with `args`, the words after it: prints the findings, or one JSON object with --json.

    Raises SystemExit(1) if a check failed, ConfigError without a recipe and for wrong settings.
    """
    # `--json` belongs to the command, all other flags are settings of the recipe.
    as_json = "--json" in args
    rest = [arg for arg in args if arg != "--json"]
    if flags.wants_help(rest):
        print_result(HELP)
        return
    if not rest or rest[0].startswith("-"):
        raise ConfigError(
            "the recipe is missing. Name it first, for example: cohort check quickstart [--flags]. Recipes: "
            f"{', '.join(sorted(RECIPES))}."
        )
    words, given = flags.split_args(rest[1:])
    num_ranks = _read_ranks([flag for flag in given if flag.name == "ranks"])
    config = load.load_config(rest[0], words, [flag for flag in given if flag.name != "ranks"])
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.inspect.check.run import run_checks

    findings = []
    with show_grader_output():
        for finding in run_checks(config, _print_progress, num_ranks):
            findings.append(finding)
            if not as_json:
                print_result(str(finding))
    counts = Counter(f.status for f in findings)
    if as_json:
        report = {"recipe": config.recipe, "ok": not counts["FAIL"], "findings": [_to_json(f) for f in findings]}
        print_result(json.dumps(report, allow_nan=False))
    else:
        print_result(f"{len(findings)} checks: {counts['FAIL']} failed, {counts['warn']} with a warning")
        # Failures once more at the end, where a user of a terminal looks.
        print_result("".join(f"{f}\n" for f in findings if f.status == "FAIL"), end="")
    if counts["FAIL"]:
        raise SystemExit(1)


def _read_ranks(given: Sequence[flags.Flag]) -> int:
    """Returns the number of ranks of the flag --ranks; 1 if it is not given. Raises ConfigError for a wrong value."""
    setting = flags.Setting("ranks", int, 1)
    flags.check_given(given, {"ranks": setting})
    num_ranks = given[0].read_value(setting) if given else 1
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks is {num_ranks}; it must be from 1 to {MAX_RANKS:,}.")
    return int(num_ranks)


def _to_json(finding: Finding) -> dict[str, Any]:
    """Returns a finding as the object that `--json` prints. NaN and infinity, which JSON lacks, become strings."""
    details = {k: v if math.isfinite(v) else str(v) for k, v in finding.details.items()}
    return {"name": finding.name, "status": finding.status, "text": finding.text, "details": details}


def _print_progress(text: str) -> None:
    """Prints what is being done to stderr, if that is a terminal. Standard output has only the findings."""
    if sys.stderr.isatty():
        print_note(f"{text} ...")
