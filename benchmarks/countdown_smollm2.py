"""A real run on one GPU, in minutes: SmolLM2-135M learns Countdown, first by imitation of traces, then by GRPO.

    cohort pull smollm2-135m
    PYTHONPATH=src:. python3 benchmarks/countdown_smollm2.py FOLDER --out countdown

The instruct model does not know the game. It is first trained on synthetic traces: trial and error in <think>, then
<answer>. They are right half of the time, and none of their problems is in a split. Then it is trained by GRPO.
Files: OUT/sft (the model that GRPO starts from), OUT/runs (the run), OUT/result.json (settings, evaluations and the
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

from cohort.config.document import dump_config
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
from cohort.loops.sft import make_sft_batch, train
from cohort.models.device import DTYPES, choose_device, choose_dtype
from cohort.models.files import load_folder, save_folder
from cohort.run.directory import RunDirectory
from cohort.run.job import StepRecord
from cohort.run.store.reader import Reader
from cohort.tasks.countdown import Countdown
from cohort.tasks.traces.encode import encode_trace
from cohort.tasks.traces.styles import Mix, make_countdown_trace
from cohort.text import Tokenizer

SHOWN = ("reward/mean", "sampler_gap/mean", "sampler_gap/max", "entropy", "grad_norm", "length/mean", "groups/dead")
# One trace in ten answers at once, and of those most are wrong.
STYLES = Mix(think=0.9, broken=0.0, right=0.3, system=0.0)
# Traces per update, and tokens per forward and backward pass.
SFT_BATCH = 64
SFT_BUDGET = 16384


def train_by_imitation(folder: str, task: Countdown, updates: int, lr: float, out: Path) -> list[float]:
    """Trains the model in `folder` on traces, writes it to `out` and returns the loss of every update."""
    device = choose_device("auto")
    model = load_folder(folder, DTYPES[choose_dtype("auto", device)])
    model.decoder.to(device)
    tokenizer = Tokenizer.load(folder)
    losses: list[float] = []
    # Problems of the split `traces`, which are in neither `train` nor `test`.
    rows = list(islice(replace(task, train_size=updates * SFT_BATCH).rows("traces"), updates * SFT_BATCH))
    rng = random.Random(0)

    def batch(update: int) -> Batch:
        """Returns the traces of one update as a batch."""
        part = rows[update * SFT_BATCH : (update + 1) * SFT_BATCH]
        traces = [make_countdown_trace(rng, task.prompt(r)[0]["content"], r["nums"], r["target"], STYLES) for r in part]
        return make_sft_batch([encode_trace(tokenizer, trace) for trace in traces])

    class Updates:
        """The steps of the training loop, which records the losses."""

        def steps(self) -> Iterator[int]:
            """Yields the number of each update."""
            yield from range(updates)

        def end_step(self, step: int, record: StepRecord) -> None:
            """Records the loss of an update."""
            losses.append(record.metrics["loss"])
            if (step + 1) % 20 == 0:
                print(f"imitation, update {step + 1}: loss {losses[-1]:.3f}", flush=True)

    optim = OptimConfig(lr=lr, warmup=10, schedule="cosine", beta2=0.98)
    learner = LocalLearner(model.decoder, LearnerConfig(token_budget=SFT_BUDGET), optim, num_updates=updates)
    train(Updates(), learner, batch)
    save_folder(model.decoder, model.hf_config, model.folder, out)
    return losses


def make_config(model: Path, task: Countdown, a: argparse.Namespace) -> RL:
    """Returns the config of the GRPO run. `a` are the options of the command line."""
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
    """Trains by imitation, then by GRPO, and writes the results."""
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
    losses = train_by_imitation(a.model, task, a.sft_updates, a.sft_lr, a.out / "sft")
    imitation_end = time.monotonic()
    config = make_config(a.out / "sft", task, a)
    run = build.train(config, a.out / "runs", "plain")
    seconds = {"imitation": imitation_end - begin, "run": time.monotonic() - imitation_end}
    with Reader(run / "run.db") as reader:
        series = {name: reader.read_series(name) for name in SHOWN}
    accuracy = {step: e.accuracy for step, e in RunDirectory.open(run).load_evaluations().items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = {
        "device": device,
        "torch": torch.__version__,
        "seconds": seconds,
        "config": dump_config(RunDirectory.open(run).config),
        "imitation_loss": losses,
        "accuracy": accuracy,
        "metrics": series,
    }
    (a.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nheld-out accuracy by step: {accuracy}\nseconds: {seconds}")


if __name__ == "__main__":
    main()
