"""Runs with LoRA adapters from the command line: train, kill, resume, export."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.command_line import SMALL, cohort, differences, next_args, only_run, remains
from tests.helpers.made_once import make_once
from tests.helpers.struck_command import Strike

LORA = [*SMALL, "--learner.lora.rank=4", "--algo.kl.weight=0.01", "--optim.lr=1e-3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:

    def make(folder: Path) -> None:
        """Makes the run."""
        done = cohort("train", "quickstart", *LORA, at=folder)
        assert done.returncode == 0, done.stderr

    run = only_run(make_once(tmp_path_factory, "lora", make))
    assert run is not None
    return run


def test_4_10_a_run_with_adapters_killed_and_resumed_ends_the_same(undisturbed: Path, tmp_path: Path) -> None:
    for strike in (Strike(signal.SIGKILL, "update", 3, 5), Strike(signal.SIGKILL, "update", 2, 9)):
        struck = cohort(*next_args(tmp_path, LORA), at=tmp_path, orders=[strike])
        assert struck.returncode == -signal.SIGKILL, f"{strike} did not happen: {struck.stdout}{struck.stderr}"
    done = cohort(*next_args(tmp_path, LORA), at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None
    assert differences(remains(run), remains(undisturbed)) == []


def test_a_checkpoint_holds_adapters_and_a_merged_model(undisturbed: Path) -> None:
    """The optimizer's file has the factors and their moments only. In the model, only adapted matrices have changed."""
    folder = undisturbed / "checkpoints" / "step-000006"
    state = load_file(folder / "optimizer.safetensors")
    kinds = {name.partition("/")[0] for name in state}
    assert kinds == {"adapter", "exp_avg", "exp_avg_sq"}
    assert any(t.any() for name, t in state.items() if name.endswith("q_proj.lora_B.weight"))
    numbers = json.loads((folder / "state.json").read_text())["numbers"]
    assert numbers["lora"]["rank"] == 4
    last, earlier = (
        load_file(undisturbed / "checkpoints" / s / "model/model.safetensors") for s in ("step-000006", "step-000004")
    )
    changed = {name.split(".")[-2] for name in last if not torch.equal(last[name], earlier[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_are_exported_and_start_another_run(undisturbed: Path, tmp_path: Path) -> None:
    done = cohort("export", undisturbed, "out", "--adapters", at=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("wrote out: the adapters of "), done
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    state = load_file(undisturbed / "checkpoints/step-000006/optimizer.safetensors")
    assert stored and all(torch.equal(t, state[f"adapter/{name}"]) for name, t in stored.items())
    # PEFT loads the base from there.
    base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base).is_absolute() and (Path(base) / "model.safetensors").is_file()
    settings = ["--steps=1", "--save.every=1", "--eval.problems=1", "--learner.lora.load=out", "--threads=1"]
    done = cohort("train", "quickstart", *settings, at=tmp_path)
    assert done.returncode == 0, done.stderr
