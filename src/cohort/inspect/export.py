"""Export of a run's model as a folder that other programs load."""

from __future__ import annotations

from pathlib import Path

from cohort.config.schema import LoraConfig
from cohort.errors import ModelError, RunError
from cohort.jobs.models import name_for_other_programs
from cohort.learner.backend import select_adapter_tensors
from cohort.models.files import load_folder, save_folder
from cohort.models.peft import save_adapters
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.naming import choose_checkpoint


def export_model(path: Path, out: Path, which: str) -> Path:
    """Writes the model of a checkpoint of the run in `path` as a new Hugging Face folder `out`, and returns `out`.

    The weights are written as float32. `which` names the checkpoint: the digits of a step number, "best" (highest
    held-out accuracy) or "last". Raises RunError if there is no such run or checkpoint or it is damaged, ModelError if
    `out` exists already.
    """
    state = _load_checkpoint(RunDirectory.open(path), out, which)
    assert state.model is not None
    model = load_folder(state.model)
    return save_folder(model.decoder, model.hf_config, state.model, out)


def export_adapters(path: Path, out: Path, which: str) -> Path:
    """Writes only the LoRA adapters of a checkpoint as a new folder `out` in PEFT format, and returns `out`.

    `which` is as in `export_model`. Raises RunError if there is no such run or checkpoint, it is damaged, or the run
    trained without adapters; ModelError if `out` exists already.
    """
    directory = RunDirectory.open(path)
    state = _load_checkpoint(directory, out, which)
    lora = state.numbers.get("lora")
    if lora is None:
        raise RunError(f"the run {path} has no adapters, because it trained every weight; leave out --adapters.")
    config = LoraConfig(**{**lora, "targets": tuple(lora["targets"])})
    base = name_for_other_programs(directory.config.model)
    return save_adapters(select_adapter_tensors(state.tensors), config, base, out)


def _load_checkpoint(directory: RunDirectory, out: Path, which: str) -> Checkpoint:
    """Loads the checkpoint that `which` names: a step number, "best" (highest held-out accuracy) or "last".

    Raises RunError if there is none, it is damaged, or "best" is not known for lack of evaluations. Raises ModelError
    if `out`, the folder to which the caller will write, exists already.
    """
    found = choose_checkpoint(directory.path, which)
    if out.exists():
        raise ModelError(f"{out} exists already. Give OUT, the folder to write, a new name, or move {out} away.")
    return checkpoint.load(found.folder)
