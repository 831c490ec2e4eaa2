"""A real model on a GPU, compared with transformers: `COHORT_SMOLLM2=FOLDER pytest tests/gpu/test_real_model.py -s`.

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


def make_prompts(kind: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of each prompt: texts to be continued ("stories"), or questions in the model's chat format."""
    if kind == "stories":
        return [tokenizer.encode(text) for text in STORIES]
    questions = QUESTIONS
    if kind == "gsm8k":
        questions = [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()[:100]]
    return [tokenizer.render([{"role": "user", "content": question}]).tokens for question in questions]


def sample_completions(
    dtype: torch.dtype, kind: str, temperature: float, siblings: int, length: int
) -> tuple[Decoder, list[list[int]], dict[str, Sample]]:
    """Samples `siblings` completions per prompt, of at most `length` tokens.

    Returns the decoder, the tokens of the prompts, and the samples by "prompt/sibling".
    """
    decoder = load_folder(FOLDER, dtype).decoder.to("cuda")
    tokenizer = Tokenizer.load(FOLDER)
    prompts = make_prompts(kind, tokenizer)
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


def load_peer(dtype: torch.dtype):
    """Returns the model as transformers loads it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
    return model.to("cuda").eval()


class Agreement(NamedTuple):
    """Shares of positions at which the likeliest token is the same, given the same tokens before it.

    `same`, `rounded` and `exact` compare our greedy tokens with those of transformers.
    """

    same: float  # transformers in our type, with logits computed in fp32
    rounded: float  # transformers in our type, with the logits that it returns: in bf16 they are rounded, and some tie
    exact: float  # transformers in fp32
    peer: float  # transformers in our type (logits in fp32) compared with transformers in fp32


@torch.no_grad()
def measure_agreement(dtype: torch.dtype, kinds: Sequence[str], length: int) -> Agreement:
    """Returns the agreement over all kinds of prompts, and prints that of each kind."""
    model = load_peer(dtype)
    exact = load_peer(torch.float32)
    by_kind = []
    for kind in kinds:
        _, prompts, samples = sample_completions(dtype, kind, temperature=0.0, siblings=1, length=length)
        matches = []
        for p, tokens in enumerate(prompts):
            own = torch.tensor(samples[f"{p}/0"].tokens, device="cuda")
            stream = torch.tensor([[*tokens, *own.tolist()]], device="cuda")
            here = slice(len(tokens) - 1, -1)
            out = model(stream, output_hidden_states=True)
            # The logits are computed again in fp32, since those that the model returns are rounded.
            wide = (out.hidden_states[-1][0, here].float() @ model.lm_head.weight.float().T).argmax(-1)
            best = exact(stream).logits[0, here].argmax(-1)
            rounded = out.logits[0, here].argmax(-1)
            matches.append(torch.stack([wide == own, rounded == own, best == own, wide == best]))
        by_kind.append(torch.cat(matches, dim=1).double())
        print(f"\n{dtype}, {kind}, {by_kind[-1].shape[1]} tokens: {Agreement(*by_kind[-1].mean(1).tolist())}")
    shares = Agreement(*torch.cat(by_kind, dim=1).mean(1).tolist())
    print(f"\n{dtype}, all: {shares}")
    return shares


def measure_gaps(decoder: Decoder, prompts: list[list[int]], samples: dict[str, Sample], siblings: int) -> Tensor:
    """Returns, for every sampled token, |log-probability of the sampler - that of the learner|."""
    learner = LocalLearner(decoder, LearnerConfig(token_budget=4096), OptimConfig(), num_updates=1)
    rows = [[samples[f"{p}/{i}"] for i in range(siblings)] for p in range(len(prompts))]
    groups = [
        make_group(tokens, [make_sample(s.tokens) for s in row]) for tokens, row in zip(prompts, rows, strict=True)
    ]
    annotate(learner, groups, ["old"])
    of_sampler = [lp for row in rows for s in row for lp in s.sampler_logprobs]
    of_learner = [lp for group in groups for s in group.samples for lp in s.old_logprobs]
    gaps = (torch.tensor(of_sampler) - torch.tensor(of_learner)).abs()
    print(f"\n{decoder.embed.dtype}: gap mean {gaps.mean():.2e}, max {gaps.max():.2e} of {len(gaps)} tokens")
    return gaps


@needs_model
def test_greedy_tokens_are_those_of_transformers_in_fp32():
    agreement = measure_agreement(torch.float32, ["stories"], 64)
    # With full agreement, greedy decoding by transformers gives the same tokens.
    assert (agreement.same, agreement.rounded) == (1.0, 1.0)


@needs_model
def test_bf16_argmax_agrees_with_transformers_teacher_forced():
    """bf16 changes about one token in a hundred, also in transformers: see `Agreement.peer`."""
    agreement = measure_agreement(torch.bfloat16, ["stories", "questions", *["gsm8k"] * GSM8K.is_file()], 200)
    assert agreement.same >= 0.99


@needs_model
@pytest.mark.parametrize(
    ("dtype", "mean_bound", "max_bound"), [(torch.float32, 1e-5, 2e-4), (torch.bfloat16, 0.025, 1.0)]
)
def test_gap_between_sampler_and_learner(dtype, mean_bound, max_bound):
    """This model is deep and narrow: in bf16, two orders of summation differ by about 0.02."""
    decoder, prompts, samples = sample_completions(dtype, "stories", temperature=1.0, siblings=8, length=128)
    gaps = measure_gaps(decoder, prompts, samples, 8)
    assert gaps.mean() <= mean_bound and gaps.max() <= max_bound


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
    assert measure_gaps(decoder, prompts, sample(engine, requests), 8).mean() < 0.01
