"""A real model on a GPU against transformers: `COHORT_SMOLLM2=FOLDER pytest tests/gpu/test_real_model.py -s`.

FOLDER is SmolLM2-135M in Hugging Face format, as `cohort pull smollm2-135m` makes it.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.device import only_gpu

# isort: split

from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.engines.base import Request, sample
from cohort.engines.native import native_engine
from cohort.engines.native.cuda.engine import GraphEngine
from cohort.learner.local import LocalLearner
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.text import Tokenizer
from cohort.types import Key, Sample, Sampling
from tests.support import make_group, make_sample

FOLDER = os.environ.get("COHORT_SMOLLM2", "")
pytestmark = [only_gpu, pytest.mark.skipif(not FOLDER, reason="COHORT_SMOLLM2 names no model folder")]

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


def drawn(
    dtype: torch.dtype, temperature: float, siblings: int, length: int
) -> tuple[Decoder, list, dict[str, Sample]]:
    decoder = load_folder(FOLDER, dtype).decoder.to("cuda")
    tokenizer = Tokenizer.load(FOLDER)
    prompts = [tokenizer.encode(text) for text in STORIES]
    engine = native_engine(decoder, tokenizer.decode, slots=64, max_context=256)
    assert isinstance(engine, GraphEngine)
    requests = [
        Request(
            id=f"{p}/{i}",
            tokens=tokens,
            sampling=Sampling(max_tokens=length, temperature=temperature),
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


@torch.no_grad()
def agreement(dtype: torch.dtype, length: int) -> tuple[float, float]:
    """Feed transformers our greedy tokens: how often is its own best token, at each place, the same?

    First with logits from its hidden states in fp32, then with those it returns, which in bf16 are rounded and tie.
    """
    _, prompts, samples = drawn(dtype, temperature=0.0, siblings=1, length=length)
    model = peer(dtype)
    same, rounded, total = 0, 0, 0
    for p, tokens in enumerate(prompts):
        own = torch.tensor(samples[f"{p}/0"].tokens, device="cuda")
        out = model(torch.tensor([[*tokens, *own.tolist()]], device="cuda"), output_hidden_states=True)
        here = slice(len(tokens) - 1, -1)
        wide = out.hidden_states[-1][0, here].float() @ model.lm_head.weight.float().T
        same += int((wide.argmax(-1) == own).sum())
        rounded += int((out.logits[0, here].argmax(-1) == own).sum())
        total += len(own)
    print(
        f"\n{dtype}: argmax agrees in {same / total:.4f} of {total} tokens, {rounded / total:.4f} with rounded logits"
    )
    return same / total, rounded / total


def test_greedy_tokens_are_those_of_transformers_in_fp32():
    assert agreement(torch.float32, 64) == (1.0, 1.0)  # then greedy decoding there gives the same tokens


def test_bf16_argmax_agrees_with_transformers_teacher_forced():
    assert agreement(torch.bfloat16, 128)[0] >= 0.99


@pytest.mark.parametrize(
    ("dtype", "mean_bound", "most_bound"), [(torch.float32, 1e-5, 2e-4), (torch.bfloat16, 0.01, 1.0)]
)
def test_gap_between_sampler_and_learner(dtype, mean_bound, most_bound):
    decoder, prompts, samples = drawn(dtype, temperature=1.0, siblings=8, length=128)
    learner = LocalLearner(decoder, LearnerConfig(token_budget=4096), OptimConfig(), num_updates=1)
    groups = [
        make_group(tokens, [make_sample(samples[f"{p}/{i}"].tokens) for i in range(8)])
        for p, tokens in enumerate(prompts)
    ]
    learner.annotate(groups, ["old"])
    gaps = torch.cat(
        [
            (torch.tensor(samples[f"{p}/{i}"].sampler_logprobs) - torch.tensor(s.old_logprobs)).abs()
            for p, group in enumerate(groups)
            for i, s in enumerate(group.samples)
        ]
    )
    print(f"\n{dtype}: |sampler - learner| mean {gaps.mean():.2e}, max {gaps.max():.2e} of {len(gaps)} tokens")
    assert gaps.mean() <= mean_bound and gaps.max() <= most_bound
