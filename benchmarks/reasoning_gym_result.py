"""The recipe tiny_reasoning_gym with several seeds: held-out accuracy before and after training, and seconds.

    python benchmarks/reasoning_gym_result.py [--seeds 0 1 2] [--out build/reasoning_gym]

Needs pip install 'cohort[reasoning-gym]'. It runs `cohort train tiny_reasoning_gym --seed S` once per seed, one after
the other, and prints a Markdown table. The difference is paired: both evaluations have the same problems.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from cohort.evaluation.compare import compare
from cohort.run.directory import RunDirectory
from cohort.run.machine import describe_machine
from cohort.tasks.reasoning_gym.package import get_version


def run_seed(seed: int, out: Path) -> str:
    """Runs the recipe with a seed, below the folder `out`, and returns its row of the table."""
    begin = time.perf_counter()
    flags = ["--seed", str(seed), "--log", "plain", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "cohort", "train", "tiny_reasoning_gym", *flags], check=True)
    seconds = time.perf_counter() - begin
    # The newest folder is that of this run.
    directory = RunDirectory.open(max(out.iterdir(), key=lambda p: p.stat().st_mtime))
    evaluations = directory.load_evaluations()
    first, last = evaluations[0], evaluations[directory.config.steps]
    gain = compare(first, last).difference
    return (
        f"| {seed} | {100 * first.accuracy:.1f}% ({100 * first.low:.1f} to {100 * first.high:.1f}) "
        f"| {100 * last.accuracy:.1f}% ({100 * last.low:.1f} to {100 * last.high:.1f}) "
        f"| +{100 * gain.mean:.1f} ({100 * gain.low:.1f} to {100 * gain.high:.1f}) "
        f"| {gain.wins}, {gain.losses} | {seconds:.0f} |"
    )


def main() -> None:
    """Runs all seeds and prints the table."""
    parser = argparse.ArgumentParser(description="Run tiny_reasoning_gym with several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("build/reasoning_gym"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [run_seed(seed, args.out) for seed in args.seeds]
    here = describe_machine()
    load = os.getloadavg()[2]
    packages = f"torch {here.packages['torch']}, reasoning-gym {get_version()}"
    print(f"\n{date.today()}, {here.processor}, {here.num_cores} cores (load {load:.1f}), {packages}\n")
    print("| seed | before (95%) | after (95%) | paired difference | won, lost | seconds, in all |")
    print("|---:|---:|---:|---:|---:|---:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
