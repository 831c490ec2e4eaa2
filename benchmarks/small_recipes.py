"""The recipes of five public projects, small: held-out accuracy before and after training, and the curve of each.

    python benchmarks/small_recipes.py                       # those for this device: a CPU, or a GPU
    python benchmarks/small_recipes.py --rows tiny_countdown tiny_again --threads 1
    python benchmarks/small_recipes.py --device gpu --quick  # rehearses: one tiny step of each, nothing is kept
    python benchmarks/small_recipes.py --markdown            # prints the table of docs/results.md

Each is `cohort train RECIPE` with the settings of `SMALL`. Its own evaluations before the first step and after the last
one are compared by `cohort compare`, problem by problem. Nothing is chosen by these problems. A row whose result is
there is left out. It writes result.json, the config, the metrics (CSV) and the curve (SVG) of each row. Those for a GPU
need the model (`cohort pull smollm2-135m`) and, in the folder $COHORT_DATA, the data sets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch

from cohort.recipes import RECIPES
from cohort.run.machine import describe_machine
from cohort.tasks.search.task import SearchQA
from cohort.tools.formats import FORMATS, NamedResult
from cohort.tools.schema import make_tool
from preference_result import COLUMNS as PAIR_COLUMNS
from preference_result import summarise_run, train
from real_result import COHORT, write_metrics_csv
from real_result import COLUMNS as RL_COLUMNS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "small"
# By the kind of a run: what its CSV and its curve show, and the settings of a rehearsal.
COLUMNS: Mapping[str, Sequence[str]] = {
    "rl": RL_COLUMNS,
    "sft": ("step", "eval/accuracy", "loss", "grad_norm", "lr", "time/step"),
    "dpo": PAIR_COLUMNS,
}
CURVES = {"rl": "eval/accuracy,reward/mean", "sft": "eval/accuracy,loss", "dpo": "eval/accuracy,loss"}
QUICK: Mapping[str, Mapping[str, Any]] = {
    "rl": {"batch.prompts": 4, "batch.samples": 2, "sampling.max-tokens": 16},
    "sft": {"batch.examples": 4, "sampling.max-tokens": 16},
    "dpo": {"batch.pairs": 2},
}
QUICK_SAMPLING = ("eval.problems", "eval.every", "sampling.max-tokens")
# At most so many columns in a line of the table, as in every document.
LINE = 120


@dataclass(frozen=True, kw_only=True)
class SmallRecipe:
    """A recipe of a project in a size that takes minutes. `changed` says in words what differs from the whole one."""

    project: str
    whole: str  # the recipe with the project's own settings
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # on top of those of `recipe`
    device: Literal["cpu", "gpu"] = "cpu"
    # Settings of the recipe IMITATION, which makes the model that training starts from; None = the recipe's model.
    first: Mapping[str, Any] | None = None
    changed: str


# On a CPU: 500 problems, and so many steps that a row takes minutes on one core.
CPU = {"eval.problems": 500}
# On one large GPU: 64 prompts x 8 samples of 256 tokens take about a second per step with this model.
GPU = {
    "steps": 50,
    "batch.prompts": 64,
    "batch.samples": 8,
    "sampling.max-tokens": 256,
    "engine.slots": 512,
    "optim.lr": 1e-5,
    "eval.problems": 0,
    "eval.every": 25,
    "save.every": 50,
    "save.keep-last": 1,
    "save.keep-best": False,
}
# SmolLM2-135M hardly ever answers in the form that is asked for, so that almost no sample would be paid. So it first
# imitates right answers to the prompts of the task.
IMITATION = "smollm2_gsm8k_sft"
FIRST = {"steps": 60, "batch.examples": 64, "save.every": 60, "save.keep-last": 1}
# For a search these are conversations, which `write_search_traces` writes to this file, below the runs.
TRACES = "search_traces.jsonl"
SEARCH = {"corpus": "squad", "context": "tool", "max-chars": 400}
SMALL = (
    SmallRecipe(
        project="miniseq",
        whole="countdown",
        recipe="tiny_countdown",
        settings=CPU
        | {"steps": 40, "algo.scale": "none", "algo.aggregate": "token", "eval.every": 20}
        | {"reward.correct": 0.9, "reward.format": 0.1},
        changed="tiny for Qwen2.5-3B; the rules are not stated; no open think tag; 32 prompts, not 64; "
        "192 tokens, not 1024; 40 steps of 125",
    ),
    SmallRecipe(
        project="RL-GRPO",
        whole="countdown_minibatches",
        recipe="tiny_countdown_minibatches",
        settings=CPU | {"steps": 20, "reward.format": 0.01, "eval.every": 10},
        changed="tiny for Qwen2.5-3B-Instruct; the rules are not stated; no open think tag; 32 prompts, not 8; "
        "192 tokens, not 896; 20 steps of 125",
    ),
    SmallRecipe(
        project="miniseq",
        whole="dr_grpo_math",
        recipe="tiny_dr_grpo",
        settings=CPU | {"eval.every": 15},
        changed="sums for MATH; tiny for Qwen2.5-Math-1.5B; 32 prompts, not 128; 64 tokens, not 3000; 30 steps of 300",
    ),
    SmallRecipe(
        project="re-grpo",
        whole="arithmetic",
        recipe="quickstart",
        settings=CPU | {"batch.samples": 12, "reward.format": 0.1, "algo.kl.weight": 0.01, "eval.every": 15},
        changed="tiny for Llama-3.2-1B-Instruct with adapters; two digits, not three; no parentheses; "
        "64 tokens, not 1024; 30 steps of 300",
    ),
    SmallRecipe(
        project="re-grpo",
        whole="calculator",
        recipe="tiny_calculator",
        settings=CPU
        | {"steps": 20, "task.reward": "seed", "reward.correct": 0, "reward.steps": 1, "turns.max-turns": 2}
        | {"algo.kl.weight": 0.01, "eval.every": 10},
        changed="tiny for Qwen2.5-3B-Instruct with adapters; shorter sums; 32 x 8 samples, not 4 x 4; "
        "48 tokens, not 128; 20 steps of 256",
    ),
    SmallRecipe(
        project="TorchRL",
        whole="gsm8k_again",
        recipe="tiny_again",
        settings=CPU | {"eval.every": 15},
        changed="sums for GSM8K; tiny for Qwen2.5-3B; 32 x 8 samples, not 32 x 16; 64 tokens, not 1024; "
        "30 steps of 195; measured: first attempts",
    ),
    SmallRecipe(
        project="miniseq",
        whole="gsm8k_sft",
        recipe="tiny_countdown_sft",
        settings=CPU | {"eval.every": 40},
        changed="Countdown for GSM8K; tiny for Qwen2.5-0.5B-Instruct; 80 steps of 234",
    ),
    SmallRecipe(
        project="miniseq",
        whole="ultrafeedback_dpo",
        recipe="tiny_dpo",
        settings={"loss.nll": 0.1, "eval.every": 30},
        changed="right and wrong sums for UltraFeedback; tiny for Qwen2.5-7B-Instruct with adapters; 60 steps; "
        "measured: held-out pairs",
    ),
    SmallRecipe(
        project="miniseq",
        whole="gsm8k",
        recipe="smollm2_gsm8k",
        settings=GPU | {"algo.scale": "none", "algo.aggregate": "token", "algo.kl.weight": 0.001},
        device="gpu",
        first=FIRST,
        changed="SmolLM2-135M after 60 steps of imitation for Qwen2.5-0.5B; 64 prompts, not 128; "
        "256 tokens, not 3000; 50 steps of 300",
    ),
    SmallRecipe(
        project="miniseq",
        whole="dr_grpo_math",
        recipe="smollm2_math",
        settings=GPU,
        device="gpu",
        first=FIRST | {"task": "math12k"},
        changed="SmolLM2-135M after 60 steps of imitation for Qwen2.5-Math-1.5B; 64 prompts, not 128; "
        "256 tokens, not 3000; 50 steps of 300",
    ),
    SmallRecipe(
        project="miniseq",
        whole="gsm8k_sft",
        recipe="smollm2_gsm8k_sft",
        settings={"steps": 234, "batch.examples": 64, "sampling.max-tokens": 256, "eval.problems": 0, "eval.every": 117}
        | {"save.every": 234, "save.keep-last": 1, "save.keep-best": False},
        device="gpu",
        changed="SmolLM2-135M for Qwen2.5-0.5B-Instruct; learning rate 1e-4, constant; "
        "256 tokens in evaluations, not 512",
    ),
    SmallRecipe(
        project="miniseq",
        whole="ultrafeedback_dpo",
        recipe="smollm2_dpo",
        settings={"steps": 60, "batch.pairs": 32, "eval.problems": 0, "eval.every": 30}
        | {"data.path": "$COHORT_DATA/preference_ultrafeedback_{split}.jsonl"}
        | {"data.train-split": "train", "data.test-split": "test", "data.max-tokens": 1024}
        | {"save.every": 60, "save.keep-last": 1, "save.keep-best": False},
        device="gpu",
        changed="SmolLM2-135M, all weights, for adapters of Qwen2.5-7B-Instruct; 994 pairs of 61,000; "
        "1024 tokens, not 2049; 60 steps; measured: held-out pairs",
    ),
    SmallRecipe(
        project="re-grpo",
        whole="search_qa",
        recipe="smollm2_search_qa",
        settings=GPU
        | {"steps": 40, "sampling.max-tokens": 64, "eval.every": 20, "save.every": 40, "algo.kl.weight": 0.01}
        | {f"task.{name}": value for name, value in SEARCH.items()}
        | {"task.reward": "seed", "reward.format": 1},
        device="gpu",
        first=FIRST | {"data": "conversations", "data.path": TRACES, "task": "none"},
        changed="SmolLM2-135M after 60 steps of imitation, all weights, for adapters of Qwen2.5-3B-Instruct; "
        "passages of 400 characters, not 1500; 64 x 8 samples, not 4 x 4; "
        "three turns of 64 tokens, not two of 128; 40 steps of 256",
    ),
    SmallRecipe(
        project="gsm8k-grpo",
        whole="gsm8k_tutor",
        recipe="smollm2_gsm8k_tutor",
        settings=GPU | {"task.test-size": 500},
        device="gpu",
        first=FIRST | {"task.style": "tutor"},
        changed="SmolLM2-135M after 60 steps of imitation for Qwen2.5-3B-Instruct; "
        "64 x 8 samples at temperature 1, not 8 x 4 at 0.7; 256 tokens, not 512; 50 steps of 934",
    ),
    SmallRecipe(
        project="TorchRL",
        whole="gsm8k_again",
        recipe="smollm2_gsm8k_again",
        settings=GPU
        | {"steps": 40, "eval.every": 20, "save.every": 40, "task.style": "tags"}
        | {"algo.aggregate": "token", "algo.entropy": 1e-4},
        device="gpu",
        first=FIRST | {"task.style": "tags"},
        changed="SmolLM2-135M after 60 steps of imitation, all weights, for adapters of Qwen2.5-3B; "
        "64 x 8 samples, not 32 x 16; 256 tokens, not 1024; 40 steps of 195; measured: first attempts",
    ),
    SmallRecipe(
        project="TorchRL",
        whole="ifeval",
        recipe="smollm2_ifeval",
        settings=GPU,
        device="gpu",
        changed="SmolLM2-135M, all weights, for adapters of Qwen2.5-7B; the whole answer is checked; "
        "64 x 8 samples, not 16 x 16; 256 tokens, not 2048; 50 steps of 390",
    ),
)


def make_flags(recipe: str, settings: Mapping[str, Any], threads: int = 0, quick: bool = False) -> list[str]:
    """Returns the flags of `cohort train`. `threads` 0 = all cores. With `quick` there is one tiny step."""
    settings = {**settings, "threads": threads}
    if quick:
        settings |= {"steps": 1, "save.every": 1, "eval.problems": 4, "eval.every": 0}
        settings |= QUICK[RECIPES[recipe]().kind]
        if settings.get("task") == "none":  # nothing is sampled
            settings = {name: value for name, value in settings.items() if name not in QUICK_SAMPLING}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def write_search_traces(task: SearchQA, file: Path) -> None:
    """Writes conversations to imitate: the question is searched for, and the right answer follows the passages.

    They are about training questions. Those are left out for which no accepted answer is in what the search finds.
    """
    calls = FORMATS["tags"]
    about = calls.describe_tools([make_tool(task.search).describe()])
    lines = []
    for row in task.rows("train"):
        found = task.search(row["question"])
        if any(answer.lower() in found.lower() for answer in row["answers"]):
            call = {"role": "assistant", "content": f"<tool:search>{row['question']}</tool>"}
            replies = calls.make_replies([NamedResult(name="search", content=found)])
            answer = {"role": "assistant", "content": task.gold(row)}
            talk = [{"role": "system", "content": about}, *task.prompt(row), call, *replies, answer]
            lines.append(json.dumps({"messages": talk}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def imitate(small: SmallRecipe, runs: Path, threads: int, quick: bool) -> tuple[Path, float]:
    """Trains the model that a small recipe starts from, below the folder `runs`.

    Returns the folder of the run, and the seconds of the whole command.
    """
    settings = dict(small.first or {})
    if settings.get("data.path") == TRACES:
        runs.mkdir(parents=True, exist_ok=True)
        settings["data.path"] = runs / TRACES
        task = SearchQA(**{name.replace("-", "_"): value for name, value in SEARCH.items()})
        write_search_traces(task, runs / TRACES)
    return train(IMITATION, runs / f"{small.recipe}-first", make_flags(IMITATION, settings, threads, quick))


def run_row(small: SmallRecipe, runs: Path, out: Path, threads: int, quick: bool) -> None:
    """Trains below the folder `runs`, and writes all files of the result to the folder `out`.

    Raises CalledProcessError if a command fails.
    """
    kind = RECIPES[small.recipe]().kind
    place = {"device": "cpu"} if small.device == "cpu" else {}
    flags = make_flags(small.recipe, {**small.settings, **place}, threads, quick)
    start: dict[str, Any] = {}
    if small.first is not None:
        model, imitation_seconds = imitate(small, runs, threads, quick)
        start = {"first": small.first, "imitation_seconds": imitation_seconds}
        flags += ["--model", str(model)]
    run, seconds = train(small.recipe, runs / small.recipe, flags)
    gpu = torch.cuda.get_device_name() if small.device == "gpu" and torch.cuda.is_available() else ""
    machine = describe_machine(gpu)
    result = {
        "recipe": small.recipe,
        "of": small.whole,
        "project": small.project,
        "flags": flags,
        **start,
        "date": date.today().isoformat(),
        "device": gpu or f"{machine.processor}, {machine.num_cores} cores",
        # Of the last 15 minutes. Above the number of threads, other programs used the processor too.
        "load": round(os.getloadavg()[2], 1),
        "torch": machine.packages["torch"],
        **summarise_run(run, seconds),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_without_place(out / "config.yaml", (run / "config.yaml").read_text(encoding="utf-8"), runs)
    write_metrics_csv(run, out / "metrics.csv", COLUMNS[kind])
    title = f"{small.recipe}: {small.whole} of {small.project}, small"
    picture = ["--metrics", CURVES[kind], "--title", title, "--out", str(out / "curves.svg"), "--force"]
    subprocess.run([*COHORT, "plot", str(run), *picture], check=True)
    # Last, because a row with this file is done.
    write_without_place(out / "result.json", json.dumps(result, indent=1) + "\n", runs)


def write_without_place(file: Path, text: str, runs: Path) -> None:
    """Writes a text, in which the folder `runs` of this machine is called runs."""
    file.write_text(text.replace(str(runs.resolve()), "runs").replace(str(runs), "runs"), encoding="utf-8")


def format_rows(small: SmallRecipe, result: Mapping[str, Any] | None) -> list[str]:
    """Returns the lines of a row of the table: one with numbers, then what was changed and the intervals.

    `result` is what result.json has; None = it was not run yet.
    """
    name = f"`{small.recipe}`"
    if result is None:
        first = [name, small.device.upper(), "", "", "not run yet" + " (needs a GPU)" * (small.device == "gpu"), "", ""]
        intervals = ["", "", ""]
    else:
        before, after, gain = result["before"], result["after"], result["difference"]
        device = "CPU" if small.device == "cpu" else result["device"].removeprefix("NVIDIA ")
        name = f"[{name}]"
        rises = "" if gain["low"] > 0 else "no rise: " if gain["high"] >= 0 else "falls: "
        numbers = [f"{100 * side['accuracy']:.1f}%" for side in (before, after)] + [f"{rises}{100 * gain['mean']:+.1f}"]
        minutes = (result.get("imitation_seconds", 0) + result["seconds"]) / 60
        first = [name, device, str(result["steps"]), f"{minutes:.1f}", *numbers]
        intervals = [f"{100 * side['low']:.1f} to {100 * side['high']:.1f}" for side in (before, after, gain)]
    rest = ["", "", "", *intervals]
    # What the cells and bars of a line with intervals leave of it.
    texts = join_changes(small.changed, LINE - 1 - len(join_cells([small.project, "", *rest])))
    lines = [join_cells([f"`{small.whole}`", *first]), join_cells([small.project, texts[0], *rest])]
    return lines + [join_cells(["", text, *[""] * len(rest)]) for text in texts[1:]]


def join_changes(changed: str, width: int) -> list[str]:
    """Returns lines of at most `width` characters with whole changes, which "; " separates.

    >>> join_changes("sums for MATH; tiny; 64 tokens", 20)
    ['sums for MATH; tiny;', '64 tokens']
    """
    lines = [""]
    for change in changed.split("; "):
        longer = f"{lines[-1]}; {change}" if lines[-1] else change
        if len(longer) < width:
            lines[-1] = longer
        else:
            lines[-1] += ";"
            lines.append(change)
    return lines


def join_cells(cells: Sequence[str]) -> str:
    """Returns a line of a Markdown table.

    >>> join_cells(["a", "", "b"])
    '| a | | b |'
    """
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def format_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the Markdown table of all small recipes, given the results of those that were run, by recipe.

    The names of these are links to their curves, whose places follow the table.
    """
    head = ["recipe, project", "small recipe, and what was changed", "device", "steps", "minutes"]
    head += ["before", "after", "difference"]
    lines = [join_cells(head), "|---|---|---|---:|---:|---|---|---|"]
    for small in SMALL:
        lines += format_rows(small, results.get(small.recipe))
    done = [small.recipe for small in SMALL if small.recipe in results]
    return "\n".join([*lines, "", *(f"[`{name}`]: results/{RESULTS.name}/{name}/curves.svg" for name in done)])


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the results in a folder, by recipe."""
    files = [folder / small.recipe / "result.json" for small in SMALL]
    return {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()}


def run_rows(chosen: Sequence[SmallRecipe], a: argparse.Namespace, runs: Path, out: Path) -> list[str]:
    """Runs the chosen small recipes that have no result in `out`. Returns the names of those that failed.

    `a` are the options of the command line.
    """
    failed = []
    for small in chosen:
        if (out / small.recipe / "result.json").exists():
            print(f"{small.recipe}: there is a result already", flush=True)
            continue
        run = runs / small.recipe
        if run.exists():
            print(f"{run} is a run without a result; remove it, or name another folder: --runs.", file=sys.stderr)
            failed.append(small.recipe)
            continue
        try:
            run_row(small, runs, out / small.recipe, a.threads, a.quick)
        except subprocess.CalledProcessError as e:
            print(f"{small.recipe}: exit status {e.returncode}", file=sys.stderr, flush=True)
            failed.append(small.recipe)
    return failed


def main() -> None:
    """Runs the small recipes for a device, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[small.recipe for small in SMALL], help="these, on any device")
    here = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "gpu"], default=here, help="those that are meant for it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "small_recipes")
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--quick", action="store_true", help="one tiny step of each; keeps nothing")
    parser.add_argument("--markdown", action="store_true", help="only print the table of the results that there are")
    a = parser.parse_args()
    if a.markdown:
        print(format_table(read_results(a.out)))
        return
    chosen = [small for small in SMALL if (small.recipe in a.rows if a.rows else small.device == a.device)]
    if a.quick:
        with tempfile.TemporaryDirectory() as folder:
            failed = run_rows(chosen, a, Path(folder) / "runs", Path(folder) / "results")
            results = read_results(Path(folder) / "results")
    else:
        failed = run_rows(chosen, a, a.runs, a.out)
        results = read_results(a.out)
    print(format_table(results))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
