"""Tensors that are sent as records keep type, shape and every bit."""

from __future__ import annotations

import pytest
import torch

from cohort.data.tensors import tensors_from_records, tensors_to_records
from cohort.serialize import dumps, loads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_a_tensor_comes_back_bit_for_bit(dtype):
    values = torch.linspace(-3, 300, 24).view(2, 3, 4).to(dtype)
    given = {"whole": values, "strided": values[:, ::2].transpose(0, 2), "empty": values[:0], "one": values[0, 0, 0]}
    again = tensors_from_records(loads(dumps(tensors_to_records(given.items()))))
    for name, tensor in given.items():
        assert again[name].dtype == dtype and torch.equal(again[name], tensor), name


def test_a_record_holds_a_copy():
    weight = torch.zeros(3)
    [(_, plain)] = tensors_to_records([("w", weight)]).items()
    weight += 1
    assert not plain.data.any()
