"""A result of preference optimisation: how often held-out pairs are ranked right, before and after, for several seeds.

    python benchmarks/preference_result.py --model smollm2-135m --data pairs.jsonl --out results --seeds 0 1 \\
        -- --data.held-out 0.2 --passes 2 --optim.lr 1e-5
    python benchmarks/preference_result.py --model qwen2.5-coder-1.5b --data 'ultrafeedback_{split}.jsonl' \\
        --out results --drop-checkpoints -- --data.max-tokens 2049 --data.too-long skip --batch.pairs 16 --passes 3

This is `cohort train dpo` for each seed, with the flags after `--`. The held-out pairs are those of the file of the
test split, or are chosen by a hash of their prompts: they are the same for every seed, and no prompt is on both sides.
Nothing is chosen by them: the result is that of the last step. It writes result.json, the config and the metrics (CSV)
of the first seed, the curves of all seeds, and table.md: the accuracy of every seed, and the means of the first seed's
metrics. None of these files has a text of the data. The runs themselves stay in the folder `runs`; with
`--drop-checkpoints` without their checkpoints, which take 25 GB for a model of 1.5 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from real_result import COHORT, write_mean_table, write_metrics_csv

COLUMNS = [
    "step",
    "eval/accuracy",
    "loss",
    "reward/accuracy",
    "reward/margin",
    "reward/chosen",
    "reward/rejected",
    "nll",
    "kl/ref",
    "grad_norm",
    "lr",
    "pack/tokens",
    "time/step",
]
MEANS = ("loss", "reward/accuracy", "reward/margin", "reward/chosen", "reward/rejected", "nll", "grad_norm")
NUMBERS = ("accuracy", "low", "high", "summary", "mean_tokens", "setting")


def train(recipe: str, run: Path, flags: list[str]) -> tuple[Path, float]:
    """Trains a recipe in the folder `run`, which is new. Returns the folder, and the seconds of the whole command."""
    begin = time.monotonic()
    place = ["--out", str(run.parent), "--name", run.name]
    subprocess.run([*COHORT, "train", recipe, *place, *flags], check=True)
    return run, time.monotonic() - begin


def summarise_run(run: Path, seconds: float) -> dict[str, Any]:
    """Returns the numbers of a run: held-out accuracy before and after, their difference, steps and times."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in (run / "eval").glob("*.json")]
    found.sort(key=lambda evaluation: evaluation["setting"]["step"])
    before, after = ({name: evaluation[name] for name in NUMBERS} for evaluation in (found[0], found[-1]))
    compared = subprocess.run(
        [*COHORT, "compare", f"{run}@0", str(run), "--json"], check=True, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [line["metrics"]["time/step"] for line in lines if "time/step" in line["metrics"]]
    return {
        "before": before,
        "after": after,
        "difference": json.loads(compared.stdout)["difference"],
        "steps": len(times),
        "training_seconds": sum(times),
        "seconds": seconds,
    }


def write_table(summaries: dict[int, dict[str, Any]], metrics: Path, out: Path) -> None:
    """Writes Markdown tables: the held-out accuracy of every seed, and the means of the first seed's metrics."""
    rows = ["| seed | held-out pairs | before | after | 95% | steps | seconds |", "|---:|---:|---:|---:|---|---:|---:|"]
    for seed, found in summaries.items():
        before, after = found["before"], found["after"]
        interval = f"{after['low']:.1%} to {after['high']:.1%}"
        accuracies = f"{before['accuracy']:.1%} | {after['accuracy']:.1%} | {interval}"
        num = after["setting"]["num_problems"]
        rows.append(f"| {seed} | {num} | {accuracies} | {found['steps']} | {found['training_seconds']:.0f} |")
    write_mean_table(metrics, out, names=MEANS)
    out.write_text("\n".join(rows) + "\n\n" + out.read_text(encoding="utf-8"), encoding="utf-8")


def main() -> None:
    """Trains with every seed and writes all files of the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--drop-checkpoints", action="store_true", help="remove those of each run once it is measured")
    a, rest = parser.parse_known_args()
    flags = [flag for flag in rest if flag != "--"]
    given = ["--model", a.model, "--data.path", a.data, *flags]
    runs: dict[int, Path] = {}
    summaries: dict[int, dict[str, Any]] = {}
    for seed in a.seeds:
        runs[seed], seconds = train("dpo", a.out / "runs" / f"seed-{seed}", [*given, "--seed", str(seed)])
        summaries[seed] = summarise_run(runs[seed], seconds)
        if a.drop_checkpoints:
            shutil.rmtree(runs[seed] / "checkpoints")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    result = {
        "recipe": "dpo",
        "flags": flags,
        "date": date.today().isoformat(),
        "device": gpu,
        "torch": torch.__version__,
        "seeds": summaries,
    }
    first = runs[a.seeds[0]]
    # The folder of the data is of this machine.
    config = (first / "config.yaml").read_text(encoding="utf-8")
    config = config.replace(str(Path(a.data).resolve()), Path(a.data).name)
    (a.out / "config.yaml").write_text(config, encoding="utf-8")
    write_metrics_csv(first, a.out / "metrics.csv", COLUMNS)
    write_table(summaries, a.out / "metrics.csv", a.out / "table.md")
    folders = [str(run) for run in runs.values()]
    subprocess.run([*COHORT, "plot", *folders, "--out", str(a.out / "curves.svg"), "--title", "dpo"], check=True)
    (a.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
