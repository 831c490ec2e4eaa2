"""A model and its learner: what every kind of run saves, restores and closes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from cohort.config.document import dump, parse
from cohort.config.schema import RunConfig
from cohort.engines.weights import copy_weights
from cohort.errors import RunError
from cohort.learner.local import LocalLearner
from cohort.models.auto import AnyDecoder
from cohort.models.decoder import Decoder
from cohort.models.files import LoadedModel, load_folder, save_folder
from cohort.run.checkpoint import Checkpoint
from cohort.run.directory import RunDirectory


@dataclass(kw_only=True)
class Trained:
    """What is trained, with its optimizer. Kinds of run add what they train it on."""

    config: RunConfig
    model: LoadedModel
    learner: LocalLearner

    def write_model(self, folder: Path) -> None:
        """The weights now, as a Hugging Face folder. They are the learner's, which may be in another process."""
        weights, decoder = self.learner.weights(), self.model.decoder
        if weights.module is not decoder:
            assert isinstance(decoder, Decoder), "a foreign model is trained in this process"
            copy_weights(weights, decoder)
        save_folder(decoder, self.model.hf_config, self.model.folder, folder)

    def learner_checkpoint(self, step: int, cursor: int) -> Checkpoint:
        """The learner's state after `step` steps; `cursor` says how far the data is used."""
        tensors, numbers = self.learner.state()
        # The number of steps is the one setting that may change, so a checkpoint does not know it.
        settings = dump(replace(self.config, steps=0))
        numbers |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "config": settings}
        if self.learner.adapters is not None:
            numbers["lora"] = asdict(self.learner.adapters.config)
        return Checkpoint(step=step, cursor=cursor, optimizer=tensors, numbers=numbers)

    def restore_learner(self, state: Checkpoint) -> None:
        """Become the state of a checkpoint. The weights are copied in place: an engine may share them."""
        assert state.model is not None
        RunDirectory(state.model.parents[2], parse(state.numbers["config"], warn=False)).require_same(self.config)
        # Sums depend on the number of threads, so the run keeps its own, also where there are fewer cores.
        torch.set_num_threads(int(state.numbers["threads"]))
        decoder = self.model.decoder
        saved = load_folder(state.model, decoder.embed.dtype).decoder
        if self.learner.adapters is None:
            decoder.load_state_dict(saved.state_dict())
        self.learner.load_state(state.optimizer, state.numbers)
        if self.learner.adapters is not None:
            _require_merged(decoder, saved, self.config.model)

    def close(self) -> None:
        """Give back what a process holds besides memory."""


def _require_merged(decoder: AnyDecoder, saved: AnyDecoder, model: str) -> None:
    """The base is read from the run's model again: with the adapters it must be what the checkpoint has."""
    for (name, p), q in zip(decoder.state_dict().items(), saved.state_dict().values(), strict=True):
        close = 4 * torch.finfo(p.dtype).eps
        if not torch.allclose(p.cpu(), q, rtol=close, atol=close * float(q.abs().max())):
            raise RunError(
                f"{model} is no longer the model this run was started from: with the checkpoint's adapters, {name} "
                "is not the checkpoint's; put the original back."
            )
