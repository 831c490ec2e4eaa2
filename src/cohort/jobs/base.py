"""The base of all jobs: a model, its learner, and how both are saved in checkpoints and restored from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch

from cohort.config.document import dump_config, parse_config, reuse_variants
from cohort.config.schema import RunConfig
from cohort.engines.weights import copy_weights
from cohort.errors import RunError
from cohort.jobs.inputs import InputDigests, require_same_inputs
from cohort.learner.local import LocalLearner
from cohort.learner.optim import learning_rate
from cohort.models.auto import AnyDecoder
from cohort.models.decoder import Decoder
from cohort.models.files import LoadedModel, load_folder, save_folder
from cohort.run.checkpoint import Checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.life import Run
from cohort.run.together import FollowingRun
from cohort.tasks.base import Task


@dataclass(kw_only=True)
class TrainingJob:
    """The model that a run trains, and its learner. Subclasses add what it is trained on, and the loop."""

    config: RunConfig
    model: LoadedModel
    learner: LocalLearner
    inputs: InputDigests
    earlier_grader: str = ""  # the digest in the checkpoint that was restored; "" = none was, or it has no digest

    @property
    def measure(self) -> Callable[[], Mapping[str, float]] | None:
        """None: nothing is measured besides evaluations. Subclasses may measure held-out examples."""
        return None

    def prepare(self, run: Path) -> list[tuple[str, str]]:
        """Does nothing here, and returns no notices. Subclasses may read or write files of the run directory `run`."""
        return []

    def write_model(self, folder: Path | str) -> None:
        """Writes the current weights, config and tokenizer into `folder`, as a Hugging Face model folder.

        With several ranks, `checkpoint_learner` must come before it. Then the first rank alone may call this.
        """
        if self.learner.grid.whole.size == 1:
            self._update_decoder()
        save_folder(self.model.decoder, self.model.hf_config, self.model.folder, Path(folder))

    def _update_decoder(self) -> None:
        """Copies the current weights into the job's own model, if the learner has another. Every rank must call it."""
        weights = self.learner.weights()
        decoder = self.model.decoder
        # A learner in another process has a model of its own, and so have ranks that divide the weights among them.
        if weights.module is not decoder:
            assert isinstance(decoder, Decoder), "a foreign model is trained in this process"
            copy_weights(weights, decoder)

    def checkpoint_learner(self, step: int, cursor: int) -> Checkpoint:
        """Returns a checkpoint with the learner's state after `step` completed steps. It does not contain the weights.

        `cursor` is the position in the prompt stream, or in the data, from which the run continues. Settings, digests
        of the inputs, number of threads and version of torch are stored as well. Every rank must call it. Then the
        first saves the checkpoint while the others assist it (`checkpoint.assist_save`).
        """
        if self.learner.grid.whole.size > 1:
            self._update_decoder()
        state = self.learner.state()
        # The number of steps is the one setting that may change, so it is left out here.
        settings = dump_config(replace(self.config, steps=0))
        numbers = {**state.numbers, "threads": torch.get_num_threads(), "torch": torch.__version__, "config": settings}
        numbers["inputs"] = self.inputs.to_json()
        if self.learner.adapters is not None:
            numbers["lora"] = asdict(self.learner.adapters.config)
        return Checkpoint(step=step, cursor=cursor, optimizer=state, numbers=numbers)

    def restore_learner(self, state: Checkpoint) -> None:
        """Restores weights, the learner's state and torch's number of threads from a checkpoint, in place.

        Every rank must call it. Only the first needs the files; `state` of the others has the numbers alone. Raises
        RunError if the checkpoint was made with other settings than those of this job, or if model, adapters or rows
        have changed since.
        """
        saved = self._load_saved_model(state) if self.learner.grid.whole.is_first else None
        self.earlier_grader = str(state.numbers.get("inputs", {}).get("grader", ""))
        # Sums depend on the number of threads, so the run keeps its number, also on a machine with fewer cores.
        torch.set_num_threads(int(state.numbers["threads"]))
        decoder = self.model.decoder
        # Copied in place, because an engine may share the storage. With adapters, the learner merges the weights.
        if self.learner.adapters is None:
            if saved is not None:
                decoder.load_state_dict(saved.state_dict())
            for tensor in decoder.state_dict().values():
                self.learner.grid.whole.broadcast(tensor)
            self.learner.load_weights(decoder)
        self.learner.load_state(state.tensors, state.numbers)
        if self.learner.adapters is not None and saved is not None:
            _require_equal_weights(decoder, saved, self.config.model)

    def _load_saved_model(self, state: Checkpoint) -> AnyDecoder:
        """Returns the model of a checkpoint, after comparing the checkpoint's settings and inputs with this job's.

        Raises RunError where they differ.
        """
        assert state.model is not None
        # <run>/checkpoints/<step>/model: the third folder above the model is the run.
        settings = parse_config(state.numbers["config"], warn=False, find=reuse_variants(self.config))
        saved_with = RunDirectory(state.model.parents[2], settings)
        saved_with.require_same_settings(self.config)
        # Checkpoints of earlier versions have no digests.
        require_same_inputs(state.numbers.get("inputs", {}), self.inputs, self.config, saved_with.path)
        return load_folder(state.model, self.model.decoder.embed.dtype).decoder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def record_changed_grader(self, run: Run | FollowingRun, task: Task | None) -> None:
        """Records an event if the code that scores the task is not that of the restored checkpoint.

        For a checkpoint of an earlier version, which has no digest of the grader, the newest evaluation counts. Nothing
        is recorded without a task, and if all steps are done.
        """
        newest = max(run.evaluations, default=0)
        step = run.step if self.earlier_grader else newest
        before = self.earlier_grader or (run.evaluations[newest].setting.grader if run.evaluations else "")
        if task is None or before in ("", self.inputs.grader) or run.step >= self.config.steps:
            return
        run.record_event(
            "grader",
            f"the code that scores {task.name} has changed since step {step} ({before} is now {self.inputs.grader}): "
            "rewards and accuracies up to that step cannot be compared with later ones",
        )

    def describe_extension(self, step: int, old_steps: int, new_steps: int) -> str:
        """Returns how the learning rate jumps if the run has `new_steps` steps, not `old_steps`; "" = it does not.

        A decaying schedule is spread over all steps, so its rate after `step` completed steps depends on their number.
        """
        optim = self.config.optim
        per_step = self.config.learner.updates_per_batch
        # Updates without signal count too, so this is not the number of optimizer steps.
        update = self.learner.update_index
        before = learning_rate(optim, max(0, update - 1), old_steps * per_step)
        planned = learning_rate(optim, update, old_steps * per_step)
        after = learning_rate(optim, update, new_steps * per_step)
        if not update or math.isclose(planned, after):
            return ""
        return (
            f"the {optim.schedule} schedule now ends at step {new_steps}, so the learning rate goes from {before:.3g} "
            f"(step {step}) to {after:.3g} (step {step + 1})"
        )

    def close(self) -> None:
        """Does nothing here. Subclasses end the processes and connections that they have opened."""


def _require_equal_weights(decoder: AnyDecoder, saved: AnyDecoder, model: str) -> None:
    """Raises RunError unless the weights of `decoder`, adapters merged, equal the `saved` ones up to rounding.

    A checkpoint of adapters does not restore the base weights: they are read again from `model`, a name or a path,
    which may have changed since the run was started.
    """
    for (name, p), q in zip(decoder.state_dict().items(), saved.state_dict().values(), strict=True):
        tolerance = 4 * torch.finfo(p.dtype).eps
        if not torch.allclose(p.cpu(), q, rtol=tolerance, atol=tolerance * float(q.abs().max())):
            raise RunError(
                f"The model {model} has changed since this run was started: merged with the checkpoint's adapters, "
                f'its tensor "{name}" is not that of the checkpoint. Put the original files of the model back.'
            )
