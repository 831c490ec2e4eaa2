"""How an evaluation of a run's checkpoint differs from the run: other settings, or problems that it was trained on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from cohort.config.flags import collect_settings, format_setting
from cohort.config.imitation import DPO, SFT, TaskAnswers
from cohort.config.kinds import RL
from cohort.config.options import CONVERSATION_OPTIONS, EvalOptions
from cohort.config.schema import Conversation
from cohort.errors import CohortError
from cohort.evaluation.coefficients import format_coefficients, list_coefficients, read_coefficients
from cohort.logs.escape import escape_line, join_command
from cohort.run.directory import RunDirectory
from cohort.run.naming import NamedCheckpoint
from cohort.system.paths import expand_home
from cohort.tasks.base import Task
from cohort.tasks.places import make_data_path_absolute


class _PairedSetting(NamedTuple):
    """A setting as the run had it and as the evaluation has it."""

    name: str  # of the flag of `cohort eval`, without dashes
    trained: Any
    here: Any


def describe_unlikeness(checkpoint: NamedCheckpoint, task: Task, options: EvalOptions) -> list[str]:
    """Returns what a user must know who evaluates a checkpoint otherwise than its run did; [] if there is nothing.

    The settings of the run are those in its config.yaml, and none of its code is run. Only a run with the same task,
    by name, is considered; one whose config cannot be read is not.
    """
    try:
        config = RunDirectory.open(checkpoint.run).config
    except CohortError:
        # The weights can be evaluated all the same: a run of a later version has settings that are not known here.
        return []
    if not isinstance(config, RL | SFT | DPO) or config.task is None or config.task.name != task.name:
        return []
    lines = [
        _describe_settings(checkpoint.name, config, task, options),
        _describe_rows(checkpoint.name, config, options),
    ]
    return [line for line in lines if line]


def _describe_settings(name: str, config: RL | SFT | DPO, task: Task, options: EvalOptions) -> str:
    """Returns which settings the run, and its checkpoint `name`, had otherwise, with the flags of `cohort eval`.

    "" if all are equal.
    """
    all_pairs = _pair_settings(config, task, options)
    pairs = [p for p in all_pairs if _normalise(p.name, p.trained) != _normalise(p.name, p.here)]
    if not pairs:
        return ""
    shown = ", ".join(
        f"{p.name} {escape_line(repr(p.trained), 60)} (here {escape_line(repr(p.here), 60)})" for p in pairs
    )
    flags = join_command([word for p in pairs for word in format_setting(p.name, p.trained)])
    return (
        f"the run of {name} trained on {config.task.name} with other settings than this evaluation has: {shown}. To "
        f"evaluate as the run did, give {flags}"
    )


def _pair_settings(config: RL | SFT | DPO, task: Task, options: EvalOptions) -> Iterator[_PairedSetting]:
    """Yields the settings that decide about prompts and answers, with the values of the run and of the evaluation."""
    yield _PairedSetting("template", config.template, options.template)
    yield _PairedSetting("system", config.system, options.system)
    trained = config.sampling.max_tokens or task.max_tokens
    yield _PairedSetting("max_tokens", trained, options.max_tokens or task.max_tokens)
    yield _PairedSetting("stop", config.sampling.stop, options.stop)
    # A user who gives another temperature means it, for instance 0 for greedy answers.
    if options.temperature == EvalOptions.temperature:
        yield _PairedSetting("temperature", config.eval.temperature, options.temperature)
    trained_with, here = getattr(config, "reward", {}), read_coefficients(task, options.reward)
    if task.accuracy is None and list_coefficients(task, trained_with) != list_coefficients(task, here):
        words = [format_coefficients(list_coefficients(task, c)).split() for c in (trained_with, here)]
        yield _PairedSetting("reward", tuple(words[0]), tuple(words[1]))
    if isinstance(turns := getattr(config, "turns", None), Conversation):
        for option, name in CONVERSATION_OPTIONS.items():
            yield _PairedSetting(option, getattr(turns, name), getattr(options, option))
    recorded = collect_settings(config.task, "task.")
    for name, setting in collect_settings(task, "task.").items():
        if name in recorded:
            yield _PairedSetting(name, recorded[name].value, setting.value)


def _normalise(name: str, value: Any) -> Any:
    """Returns a value of a setting so that equal meanings are equal: paths are absolute, and tuples are lists."""
    if name == "template" and value not in ("chat", "text"):
        return os.path.abspath(expand_home(value))
    if name == "task.data" and isinstance(value, str) and value:
        return make_data_path_absolute(value)
    if name == "task.passages":
        return [make_data_path_absolute(one) if isinstance(one, str) else one for one in value]
    return list(value) if isinstance(value, tuple) else value


def _describe_rows(name: str, config: RL | SFT | DPO, options: EvalOptions) -> str:
    """Returns what is wrong with the validation split for the checkpoint `name`; "" if nothing is, or for other splits.

    A larger share only adds rows, so a run with a larger one has not seen the rows of a smaller one.
    """
    # Other kinds of run train on rows of their task only if they imitate its answers.
    trains_on_task = isinstance(config, RL) or isinstance(config.data, TaskAnswers)
    if options.split != "validation" or not trains_on_task:
        return ""
    if config.eval.split != "validation":
        return (
            f"the run of {name} trained on all training rows, those of this validation split too, so this result is "
            "not one of problems that are new to it; use --split test, or train with --eval.split validation"
        )
    share = config.eval.validation_share
    if share == options.validation_share:
        return ""
    what = (
        f"this split of {options.validation_share:g} has rows that it was trained on"
        if share < options.validation_share
        else f"this split of {options.validation_share:g} is only a part of them"
    )
    return (
        f"the run of {name} kept a share of {share:g} of the training rows apart, and {what}; give --validation-share "
        f"{share:g}"
    )
