"""Answers that are tried on the grader of a task: right, empty, copied and so on, and how they are scored."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from cohort.errors import TaskError
from cohort.jobs.build import RLJob
from cohort.rollout.episode import make_answer
from cohort.scoring.base import Pool
from cohort.tasks.calls import get_gold
from cohort.tasks.parts import NO_PART
from cohort.types import Answer, Outcome, Prompt, Sample

NUM_REPEATS = 50
# Format without content, in the formats that tasks commonly ask for.
SKELETONS = ("<answer></answer>", "<think></think><answer></answer>", "\\boxed{}", "#### ", "{}", "```\n```")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One answer to be scored and, once it is scored, its outcome.

    `kind` says how the answer was made: empty, whitespace, echo (the prompt itself), skeleton (format only), gold
    (the task's right answer), truncated, repeated, other (the gold answer of another row), sample (from the model).
    """

    prompt: Prompt
    kind: str
    answer: Answer
    outcome: Outcome = field(default_factory=Outcome)
    seconds: float = 0.0  # that the score took
    reward: float = 0.0
    correct: bool = False

    def with_outcome(self, job: RLJob, outcome: Outcome, seconds: float = 0.0) -> Case:
        """Returns the case with its outcome, the reward of that, and whether the task's accuracy is 1."""
        accuracy = job.config.task.accuracy
        reward = job.producer.settings.compute_reward(outcome.parts)
        correct = accuracy is not None and outcome.parts.get(accuracy, 0.0) == 1.0
        return replace(self, outcome=outcome, seconds=seconds, reward=reward, correct=correct)


def is_failed(case: Case) -> bool:
    """Returns whether a scored case has no score. A task may say that no part applies to it: that is no failure."""
    return case.outcome.failure not in ("", NO_PART)


def advise_on_failure(failure: str) -> str:
    """Returns how a message about a failure ends: what a grader has to do, unless a service is the cause."""
    # The failure of a service ends with its own advice.
    if "ServiceError" in failure:
        return "."
    return ". A wrong answer must get the score 0, not raise an exception."


def make_cases(task: object, prompts: Sequence[Prompt]) -> list[Case]:
    """Returns the answers to try on the grader for each prompt, not yet scored: right, empty, copied and so on.

    All kinds of a prompt come before the next prompt, so that each kind has been tried when time runs out. Kinds made
    from a right answer are left out where the task gives none.
    """
    golds = [find_gold(task, p) for p in prompts]
    cases: list[Case] = []
    for n, (prompt, gold) in enumerate(zip(prompts, golds, strict=True)):
        asked = [m["content"] for m in prompt.messages if m["role"] == "user" and isinstance(m.get("content"), str)]
        texts = [("empty", ""), ("whitespace", " \n\t \n"), ("echo", "\n".join(asked))]
        texts += [("skeleton", s) for s in SKELETONS]
        if gold:
            other = golds[(n + 1) % len(golds)]
            repeated = "\n".join([gold] * NUM_REPEATS)
            texts += [("gold", gold), ("truncated", gold[: len(gold) // 2]), ("repeated", repeated)]
            # The task's own format without content: the gold answer with all words removed but those in tags.
            texts += [("skeleton", re.sub(r"(</?\w+>)|\w+", lambda m: m[1] or "", gold))]
            texts += [("other", other)] if other not in ("", gold) else []
        cases += [Case(prompt=prompt, kind=kind, answer=_make_case_answer(prompt, kind, text)) for kind, text in texts]
    return cases


def find_gold(task: object, prompt: Prompt) -> str:
    """Returns the right answer that the task's `gold` gives for the prompt's row.

    Returns "" if the task has no `gold` or that raises TaskError. Raises UserCodeError if that of a user's task
    raises something else.
    """
    try:
        return get_gold(task, prompt.row) or ""
    except TaskError:
        return ""


def score_golds(job: RLJob, prompts: Iterator[list[Prompt]], seconds: float) -> list[Case]:
    """Scores the right answers of further prompts, which come in small lists, and returns them as scored cases.

    Stops after the list during which `seconds` have passed. Prompts without a right answer are left out.
    """
    begin = time.perf_counter()
    task = job.config.task
    scored: list[Case] = []
    while time.perf_counter() - begin < seconds and (batch := next(prompts, None)) is not None:
        golds = [(prompt, find_gold(task, prompt)) for prompt in batch]
        made = [Case(prompt=p, kind="gold", answer=_make_case_answer(p, "gold", text)) for p, text in golds if text]
        outcomes = job.scorer.score([(case.prompt.row, case.answer) for case in made])
        scored += [case.with_outcome(job, outcome) for case, outcome in zip(made, outcomes, strict=True)]
    return scored


def _make_case_answer(prompt: Prompt, kind: str, text: str) -> Answer:
    """Returns `text` in the form in which the grader gets an answer to the prompt.

    For the kinds gold, repeated, other and truncated `text` is the full answer. For other kinds the full answer begins
    with the text that the task forces on the model, if any. Its number of tokens is the number of words in `text`.
    """
    answer = make_answer(prompt, Sample(tokens=[], provenance=[], sampler_logprobs=[], text=text))
    # A gold answer is complete: a prefix that the task forces on the model is already part of its text.
    is_whole = kind in ("gold", "repeated", "other", "truncated")
    return replace(answer, num_tokens=len(text.split()), full=text if is_whole else answer.full)


def score_cases(job: RLJob, pool: Pool, cases: Iterable[Case], seconds: float) -> Iterator[Case]:
    """Scores the cases in `pool`, and yields copies with outcome, reward, correct and seconds.

    They are scored one after another, so that each is timed alone; where scoring asks an outside service, as many at
    once as in a run, and each has the time of all. A case is correct if the task's accuracy part is 1; one that could
    not be scored has the reward 0. Stops after the case during which `seconds` since the start have passed. A grader
    that hangs on a case costs that case its own time limit only.
    """
    begin = time.perf_counter()
    at_once = job.config.scoring.concurrency if job.config.task.service else 1
    waiting = iter(cases)
    # The first one alone: it waits for the start of its worker, which is not the time of the others.
    batch = list(islice(waiting, 1))
    while batch:
        start = time.perf_counter()
        outcomes = pool.score([(case.prompt.row, case.answer) for case in batch])
        now = time.perf_counter()
        for case, outcome in zip(batch, outcomes, strict=True):
            yield case.with_outcome(job, outcome, now - start)
        if now - begin > seconds:
            return
        batch = list(islice(waiting, at_once))
