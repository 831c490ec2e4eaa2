"""Tests of safetensors files that are filled piece by piece: the safetensors library reads what was written."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cohort.models.shards import ShardWriter, TensorSpec


def make_tensors() -> dict[str, Tensor]:
    """Returns random tensors of several types and odd sizes."""
    g = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(3, 5, generator=g).to(torch.bfloat16),
        "wide": torch.randn(7, generator=g),
        "half": torch.randn(2, 3, 4, generator=g).half(),
        "matrix": torch.randn(64, 33, generator=g),
    }


def make_specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    """Returns the shapes and types of tensors."""
    return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()}


def read_file(file: Path) -> dict[str, Tensor]:
    """Reads all tensors with the safetensors library."""
    with safe_open(file, framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 it is no mapping


@pytest.mark.parametrize("piece", [1, 4, 1000, 10**6])
def test_pieces_in_any_order_from_threads(piece: int, tmp_path: Path) -> None:
    wanted = make_tensors()
    pieces = [(n, i, t.view(-1)[i : i + piece]) for n, t in wanted.items() for i in range(0, t.numel(), piece)]
    with ShardWriter(tmp_path, make_specs(wanted), 10**9) as shards, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: shards.write(*p), reversed(pieces)))
    found = read_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    wanted = make_tensors()
    with ShardWriter(tmp_path, make_specs(wanted), 10**9):
        pass
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in wanted.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0
    assert len(raw) == 8 + length + sum(t.numel() * t.dtype.itemsize for t in wanted.values())


def test_several_files_and_their_index(tmp_path: Path) -> None:
    wanted = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    with ShardWriter(tmp_path, make_specs(wanted), 85) as shards:
        assert shards.num_files == 3
        for name, tensor in wanted.items():
            shards.write(name, 0, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(index["weight_map"].values()) == [files[0], files[0], files[1], files[1], files[2]]
    for name, file in index["weight_map"].items():
        assert torch.equal(read_file(tmp_path / file)[name], wanted[name])


def test_a_tensor_larger_than_a_file_may_be_has_its_own(tmp_path: Path) -> None:
    wanted = {"large": torch.ones(100), "small": torch.ones(1)}
    with ShardWriter(tmp_path, make_specs(wanted), 50):
        pass
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
