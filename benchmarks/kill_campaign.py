"""Kills real runs many times, resumes them, and compares each with a run that was never interrupted.

    python benchmarks/kill_campaign.py --kills 100
    python benchmarks/kill_campaign.py sft --kills 100      # or dpo: imitation and preferences on rows of a file

Half of the kills come at a random time, half at a random line of a random call of a random part of the run (rollout,
scoring, update, checkpoint, ...). Each run is killed and resumed until it reaches its end. Then its weights, optimizer
state, checkpoints, rollouts, evaluations, metrics, groups, samples and events must equal those of the uninterrupted
run, and no scoring worker may have outlived its parent. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The helpers are in tests/, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.command_line import (
    SMALL,
    Census,
    differences,
    next_args,
    no_worker_is_left,
    only_run,
    prompts_are_accounted_for,
    reference,
    remains,
    start,
)
from tests.helpers.given_answers import Case, write_rows


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The kind of runs that are killed: a recipe with its settings."""

    recipe: str
    settings: list[str]


def make_kind(recipe: str, root: Path) -> Kind:
    """Returns the settings of a recipe: small runs. Data that they need are written into a folder below `root`."""
    if recipe == "quickstart":
        return Kind(recipe=recipe, settings=SMALL)
    folder = root / "rows"
    folder.mkdir(parents=True)
    write_rows(folder)
    return Kind(recipe=recipe, settings=Case(recipe, folder.resolve()).flags)


@dataclass
class RunHistory:
    """What happened to one run from its start to its end: where it was killed, how often resumed, what was wrong."""

    deaths: list[str] = field(default_factory=list)
    resumes: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def start_or_resume(
    folder: Path, kind: Kind, census: Census, rng: random.Random, history: RunHistory, kill: bool
) -> bool:
    """Starts or resumes the run of a folder and returns whether it reached its end.

    With `kill` the process is killed, at a random time or a random line. `history` records what happened.
    """
    args = next_args(folder, kind.settings, kind.recipe)
    history.resumes += args[0] == "resume"
    # Half of the kills come at a time, the others at a line of the code.
    by_clock = kill and rng.random() < 0.5
    strike = census.random_strike(rng) if kill and not by_clock else None
    moment = rng.uniform(0, census.seconds)
    process = start(*args, at=folder, orders=[strike] if strike else [])
    try:
        out, err = process.communicate(timeout=moment if by_clock else None)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    # Killed by the clock above, or by itself at the chosen line.
    if process.returncode == -signal.SIGKILL:
        history.deaths.append(str(strike) if strike else f"after {moment:.2f} s")
        if not no_worker_is_left(process.pid):
            history.problems.append(f"a worker outlived its parent, killed {history.deaths[-1]}")
        return False
    if process.returncode != 0:
        history.problems.append(f"exit code {process.returncode}: {err.strip() or out.strip()}")
    return True


def kill_until_complete(
    folder: Path, kind: Kind, original: dict[str, Any], census: Census, rng: random.Random, kills: int
) -> RunHistory:
    """Kills and resumes a run up to `kills` times, lets it end and compares its files with `original`."""
    history = RunHistory()
    begin = time.monotonic()
    while not start_or_resume(folder, kind, census, rng, history, kill=len(history.deaths) < kills):
        pass
    run = only_run(folder)
    if run is None:
        history.problems.append("there is no run")
    elif not history.problems:
        history.problems += [f"{name} differs" for name in differences(remains(run), original)]
        if kind.recipe == "quickstart" and not prompts_are_accounted_for(run):
            history.problems.append("a prompt was trained twice or not at all")
    history.seconds = time.monotonic() - begin
    return history


def run_campaign(recipe: str, kills: int, seed: int, keep: Path | None = None) -> list[RunHistory]:
    """Runs a recipe and kills it until there were `kills` kills, and returns what happened to each run.

    `keep` is a new folder for the runs; None = a temporary one.
    """
    rng = random.Random(seed)
    histories: list[RunHistory] = []
    with tempfile.TemporaryDirectory(prefix="kill-campaign-") as scratch:
        root = keep or Path(scratch)
        (root / "reference").mkdir(parents=True)
        kind = make_kind(recipe, root)
        run, census = reference(root / "reference", kind.settings, kind.recipe)
        original = remains(run)
        print(f"reference: {census.seconds:.1f} s, {sum(census.lengths['anywhere'])} lines of the package", flush=True)
        print(f"{'run':>4} {'kills':>6} {'resumes':>8} {'seconds':>8}  identical  deaths", flush=True)
        while (kills_left := kills - sum(len(history.deaths) for history in histories)) > 0:
            folder = root / f"run-{len(histories) + 1:03d}"
            folder.mkdir()
            histories.append(kill_until_complete(folder, kind, original, census, rng, kills_left))
            print_history(len(histories), histories[-1])
    return histories


def print_history(number: int, history: RunHistory) -> None:
    """Prints the row of one run, and its problems below."""
    same = "no" if history.problems else "yes"
    deaths = ", ".join(history.deaths) or "none"
    print(
        f"{number:4d} {len(history.deaths):6d} {history.resumes:8d} {history.seconds:8.1f}  {same:9}  {deaths}",
        flush=True,
    )
    for problem in history.problems:
        print(f"     {problem}", flush=True)


def main() -> int:
    """Runs the campaign and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", choices=["quickstart", "sft", "dpo"], default="quickstart")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the runs in this new folder")
    options = parser.parse_args()
    begin = time.monotonic()
    histories = run_campaign(options.recipe, options.kills, options.seed, options.keep)
    bad = sum(bool(history.problems) for history in histories)
    kills = sum(len(history.deaths) for history in histories)
    resumes = sum(history.resumes for history in histories)
    identical = "yes" if not bad else f"no ({bad} differ)"
    seconds = time.monotonic() - begin
    print(f"{kills} kills, {resumes} resumes, {len(histories)} runs, identical: {identical}, {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
