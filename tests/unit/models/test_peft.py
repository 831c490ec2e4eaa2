"""Tests of adapter folders: writing, reading, refusals, and their use in runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cohort import models
from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO, LearnerConfig, LoraConfig, OptimConfig
from cohort.errors import ModelError, RunError
from cohort.inspect import export
from cohort.models.lora import Adapters
from cohort.models.peft import load_adapters, save_adapters
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from tests.helpers.decoders_and_groups import small_decoder
from tests.helpers.small_runs import built_job, run_steps, small_run

LORA = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "down_proj"))


@pytest.fixture
def folder(tmp_path):
    """A folder with fresh adapters."""
    adapters = Adapters(small_decoder(), LORA)
    return save_adapters(adapters.tensors(), LORA, "some/model", tmp_path / "adapters")


def change_settings(folder, **settings):
    """Changes settings in adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_folder_has_pefts_names_and_shapes(folder):
    stored = load_file(folder / "adapter_model.safetensors")
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert {name: list(t.shape) for name, t in stored.items() if ".layers.1." in name} == {
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": [3, 32],
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": [48, 3],
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": [3, 40],
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": [32, 3],
    }
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 5, "LORA")
    assert settings["target_modules"] == ["q_proj", "down_proj"]
    assert settings["base_model_name_or_path"] == "some/model"


def test_saved_adapters_are_loaded_unchanged(folder):
    adapters = Adapters(small_decoder(), LORA)
    found = load_adapters(folder)
    assert found.config == LORA
    assert all(torch.equal(t, found.tensors[n]) for n, t in adapters.tensors().items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("a_variant_of_tomorrow", {"on": True}),
    ],
)
def test_variants_of_lora_are_refused_by_name(folder, name, value):
    change_settings(folder, **{name: value})
    with pytest.raises(ModelError, match=f"{name} = .* is not supported"):
        load_adapters(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.1, "peft_version": "9.9", "target_modules": ".*(q|down)_proj"},
        {"use_dora": False, "loftq_config": {}, "velora_config": None, "init_lora_weights": "gaussian"},
    ],
)
def test_settings_that_do_not_change_the_adapters_are_accepted(folder, settings):
    change_settings(folder, **settings)
    assert load_adapters(folder).config == LORA


@pytest.mark.parametrize("settings", [{"r": 0}, {"r": "8"}, {"lora_alpha": -1}, {"lora_alpha": None}])
def test_invalid_ranks_and_alphas_are_refused(folder, settings):
    change_settings(folder, **settings)
    with pytest.raises(ModelError, match=next(iter(settings))):
        load_adapters(folder)


def test_adapters_of_other_matrices_and_other_models_are_refused(folder):
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    save_file(stored | {"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 32)}, file)
    with pytest.raises(ModelError, match="adapters of lm_head are not supported"):
        load_adapters(folder)
    save_file(stored | {"base_model.model.model.layers.0.mlp.down_proj.magnitude": torch.zeros(3)}, file)
    with pytest.raises(ModelError, match="magnitude"):
        load_adapters(folder)
    with pytest.raises(ModelError, match="fewer layers"):
        Adapters(small_decoder(num_layers=3), LORA, start=stored)
    with pytest.raises(ModelError, match=r"but the model and rank \d+ need"):
        Adapters(small_decoder(ff=48), LORA, start=stored)
    with pytest.raises(ModelError, match="for which this run has no adapted matrix"):
        Adapters(small_decoder(num_layers=1), LORA, start=stored)
    file.write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load_adapters(folder)
    file.unlink()
    with pytest.raises(ModelError, match="again as safetensors"):
        load_adapters(folder)
    with pytest.raises(ModelError, match="not a folder of adapters"):
        load_adapters(folder / "nowhere")


def make_run(path, config, parts, steps):
    """Runs some steps, writes a checkpoint, and returns the run directory's path."""
    directory = RunDirectory.create(path, config)
    run_steps(parts, steps)
    checkpoint.save(directory.checkpoints, parts.make_checkpoint(steps), parts.write_model)
    directory.unlock()
    return directory.path


def test_the_adapters_of_a_run_are_exported_and_start_another(tmp_path):
    """The second run begins as the policy the first one ended with, which is its reference."""
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    config = small_run(learner=LearnerConfig(lora=lora), optim=OptimConfig(lr=1e-3))
    with built_job(config) as parts:
        run = make_run(tmp_path / "runs", config, parts, 2)
        trained = {n: p.clone() for n, p in parts.model.decoder.named_parameters()}
        plain = parts.model.folder
    out = export.export_adapters(run, tmp_path / "adapters", "last")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        Path(models.__file__).parent / "tiny"
    )
    with pytest.raises(ModelError, match="exists already"):
        export.export_adapters(run, out, "last")
    again = small_run(
        learner=LearnerConfig(lora=LoraConfig(load=str(out)), minibatches=2), algo=GRPO(kl=KLConfig(weight=0.1))
    )
    with built_job(again) as parts:
        assert parts.model.folder == plain and parts.learner.reference is None
        assert parts.learner.adapters.config == lora
        assert all(torch.equal(p, trained[n]) for n, p in parts.model.decoder.named_parameters())
        groups, _ = run_steps(parts, 1)[0]
        assert all(s.ref_logprobs == s.old_logprobs for g in groups for s in g.samples)
        state = parts.make_checkpoint(1)
        assert state.numbers["lora"]["rank"] == 4


def test_a_run_that_trained_every_weight_has_no_adapters(tmp_path):
    config = small_run()
    with built_job(config) as parts:
        run = make_run(tmp_path / "runs", config, parts, 1)
    with pytest.raises(RunError, match="has no adapters, because it trained every weight; leave out --adapters"):
        export.export_adapters(run, tmp_path / "adapters", "last")
    assert not (tmp_path / "adapters").exists()


def test_a_run_whose_base_has_changed_is_not_resumed(tmp_path):
    config = small_run(learner=LearnerConfig(lora=LoraConfig(rank=2)), optim=OptimConfig(lr=1e-3))
    with built_job(config) as parts:
        run_steps(parts, 1)
        path = checkpoint.save(tmp_path, parts.make_checkpoint(1), parts.write_model)
    with built_job(config) as other:
        other.restore(checkpoint.load(path))
        other.learner.adapters.layers[1]["o_proj"].base.matrix[3, 4] += 0.01
        with pytest.raises(RunError, match=r"model tiny has changed .*layers.1.out"):
            other.restore(checkpoint.load(path))
