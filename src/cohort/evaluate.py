"""Evaluation: sample the held-out problems, grade them, and say how sure the number is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cohort.clock import stage
from cohort.engines.base import Engine
from cohort.engines.rollout import Tasks, stop_if_scoring_is_broken, stream
from cohort.scores import accuracy, all_passes, interval, mean
from cohort.store.records import EvalAnswer, EvalItem, EvalSetting, Evaluation
from cohort.tasks.base import Task
from cohort.types import Group, Prompt, Row, Sampling

Spell = Callable[[Sequence[int]], str]


@stage("evaluate")
def evaluate(
    engine: Engine,
    tasks: Tasks,
    prompts: Sequence[Prompt],
    setting: EvalSetting,
    spell: Spell,
    known: Mapping[str, EvalItem] | None = None,
    done: Callable[[EvalItem], None] = lambda item: None,
) -> Evaluation:
    """Answers to each prompt, `done` told of each item as it is complete; `known` ones are not sampled again.

    A sample that could not be scored is left out, not counted as wrong.
    """
    items = dict(known or {})
    groups: list[Group] = []
    missing = [p for p in prompts if p.id not in items]
    for _, group in stream(engine, tasks, missing, setting.num_samples):
        groups.append(group)
        items[group.prompt.id] = _item(group, tasks.stream.task.accuracy, spell)
        done(items[group.prompt.id])
    stop_if_scoring_is_broken(groups)
    return summarised(setting, [items[p.id] for p in prompts], tasks.stream.task, [p.row for p in prompts])


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


def sampling_facts(sampling: Sampling) -> dict[str, float]:
    """What an evaluation records of how its answers were drawn."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    return {name: getattr(sampling, name) for name in names}


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
    return EvalItem(id=prompt.id, messages=prompt.messages, prompt=spell(prompt.tokens), answers=answers)
