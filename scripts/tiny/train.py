"""The training of the bundled `tiny` model: supervised fine-tuning on traces, from random weights, in two phases.

    python -m scripts.tiny.train --out build/tiny                  # on a GPU if there is one
    python -m scripts.tiny.train --out build/tiny --updates 20     # a rehearsal

The first phase teaches the skill with thoughts and answers that are right. The second phase, the last 15 % of the
updates, teaches the habits: the mixture of styles from which reinforcement learning then selects. Both phases at once
do not work: after 3000 updates only one in ten answers that begin with a thought was right, because of the wrong
guesses in the mixture.

The traces depend only on the seed, not on the number of workers. Floating-point sums differ between devices, so weights
that were trained on another device differ in detail and score about the same.
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

# The folder with the tokenizer and the chat template.
SOURCE = Path("src/cohort/models/tiny")
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
# The first phase: 85 % of the traces think first, the others answer at once, and all are right.
SKILL = Mix(think=0.85, broken=0.0, right=1.0)
# The second phase, and its share of the updates.
HABITS = Mix()
HABITS_SHARE = 0.15
# Most tokens in one forward and backward pass.
TOKEN_BUDGET = 65_536

# The rows and the tokenizer of a worker process. `start_worker` sets them.
_worker: dict[str, Any] = {}


def start_worker(num_rows: int) -> None:
    """Prepares a worker process: loads the rows of the traces and the tokenizer."""
    import torch

    torch.set_num_threads(1)
    _worker["rows"] = mixture.load_trace_rows(num_rows)
    _worker["tokenizer"] = Tokenizer.load(SOURCE)


def make_batch(job: tuple[int, int, int, Mix]) -> bytes:
    """Returns a serialised batch. `job` is (seed, number of the update, traces in the batch, mixture of styles)."""
    from cohort.loops.sft import make_sft_batch

    seed, update, size, mix = job
    examples = mixture.make_examples(_worker["rows"], _worker["tokenizer"], seed, update, size, mix)
    return dumps(make_sft_batch(examples))


def make_batches(args: argparse.Namespace) -> Iterator[Any]:
    """Yields None, then the batch of each update in order. Worker processes make them ahead.

    The caller takes the None first: that starts the workers, which must happen before this process uses a GPU.
    """
    first_habit = round(args.updates * (1 - HABITS_SHARE))
    jobs = ((args.seed, u, args.batch, SKILL if u < first_habit else HABITS) for u in range(args.updates))
    with multiprocessing.get_context("spawn").Pool(args.workers, start_worker, (args.rows,)) as pool:
        yield None
        for batch in pool.imap(make_batch, jobs):
            yield loads(batch)


def main() -> None:
    """Trains the model, writes it to `--out` and prints its scores."""
    args = parse_arguments()
    stream = make_batches(args)
    next(stream)
    train_model(args, stream)
    from cohort.models.files import load_folder
    from scripts.tiny.scores import measure_scores

    print("| task | begins with | accuracy | tokens | thinks |\n|---|---|---|---|---|")
    for score in measure_scores(load_folder(args.out).decoder, Tokenizer.load(args.out), args.problems):
        print(score, flush=True)


def train_model(args: argparse.Namespace, stream: Iterator[Any]) -> None:
    """Trains the model from random weights and writes it to `args.out`. `stream` yields one batch per update."""
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
    report = TrainingProgress(args, decoder)
    sft.train(report, learner, lambda update: next(stream))
    num = sum(p.numel() for p in decoder.parameters())
    print(f"{num / 1e6:.2f}M parameters on {device}: {report.targets / 1e6:.1f}M target tokens", flush=True)
    save_folder(decoder, CONFIG, SOURCE, args.out, dtype=torch.bfloat16)


class TrainingProgress:
    """The steps of the training loop, with progress on the terminal.

    Every 200 updates it prints the loss, and every `--probe` updates the scores on problems of the split `train`.
    """

    def __init__(self, args: argparse.Namespace, decoder: Any) -> None:
        self.args = args
        self.decoder = decoder
        # Tokens of the assistant that were trained on so far.
        self.targets = 0.0
        self.start = time.monotonic()

    def steps(self) -> Iterator[int]:
        """Yields the number of each update, from 0 on."""
        yield from range(self.args.updates)

    def end_step(self, step: int, record: StepRecord) -> None:
        """Counts the tokens of an update and prints what is due after it."""
        stats = record.metrics
        self.targets += stats["tokens"]
        done = step + 1
        last = done == self.args.updates
        if done % 200 == 0 or last:
            seconds = time.monotonic() - self.start
            progress = f"loss {stats['loss']:.4f} targets {self.targets / 1e6:.1f}M {seconds:.0f} s"
            print(f"update {done} {progress}", flush=True)
        if self.args.probe and (done % self.args.probe == 0 or last):
            from scripts.tiny.scores import probe_on_train_problems

            print(probe_on_train_problems(self.decoder, Tokenizer.load(SOURCE), 256), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled tiny model from its traces.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=8_400)
    parser.add_argument("--batch", type=int, default=384, help="traces per update")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--rows", type=int, default=60_000, help="distinct problems of three terms")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems to score on")
    parser.add_argument("--probe", type=int, default=1_400, help="updates between probes; 0 = none")
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 1))
    parser.add_argument("--device", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
