"""Whether every algorithm learns: the quickstart with each algorithm and several seeds.

    python benchmarks/algorithms.py [--algos grpo gspo] [--seeds 0 1 2] [--out results.json]

Each run is `cohort train quickstart --algo NAME --seed S` with two updates per batch (`--learner.minibatches 2`), so
that ratios, clips and gates have an effect. It prints the held-out accuracy before and after training, on 500 problems
at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cohort.config.algos import ALGOS


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: held-out accuracy before and after training, and its seconds."""

    algo: str
    seed: int
    before: float
    after: float
    seconds: float


def run_quickstart(algo: str, seed: int, extra: list[str]) -> Result:
    """Trains the quickstart with an algorithm and a seed, as a command on one thread, and returns the result.

    `extra` are further flags of `cohort train`.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--algo", algo, "--seed", str(seed), "--threads", "1", "--learner.minibatches", "2", *extra]
        command = [sys.executable, "-m", "cohort", "train", "quickstart", *flags, "--out", folder, "--log", "json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    finish = next(line for line in map(json.loads, output.splitlines()) if line["kind"] == "finish")
    seconds = time.monotonic() - begin
    return Result(algo=algo, seed=seed, before=finish["before"], after=finish["after"], seconds=seconds)


def format_table(results: list[Result]) -> str:
    """Returns a Markdown table with one row per algorithm."""
    rows = ["| algorithm | before | after, by seed |", "|---|---:|---|"]
    for algo in dict.fromkeys(r.algo for r in results):
        runs = sorted((r for r in results if r.algo == algo), key=lambda r: r.seed)
        before = sum(r.before for r in runs) / len(runs)
        after = ", ".join(f"{r.after:.3f}" for r in runs)
        rows.append(f"| `{algo}` | {before:.3f} | {after} |")
    return "\n".join(rows)


def main() -> None:
    """Runs every algorithm with every seed, several at a time, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=list(ALGOS), choices=list(ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--out", type=Path)
    # Unknown flags are passed on to the runs.
    a, extra = parser.parse_known_args()
    with ThreadPoolExecutor(a.jobs) as pool:
        waiting = [pool.submit(run_quickstart, algo, seed, extra) for algo in a.algos for seed in a.seeds]
        results = []
        for future in waiting:
            results.append(future.result())
            print(results[-1], file=sys.stderr, flush=True)
    print(format_table(results))
    if a.out:
        a.out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
