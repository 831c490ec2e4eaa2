"""A real model on a GPU against transformers: `COHORT_SMOLLM2=FOLDER pytest tests/gpu/test_real_model.py -s`.

FOLDER is SmolLM2-135M in Hugging Face format, as `cohort pull smollm2-135m` makes it. Where COHORT_DATA names a folder
with gsm8k_test.jsonl, the first hundred questions of GSM8K are among the prompts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.gpu.device import only_gpu

# isort: split

from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.engines.base import Request, sample
from cohort.engines.native import make_native_engine
from cohort.engines.native.cuda.engine import GraphEngine
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.models.shapes import find_shape, make_random_decoder
from cohort.text import Tokenizer
from cohort.types import Key, Sample, Sampling
from tests.helpers.decoders_and_groups import make_group, make_sample

FOLDER = os.environ.get("COHORT_SMOLLM2", "")
pytestmark = only_gpu
GSM8K = Path(os.environ.get("COHORT_DATA", "")) / "gsm8k_test.jsonl"
needs_model = pytest.mark.skipif(not FOLDER, reason="COHORT_SMOLLM2 names no model folder")

STORIES = [
    "The three laws of thermodynamics say that",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Question: Natalia sold clips to 48 of her friends in April. Answer:",
    "The capital of France is Paris. The capital of Italy is",
    "To make a good soup, first",
    "In 1969, astronauts",
    "List of prime numbers: 2, 3, 5, 7,",
]
QUESTIONS = [
    "What are the three laws of thermodynamics?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold clips to 48 friends in April and half as many in May. How many did she sell altogether?",
    "How do I make a good vegetable soup?",
    "Who walked on the Moon in 1969?",
    "List the first ten prime numbers.",
    "Explain photosynthesis to a child.",
    "Write a short poem about the sea.",
    "What is the difference between a virus and a bacterium?",
    "Give me three tips for learning a language.",
    "Why is the sky blue?",
    "Summarize the plot of Romeo and Juliet.",
    "What is 17 times 23?",
    "Write an email asking for a day off.",
]


def prompts_of(kind: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Text to be continued, or questions in the model's own chat format."""
    if kind == "stories":
        return [tokenizer.encode(text) for text in STORIES]
    questions = QUESTIONS
    if kind == "gsm8k":
        questions = [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()[:100]]
    return [tokenizer.render([{"role": "user", "content": question}]).tokens for question in questions]


def drawn(
    dtype: torch.dtype, kind: str, temperature: float, siblings: int, length: int
) -> tuple[Decoder, list[list[int]], dict[str, Sample]]:
    decoder = load_folder(FOLDER, dtype).decoder.to("cuda")
    tokenizer = Tokenizer.load(FOLDER)
    prompts = prompts_of(kind, tokenizer)
    engine = make_native_engine(decoder, tokenizer.decode, slots=64, max_context=512)
    assert isinstance(engine, GraphEngine)
    stops = () if kind == "stories" else tokenizer.stop_ids
    requests = [
        Request(
            id=f"{p}/{i}",
            tokens=tokens,
            sampling=Sampling(max_tokens=length, temperature=temperature, stop_ids=stops),
            key=Key(seed=0, purpose="test", task="t", prompt_id=str(p), visit=0, sample=i),
        )
        for p, tokens in enumerate(prompts)
        for i in range(siblings)
    ]
    return decoder, prompts, sample(engine, requests)


def peer(dtype: torch.dtype):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
    return model.to("cuda").eval()


class Agreement(NamedTuple):
    """Shares of our greedy tokens that are also the best, given all before them, by transformers in ..."""

    same: float  # ... our type
    rounded: float  # ... our type, by the logits it returns, which in bf16 are rounded and tie
    exact: float  # ... fp32
    peer: float  # share of the places where transformers in our type agrees with itself in fp32


@torch.no_grad()
def agreement(dtype: torch.dtype, kinds: Sequence[str], length: int) -> Agreement:
    """Over all tokens of all kinds of prompts; each kind's own shares are printed."""
    model, exact = peer(dtype), peer(torch.float32)
    each = []
    for kind in kinds:
        _, prompts, samples = drawn(dtype, kind, temperature=0.0, siblings=1, length=length)
        found = []
        for p, tokens in enumerate(prompts):
            own = torch.tensor(samples[f"{p}/0"].tokens, device="cuda")
            stream = torch.tensor([[*tokens, *own.tolist()]], device="cuda")
            here = slice(len(tokens) - 1, -1)
            out = model(stream, output_hidden_states=True)
            wide = (out.hidden_states[-1][0, here].float() @ model.lm_head.weight.float().T).argmax(-1)
            best = exact(stream).logits[0, here].argmax(-1)
            found.append(torch.stack([wide == own, out.logits[0, here].argmax(-1) == own, best == own, wide == best]))
        each.append(torch.cat(found, dim=1).double())
        print(f"\n{dtype}, {kind}, {each[-1].shape[1]} tokens: {Agreement(*each[-1].mean(1).tolist())}")
    shares = Agreement(*torch.cat(each, dim=1).mean(1).tolist())
    print(f"\n{dtype}, all: {shares}")
    return shares


def gaps(decoder: Decoder, prompts: list[list[int]], samples: dict[str, Sample], siblings: int) -> Tensor:
    """|sampler - learner log-probability| of every token drawn."""
    learner = LocalLearner(decoder, LearnerConfig(token_budget=4096), OptimConfig(), num_updates=1)
    rows = [[samples[f"{p}/{i}"] for i in range(siblings)] for p in range(len(prompts))]
    groups = [
        make_group(tokens, [make_sample(s.tokens) for s in row]) for tokens, row in zip(prompts, rows, strict=True)
    ]
    annotate(learner, groups, ["old"])
    ours = [lp for row in rows for s in row for lp in s.sampler_logprobs]
    theirs = [lp for group in groups for s in group.samples for lp in s.old_logprobs]
    found = (torch.tensor(ours) - torch.tensor(theirs)).abs()
    print(f"\n{decoder.embed.dtype}: gap mean {found.mean():.2e}, max {found.max():.2e} of {len(found)} tokens")
    return found


@needs_model
def test_greedy_tokens_are_those_of_transformers_in_fp32():
    found = agreement(torch.float32, ["stories"], 64)
    assert (found.same, found.rounded) == (1.0, 1.0)  # then greedy decoding there gives the same tokens


@needs_model
def test_bf16_argmax_agrees_with_transformers_teacher_forced():
    """bf16 itself changes a token in a hundred, in transformers as here: see its agreement with itself in fp32."""
    found = agreement(torch.bfloat16, ["stories", "questions", *["gsm8k"] * GSM8K.is_file()], 200)
    assert found.same >= 0.99


@needs_model
@pytest.mark.parametrize(
    ("dtype", "mean_bound", "most_bound"), [(torch.float32, 1e-5, 2e-4), (torch.bfloat16, 0.025, 1.0)]
)
def test_gap_between_sampler_and_learner(dtype, mean_bound, most_bound):
    """This model is deep and narrow: in bf16 no two orders of summation agree better than to about 0.02."""
    decoder, prompts, samples = drawn(dtype, "stories", temperature=1.0, siblings=8, length=128)
    found = gaps(decoder, prompts, samples, 8)
    assert found.mean() <= mean_bound and found.max() <= most_bound


def test_gap_in_bf16_with_random_weights_of_a_real_shape():
    decoder = make_random_decoder(find_shape("qwen2.5-0.5b"), torch.bfloat16, "cuda")
    engine = make_native_engine(decoder, lambda ids: "", slots=64, max_context=256)
    prompts = [torch.randint(0, 150_000, (128,), generator=torch.Generator().manual_seed(p)).tolist() for p in range(8)]
    requests = [
        Request(
            id=f"{p}/{i}",
            tokens=tokens,
            sampling=Sampling(max_tokens=128),
            key=Key(seed=0, purpose="test", task="t", prompt_id=str(p), visit=0, sample=i),
        )
        for p, tokens in enumerate(prompts)
        for i in range(8)
    ]
    assert gaps(decoder, prompts, sample(engine, requests), 8).mean() < 0.01
