"""Every algorithm in the quickstart's setting, several seeds: does it learn?

    python benchmarks/algorithms.py [--algos grpo gspo] [--seeds 0 1 2] [--out results.json]

Each run is `cohort train quickstart --algo NAME --seed S` with two updates a batch (`--learner.minibatches 2`), so
that ratios, clips and gates act. Prints held-out accuracy before and after, 500 problems, temperature 1.
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
    algo: str
    seed: int
    before: float
    after: float
    seconds: float


def train(algo: str, seed: int, extra: list[str]) -> Result:
    """One run as a user types it, on one thread, in a folder of its own."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--algo", algo, "--seed", str(seed), "--threads", "1", "--learner.minibatches", "2", *extra]
        command = [sys.executable, "-m", "cohort", "train", "quickstart", *flags, "--out", folder, "--log", "json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    finish = next(line for line in map(json.loads, said.splitlines()) if line["kind"] == "finish")
    seconds = time.monotonic() - begin
    return Result(algo=algo, seed=seed, before=finish["before"], after=finish["after"], seconds=seconds)


def table(results: list[Result]) -> str:
    rows = ["| algorithm | before | after, by seed |", "|---|---:|---|"]
    for algo in dict.fromkeys(r.algo for r in results):
        mine = sorted((r for r in results if r.algo == algo), key=lambda r: r.seed)
        before = sum(r.before for r in mine) / len(mine)
        after = ", ".join(f"{r.after:.3f}" for r in mine)
        rows.append(f"| `{algo}` | {before:.3f} | {after} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=list(ALGOS), choices=list(ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--out", type=Path)
    a, extra = parser.parse_known_args()
    with ThreadPoolExecutor(a.jobs) as pool:
        waiting = [pool.submit(train, algo, seed, extra) for algo in a.algos for seed in a.seeds]
        results = []
        for future in waiting:
            results.append(future.result())
            print(results[-1], file=sys.stderr, flush=True)
    print(table(results))
    if a.out:
        a.out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
