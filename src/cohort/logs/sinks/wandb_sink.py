"""Weights & Biases: one of its runs a run, online or offline as its own settings say."""

from __future__ import annotations

import os
import re
from typing import Any

from cohort.logs.sinks.base import Sink, SinkRow
from cohort.logs.view import Header


class WandbSink(Sink):
    """Its id there is the run's name, so a resumed run goes on in the same one. Offline every start makes a folder
    of its own, with the whole run in it."""

    _run: Any = None

    def connect(self, header: Header) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cohort"),
            id=re.sub(r"[^A-Za-z0-9_-]", "-", header.name),
            name=header.name,
            config=header.config,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", header.path),
            # The terminal is the progress view's: neither copied nor filled with a summary.
            settings=wandb.Settings(console="off", quiet=True),
        )
        # Its own count, which must grow, is that of the rows: a step and its evaluation are two.
        self._num_there = self._run.step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def has(self, row: SinkRow) -> bool:
        return bool(row.number < self._num_there)

    def write(self, row: SinkRow) -> None:
        self._run.log({"step": row.step, **row.metrics}, step=row.number)

    def stop(self, ended_well: bool) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if ended_well else 1)
