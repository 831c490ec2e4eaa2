"""Makes the bundled `tiny` model: supervised fine-tuning on the traces, from random weights, in two phases.

    python -m scripts.tiny.train --out build/tiny                  # on a GPU if there is one
    python -m scripts.tiny.train --out build/tiny --updates 20     # a rehearsal

Phase one teaches the skill: thoughts and answers that are right. Phase two, the last part, teaches the habits: the
mixture of styles that reinforcement learning is to sort out. (Taught at once, the wrong guesses drown the sums: after
3000 updates a think-first answer was right one time in ten.)

The traces depend on the seed alone, not on the number of workers. Floating-point sums differ between devices:
weights trained elsewhere differ in detail and score alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cohort.run.job import StepRecord
from cohort.serialize import dumps, loads
from cohort.tasks.traces import mixture
from cohort.tasks.traces.styles import Mix
from cohort.text import Tokenizer

SOURCE = Path("src/cohort/models/tiny")  # tokenizer and chat template
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 704,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
SKILL = Mix(think=0.85, broken=0.0, right=1.0)  # the rest answers at once, and right
HABITS = Mix()
HABITS_SHARE = 0.15  # of the updates
TOKEN_BUDGET = 65_536  # tokens a forward and backward

_worker: dict[str, Any] = {}


def start_worker(num_rows: int) -> None:
    import torch

    torch.set_num_threads(1)
    _worker["rows"], _worker["tokenizer"] = mixture.load(num_rows), Tokenizer.load(SOURCE)


def make_batch(job: tuple[int, int, int, Mix]) -> bytes:
    """The batch of update number `update`, in the form that travels."""
    from cohort.loops.sft import batch_of

    seed, update, size, mix = job
    examples = mixture.examples(_worker["rows"], _worker["tokenizer"], seed, update, size, mix)
    return dumps(batch_of(examples))


def batches(args: argparse.Namespace) -> Iterator[Any]:
    """Every update's batch in order, made ahead by worker processes."""
    first_habit = round(args.updates * (1 - HABITS_SHARE))
    jobs = ((args.seed, u, args.batch, SKILL if u < first_habit else HABITS) for u in range(args.updates))
    with multiprocessing.get_context("spawn").Pool(args.workers, start_worker, (args.rows,)) as pool:
        yield None  # the workers start before this process holds a device
        for made in pool.imap(make_batch, jobs):
            yield loads(made)


def main() -> None:
    args = parse()
    stream = batches(args)
    next(stream)
    train(args, stream)
    from cohort.models.files import load_folder
    from scripts.tiny.scores import measure

    print("| task | begins with | accuracy | tokens | thinks |\n|---|---|---|---|---|")
    for score in measure(load_folder(args.out).decoder, Tokenizer.load(args.out), args.problems):
        print(score, flush=True)


def train(args: argparse.Namespace, stream: Iterator[Any]) -> None:
    """From random weights to a folder that transformers loads."""
    import torch

    from cohort.config.schema import LearnerConfig, OptimConfig
    from cohort.learner.local import LocalLearner
    from cohort.loops import sft
    from cohort.models.config import ModelConfig
    from cohort.models.decoder import Decoder, initialise
    from cohort.models.files import save_folder

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    decoder = Decoder(ModelConfig.from_hf(CONFIG))
    initialise(decoder, args.seed)
    decoder.to(device)
    optim = OptimConfig(lr=args.lr, schedule="cosine", warmup=200, lr_floor=0.02, beta2=0.98, weight_decay=0.05)
    learner = LocalLearner(decoder, LearnerConfig(token_budget=TOKEN_BUDGET), optim, num_updates=args.updates)
    report = Progress(args, decoder)
    sft.train(report, learner, lambda update: next(stream))
    num = sum(p.numel() for p in decoder.parameters())
    print(f"{num / 1e6:.2f}M parameters on {device}: {report.targets / 1e6:.1f}M target tokens", flush=True)
    save_folder(decoder, CONFIG, SOURCE, args.out, dtype=torch.bfloat16)


class Progress:
    """The updates, with a line every few hundred, and now and then what the model can do on the `train` split."""

    def __init__(self, args: argparse.Namespace, decoder: Any) -> None:
        self.args, self.decoder, self.targets, self.start = args, decoder, 0.0, time.monotonic()

    def steps(self) -> Iterator[int]:
        yield from range(self.args.updates)

    def end_step(self, step: int, record: StepRecord) -> None:
        stats = record.metrics
        self.targets += stats["tokens"]
        done, last = step + 1, step + 1 == self.args.updates
        if done % 200 == 0 or last:
            passed = time.monotonic() - self.start
            told = f"loss {stats['loss']:.4f} targets {self.targets / 1e6:.1f}M {passed:.0f} s"
            print(f"update {done} {told}", flush=True)
        if self.args.probe and (done % self.args.probe == 0 or last):
            from scripts.tiny.scores import probe

            print(probe(self.decoder, Tokenizer.load(SOURCE), 256), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled tiny model from its traces.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=8_400)
    parser.add_argument("--batch", type=int, default=384, help="traces an update")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--rows", type=int, default=60_000, help="distinct problems of three terms")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems to score on")
    parser.add_argument("--probe", type=int, default=1_400, help="updates between probes; 0 = none")
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 1))
    parser.add_argument("--device", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
