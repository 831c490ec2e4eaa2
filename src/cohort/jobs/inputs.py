"""The inputs of a run: model, adapters, rows and date. They are settled at the start, and digests find changes.

A resume needs the inputs that the run began with: the tokenizer, the reference policy and the adapters come from the
model's folder, and the position in the prompt stream means a row only if all rows are there in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from cohort.config.imitation import ExampleRows
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, RunError
from cohort.jobs.models import find_model
from cohort.system.paths import expand_home
from cohort.tasks.places import make_data_path_absolute
from cohort.text.folder import reads_date
from cohort.text.framing import read_template
from cohort.user_code import make_spec_absolute

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputDigests:
    """Digests of everything that a run reads, as its checkpoints hold them. "" = the run has no such input."""

    model: str
    adapters: str = ""  # those that learner.lora.load names
    template: str = ""  # of the file that template names
    train_rows: str = ""  # rows and prompts, whatever their order
    train_order: str = ""  # the same in their order
    held_out_rows: str = ""  # rows and prompts of the evaluated problems, in their order
    grader: str = ""  # of the code that scores; it may change, and the run says so

    def to_json(self) -> dict[str, str]:
        """Returns the digests by name, as plain values."""
        return asdict(self)


def settle_inputs(config: C) -> C:
    """Returns the config of a new run so that it means the same on another day and in another working directory.

    Paths in `model`, `template`, `learner.lora.load`, `task.data`, `task.passages`, `task.embedder` and `data` are
    absolute, and a run
    in `model` has a step. Names of models stay as they are. `date` is today if the chat template asks for it. Raises
    ModelError or RunError if there is no such model, and ConfigError for a date that the template does not ask for, and
    a template file that cannot be read.
    """
    model = find_model(config.model)
    day = choose_date(config.date, config.template, model.folder)
    config = replace(config, model=model.lasting_name, date=day)
    if config.template not in ("chat", "text"):
        config = replace(config, template=os.path.abspath(expand_home(config.template)))
    if config.learner.lora.load:
        lora = replace(config.learner.lora, load=os.path.abspath(expand_home(config.learner.lora.load)))
        config = replace(config, learner=replace(config.learner, lora=lora))
    task = getattr(config, "task", None)
    if isinstance(data := getattr(task, "data", None), str) and data:
        config = replace(config, task=replace(task, data=make_data_path_absolute(data)))  # type: ignore[call-arg,type-var]
    # Those that search read passages too.
    if isinstance(names := getattr(task, "passages", None), tuple) and names:
        absolute = tuple(map(make_data_path_absolute, names))
        config = replace(config, task=replace(config.task, passages=absolute))  # type: ignore[attr-defined,call-arg]
    if isinstance(folder := getattr(task, "embedder", None), str) and folder:
        absolute_folder = os.path.abspath(expand_home(folder))
        config = replace(config, task=replace(config.task, embedder=absolute_folder))  # type: ignore[attr-defined,call-arg]
    data = getattr(config, "data", None)
    if isinstance(data, ExampleRows):
        path = make_data_path_absolute(data.path, (data.train_split, data.held_out_split)) if data.path else ""
        data = replace(data, path=path, map=make_spec_absolute(data.map))
        config = replace(config, data=data)  # type: ignore[call-arg]  # the kinds that have data
    return config


def choose_date(wanted: str, template: str, folder: Path) -> str:
    """Returns the day, as YYYY-MM-DD, that the chat template of the model in `folder` sees as today.

    It is `wanted`, or today if that is "". The result is "" if prompts do not depend on it: `template` is "text", or
    the chat template does not ask for the date. Raises ConfigError if a day is wanted all the same.
    """
    is_read = template != "text" and reads_date(folder, read_template(template))
    if wanted and not is_read:
        raise ConfigError(
            f"--date {wanted} has no effect, because the prompts of this model do not contain the date; remove --date."
        )
    return wanted or (f"{date.today():%Y-%m-%d}" if is_read else "")


def require_same_inputs(saved: Mapping[str, Any], now: InputDigests, config: RunConfig, run: Path) -> None:
    """Raises RunError, which names the input and the remedy, if an input has changed since the run was started.

    A changed grader is allowed: a run goes on after a repair of its grader. `saved` are the digests of a checkpoint of
    the run in the directory `run`; digests that it lacks, because an earlier version of Cohort wrote it, are not
    compared.
    """
    names = [f.name for f in fields(now) if f.name in saved and f.name != "grader"]
    changed = [name for name in names if saved[name] != getattr(now, name)]
    if not changed:
        return
    restart = f"start a new run from its newest checkpoint: `cohort train RECIPE --model {run}`"
    if changed[0] == "train_order":
        raise RunError(
            f"the run {run} cannot continue: the rows of the task's train split are those of its start, but in another "
            "order. Let the task's method `rows` yield them in an order that is the same in every process (if it goes "
            f"through a set or lists a folder: through sorted(...)), then {restart}."
        )
    what = {
        "model": f"the files of the model {config.model}",
        "template": f"the lines of the template file {config.template}",
        "adapters": f"the adapters in {config.learner.lora.load} (learner.lora.load)",
        "train_rows": "the rows of the task's train split, or their prompts,",
        "held_out_rows": f"the rows of the task's {config.eval.split} split, their prompts or their order",
    }
    raise RunError(
        f"the run {run} cannot continue: {what[changed[0]]} have changed since it was started. Put back what was "
        f"there, or {restart}."
    )
