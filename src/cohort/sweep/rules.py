"""Stop rules: they end a run at a certain step if a metric is too low or too high there.

A rule looks only at what the run has recorded of that step. So it decides the same whatever interrupted the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.evaluation.records import ACCURACY, HELD_OUT_METRICS
from cohort.logs.numbers import format_compact

_EVALUATED = "eval/"  # how metrics of evaluations begin


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Ends a run after step `step` if its metric is below or above a number there, or is NaN."""

    side: str  # "below" or "above"
    metric: str  # as run.db names it
    value: float
    step: int  # completed steps

    @property
    def spelling(self) -> str:
        """The rule as it is written on a command line."""
        name = "accuracy" if self.metric == ACCURACY else self.metric
        return f"--stop-{self.side} {name} {self.value:g} at {self.step}"

    @property
    def needs_evaluation(self) -> bool:
        """Whether only steps that are evaluated have the metric."""
        return self.metric.startswith(_EVALUATED)

    def decide(self, metrics: Mapping[str, float]) -> str:
        """Returns why a run with these metrics after step `step` ends there; "" = it goes on.

        A metric that the step does not have ends nothing. NaN does: such a run has failed by any measure.
        """
        found = metrics.get(self.metric)
        if found is None:
            return ""
        beyond = found < self.value if self.side == "below" else found > self.value
        return f"{self.spelling}: it is {format_compact(found)}" if beyond or math.isnan(found) else ""


def read_rule(side: str, words: Sequence[str]) -> StopRule:
    """Returns the rule of the words after --stop-below or --stop-above: METRIC VALUE at STEP.

    Raises ConfigError for other words, and for metrics that are clock times.
    """
    flag = f"--stop-{side}"
    example = f"Write for example: {flag} accuracy 0.5 at 20."
    if len(words) != 4 or words[2] != "at":
        raise ConfigError(f'{flag} takes METRIC VALUE at STEP, not "{" ".join(words)}". {example}')
    name, number, _, step = words
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f'{flag}: the value must be a number, not "{number}". {example}')
    if not step.isdecimal() or not 0 < int(step) < 10**9:
        raise ConfigError(f'{flag}: the step must be a whole number from 1 on, not "{step}". {example}')
    if name.startswith("time/"):
        raise ConfigError(
            f"{flag}: {name} is a clock time, so the same sweep would end in other ways on another day. Name another "
            "metric."
        )
    metric = ACCURACY if name == "accuracy" else name
    return StopRule(side=side, metric=metric, value=value, step=int(step))


def check_rules(rules: Sequence[StopRule], configs: Sequence[RunConfig]) -> None:
    """Raises ConfigError for a rule that has no effect in any of the runs, or that needs a missing evaluation.

    `configs` are those of all runs. A rule does nothing in a run that has no more steps than the rule's step.
    """
    for rule in rules:
        longer = [config for config in configs if config.steps > rule.step]
        if not longer:
            raise ConfigError(
                f"{rule.spelling} has no effect: the runs end after {max(c.steps for c in configs)} steps. Lower the "
                "step, or raise --steps."
            )
        if not rule.needs_evaluation:
            continue
        for config in longer:
            if not config.is_evaluated:
                raise ConfigError(
                    f"{rule.spelling}: a run of this recipe is not evaluated. Name a metric of its steps."
                )
            if rule.metric in HELD_OUT_METRICS and rule.metric != f"eval/{config.measure}":
                raise ConfigError(
                    f"{rule.spelling}: evaluations of this recipe have no such number. Name eval/{config.measure}."
                )
            if not config.eval.every or rule.step % config.eval.every:
                raise ConfigError(
                    f"{rule.spelling}: step {rule.step} has no evaluation (eval.every is {config.eval.every}). Add "
                    f"--eval.every {rule.step}, or name a step that is evaluated."
                )


def find_ending(rules: Sequence[StopRule], step: int, metrics: Mapping[str, float]) -> str:
    """Returns why the first of the rules that applies ends a run after `step` steps; "" = none does."""
    return next((why for rule in rules if rule.step == step and (why := rule.decide(metrics))), "")
