"""Stop rules: how they are written, when they are refused, and what they decide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cohort.config.schema import EvalConfig
from cohort.errors import ConfigError
from cohort.recipes import RECIPES
from cohort.sweep.rules import StopRule, check_rules, find_ending, read_rule

RULE = StopRule(side="below", metric="eval/accuracy", value=0.5, step=20)


def test_a_rule_is_read_as_it_is_written() -> None:
    assert read_rule("below", ["accuracy", "0.5", "at", "20"]) == RULE
    assert RULE.spelling == "--stop-below accuracy 0.5 at 20"
    assert read_rule("above", ["entropy", "3", "at", "1"]).metric == "entropy"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["accuracy", "0.5", "20"], "METRIC VALUE at STEP"),
        (["accuracy", "half", "at", "20"], "must be a number"),
        (["accuracy", "nan", "at", "20"], "must be a number"),
        (["accuracy", "0.5", "at", "0"], "whole number from 1 on"),
        (["accuracy", "0.5", "at", "x"], "whole number from 1 on"),
        (["time/step", "0.5", "at", "2"], "clock time"),
    ],
)
def test_a_wrong_rule_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rule("below", words)


def test_a_rule_stops_at_its_step_only_and_beyond_its_value_only() -> None:
    why = "--stop-below accuracy 0.5 at 20: it is 0.499"
    assert find_ending([RULE], 20, {"eval/accuracy": 0.499}) == why
    assert find_ending([RULE], 20, {"eval/accuracy": 0.5}) == ""
    assert find_ending([RULE], 19, {"eval/accuracy": 0.1}) == "" == find_ending([RULE], 21, {"eval/accuracy": 0.1})
    above = replace(RULE, side="above", metric="loss")
    assert find_ending([RULE, above], 20, {"eval/accuracy": 0.9, "loss": 0.6}).startswith("--stop-above loss")
    assert find_ending([above], 20, {"loss": 0.5}) == ""


def test_nan_stops_and_a_missing_metric_does_not() -> None:
    assert find_ending([RULE], 20, {"eval/accuracy": math.nan}).endswith("it is nan")
    assert find_ending([replace(RULE, side="above")], 20, {"eval/accuracy": math.nan}).endswith("it is nan")
    assert find_ending([RULE], 20, {"reward/mean": 0.0}) == ""


def test_a_rule_needs_an_evaluation_and_a_later_step() -> None:
    run = RECIPES["quickstart"]()
    check_rules([RULE], [replace(run, eval=EvalConfig(every=10))])
    check_rules([replace(RULE, metric="reward/mean")], [run])
    with pytest.raises(ConfigError, match=r"step 20 has no evaluation \(eval.every is 0\). Add --eval.every 20"):
        check_rules([RULE], [run])
    with pytest.raises(ConfigError, match="no effect: the runs end after 20 steps"):
        check_rules([RULE], [replace(run, steps=20), replace(run, steps=10)])
    with pytest.raises(ConfigError, match="not evaluated"):
        check_rules([RULE], [RECIPES["tiny_sft"]()])
