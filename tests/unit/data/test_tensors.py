"""Tensors that travel keep type, shape and every bit."""

from __future__ import annotations

import pytest
import torch

from cohort.data.tensors import as_plain, as_tensors
from cohort.serialize import dumps, loads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_a_tensor_travels_bit_for_bit(dtype):
    values = torch.linspace(-3, 300, 24).view(2, 3, 4).to(dtype)
    given = {"whole": values, "strided": values[:, ::2].transpose(0, 2), "empty": values[:0], "one": values[0, 0, 0]}
    again = as_tensors(loads(dumps(as_plain(given.items()))))
    for name, tensor in given.items():
        assert again[name].dtype == dtype and torch.equal(again[name], tensor), name


def test_what_travelled_is_a_copy():
    weight = torch.zeros(3)
    [(_, plain)] = as_plain([("w", weight)]).items()
    weight += 1
    assert not plain.data.any()
