"""A comparison of the speed of two trees of this repository, measured in turns on one machine.

    PYTHONPATH=src python3 benchmarks/two_trees.py --base OTHER/src --shapes qwen2.5-0.5b qwen2.5-1.5b --repeats 3
    ... --what engine learner step --out two_trees.json

Each measurement is `cohort bench` in its own process, with random weights of a named shape. Base and new tree take
turns, and the median of each side's repeats counts. The spread is (largest - smallest) / median of the base's repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "src"
# The program of a measurement. It runs with this tree and with earlier ones, hence the imports from several places.
PROGRAM = """
import json, sys
from cohort.config.options import BenchOptions, EngineBenchOptions, LearnerBenchOptions
try:  # where the benchmarks are, in this tree and in earlier ones
    from cohort.inspect.bench import run as bench
except ImportError:
    try:
        from cohort.jobs import bench
    except ImportError:
        from cohort import build as bench
what, settings = sys.argv[1], json.loads(sys.argv[2])
options = {"engine": EngineBenchOptions, "learner": LearnerBenchOptions, "step": BenchOptions}[what](**settings)
print("SECONDS", getattr(bench, f"bench_{what}")(options).seconds)
"""
CASES = {
    "engine": {"prompts": 64, "samples": 8, "prompt_tokens": 256, "completion_tokens": 512},
    "engine lognormal": {
        **{"prompts": 64, "samples": 8, "prompt_tokens": 256, "completion_tokens": 512, "lengths": "lognormal"}
    },
    "learner": {"prompts": 64, "samples": 8, "prompt_tokens": 256, "completion_tokens": 512},
    "step": {"prompts": 64, "samples": 8, "prompt_tokens": 256, "completion_tokens": 512},
}


def measure_in_process(source: Path, what: str, settings: dict[str, object]) -> float:
    """Returns the seconds of one benchmark with the package in the folder `source`, in its own process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PROGRAM, what.split()[0], json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} in {source} failed:\n{done.stderr[-2000:]}")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    return float(line.split()[1])


def main() -> None:
    """Measures both trees and prints one row per shape and benchmark."""
    parser = argparse.ArgumentParser(description="Compare the speed of two trees.")
    parser.add_argument("--base", type=Path, required=True, help="the src folder of the other tree")
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-0.5b"])
    parser.add_argument("--what", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3, help="processes per side")
    parser.add_argument("--small", action="store_true", help="a rehearsal: 2 prompts x 2 samples of 8 tokens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'shape':<14} {'what':<17} {'base s':>8} {'new s':>8} {'new/base':>8} {'spread':>7}", flush=True)
    for shape in args.shapes:
        for what in args.what:
            settings = {**CASES[what], "model": shape, "weights": "random"}
            if args.small:
                settings |= {"prompts": 2, "samples": 2, "prompt_tokens": 8, "completion_tokens": 8}
            times: dict[str, list[float]] = {"base": [], "new": []}
            # The trees take turns, so that a slow change of the machine affects both.
            for _ in range(args.repeats):
                times["base"].append(measure_in_process(args.base, what, settings))
                times["new"].append(measure_in_process(HERE, what, settings))
            base, new = (statistics.median(times[side]) for side in ("base", "new"))
            spread = (max(times["base"]) - min(times["base"])) / base
            rows.append({"shape": shape, "what": what, **times, "ratio": new / base, "spread": spread})
            print(f"{shape:<14} {what:<17} {base:>8.3f} {new:>8.3f} {new / base:>8.3f} {spread:>7.3f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
