"""A run's model as a folder that other programs load."""

from __future__ import annotations

from pathlib import Path

from cohort.config.schema import LoraConfig
from cohort.errors import ModelError, RunError
from cohort.learner.backend import adapter_tensors
from cohort.models.files import load_folder, save_folder
from cohort.models.peft import save_adapters
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.run.directory import RunDirectory


def export(path: Path, out: Path, which: str) -> Path:
    """A checkpoint of a run as a plain Hugging Face folder. `which`: a step, "best" or "last"."""
    state = _exported(RunDirectory.open(path), out, which)
    assert state.model is not None
    model = load_folder(state.model)
    return save_folder(model.decoder, model.hf_config, state.model, out)


def export_adapters(path: Path, out: Path, which: str) -> Path:
    """The adapters of a checkpoint alone, as a folder in PEFT format."""
    directory = RunDirectory.open(path)
    state = _exported(directory, out, which)
    lora = state.numbers.get("lora")
    if lora is None:
        raise RunError(f"{path} has no adapters, it trained every weight; leave --adapters out")
    config = LoraConfig(**{**lora, "targets": tuple(lora["targets"])})
    return save_adapters(adapter_tensors(state.optimizer), config, directory.config.model, out)


def _exported(directory: RunDirectory, out: Path, which: str) -> Checkpoint:
    path = directory.path
    found = checkpoint.steps(directory.checkpoints)
    if not found:
        raise RunError(f"{path} has no checkpoint yet; it writes one every save.every steps and at its end")
    step = found[-1]
    if which == "best":
        scored = {s: e.accuracy for s, e in directory.evaluations().items() if s}
        if not scored:
            raise RunError(f"{path} has no evaluated checkpoint; use --step last")
        step = max(scored, key=lambda s: (scored[s], -s))
    elif which != "last":
        step = int(which)
    if step not in found:
        raise RunError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, found))}")
    if out.exists():
        raise ModelError(f"{out} exists already: choose another folder")
    return checkpoint.load(directory.checkpoints / checkpoint.name(step))
