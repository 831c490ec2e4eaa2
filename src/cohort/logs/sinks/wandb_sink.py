"""Sink for Weights & Biases: one run there per run directory, online or offline as its own settings say."""

from __future__ import annotations

import os
import re
from typing import Any

from cohort.logs.sinks.base import Sink, SinkRow
from cohort.logs.view import Header


class WandbSink(Sink):
    """Sends rows to the W&B run whose id is the name of the run directory, so a resumed run continues there.

    Offline, every start writes a new folder with the whole run.
    """

    _run: Any = None

    def connect(self, header: Header) -> None:
        """Opens or continues the W&B run whose id is the name of the run directory.

        In the id, "-" replaces characters other than letters, digits, "_" and "-". The project is that of
        WANDB_PROJECT, or else "cohort". W&B's files go to WANDB_DIR, or else to the run directory.
        """
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cohort"),
            id=re.sub(r"[^A-Za-z0-9_-]", "-", header.name),
            name=header.name,
            config=header.config,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", header.path),
            # The terminal belongs to the progress view: W&B neither copies it nor prints a summary.
            settings=wandb.Settings(console="off", quiet=True),
        )
        # W&B's own step must grow with every row, so it counts rows: a step and its evaluation are two. The metric
        # "step" is the x axis instead.
        self._num_known = self._run.step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def has_row(self, row: SinkRow) -> bool:
        """Returns whether W&B has the row already: at the start it told how many rows it has."""
        return bool(row.number < self._num_known)

    def write_row(self, row: SinkRow) -> None:
        """Sends the metrics of a row to W&B, with the step as the x axis."""
        self._run.log({"step": row.step, **row.metrics}, step=row.number)

    def stop(self, ended_well: bool) -> None:
        """Ends the W&B run, marked as failed unless `ended_well`."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if ended_well else 1)
