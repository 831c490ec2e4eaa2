"""Training of `tiny` with vLLM, in the process that trains or as a server, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.config.engines import EngineConfig, NativeEngine
from cohort.config.schema import BatchConfig
from cohort.engines.base import Request
from cohort.errors import EngineError
from cohort.jobs.build import RLJob
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.models.shards import TensorSpec
from cohort.recipes.tiny import quickstart
from cohort.types import Sample
from tests.helpers.decoders_and_groups import naive_logprobs
from tests.helpers.small_runs import built_job, run_steps
from tests.with_vllm.questions import TINY

STEPS = 10
CONFIG = replace(quickstart(), threads=1, steps=STEPS, batch=BatchConfig(prompts=16, samples=8))
ROUNDING = 5e-4  # in nats, of any of thousands of tokens; 1.8e-4 was the largest difference seen
WRONG_LOADS = ("lost", "ten steps old", "transposed", "rounded")

Fault = Callable[[str, Tensor], Tensor | None]
"""What becomes of a tensor with this name; None = it is lost."""


@dataclass(frozen=True)
class GivenWeights:
    """Weights from a dict."""

    tensors: Mapping[str, Tensor]
    module: Any = None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every tensor, by name."""
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def copy_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Returns copies of all weights by name."""
    return {name: tensor.clone() for name, tensor in decoder.named_weights()}


@dataclass(frozen=True)
class Trained:
    """A job after ten steps with vLLM, and what it was before."""

    job: RLJob
    metrics: list[dict[str, float]]  # per step
    old: Decoder  # as it was before the first step
    new: Decoder  # as it is after the last step

    def load(self, decoder: Decoder, version: int) -> None:
        """Loads the weights of a decoder into vLLM, without a proof."""
        self.job.engine.load(GivenWeights(copy_tensors(decoder)), version)


@contextmanager
def train_with(engine: EngineConfig) -> Iterator[Trained]:
    """Yields a job that has trained ten steps with an engine."""
    with built_job(replace(CONFIG, engine=engine)) as job:
        metrics = [dict(record.metrics) for _, record in run_steps(job, STEPS)]
        new = job.learner.decoder
        assert isinstance(new, Decoder)
        yield Trained(job, metrics, load_folder(TINY).decoder, new)


@cache
def compute_native_rewards() -> list[float]:
    """Returns the mean reward of each step of the same training with the native engine."""
    with built_job(replace(CONFIG, engine=NativeEngine())) as job:
        return [record.metrics["reward/mean"] for _, record in run_steps(job, STEPS)]


def check_rewards_and_gap(trained: Trained) -> None:
    """Checks that the reward rose as with the native engine, and that every step reported a small gap."""
    ours, theirs = [step["reward/mean"] for step in trained.metrics], compute_native_rewards()
    for rewards in (ours, theirs):
        assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2
    # The first step samples 128 answers from the same model, with other random numbers.
    assert abs(ours[0] - theirs[0]) < 0.2 and abs(sum(ours[-3:]) - sum(theirs[-3:])) / 3 < 0.2
    canary = trained.job.sync.canary
    assert canary is not None and 0 < canary.tolerance < 1e-4
    for step in trained.metrics:
        assert 0 < step["sampler_gap/mean"] <= step["sampler_gap/max"] < 1e-3
        assert 0 < step["sync/gap"] <= canary.tolerance
        assert step["sync/load_seconds"] > 0 and step["sync/proof_seconds"] > 0


# ---- wrong loads


def transpose(tensor: Tensor) -> Tensor:
    """Returns the transpose of a square matrix; anything else as it is."""
    return tensor.T.contiguous() if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] else tensor


def round_off(tensor: Tensor) -> Tensor:
    """Returns the tensor rounded to bfloat16, as float32."""
    return tensor.bfloat16().float()


def check_wrong_loads(trained: Trained, kind: str, send_wrongly: Callable[[Fault], None]) -> None:
    """Checks that a fault of every single tensor is caught. `send_wrongly` sends the weights with a fault on the way
    to an engine that has those of ten steps ago.
    """
    old = copy_tensors(trained.old)
    changes: dict[str, Fault] = {
        "lost": lambda name, tensor: None,
        "ten steps old": lambda name, tensor: old[name],
        "transposed": lambda name, tensor: transpose(tensor),
        "rounded": lambda name, tensor: round_off(tensor),
    }
    change = changes[kind]
    tried, passed = 0, []
    for wrong, now in copy_tensors(trained.new).items():
        changed = change(wrong, now)
        if changed is not None and torch.equal(changed, now):
            continue
        tried += 1
        try:
            send_wrongly(lambda name, tensor, wrong=wrong: change(name, tensor) if name == wrong else tensor)  # type: ignore[misc]
        except EngineError as error:
            assert "did not arrive whole in the vllm engine" in str(error)
        else:
            passed.append(wrong)
    # Every tensor, vectors too; the query and output matrices are square.
    assert tried == (2 * len(trained.new.layers) if kind == "transposed" else len(old))
    assert passed == []


# ---- loads while requests are under way


def check_logprobs(trained: Trained, requests: list[Request], done: Mapping[str, Sample]) -> None:
    """Compares each span of the samples with the decoder of its version: even versions are the old one."""
    differences: dict[int, float] = {}  # from the other decoder, by version
    for request in requests:
        s, prompt = done[request.id], request.tokens
        with torch.no_grad():
            by_version = [
                naive_logprobs(decoder, prompt, s.tokens, request.sampling.temperature).tolist()
                for decoder in (trained.old, trained.new)
            ]
        ends = [begin for begin, _ in s.versions[1:]] + [len(s.tokens)]
        for (begin, version), end in zip(s.versions, ends, strict=True):
            found = s.sampler_logprobs[begin:end]
            assert found == pytest.approx(by_version[version % 2][begin:end], abs=ROUNDING)
            other = by_version[1 - version % 2][begin:end]
            difference = max(abs(a - b) for a, b in zip(found, other, strict=True))
            differences[version] = max(difference, differences.get(version, 0.0))
    # Or the comparison could not fail.
    assert min(differences.values()) > 0.01
