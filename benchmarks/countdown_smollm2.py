"""A real run: SmolLM2-135M learns Countdown, first by imitation of a few traces, then by GRPO. Minutes on one GPU.

    cohort pull smollm2-135m
    PYTHONPATH=src:. python3 benchmarks/countdown_smollm2.py FOLDER --out countdown

The instruct model does not know the game: it gets a short supervised start on synthetic traces (trial and error in
<think>, then <answer>; their numbers are disjoint from both splits) that are right half of the time, and GRPO does the
rest. Written: OUT/sft (the model RL starts from), OUT/runs (the run), OUT/result.json (settings, evaluations and the
metrics of every step).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from cohort.config.document import dump
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    OptimConfig,
    SamplingConfig,
    SaveConfig,
)
from cohort.data.batch import Batch
from cohort.jobs import build
from cohort.learner.local import LocalLearner
from cohort.loops.sft import pack_examples, train
from cohort.models.device import DTYPES, find_device, find_dtype
from cohort.models.files import load_folder, save_folder
from cohort.run.directory import RunDirectory
from cohort.run.job import StepRecord
from cohort.run.store.reader import Reader
from cohort.tasks.countdown import Countdown
from cohort.tasks.traces.encode import encode
from cohort.tasks.traces.styles import Mix, countdown
from cohort.text import Tokenizer

SHOWN = ("reward/mean", "sampler_gap/mean", "sampler_gap/max", "entropy", "grad_norm", "length/mean", "groups/dead")
STYLES = Mix(think=0.9, broken=0.0, right=0.3, system=0.0)  # one in ten answers at once, mostly wrong
SFT_BATCH, SFT_BUDGET = 64, 16384


def imitate(folder: str, task: Countdown, updates: int, lr: float, out: Path) -> list[float]:
    """The supervised start; returns the loss of every update."""
    device = find_device("auto")
    model = load_folder(folder, DTYPES[find_dtype("auto", device)])
    model.decoder.to(device)
    tokenizer = Tokenizer.load(folder)
    losses: list[float] = []
    rows = list(islice(replace(task, train_size=updates * SFT_BATCH).rows("traces"), updates * SFT_BATCH))
    rng = random.Random(0)

    def batch(update: int) -> Batch:
        part = rows[update * SFT_BATCH : (update + 1) * SFT_BATCH]
        traces = [countdown(rng, task.prompt(r)[0]["content"], r["nums"], r["target"], STYLES) for r in part]
        return pack_examples([encode(tokenizer, trace) for trace in traces], SFT_BUDGET)

    class Updates:
        def steps(self) -> Iterator[int]:
            yield from range(updates)

        def end_step(self, step: int, record: StepRecord) -> None:
            losses.append(record.metrics["loss"])
            if (step + 1) % 20 == 0:
                print(f"imitation, update {step + 1}: loss {losses[-1]:.3f}", flush=True)

    optim = OptimConfig(lr=lr, warmup=10, schedule="cosine", beta2=0.98)
    learner = LocalLearner(model.decoder, LearnerConfig(token_budget=SFT_BUDGET), optim, num_updates=updates)
    train(Updates(), learner, batch)
    save_folder(model.decoder, model.hf_config, model.folder, out)
    return losses


def recipe(model: Path, task: Countdown, a: argparse.Namespace) -> RL:
    return RL(
        model=str(model),
        steps=a.steps,
        task=task,
        reward={"correct": 1.0, "format": 0.1},
        batch=BatchConfig(prompts=a.prompts, samples=8),
        sampling=SamplingConfig(max_tokens=a.max_tokens),
        optim=OptimConfig(lr=a.lr, warmup=5),
        eval=EvalConfig(every=max(1, a.steps // 4), problems=a.problems),
        save=SaveConfig(every=max(1, a.steps // 2), rollouts=1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder in Hugging Face format")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sft-updates", type=int, default=150)
    parser.add_argument("--sft-lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--numbers", type=int, default=3, help="numbers of a problem")
    a = parser.parse_args()
    task = Countdown(min_numbers=a.numbers, max_numbers=a.numbers, instructions=True)
    begin = time.monotonic()
    losses = imitate(a.model, task, a.sft_updates, a.sft_lr, a.out / "sft")
    middle = time.monotonic()
    config = recipe(a.out / "sft", task, a)
    run = build.train(config, a.out / "runs", "plain")
    seconds = {"imitation": middle - begin, "run": time.monotonic() - middle}
    with Reader(run / "run.db") as reader:
        series = {name: reader.series(name) for name in SHOWN}
    found = {step: e.accuracy for step, e in RunDirectory.open(run).evaluations().items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = {
        "device": device,
        "torch": torch.__version__,
        "seconds": seconds,
        "config": dump(RunDirectory.open(run).config),
        "imitation_loss": losses,
        "accuracy": found,
        "metrics": series,
    }
    (a.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nheld-out accuracy by step: {found}\nseconds: {seconds}")


if __name__ == "__main__":
    main()
