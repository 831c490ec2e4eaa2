"""Evaluation: samples answers to held-out problems, scores them, and computes accuracy or mean reward with interval."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cohort.evaluation.records import EvalAnswer, EvalItem, EvalSetting, Evaluation
from cohort.evaluation.statistics import accuracy_interval, compute_accuracy, compute_all_pass_at_k, mean, mean_interval
from cohort.ranks.agree import agree_on_errors
from cohort.rollout.producer import Producer, stop_if_many_failed
from cohort.scoring.base import Pool
from cohort.serialize import record
from cohort.system.clock import stage
from cohort.tasks.base import Task
from cohort.tasks.calls import compute_summary, get_label, is_mixture
from cohort.types import Group, Prompt, Row, Sampling
from cohort.world import ONE_PROCESS, World

# Ranks send items to the first one. They are registered here, because `evaluation.records` is imported without numpy.
record(EvalAnswer)
record(EvalItem)
# Samples of each rank between two moments at which the first rank gets the answers of all.
CHUNK_SAMPLES = 1024

Spell = Callable[[Prompt], str]
"""Returns a prompt as the text that the model sees, special tokens included."""


@stage("evaluate")
def evaluate(
    producer: Producer,
    prompts: Sequence[Prompt],
    setting: EvalSetting,
    spell: Spell,
    known_items: Mapping[str, EvalItem] | None = None,
    on_item: Callable[[EvalItem], None] = lambda item: None,
    then: str = "evaluate again",
    world: World = ONE_PROCESS,
) -> Evaluation | None:
    """Samples and scores answers to each prompt, and returns the evaluation: accuracy, interval, and all answers.

    Of several ranks each answers a part of the prompts. The first returns the evaluation, the others None.

    Its items are in the order of the prompts. `spell` returns a prompt as text, to be stored. `known_items`, by problem
    id, are taken over and not sampled again. `on_item` is called with each new item as it is complete. A sample that
    could not be scored is left out, not counted as wrong. Raises TrainingStopped if more than MAX_FAILED_SHARE of all
    samples fail; `then` says in its message what to do after the repair of the grader.
    """
    items = dict(known_items or {})
    missing = [p for p in prompts if p.id not in items]
    failed: list[str] = []
    task = producer.stream.task

    def answer_prompts(own: Sequence[Prompt]) -> list[EvalItem]:
        """Answers prompts, keeps the items and returns them."""
        for _, group in producer.start(own):
            item = _make_item(group, task.accuracy, spell)
            items[item.id] = item
            # Checked after each item, so that a broken grader stops the evaluation early.
            failed.extend(a.failure for a in item.answers if a.failure)
            stop_if_many_failed(failed, len(prompts) * setting.num_samples, then)
            on_item(item)
        return [items[p.id] for p in own]

    for chunk in _cut_chunks(missing, setting.num_samples, world.size):
        with world.phase("an evaluation"):
            done = agree_on_errors(world, partial(answer_prompts, chunk[world.rank :: world.size]))
            if isinstance(producer.scorer, Pool):
                producer.scorer.share_outcomes(world)
            for item in (item for part in world.gather_on_first(done)[1:] for item in part):
                items[item.id] = item
                on_item(item)
    if not world.is_first:
        return None
    if world.size > 1:
        failed = [a.failure for p in prompts for a in items[p.id].answers if a.failure]
        stop_if_many_failed(failed, len(prompts) * setting.num_samples, then)
    # In the order of the prompts, whatever finished first.
    return summarise(setting, [items[p.id] for p in prompts], task, [p.row for p in prompts])


def _cut_chunks(prompts: Sequence[Prompt], num_samples: int, num_ranks: int) -> list[Sequence[Prompt]]:
    """Returns the prompts in pieces. After each piece the first of several ranks gets and can keep the answers of all.

    One process has all prompts in one piece: it keeps every answer at once, and the engine is never idle.
    """
    size = len(prompts) if num_ranks == 1 else num_ranks * max(1, CHUNK_SAMPLES // num_samples)
    return [prompts[i : i + size] for i in range(0, len(prompts), max(1, size))]


def summarise(setting: EvalSetting, items: Sequence[EvalItem], task: Task, rows: Sequence[Row]) -> Evaluation:
    """Returns the evaluation (accuracy, interval, pass@k, means) that results from these items.

    `rows` are the task's rows, in the order of the items. `task` names the accuracy and may compute further numbers.
    Without an accuracy the mean reward takes its place, and there is no pass@k. The mean of a part is over the answers
    that have it. Answers that could not be scored count only in mean tokens, finish reasons and `num_failed`.
    """
    answers = [a for item in items for a in item.answers]
    scored = [a for a in answers if a.value is not None]
    scores = [item.scores for item in items]
    is_share = task.accuracy is not None
    value = compute_accuracy(scores)
    low, high = accuracy_interval(scores) if is_share else mean_interval(scores) or (None, None)
    # The other reward parts. The accuracy has its own field.
    names = dict.fromkeys(name for a in scored for name in a.parts if name != task.accuracy)
    graded = [(row, a.parts) for row, item in zip(rows, items, strict=True) for a in item.answers if not a.failure]
    return Evaluation(
        setting=setting,
        accuracy=value if is_share else None,
        reward=None if is_share else value,
        low=low,
        high=high,
        passes=compute_all_pass_at_k(scores) if is_share else [],
        parts={name: mean([a.parts[name] for a in scored if name in a.parts]) for name in names},
        summary={
            **compute_summary(task, [row for row, _ in graded], [parts for _, parts in graded]),
            **({} if is_share else _compute_own_rewards(task, rows, scores)),
        },
        mean_tokens=mean([a.num_tokens for a in answers]),
        finishes=dict(sorted(Counter(a.finish for a in answers).items())),
        num_failed=len(answers) - len(scored),
        items=list(items),
    )


def _compute_own_rewards(task: Task, rows: Sequence[Row], scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the mean reward of each task of a mixture, by names like "reward/LABEL"; {} for any other task.

    `scores` are the rewards of the answers to each row. A task none of whose answers was scored is left out.
    """
    if not is_mixture(task):
        return {}
    own: dict[str, list[Sequence[float]]] = {}
    for row, rewards in zip(rows, scores, strict=True):
        own.setdefault(get_label(task, row), []).append(rewards)
    return {f"reward/{label}": compute_accuracy(given) for label, given in own.items() if any(given)}


def describe_sampling(sampling: Sampling) -> dict[str, Any]:
    """Returns the sampling options by name, as JSON values, for the setting that an evaluation stores.

    Stop strings are in "stop"; ids of stop tokens are left out.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    return {**{name: getattr(sampling, name) for name in names}, "stop": list(sampling.stop_strings)}


def digest_rows(prompts: Sequence[Prompt]) -> str:
    """Returns 16 hexadecimal digits of a hash of the problems, in order: rows (right answers included) and messages."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(json.dumps([p.row, p.messages], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _make_item(group: Group, accuracy_part: str | None, spell: Spell) -> EvalItem:
    """Returns a scored group as an item of an evaluation: a problem with its answers.

    `accuracy_part` names the reward part that is 0 or 1; an answer that could not be scored has None instead. Without
    such a part an answer has its reward. `spell` returns the prompt as text.
    """
    answers = [
        EvalAnswer(
            text=s.text,
            finish=str(s.finish),
            num_tokens=len(s.tokens),
            correct=None if s.failure or accuracy_part is None else s.parts[accuracy_part],
            reward=None if s.failure or accuracy_part is not None else s.reward,
            parts=dict(s.parts),
            reason=s.reason,
            failure=s.failure,
            messages=s.messages,
            calls=s.calls,
        )
        for s in group.samples
    ]
    prompt = group.prompt
    return EvalItem(id=prompt.id, messages=prompt.messages, prompt=spell(prompt), answers=answers, tools=prompt.tools)
