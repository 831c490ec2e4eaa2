"""Evaluation: sample the held-out problems, grade them, and say how sure the number is."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cohort.evaluation.records import EvalAnswer, EvalItem, EvalSetting, Evaluation
from cohort.evaluation.statistics import accuracy, all_passes, interval, mean
from cohort.rollout.producer import Producer, stop_if_many_failed
from cohort.system.clock import stage
from cohort.tasks.base import Task
from cohort.types import Group, Prompt, Row, Sampling

Spell = Callable[[Prompt], str]


@stage("evaluate")
def evaluate(
    producer: Producer,
    prompts: Sequence[Prompt],
    setting: EvalSetting,
    spell: Spell,
    known: Mapping[str, EvalItem] | None = None,
    done: Callable[[EvalItem], None] = lambda item: None,
    then: str = "evaluate again",
) -> Evaluation:
    """Answers to each prompt, `done` told of each item as it is complete; `known` ones are not sampled again.

    A sample that could not be scored is left out, not counted as wrong; with many of them there is no result, and the
    error says what to do `then`.
    """
    items = dict(known or {})
    missing = [p for p in prompts if p.id not in items]
    failed: list[str] = []
    task = producer.stream.task
    for _, group in producer.start(missing):
        item = _item(group, task.accuracy, spell)
        items[item.id] = item
        failed += [a.failure for a in item.answers if a.failure]
        stop_if_many_failed(failed, len(prompts) * setting.num_samples, then)
        done(item)
    return summarised(setting, [items[p.id] for p in prompts], task, [p.row for p in prompts])


def summarised(setting: EvalSetting, items: Sequence[EvalItem], task: Task, rows: Sequence[Row]) -> Evaluation:
    """The numbers of an evaluation, from its items and their rows."""
    answers = [a for item in items for a in item.answers]
    scored = [a for a in answers if a.correct is not None]
    scores = [item.correct for item in items]
    low, high = interval(scores)
    names = [name for name in (scored[0].parts if scored else {}) if name != task.accuracy]
    extra = getattr(task, "summary", None)
    graded = [(row, a.parts) for row, item in zip(rows, items, strict=True) for a in item.answers if not a.failure]
    return Evaluation(
        setting=setting,
        accuracy=accuracy(scores),
        low=low,
        high=high,
        passes=all_passes(scores),
        parts={name: mean([a.parts[name] for a in scored]) for name in names},
        summary={} if extra is None else extra(*zip(*graded, strict=True)) if graded else {},
        mean_tokens=mean([a.num_tokens for a in answers]),
        finishes=dict(sorted(Counter(a.finish for a in answers).items())),
        num_failed=len(answers) - len(scored),
        items=list(items),
    )


def sampling_facts(sampling: Sampling) -> dict[str, Any]:
    """What an evaluation records of how its answers were drawn."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    return {**{name: getattr(sampling, name) for name in names}, "stop": list(sampling.stop_strings)}


def rows_digest(prompts: Sequence[Prompt]) -> str:
    """Names the problems, their answers and how they are asked."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(json.dumps([p.row, p.messages], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _item(group: Group, part: str, spell: Spell) -> EvalItem:
    answers = [
        EvalAnswer(
            text=s.text,
            finish=str(s.finish),
            num_tokens=len(s.tokens),
            correct=None if s.failure else s.parts[part],
            parts=dict(s.parts),
            reason=s.reason,
            failure=s.failure,
        )
        for s in group.samples
    ]
    prompt = group.prompt
    return EvalItem(id=prompt.id, messages=prompt.messages, prompt=spell(prompt), answers=answers)
