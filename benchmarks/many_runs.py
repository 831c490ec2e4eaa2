"""How long `cohort runs` takes on a folder of many runs, some of them broken and some under way.

    python benchmarks/many_runs.py [--runs 1000] [--times 5]

Makes the runs in a temporary folder, and prints the seconds of the whole command, the start of Python included: by the
clock, the least and the median of several calls, and of the processor, the least. On a machine that other programs use
too, the time of the processor says more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.helpers.command_line import ENV, command  # noqa: E402
from tests.helpers.many_runs import many_runs  # noqa: E402


def main() -> None:
    """Makes the runs, calls the command several times, and prints a line per form of output."""
    parser = argparse.ArgumentParser(description="Time `cohort runs` on a folder of many runs.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, many_runs(Path(folder, "runs"), options.runs) as made:
        print(f"{len(made.states)} runs")
        for words in ([], ["--json"], ["--filter", "accuracy>0.5", "--sort", "accuracy"]):
            measured = [measure(Path(folder), words) for _ in range(options.times)]
            clock = [seconds for seconds, _ in measured]
            processor = min(seconds for _, seconds in measured)
            times = f"clock {min(clock):.2f} s (median {statistics.median(clock):.2f} s)  processor {processor:.2f} s"
            print(f"{' '.join(['cohort runs', *words]):<50}  {times}")


def measure(folder: Path, words: list[str]) -> tuple[float, float]:
    """Returns the seconds that one call of `cohort runs` takes, by the clock and of the processor."""
    begin = time.perf_counter()
    before = os.times()
    done = subprocess.run(command(["runs", *words]), cwd=folder, env=ENV, capture_output=True, check=False)
    after = os.times()
    seconds = time.perf_counter() - begin
    assert done.returncode == 0, done.stderr
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used


if __name__ == "__main__":
    main()
