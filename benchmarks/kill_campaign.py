"""Kill real runs again and again, resume them, and compare each with a run that nobody disturbed.

    python benchmarks/kill_campaign.py --kills 100

Half of the kills come at a random moment of the clock, half at a random line of a random call of a random part of the
run (rollout, scoring, update, checkpoint, ...). Each run is killed and resumed until it gets to its end; then its
weights, optimizer state, checkpoints, rollouts, evaluations, metrics, groups, samples and events must be those of the
undisturbed run, and no scoring worker may have outlived its parent. Exits with 1 if anything differs.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.command_line import (
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


@dataclass
class Life:
    """One run from its start to its end, through all its deaths."""

    deaths: list[str] = field(default_factory=list)
    resumes: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def attempt(folder: Path, census: Census, rng: random.Random, life: Life, kill: bool) -> bool:
    """Start or resume the run of a folder; whether it got to its end."""
    args = next_args(folder)
    life.resumes += args[0] == "resume"
    by_clock = kill and rng.random() < 0.5
    strike = census.random_strike(rng) if kill and not by_clock else None
    moment = rng.uniform(0, census.seconds)
    process = start(*args, at=folder, orders=[strike] if strike else [])
    try:
        out, err = process.communicate(timeout=moment if by_clock else None)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    if process.returncode == -signal.SIGKILL:
        life.deaths.append(str(strike) if strike else f"after {moment:.2f} s")
        if not no_worker_is_left(process.pid):
            life.problems.append(f"a worker outlived its parent, killed {life.deaths[-1]}")
        return False
    if process.returncode != 0:
        life.problems.append(f"exit code {process.returncode}: {err.strip() or out.strip()}")
    return True


def live(folder: Path, original: dict[str, Any], census: Census, rng: random.Random, kills: int) -> Life:
    """A run that is killed up to `kills` times before it may end, compared with the original."""
    life, begin = Life(), time.monotonic()
    while not attempt(folder, census, rng, life, kill=len(life.deaths) < kills):
        pass
    run = only_run(folder)
    if run is None:
        life.problems.append("there is no run")
    elif not life.problems:
        life.problems += [f"{name} differs" for name in differences(remains(run), original)]
        if not prompts_are_accounted_for(run):
            life.problems.append("a prompt was trained twice or not at all")
    life.seconds = time.monotonic() - begin
    return life


def campaign(kills: int, seed: int, keep: Path | None = None) -> list[Life]:
    """Lives until there were `kills` deaths."""
    rng, lives = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="kill-campaign-") as scratch:
        root = keep or Path(scratch)
        (root / "reference").mkdir(parents=True)
        run, census = reference(root / "reference")
        original = remains(run)
        print(f"reference: {census.seconds:.1f} s, {sum(census.lengths['anywhere'])} lines of the package", flush=True)
        print(f"{'run':>4} {'kills':>6} {'resumes':>8} {'seconds':>8}  identical  deaths", flush=True)
        while (left := kills - sum(len(life.deaths) for life in lives)) > 0:
            folder = root / f"run-{len(lives) + 1:03d}"
            folder.mkdir()
            lives.append(live(folder, original, census, rng, left))
            show(len(lives), lives[-1])
    return lives


def show(number: int, life: Life) -> None:
    same = "no" if life.problems else "yes"
    deaths = ", ".join(life.deaths) or "none"
    print(f"{number:4d} {len(life.deaths):6d} {life.resumes:8d} {life.seconds:8.1f}  {same:9}  {deaths}", flush=True)
    for problem in life.problems:
        print(f"     {problem}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the runs in this new folder")
    options = parser.parse_args()
    begin = time.monotonic()
    lives = campaign(options.kills, options.seed, options.keep)
    bad = sum(bool(life.problems) for life in lives)
    print(
        f"{sum(len(life.deaths) for life in lives)} kills, {sum(life.resumes for life in lives)} resumes,"
        f" {len(lives)} runs, identical: {'yes' if not bad else f'no ({bad} differ)'}, {time.monotonic() - begin:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
