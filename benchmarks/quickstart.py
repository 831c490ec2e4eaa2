"""The quickstart with several seeds: held-out accuracy before and after training, and seconds.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--out build/quickstart]

It runs `cohort train quickstart --seed S` once per seed, one after the other, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from cohort.run.directory import RunDirectory
from cohort.run.machine import describe_machine
from cohort.run.store.reader import Reader


def run_quickstart(seed: int, out: Path) -> str:
    """Runs the quickstart with a seed, below the folder `out`, and returns its row of the table."""
    begin = time.perf_counter()
    flags = ["--seed", str(seed), "--log", "plain", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "cohort", "train", "quickstart", *flags], check=True)
    seconds = time.perf_counter() - begin
    # The newest folder is that of this run.
    directory = RunDirectory.open(max(out.iterdir(), key=lambda p: p.stat().st_mtime))
    first, last = (e for step, e in directory.load_evaluations().items() if step in (0, directory.config.steps))
    with Reader(directory.database) as reader:
        length = list(reader.read_series("length/mean").values())
        gap = max(reader.read_series("sampler_gap/max").values())
    return (
        f"| {seed} | {first.accuracy:.3f} ({first.low:.3f} to {first.high:.3f}) "
        f"| {last.accuracy:.3f} ({last.low:.3f} to {last.high:.3f}) | {first.setting.num_problems} "
        f"| {length[0]:.1f} -> {length[-1]:.1f} | {gap:.1e} | {seconds:.0f} |"
    )


def main() -> None:
    """Runs all seeds and prints the table."""
    parser = argparse.ArgumentParser(description="Run the quickstart with several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("build/quickstart"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [run_quickstart(seed, args.out) for seed in args.seeds]
    here = describe_machine()
    print(f"\n{date.today()}, {here.processor}, {here.num_cores} cores, torch {here.packages['torch']}\n")
    columns = "seed|before (95%)|after (95%)|problems|tokens per completion|largest sampler gap|seconds, in all"
    print(f"| {columns.replace('|', ' | ')} |\n{'|---:' * 7}|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
