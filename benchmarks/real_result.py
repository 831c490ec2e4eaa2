"""A real result from beginning to end: evaluate, train for some minutes, evaluate again, compare.

    python benchmarks/real_result.py coder_gsm8k gsm8k --out results/gsm8k --minutes 12 [--greedy] [--steps 150 ...]

The recipe runs as `cohort train` does. After `--minutes` of training, without evaluations, it gets the signal of
Ctrl-C, so that it saves and stops. The evaluations before and after are `cohort eval TASK` on the whole test split with
the same settings: greedy (--greedy) or at temperature 1, and with --samples N also avg@N and pass@k at temperature 1.
Unknown flags are passed to the recipe. It writes result.json, the config of the run, its metrics (the main ones also
as CSV and as a Markdown table of means), its curves, and every evaluation with its items. With --shows N it also writes
conversations.md: N problems with tools, and what the model wrote and was told before and after. `last` is a link to the
last checkpoint's model.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

COHORT = [sys.executable, "-m", "cohort"]
COLUMNS = [
    "step",
    "reward/mean",
    "eval/accuracy",
    "length/mean",
    "finish/length",
    "groups/dead",
    "entropy",
    "grad_norm",
    "sampler_gap/mean",
    "time/step",
    "time/stage/rollout",
    "time/stage/update",
]


def evaluate_model(task: str, model: str, out: Path, flags: list[str]) -> dict[str, Any]:
    """Evaluates a model with `cohort eval`, which writes to `out`. Returns its numbers without its items."""
    subprocess.run([*COHORT, "eval", task, "--model", model, "--out", str(out), *flags], check=True)
    evaluation = json.loads(out.read_text(encoding="utf-8"))
    names = ("accuracy", "low", "high", "passes", "parts", "mean_tokens", "finishes")
    return {name: evaluation[name] for name in names} | {"setting": evaluation["setting"]}


def train_for_minutes(recipe: str, out: Path, minutes: float, flags: list[str]) -> tuple[Path, dict[str, Any]]:
    """Trains a recipe for `minutes`, without evaluations, below the folder `out`.

    Returns (folder of the run, {"steps", "training_seconds", "seconds"}); "seconds" include evaluations.
    """
    command = [*COHORT, "train", recipe, "--out", str(out), "--log", "json", *flags]
    begin = time.monotonic()
    spent = 0.0
    steps = 0
    asked_to_stop = False
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        record = json.loads(line)
        if record["kind"] == "step":
            steps = record["step"]
            spent += record["metrics"]["time/step"]
            reward = record["metrics"]["reward/mean"]
            print(f"step {steps}: reward {reward:.3f}, {spent / 60:.1f} minutes of training", flush=True)
            # Only once: after a second signal the run stops without saving.
            if spent > minutes * 60 and not asked_to_stop:
                asked_to_stop = True
                process.send_signal(signal.SIGINT)
    # 130 is the exit code after Ctrl-C.
    if process.wait() not in (0, 130):
        raise SystemExit(f"training ended with exit code {process.returncode}")
    [run] = [folder for folder in out.iterdir() if (folder / "config.yaml").is_file()]
    return run, {"steps": steps, "training_seconds": spent, "seconds": time.monotonic() - begin}


def write_metrics_csv(run: Path, out: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Writes the main metrics as CSV, one line per step. An evaluation is in the line of the step before it."""
    steps: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {"step": row["step"]}).update(row["metrics"])
    with out.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows([f"{row[name]:.5g}" if name in row else "" for name in columns] for row in steps.values())


MEANS = tuple(name for name in COLUMNS if name not in ("step", "eval/accuracy"))


def write_mean_table(table: Path, out: Path, stretches: int = 6, names: Sequence[str] = MEANS) -> None:
    """Writes the means of the CSV as a Markdown table for docs/results.md: those of the columns `names`.

    The first row is the mean of the first ten steps; the other steps are divided into `stretches` equal rows. Rows of
    the CSV without a value in the first of the columns are evaluations and do not count.
    """
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row[names[0]]]
    # A run of less than about twenty steps is one row.
    rest = len(rows) - 10
    cuts = [0, *(10 + rest * i // stretches for i in range(stretches + 1))] if rest > 10 else [0, len(rows)]
    lines = [f"| steps | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for part in (rows[a:b] for a, b in pairwise(cuts) if rows[a:b]):
        means = [f"{fmean(float(row[name] or 'nan') for row in part):.3g}" for name in names]
        lines.append(f"| {part[0]['step']}-{part[-1]['step']} | {' | '.join(means)} |")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_conversations(before: Path, after: Path, out: Path, number: int) -> None:
    """Writes, as Markdown, the first problems whose conversation after training called a tool, before and after."""
    items = [json.loads(file.read_text(encoding="utf-8"))["items"] for file in (before, after)]
    chosen = [pair for pair in zip(*items, strict=True) if pair[1]["answers"][0]["calls"]][:number]
    lines = []
    for pair in chosen:
        lines += [f"## {pair[0]['messages'][-1]['content']}", ""]
        for when, item in zip(("Before", "After"), pair, strict=True):
            answer = item["answers"][0]
            talk = answer["messages"] or [{"role": "assistant", "content": answer["text"]}]
            lines += [f"{when}: {'right' if answer['correct'] else answer['reason'] or 'wrong'}", "", "```"]
            lines += [f"[{message['role']}] {message['content']}" for message in talk]
            lines += ["```", ""]
    out.write_text("\n".join(lines) or "No tool was called after training.\n", encoding="utf-8")


def describe_result(result: dict[str, Any]) -> str:
    """Returns the first comparison as a line: accuracies before and after, and their paired difference."""
    before, after = (result[when]["first"]["accuracy"] for when in ("before", "after"))
    gain = result["difference-first"]
    spread = f"{gain['mean']:+.3f} ({gain['low']:.3f} to {gain['high']:.3f})"
    return f"{result['recipe']}: {before:.3f} -> {after:.3f}, {spread}, {result['training']['steps']} steps"


def main() -> None:
    """Evaluates, trains, evaluates again, compares, and writes all files of the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("task")
    parser.add_argument("--model", required=True, help="where training starts; also what is evaluated before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--eval-flags", default="", help="further flags of cohort eval, in one string")
    parser.add_argument("--shows", type=int, default=0, help="conversations that are written down")
    a, rest = parser.parse_known_args()
    if (a.out / "runs").exists():
        raise SystemExit(f"{a.out} has a result already; choose another --out.")
    a.out.mkdir(parents=True, exist_ok=True)
    kinds = {"first": ["--temperature", "0" if a.greedy else "1"]}
    if a.samples:
        kinds["sampled"] = ["--temperature", "1", "--samples", str(a.samples)]
    extra = a.eval_flags.split()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = {"date": date.today().isoformat(), "device": gpu, "torch": torch.__version__}
    result: dict[str, Any] = {"recipe": a.recipe, **machine, "before": {}, "after": {}}

    def measure(when: str, model: str) -> None:
        """Evaluates `model` in every way and stores the numbers under `when` ("before" or "after")."""
        for kind, flags in kinds.items():
            result[when][kind] = evaluate_model(a.task, model, a.out / f"{when}-{kind}.json", [*flags, *extra])

    measure("before", a.model)
    flags = ["--model", a.model, *(flag for flag in rest if flag != "--")]
    run, result["training"] = train_for_minutes(a.recipe, a.out / "runs", a.minutes, flags)
    last = max((run / "checkpoints").iterdir()) / "model"
    (a.out / "last").symlink_to(last.resolve())
    measure("after", str(last))
    if a.shows:
        files = (a.out / f"{when}-first.json" for when in ("before", "after"))
        write_conversations(*files, a.out / "conversations.md", a.shows)
    for kind in kinds:
        pair = [str(a.out / f"{when}-{kind}.json") for when in ("before", "after")]
        done = subprocess.run([*COHORT, "compare", *pair, "--json"], check=True, capture_output=True, text=True)
        result[f"difference-{kind}"] = json.loads(done.stdout)["difference"]
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(run / name, a.out / name)
    write_metrics_csv(run, a.out / "metrics.csv")
    write_mean_table(a.out / "metrics.csv", a.out / "stretches.md")
    curves = [*COHORT, "plot", str(run), "--out", str(a.out / "curves.svg"), "--title", f"{a.recipe}: {a.task}"]
    subprocess.run(curves, check=True)
    (a.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    print(describe_result(result))


if __name__ == "__main__":
    main()
