"""Padded, packed and prefix-shared training of SFT and DPO side by side: step time, tokens computed, loss curve.

    python benchmarks/layouts.py --model tiny --dtype float64
    python benchmarks/layouts.py --model smollm2-135m --kinds dpo --data pairs.jsonl --size 16 --markdown
    python benchmarks/layouts.py --data pairs.jsonl --count         # only the tokens: what could be saved
    python benchmarks/layouts.py --shape qwen2.5-0.5b --prompt-tokens 512 --answer-tokens 512 --answers 2 --device cuda

The layouts of a step:

  padded   One row per answer, with its prompt, padded at the end to the longest row of its microbatch. This is a plain
           implementation of this script (`PaddedLearner`): torch's causal attention and autograd. Like the others it
           applies the head to targets only and has Cohort's decoder and AdamW, so that the layout alone differs.
  packed   Cohort's learner with `prefix_sharing` off: answers end to end, each with a copy of its prompt.
  shared   Cohort's learner as it is: a prompt is computed once for all its answers.

All train on the same examples from the same weights, with the same limit of tokens per microbatch. A step of DPO
includes the log-probabilities of the reference. The whole training is repeated (`--repeats`), and the layouts take
turns at every step. Seconds are the mean over the steps of the least over the repeats. Tokens are those that the
policy's forward pass computes per step, padding included.

The examples are pairs of a file (`--data`, columns prompt, chosen and rejected; SFT imitates the chosen answers), or
random tokens: `--prompt-tokens` and `--answer-tokens` are a length or a range of them, as in 32-256. Prompts of random
tokens have `--answers` answers in SFT, as the rows of rejection sampling do. `cohort train sft` takes each row alone,
so a file has no shared layout for SFT.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid, scaled_dot_product_attention

from cohort.algos.imitation import Imitation
from cohort.algos.preferences import PreferenceLoss
from cohort.config.preferences import Sigmoid
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.pack import make_batch, pack
from cohort.examples.encode import ExampleRenderer, encode_pairs, make_example_group
from cohort.examples.rows import read_pairs
from cohort.examples.stream import ExampleStream
from cohort.jobs.models import find_model
from cohort.learner.local import LocalLearner
from cohort.loops.dpo import make_pair_batch
from cohort.loops.learning import annotate
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.models.shapes import find_shape, make_random_decoder
from cohort.models.spinning import throttle_thread_spinning
from cohort.system.process import keep_freed_memory
from cohort.text import Tokenizer
from cohort.types import Group, Provenance

LAYOUTS = ("padded", "packed", "shared")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all layouts have in common."""

    decoder: Decoder  # the weights that training starts from
    reference: Decoder | None  # of DPO
    steps: int
    budget: int  # tokens per microbatch
    lr: float
    beta: float

    def make_learner(self, share: bool) -> LocalLearner:
        """Returns a learner with a copy of the weights."""
        return LocalLearner(
            copy.deepcopy(self.decoder),
            LearnerConfig(prefix_sharing=share, token_budget=self.budget),
            OptimConfig(lr=self.lr),
            num_updates=self.steps,
            reference=self.reference,
        )


@dataclass(kw_only=True)
class Result:
    """What one layout did. Lists have one entry per step."""

    kind: str
    layout: str
    losses: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # the least of all repeats
    loss_gap: float = 0.0  # largest difference of a loss from that of the padded layout
    weight_gap: float = 0.0  # the same for the weights after the last step
    weight_change: float = 0.0  # largest change of a weight by the training


# ---- the padded layout: a plain implementation of this script --------------------------------------------------------


Row = tuple[list[int], list[int]]  # its tokens, and the places of targets among them


def cut_rows(groups: Sequence[Group], budget: int) -> Iterator[list[Row]]:
    """Yields the rows of each microbatch, in the order of the groups, which stay whole.

    A microbatch has at most `budget` tokens when its rows are padded to the longest, unless one group has more.
    """
    found: list[Row] = []
    for group in groups:
        start = len(group.prompt.tokens)
        rows = [
            (
                [*group.prompt.tokens, *sample.tokens],
                [start + i for i, p in enumerate(sample.provenance) if p == Provenance.TARGET],
            )
            for sample in group.samples
        ]
        if found and count_padded([*found, *rows]) > budget:
            yield found
            found = []
        found += rows
    yield found


def count_padded(rows: Sequence[Row]) -> int:
    """Returns the number of tokens of rows that are padded to the longest."""
    return len(rows) * max(len(tokens) for tokens, _ in rows)


class PaddedLearner:
    """Trains on padded rows with plain PyTorch. Only decoder and AdamW are those of Cohort's learner."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.learner = setup.make_learner(share=False)  # for its decoder and its optimizer

    def train(self, groups: Sequence[Group]) -> tuple[float, int]:
        """Makes one step. Returns its loss, and the tokens that one forward pass over all rows computes."""
        num_targets = sum(s.provenance.count(Provenance.TARGET) for g in groups for s in g.samples)
        total, num_tokens = 0.0, 0
        self.learner.optimizer.zero_grad()
        for rows in cut_rows(groups, self.setup.budget):
            values, owners = self._compute_logprobs(self.learner.decoder, rows)
            if self.setup.reference is None:
                loss = -values.sum() / num_targets
            else:
                with torch.no_grad():
                    reference, _ = self._compute_logprobs(self.setup.reference, rows)
                # Rows are the better and the worse answer of each pair in turn.
                sums = values.new_zeros(len(rows)).index_add(0, owners, values - reference).view(-1, 2)
                loss = -logsigmoid(self.setup.beta * (sums[:, 0] - sums[:, 1])).sum() / len(groups)
            loss.backward()
            self.learner.optimizer.collect_grads()
            total += loss.item()
            num_tokens += count_padded(rows)
        self.learner.optim_step()
        return total, num_tokens

    def _compute_logprobs(self, decoder: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each target [N], and the row that it is in [N]."""
        size, length = len(rows), max(len(tokens) for tokens, _ in rows)
        device = decoder.embed.device
        padded = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in rows], device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Causal attention within each row. What follows a token cannot reach it, so padding needs no mask."""
            queries = q.flatten(1, 2).unflatten(0, (size, length)).transpose(1, 2)  # [B, H, L, D]
            keys, values = (
                x.repeat_interleave(q.shape[2], 1).unflatten(0, (size, length)).transpose(1, 2) for x in (k, v)
            )
            mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
            return mixed.transpose(1, 2).reshape(q.shape)

        hidden = decoder(padded.flatten(), torch.arange(length, device=device).repeat(size), attend)
        places = torch.tensor([n * length + place for n, (_, places) in enumerate(rows) for place in places])
        owners = torch.tensor([n for n, (_, places) in enumerate(rows) for _ in places], device=device)
        places = places.to(device)
        # A target is predicted by the token before it.
        logits = decoder.logits(hidden.index_select(0, places - 1))
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        targets = padded.flatten().index_select(0, places)
        return log_softmax(wide, -1).gather(1, targets[:, None])[:, 0], owners


# ---- the layouts of Cohort -------------------------------------------------------------------------------------------


class PackedLearner:
    """Cohort's own learner and loops, with or without shared prompts."""

    def __init__(self, setup: Setup, share: bool) -> None:
        self.setup = setup
        self.learner = setup.make_learner(share)

    def train(self, groups: list[Group]) -> tuple[float, int]:
        """Makes one step. Returns its loss, and the tokens that one forward pass over the packed streams computes."""
        if self.setup.reference is None:
            update = self.learner.update(make_batch(groups, loss_on=Provenance.TARGET), Imitation())
        else:
            loss = PreferenceLoss(Sigmoid(beta=self.setup.beta))
            annotate(self.learner, groups, loss.needs(groups), Provenance.TARGET)
            update = self.learner.update(make_pair_batch(groups), loss)
        return update.metrics["loss"], int(update.metrics["pack/tokens"])


def make_trainer(layout: str, setup: Setup) -> PaddedLearner | PackedLearner:
    """Returns what trains in a layout."""
    return PaddedLearner(setup) if layout == "padded" else PackedLearner(setup, share=layout == "shared")


# ---- the examples ----------------------------------------------------------------------------------------------------


def read_groups(file: str, tokenizer: Tokenizer, max_tokens: int) -> list[Group]:
    """Returns the pairs of a file. Those of more than `max_tokens` tokens lose their end."""
    framing = ExampleRenderer(tokenizer=tokenizer, template="chat", system="")
    return encode_pairs(read_pairs(file, "train", ()), framing, max_tokens, "cut", "skip").groups


def draw_groups(num: int, vocab: int, prompts: range, answers: range, num_answers: int, seed: int) -> list[Group]:
    """Returns prompts of random tokens with `num_answers` answers each. Lengths are drawn from the two ranges."""
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    groups = []
    for n in range(num):
        prompt = draw(rng.choice(prompts))
        examples = []
        for _ in range(num_answers):
            answer = draw(rng.choice(answers))
            provenance = [int(Provenance.PROMPT)] * len(prompt) + [int(Provenance.TARGET)] * len(answer)
            examples.append(make_example_group(str(n), prompt + answer, provenance))
        groups.append(replace(examples[0], samples=[example.samples[0] for example in examples]))
    return groups


def parse_range(text: str) -> range:
    """Returns the lengths that "64" or "32-256" stand for."""
    low, _, high = text.partition("-")
    return range(int(low), int(high or low) + 1)


# ---- the measurement -------------------------------------------------------------------------------------------------


def measure(kind: str, layouts: Sequence[str], setup: Setup, stream: ExampleStream, repeats: int) -> list[Result]:
    """Trains every layout `repeats` times, in turns at every step. The first result is that of the padded layout."""
    results = [Result(kind=kind, layout=layout) for layout in layouts]
    trainers = [make_trainer(layout, setup) for layout in layouts]
    begin = [trainer.learner.snapshot() for trainer in trainers]
    for repeat in range(repeats):
        for trainer, start in zip(trainers, begin, strict=True):
            trainer.learner.restore(start)
        for step in range(setup.steps):
            # Another layout goes first at every step.
            for i in range(len(layouts)):
                number = (i + step + repeat) % len(layouts)
                result = results[number]
                seconds, (loss, tokens) = take_time(lambda n=number, s=step: trainers[n].train(stream.list_groups(s)))
                if not repeat:
                    result.losses.append(loss)
                    result.tokens.append(tokens)
                    result.seconds.append(seconds)
                result.seconds[step] = min(result.seconds[step], seconds)
    first = setup.decoder.state_dict()
    last = [trainer.learner.decoder.state_dict() for trainer in trainers]
    for result, weights in zip(results, last, strict=True):
        result.loss_gap = max(abs(a - b) for a, b in zip(result.losses, results[0].losses, strict=True))
        result.weight_gap = find_largest_gap(weights, last[0])
        result.weight_change = find_largest_gap(weights, first)
    return results


def take_time(work: Callable[[], tuple[float, int]]) -> tuple[float, tuple[float, int]]:
    """Returns the seconds that a function takes, and its result. Waits for a GPU."""
    begin = time.perf_counter()
    value = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, value


def find_largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest difference of an entry between two sets of tensors."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def count_tokens(kind: str, layout: str, groups: list[Group], budget: int) -> int:
    """Returns the tokens that one forward pass over a step's examples computes."""
    if layout == "padded":
        return sum(map(count_padded, cut_rows(groups, budget)))
    batch = make_pair_batch(groups) if kind == "dpo" else make_batch(groups, loss_on=Provenance.TARGET)
    return sum(minibatch.num_inputs for minibatch in pack(batch, budget, share=layout == "shared"))


# ---- the tables ------------------------------------------------------------------------------------------------------

HEAD = ["kind", "layout", "tokens", "share", "step, s", "speed", "loss gap", "weight gap", "weight change"]


def make_cells(result: Result, padded: Result) -> list[str]:
    """Returns the row of a layout. Speed and share of tokens are relative to the padded layout."""
    tokens = fmean(result.tokens)
    cells = [result.kind, result.layout, f"{tokens:.0f}", f"{tokens / fmean(padded.tokens):.0%}"]
    # Without training there are only counts.
    if not result.seconds:
        return cells
    seconds = fmean(result.seconds)
    return [
        *cells,
        f"{seconds:.3g}",
        f"{fmean(padded.seconds) / seconds:.2f}",
        f"{result.loss_gap:.1e}",
        f"{result.weight_gap:.1e}",
        f"{result.weight_change:.1e}",
    ]


def print_table(rows: list[list[str]], markdown: bool, num_texts: int) -> None:
    """Prints rows, of which the first is the head. The first `num_texts` columns are texts, the others numbers."""
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "|" + "---|" * num_texts + "---:|" * (len(rows[0]) - num_texts))
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if n < num_texts else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
    print("\n".join(lines) + "\n", flush=True)


def print_results(results: list[list[Result]], markdown: bool) -> None:
    """Prints the table of all layouts, and the loss of every step if there is one. `results` has a list per kind."""
    cells = [make_cells(result, group[0]) for group in results for result in group]
    print_table([HEAD[: len(cells[0])], *cells], markdown, 2)
    if not results[0][0].losses:
        return
    steps = [str(n + 1) for n in range(len(results[0][0].losses))]
    losses = [[r.kind, r.layout, *(f"{loss:.7f}" for loss in r.losses)] for group in results for r in group]
    print_table([["kind", "loss at step", *steps], *losses], markdown, 2)


def describe_machine(device: torch.device) -> str:
    """Returns date, hardware and versions in one line."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (cpus := Path("/proc/cpuinfo")).exists():
        found = [line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if "model name" in line]
        name = found[0] if found else name
    load = os.getloadavg()[0]
    return (
        f"{date.today()}, {name}, {torch.get_num_threads()} threads, load {load:.1f} at the start, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def load_decoder(a: argparse.Namespace) -> tuple[Decoder, Tokenizer | None]:
    """Returns the model on its device, and its tokenizer; None for random weights."""
    dtype = getattr(torch, a.dtype)
    if a.shape:
        return make_random_decoder(find_shape(a.shape), dtype, a.device), None
    folder = find_model(a.model).folder
    decoder = load_folder(folder, dtype).decoder.to(a.device)
    assert isinstance(decoder, Decoder), "the model is not of the native family"
    return decoder, Tokenizer.load(folder)


def compare_kind(kind: str, a: argparse.Namespace, decoder: Decoder, tokenizer: Tokenizer | None) -> list[Result]:
    """Returns the results of all layouts for one kind of run. With `--count` they have only tokens."""
    if a.data and tokenizer is not None:
        groups = read_groups(a.data, tokenizer, a.max_tokens)
        # The better answer is imitated.
        groups = [replace(g, samples=g.samples[:1]) for g in groups] if kind == "sft" else groups
    else:
        lengths = (parse_range(a.prompt_tokens), parse_range(a.answer_tokens))
        num_answers = a.answers if kind == "sft" else 2
        groups = draw_groups(a.size * a.steps, decoder.config.vocab_size, *lengths, num_answers, a.seed)
    layouts = [name for name in LAYOUTS if name != "shared" or any(len(g.samples) > 1 for g in groups)]
    stream = ExampleStream(groups=groups, size=a.size, seed=a.seed)
    if a.count:
        counts = {
            name: [count_tokens(kind, name, stream.list_groups(n), a.budget) for n in range(a.steps)]
            for name in layouts
        }
        return [Result(kind=kind, layout=name, tokens=tokens) for name, tokens in counts.items()]
    reference = copy.deepcopy(decoder).requires_grad_(False) if kind == "dpo" else None
    setup = Setup(decoder=decoder, reference=reference, steps=a.steps, budget=a.budget, lr=a.lr, beta=a.beta)
    return measure(kind, layouts, setup, stream, a.repeats)


def main() -> None:
    """Measures the layouts of each kind of run, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", default="", help="random weights of this shape in place of a model")
    parser.add_argument("--kinds", nargs="+", choices=["sft", "dpo"], default=["sft", "dpo"])
    parser.add_argument("--data", default="", help="file of pairs; without it tokens are random")
    parser.add_argument("--max-tokens", type=int, default=512, help="longer examples of the file lose their end")
    parser.add_argument("--prompt-tokens", default="32-128")
    parser.add_argument("--answer-tokens", default="8-64")
    parser.add_argument("--answers", type=int, default=4, help="answers per prompt of random tokens in SFT")
    parser.add_argument("--size", type=int, default=8, help="prompts per step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", action="store_true", help="count tokens, and do not train")
    parser.add_argument("--budget", type=int, default=2048, help="tokens per microbatch")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    a = parser.parse_args()
    if a.data and a.shape:
        parser.error("--shape has no tokenizer for the texts of --data: name a model with --model")
    keep_freed_memory()
    torch.set_num_threads(a.threads)
    throttle_thread_spinning()
    machine = describe_machine(torch.device(a.device))
    decoder, tokenizer = load_decoder(a)
    results = [compare_kind(kind, a, decoder, tokenizer) for kind in a.kinds]
    if a.json:
        records = [asdict(result) for group in results for result in group]
        json.dump({"machine": machine, "settings": vars(a), "results": records}, sys.stdout, indent=1)
        print()
        return
    print(machine + "\n")
    print_results(results, a.markdown)


if __name__ == "__main__":
    main()
