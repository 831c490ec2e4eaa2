"""Reads rollout files of format 1, which earlier versions wrote. This format is no longer written.

Such a file is a safetensors file. Its arrays prompt_tokens, prompt_provenance, tokens, provenance and four of floats
hold the values of all prompts and samples, one after another. The array `text` is compressed JSON with everything that
is not per token, and with the lengths of the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from cohort.fates import Fate
from cohort.serialize import inflate
from cohort.system.json_text import parse_json
from cohort.types import Finish, Group, Prompt, Sample

_FLOATS = ("sampler_logprobs", "kept_mass", "old_logprobs", "ref_logprobs")
Array = NDArray[Any]


def is_format_1(arrays: Mapping[str, Array]) -> bool:
    """Returns whether the arrays of a safetensors file, by name, are those of a rollout file of format 1."""
    return "text" in arrays and "json" not in arrays


def read_format_1(arrays: Mapping[str, Array]) -> list[Group]:
    """Returns the groups in the arrays, by name, of a rollout file of format 1.

    Raises ValueError, LookupError, TypeError, AttributeError or zlib.error if the content is damaged.
    """
    # The size of the arrays bounds how large the text may become, in case the file is damaged.
    header = parse_json(inflate(arrays["text"].tobytes(), sum(array.nbytes for array in arrays.values())))
    readers = {name: _ArrayReader(array) for name, array in arrays.items()}
    return [_read_group(data, readers) for data in header["groups"]]


def _read_group(data: dict[str, Any], readers: dict[str, _ArrayReader]) -> Group:
    """Returns the next group with its samples, and moves the readers behind it.

    `data` is its JSON, `readers` give the next tokens and numbers of each array, by its name.
    """
    num_tokens, num_provenance = data["num_tokens"]
    prompt = Prompt(
        task=data["task"],
        id=data["id"],
        visit=data["visit"],
        row=data["row"],
        messages=data["messages"],
        tokens=readers["prompt_tokens"].read(num_tokens),
        provenance=readers["prompt_provenance"].read(num_provenance),
        forced_text=data["forced_text"],
    )
    samples = [_read_sample(sample, readers) for sample in data["samples"]]
    return Group(prompt=prompt, samples=samples, excluded=Fate(data["excluded"]), reused=data.get("age", 0))


def _read_sample(data: dict[str, Any], readers: dict[str, _ArrayReader]) -> Sample:
    """Returns the next sample, and moves the readers behind it.

    `data` is its JSON, `readers` give the next tokens and numbers of each array, by its name.
    """
    # A length of -1 means that the field was None.
    num_tokens, num_provenance, *num_floats = data["num"]
    floats = {name: None if num < 0 else readers[name].read(num) for name, num in zip(_FLOATS, num_floats, strict=True)}
    return Sample(
        tokens=readers["tokens"].read(num_tokens),
        provenance=readers["provenance"].read(num_provenance),
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


class _ArrayReader:
    """Reads an array piece by piece, from its beginning."""

    def __init__(self, array: Array) -> None:
        self._values: list[Any] = array.tolist()
        self._position = 0

    def read(self, num: int) -> list[Any]:
        """Returns the next `num` values of the array, and moves behind them.

        Raises ValueError if fewer are left, or `num` is negative.
        """
        if num < 0:
            raise ValueError("a length is negative")
        piece = self._values[self._position : self._position + num]
        if len(piece) != num:
            raise ValueError("an array is shorter than the sum of its lengths")
        self._position += num
        return piece
