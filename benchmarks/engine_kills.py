"""Kills engine processes at random moments, and counts requests that were lost, doubled or answered otherwise.

    python benchmarks/engine_kills.py --kills 100

A fleet of two engine processes with a small random model in float64 answers 12 requests per round, with new weights
before each round. In every round one process is killed, a quarter of the times while the weights are loaded. The tokens
are compared with those of an engine that nothing disturbed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.fleets import run_kill_campaign, write_folder


def main() -> None:
    """Runs the campaign and prints what became of it. Ends with code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder) / "model", num_layers=options.layers)
        begin = time.monotonic()
        done = run_kill_campaign(model, options.kills, options.seed)
    print(f"{date.today()}, torch {torch.__version__}, {time.monotonic() - begin:.0f} s")
    for name, value in asdict(done).items():
        print(f"{name.replace('_', ' '):20} {value}")
    sys.exit(bool(done.lost or done.doubled or done.wrong or done.unequal_versions))


if __name__ == "__main__":
    main()
