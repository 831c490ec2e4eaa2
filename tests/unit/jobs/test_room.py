"""The memory that models need, and the refusal of those that do not fit together."""

from __future__ import annotations

import json
import shutil
import struct

import pytest

from cohort.errors import ConfigError, ModelError
from cohort.jobs.room import SamplingDemand, check_room, compute_demand
from cohort.models.catalog import BUNDLED
from cohort.models.files import load_folder

GB = 10**9


def test_the_demand_is_that_of_the_loaded_model():
    decoder = load_folder(BUNDLED["tiny"]).decoder
    demand = compute_demand(BUNDLED["tiny"], 4)
    assert demand.weights == 4 * sum(p.numel() for p in decoder.parameters())
    # 4 layers, keys and values of 2 heads of 32, for the whole context of 1024 tokens.
    assert demand.kv == 4 * 2 * 2 * 32 * 4 * 1024
    assert compute_demand(BUNDLED["tiny"], 2).total == demand.total // 2


def test_models_that_do_not_fit_are_refused_with_the_numbers():
    demands = [SamplingDemand(weights=3 * GB, kv=GB // 10), SamplingDemand(weights=14 * GB, kv=GB // 5)]
    with pytest.raises(
        ConfigError, match=r"^these models need 3\.1 \+ 14\.2 GB, and 12\.0 GB are free on this machine"
    ):
        check_room(demands, 12 * GB, "cpu")
    with pytest.raises(ConfigError, match=r"^the model needs 14\.2 GB, and 11\.0 GB are free on the GPU"):
        check_room(demands[1:], 12 * GB, "cuda")
    check_room(demands, 18 * GB, "cpu")
    check_room(demands, None, "cpu")


def test_a_config_that_is_larger_than_its_files_is_refused(tmp_path):
    folder = shutil.copytree(BUNDLED["tiny"], tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": 512', '"vocab_size": 51200000'))
    with pytest.raises(ModelError, match="but the weight files have"):
        compute_demand(folder, 4)


def test_a_model_larger_than_the_memory_is_measured(tmp_path):
    folder = shutil.copytree(BUNDLED["tiny"], tmp_path / "huge")
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "intermediate_size": 28672, "max_position_embeddings": 32768}
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    # A file with a head and a hole: it takes no space on the disk.
    num = 68_456_554_496
    head = json.dumps({"all": {"dtype": "BF16", "shape": [num], "data_offsets": [0, 2 * num]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + 2 * num)
    demand = compute_demand(folder, 2)
    assert demand.weights == 2 * num
    # Keys and values of 8192 tokens: the context is longer.
    assert demand.kv == 2 * 80 * 8 * 128 * 2 * 8192
    with pytest.raises(ConfigError, match=r"^these models need 0\.01 \+ 139\.6 GB, and 16\.0 GB are free"):
        check_room([compute_demand(BUNDLED["tiny"], 2), demand], 16 * GB, "cpu")
