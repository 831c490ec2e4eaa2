"""Silly numbers: every numeric setting accepts a number or refuses it in plain words, before anything is built."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from operator import attrgetter

import pytest

from cohort.cli.eval import Options as EvalOptions
from cohort.config.algos import ALGOS, PairPolicy
from cohort.config.flags import Setting, apply_settings, collect_settings, format_flag, split_args
from cohort.config.load import _make_settings_record, change_config, load_config
from cohort.config.options import EngineBenchOptions, LearnerBenchOptions
from cohort.config.schema import SamplingConfig
from cohort.errors import CohortError, ConfigError

WHOLE = ["-1", "0", "1e300", str(2**63), str(10**30)]
SILLY = [*WHOLE, "1e-300", "nan", "inf"]
# Command lines that together have every numeric setting. Sections that are off are turned on.
ON = "--learner.lora.rank=2 --algo.kl.weight=0.1 --algo.correction.kind=mask --replay.prompts=1 --learner.epochs=2"
# A loss on pairs has no KL penalty and no correction.
PAIRED = "--learner.lora.rank=2 --replay.prompts=1 --learner.epochs=2"
COMMANDS = [
    f"quickstart --turns think_again {ON}",
    *(f"quickstart --algo {name} {PAIRED if issubclass(cls, PairPolicy) else ON}" for name, cls in ALGOS.items()),
    *(f"quickstart --task {task}" for task in ("countdown", "gsm8k", "minerva", "ifeval")),
    *(f"quickstart --engine {engine}" for engine in ("server", "vllm")),
    "tiny_sft --learner.lora.rank=2",
]


def numeric_settings(settings: dict[str, Setting]) -> list[Setting]:
    return [s for s in settings.values() if s.type in (int, float) or int in getattr(s.type, "__args__", ())]


@cache
def settings_to_try() -> dict[str, list[Setting]]:
    """Returns the numeric settings of each command line, each with the same bounds only once."""
    seen = set()
    plan: dict[str, list[Setting]] = {}
    for command in COMMANDS:
        recipe, *args = command.split()
        plan[command] = []
        for setting in numeric_settings(collect_settings(_make_settings_record(load_config(recipe, args)))):
            key = (setting.name, tuple(bound.wording for bound in setting.bounds))
            if key not in seen:
                plan[command].append(setting)
            seen.add(key)
    assert len(seen) >= 70
    return plan


@pytest.mark.parametrize("command", COMMANDS)
def test_silly_numbers_of_a_run_are_accepted_or_refused(command: str) -> None:
    recipe, *args = command.split()
    numbers = settings_to_try()[command]
    for setting in numbers:
        flag = format_flag(setting.name)
        others = [arg for arg in args if not arg.startswith(flag + "=")]
        accepted = {}
        for text in SILLY if setting.type is float else WHOLE:
            try:
                config = load_config(recipe, [*others, f"{flag}={text}"])
            except CohortError as error:
                words = str(error)
                assert "\n" not in words and len(words) < 1000, words
                assert setting.name.rpartition(".")[2] in words.replace("-", "_"), words
            else:
                accepted[text] = collect_settings(config)[setting.name].value
        # Whatever is accepted fits the numbers of torch: 63 bits, and floats of 32 bits, in which 1e-300 is 0.
        assert all(value is None or -(2**63) < value < 2**63 for value in accepted.values()), (flag, accepted)
        # (One reward part alone must not be 0.)
        assert "1e-300" not in accepted or "0" in accepted or setting.name.startswith("reward."), flag


@pytest.mark.parametrize("options", [EvalOptions(), EngineBenchOptions(), LearnerBenchOptions()])
def test_silly_numbers_of_other_commands_are_accepted_or_refused(
    options: EvalOptions | EngineBenchOptions | LearnerBenchOptions,
) -> None:
    numbers = numeric_settings(collect_settings(options))
    assert len(numbers) > 5
    for setting in numbers:
        for text in SILLY:
            flag = format_flag(setting.name)
            try:
                changed = apply_settings(options, split_args([f"{flag}={text}"])[1])
                changed.check()
            except ConfigError as error:
                assert flag in str(error)
            else:
                value = float(attrgetter(setting.name)(changed))
                assert math.isfinite(value) and abs(value) < 2**63, (flag, value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--threads 2147483648", "threads is 2147483648; it must be at most 4,096. Correct or remove --threads"),
        ("--sampling.temperature 1e-300", "sampling.temperature is 1e-300; it must be at least 0.001."),
        ("--eval.temperature 1e-300", "eval.temperature is 1e-300; it must be 0, or at least 0.001."),
        ("--batch.samples 1000000000000000000", "batch.samples is 1000000000000000000; it must be at most 100,000."),
        ("--engine.slots 10000000000", "engine.slots is 10000000000; it must be at most 65,536."),
        ("--reward.format 1e300", "reward.format is 1e+300; it must be a finite number from -1,000,000 to 1,000,000."),
        (
            "--steps 2 --eval.every 1000",
            "eval.every is 1000, but the run has only 2 steps, so it would have no effect.",
        ),
        ("--batch.prompts 1000000 --batch.samples 1000", "together more than 10,000,000 samples per step."),
        ("--steps 2 --save.every 3", "Lower --save.every to at most 2, raise --steps, or remove --save.every."),
        ("--sampling.stop", "--sampling.stop has no effect: it is given without a value, and it is empty anyway."),
    ],
)
def test_the_message_names_the_largest_sensible_value(args: str, message: str) -> None:
    with pytest.raises(CohortError) as caught:
        load_config("quickstart", args.split())
    assert message in str(caught.value)


def test_an_interval_of_the_recipe_may_be_longer_than_a_short_run() -> None:
    config = load_config("quickstart", ["--steps", "2"])
    assert config.steps == 2 and (config.eval.every > 2 or config.save.every > 2)
    assert load_config("quickstart", ["--steps", "2", "--save.every", "2", "--eval.every", "2"]).save.every == 2


def test_an_empty_list_takes_away_what_a_recipe_has() -> None:
    recipe = replace(load_config("quickstart"), sampling=SamplingConfig(stop=("END",)))  # type: ignore[call-arg]
    assert change_config(recipe, ["--sampling.stop"]).sampling.stop == ()  # type: ignore[attr-defined]
