"""Rollout files of format 1, which earlier versions wrote: read, never written.

A safetensors file with, for all prompts and samples one after another: prompt_tokens, tokens, prompt_provenance,
provenance, four arrays of floats, and `text`, deflated JSON with everything that is not per token, and the lengths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from cohort.fates import Fate
from cohort.serialize import inflate
from cohort.types import Finish, Group, Prompt, Sample

_FLOATS = ("sampler_logprobs", "kept_mass", "old_logprobs", "ref_logprobs")
Array = NDArray[Any]


def is_format_1(arrays: Mapping[str, Array]) -> bool:
    """Whether the arrays of a safetensors file are such a file's."""
    return "text" in arrays and "json" not in arrays


def read_format_1(arrays: Mapping[str, Array]) -> list[Group]:
    """The groups of such a file."""
    header = json.loads(inflate(arrays["text"].tobytes(), sum(array.nbytes for array in arrays.values())))
    take = {name: _taker(array) for name, array in arrays.items()}
    return [_read_group(data, take) for data in header["groups"]]


Taker = Callable[[int], list[Any]]


def _read_group(data: dict[str, Any], take: dict[str, Taker]) -> Group:
    num_tokens, num_provenance = data["num_tokens"]
    prompt = Prompt(
        task=data["task"],
        id=data["id"],
        visit=data["visit"],
        row=data["row"],
        messages=data["messages"],
        tokens=take["prompt_tokens"](num_tokens),
        provenance=take["prompt_provenance"](num_provenance),
        forced_text=data["forced_text"],
    )
    samples = [_read_sample(sample, take) for sample in data["samples"]]
    return Group(prompt=prompt, samples=samples, excluded=Fate(data["excluded"]), reused=data.get("age", 0))


def _read_sample(data: dict[str, Any], take: dict[str, Taker]) -> Sample:
    num_tokens, num_provenance, *num_floats = data["num"]
    floats = {name: None if num < 0 else take[name](num) for name, num in zip(_FLOATS, num_floats, strict=True)}
    return Sample(
        tokens=take["tokens"](num_tokens),
        provenance=take["provenance"](num_provenance),
        sampler_logprobs=floats["sampler_logprobs"] or [],
        kept_mass=floats["kept_mass"] or [],
        versions=[(first, version) for first, version in data["versions"]],
        finish=Finish(data["finish"]),
        text=data["text"],
        parts=data["parts"],
        reward=data["reward"],
        reason=data["reason"],
        failure=data["failure"],
        old_logprobs=floats["old_logprobs"],
        ref_logprobs=floats["ref_logprobs"],
        advantage=data["advantage"],
        masked=Fate(data["masked"]),
    )


def _taker(array: Array) -> Taker:
    """A function that gives the next n values of the array."""
    values: list[Any] = array.tolist()
    position = 0

    def take(num: int) -> list[Any]:
        nonlocal position
        if num < 0:
            raise ValueError("a length is negative")
        taken = values[position : position + num]
        if len(taken) != num:
            raise ValueError("an array is shorter than its lengths say")
        position += num
        return taken

    return take
