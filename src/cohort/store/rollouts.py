"""Rollout files: the groups of one step, exactly, as arrays plus one compressed JSON text.

A safetensors file with, for all prompts and samples one after another:

    prompt_tokens, tokens        int32     ids
    prompt_provenance, provenance  uint8
    sampler_logprobs, kept_mass, old_logprobs, ref_logprobs
                                 float32 where that is exact (float64 otherwise)
    text                         uint8     deflated JSON: everything that is not per token, and the lengths

About 14 bytes a token (int32 + uint8 + two float32, texts deflated); `save_rollouts` returns the size.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from cohort.disk import write_atomic
from cohort.errors import RunError
from cohort.fates import Fate
from cohort.types import Finish, Group, Prompt, Sample

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})\.safetensors")
_FLOATS = ("sampler_logprobs", "kept_mass", "old_logprobs", "ref_logprobs")
Array = NDArray[Any]


def rollout_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def save_rollouts(path: Path, groups: Sequence[Group]) -> int:
    """Write the groups, whole or not at all, and return the number of bytes."""
    prompts = [g.prompt for g in groups]
    samples = [s for g in groups for s in g.samples]
    header = {"format": FORMAT, "groups": [_group_header(g) for g in groups]}
    arrays: dict[str, Array] = {
        "prompt_tokens": _flat([p.tokens for p in prompts], np.int32),
        "prompt_provenance": _flat([p.provenance for p in prompts], np.uint8),
        "tokens": _flat([s.tokens for s in samples], np.int32),
        "provenance": _flat([s.provenance for s in samples], np.uint8),
        "text": np.frombuffer(zlib.compress(json.dumps(header).encode(), 6), dtype=np.uint8),
    }
    for name in _FLOATS:
        arrays[name] = _narrow(_flat([getattr(s, name) or [] for s in samples], np.float64))
    data = save_tensors(arrays)
    write_atomic(path, data)
    return len(data)


def load_rollouts(path: Path) -> list[Group]:
    """The groups as they were saved: equal records, token for token and bit for bit."""
    try:
        arrays = load_tensors(path.read_bytes())
        header = json.loads(zlib.decompress(arrays["text"].tobytes()))
        if header["format"] > FORMAT:
            raise RunError(f"{path} has format {header['format']}, this Cohort knows {FORMAT}: upgrade Cohort.")
        take = {name: _taker(array) for name, array in arrays.items()}
        groups = [_read_group(data, take) for data in header["groups"]]
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: rollouts of that step were not kept (see save.rollouts).") from None
    except (OSError, SafetensorError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged or not a rollout file: {error}.") from error
    return groups


def rollout_steps(folder: Path) -> list[int]:
    """The steps whose rollouts are there, oldest first."""
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def remove_rollouts(folder: Path, wanted: Callable[[int], bool]) -> None:
    """Remove the files of every step that is not wanted: retention, and the clean slate before a resume."""
    for step in rollout_steps(folder):
        if not wanted(step):
            rollout_path(folder, step).unlink()


def _group_header(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "task": prompt.task,
        "id": prompt.id,
        "visit": prompt.visit,
        "row": prompt.row,
        "messages": prompt.messages,
        "forced_text": prompt.forced_text,
        "num_tokens": [len(prompt.tokens), len(prompt.provenance)],
        "excluded": group.excluded,
        "age": group.reused,
        "samples": [_sample_header(s) for s in group.samples],
    }


def _sample_header(sample: Sample) -> dict[str, Any]:
    lengths = [len(sample.tokens), len(sample.provenance)]
    for name in _FLOATS:
        values = getattr(sample, name)
        lengths.append(-1 if values is None else len(values))
    return {
        "num": lengths,
        "versions": sample.versions,
        "finish": str(sample.finish),
        "text": sample.text,
        "parts": sample.parts,
        "reward": sample.reward,
        "reason": sample.reason,
        "failure": sample.failure,
        "advantage": sample.advantage,
        "masked": sample.masked,
    }


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


def _flat(lists: list[list[Any]], dtype: type) -> Array:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in [[], *lists]]).astype(dtype)


def _narrow(values: NDArray[np.float64]) -> Array:
    """float32 when nothing is lost by it, which holds for everything computed in float32."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow.astype(np.float64), values, equal_nan=True) else values


def _taker(array: Array) -> Taker:
    """A function that gives the next n values of the array."""
    values: list[Any] = array.tolist()
    position = 0

    def take(num: int) -> list[Any]:
        nonlocal position
        taken = values[position : position + num]
        if len(taken) != num:
            raise ValueError("an array is shorter than its lengths say")
        position += num
        return taken

    return take
