"""The reward, rehearsed behind the boundary a run scores behind: right answers, none, and ways to cheat."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cohort.errors import TaskError
from cohort.inspect.check.findings import Finding, fail, ok, shown, warn
from cohort.inspect.check.trial import Trial
from cohort.jobs.build import Parts
from cohort.logs.escape import one_line
from cohort.rollout.episode import answer_of
from cohort.scoring.pool import ScoringPool
from cohort.types import Answer, Outcome, Prompt, Sample

NUM_TRAIN, NUM_TEST = 12, 4  # rows
SECONDS = 10.0  # for a pass over the answers; what is not reached is left out
SLOW, SLUGGISH = 0.5, 0.05  # seconds a score
MOST, SOME = 0.5, 0.2  # of a right answer's reward
OFTEN = 0.2  # of the rows
REPEATS = 50
SKELETONS = ("<answer></answer>", "<think></think><answer></answer>", "\\boxed{}", "#### ", "{}", "```\n```")
CHEAP = ("empty", "whitespace", "skeleton")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An answer to rehearse, and what came of it."""

    prompt: Prompt
    kind: str
    answer: Answer
    outcome: Outcome = field(default_factory=Outcome)
    seconds: float = 0.0
    reward: float = 0.0
    correct: bool = False


def check_reward(trial: Trial, seconds: float = SECONDS) -> Iterator[Finding]:
    """Also scores the trial's own samples."""
    parts, task = trial.parts, trial.parts.config.task
    stream = parts.producer.stream
    rows = stream.next(min(NUM_TRAIN, stream.num_rows)) + parts.problems[:NUM_TEST]
    try:
        scored = list(_scored(parts, parts.scorer, cases(task, rows), seconds))
        yield failures(scored)
        yield speed(parts, scored)
        judged = [c for c in scored if not c.outcome.failure]
        yield from verdicts(parts, judged)
        yield repeatable(parts, judged, seconds)
        yield order(parts, judged, seconds)
        yield signal(trial, seconds)
    except TaskError as error:
        yield fail(
            "reward/contract", f"{one_line(str(error), 300)}. Mend the grader; nothing after this was rehearsed."
        )


def cases(task: object, prompts: Sequence[Prompt]) -> list[Case]:
    """Row by row, so that every kind has been seen where time runs out."""
    golds = [_gold(task, p) for p in prompts]
    found: list[Case] = []
    for n, (prompt, gold) in enumerate(zip(prompts, golds, strict=True)):
        asked = [m["content"] for m in prompt.messages if m["role"] == "user" and isinstance(m.get("content"), str)]
        texts = [("empty", ""), ("whitespace", " \n\t \n"), ("echo", "\n".join(asked))]
        texts += [("skeleton", s) for s in SKELETONS]
        if gold:
            other = golds[(n + 1) % len(golds)]
            texts += [("gold", gold), ("truncated", gold[: len(gold) // 2]), ("repeated", "\n".join([gold] * REPEATS))]
            texts += [("skeleton", re.sub(r"(</?\w+>)|\w+", lambda m: m[1] or "", gold))]
            texts += [("other", other)] if other not in ("", gold) else []
        found += [Case(prompt=prompt, kind=kind, answer=_answer(prompt, kind, text)) for kind, text in texts]
    return found


def _gold(task: object, prompt: Prompt) -> str:
    """Empty where the task has none for the row."""
    gold = getattr(task, "gold", None)
    try:
        return str(gold(prompt.row)) if gold is not None else ""
    except TaskError:
        return ""


def _answer(prompt: Prompt, kind: str, text: str) -> Answer:
    made = answer_of(prompt, Sample(tokens=[], provenance=[], sampler_logprobs=[], text=text))
    whole = kind in ("gold", "repeated", "other", "truncated")  # a gold answer is complete, a forced prefix included
    return replace(made, num_tokens=len(text.split()), full=text if whole else made.full)


def _scored(parts: Parts, pool: ScoringPool, given: Iterable[Case], seconds: float) -> Iterator[Case]:
    """One at a time: a grader that hangs costs one limit, and every score has its own time."""
    begin, accuracy = time.perf_counter(), parts.config.task.accuracy
    for case in given:
        start = time.perf_counter()
        [outcome] = pool.score([(case.prompt.row, case.answer)])
        now = time.perf_counter()
        reward, correct = parts.producer.drawing.reward(outcome.parts), outcome.parts.get(accuracy, 0.0) == 1.0
        yield replace(case, outcome=outcome, seconds=now - start, reward=reward, correct=correct)
        if now - begin > seconds:
            return


# ---- the grader


def failures(scored: Sequence[Case]) -> Finding:
    name, failed = "reward/failures", [c for c in scored if c.outcome.failure]
    if not failed:
        return ok(name, f"none in {len(scored)} answers", answers=len(scored))
    first = f"the first, {failed[0].kind} text {shown(failed[0].answer.text)}: {shown(failed[0].outcome.failure)}"
    text = f"{len(failed)} of {len(scored)} answers could not be scored; {first}"
    return fail(name, f"{text}. What the answer got wrong is a score of 0, not an exception.", failed=len(failed))


def speed(parts: Parts, scored: Sequence[Case]) -> Finding:
    """The first score waits for the worker to start."""
    name, per_step = "reward/speed", parts.config.batch.prompts * parts.config.batch.samples
    each = statistics.median([c.seconds for c in scored][1:] or [0.0])
    text = f"{each:.2g} s a score, {each * per_step:.2g} s for the {per_step} of a step"
    if each <= SLUGGISH:
        return ok(name, text, seconds=each)
    advice = f"{text}; allowed {SLOW:g} s a score. Make the grader cheaper, or cache what it looks up."
    return (fail if each > SLOW else warn)(name, advice, seconds=each)


def repeatable(parts: Parts, scored: Sequence[Case], seconds: float) -> Finding:
    again = _scored(parts, parts.scorer, scored, seconds)
    remedy = "A score may depend on the row and the answer alone: no clock, no counter, no unseeded random numbers."
    return _equal("reward/repeatable", list(zip(scored, again, strict=False)), "scored twice", remedy)


def order(parts: Parts, scored: Sequence[Case], seconds: float) -> Finding:
    turned = list(scored)[::-1]
    with ScoringPool(parts.config.task) as pool:
        again = list(_scored(parts, pool, turned, seconds))
    remedy = "The grader remembers something between answers, or depends on its process: it must do neither."
    what = "scored in another order by another worker"
    return _equal("reward/order", list(zip(turned, again, strict=False)), what, remedy)


def _equal(name: str, pairs: Sequence[tuple[Case, Case]], what: str, remedy: str) -> Finding:
    differ = [(a, b) for a, b in pairs if a.outcome.parts != b.outcome.parts]
    if not differ:
        return ok(name, f"{len(pairs)} answers {what}: the same scores", answers=len(pairs))
    a, b = differ[0]
    text = f"{len(differ)} of {len(pairs)} answers {what} differ: {a.outcome.parts}, then {b.outcome.parts}"
    return fail(name, f"{text}. {remedy}", differ=len(differ))


# ---- its verdicts


def verdicts(parts: Parts, scored: Sequence[Case]) -> Iterator[Finding]:
    kinds: dict[str, list[Case]] = {}
    for case in scored:
        kinds.setdefault(case.kind, []).append(case)
    gold = kinds.get("gold", [])
    most = parts.producer.drawing.reward(dict.fromkeys(parts.config.task.parts, 1.0))
    full = max([c.reward for c in gold], default=most)
    yield right(gold)
    yield nothing(kinds.get("empty", []))
    yield varies(scored, gold)
    yield cheapest([c for kind in CHEAP for c in kinds.get(kind, [])], full)
    yield echo(kinds.get("echo", []), full)
    yield repetition(kinds.get("repeated", []), gold)
    for kind, words in (("other", "another row's right answer"), ("truncated", "the first half of a right answer")):
        if kind in kinds:
            yield often(kind, words, kinds[kind], full)


def right(gold: Sequence[Case]) -> Finding:
    name, wrong = "reward/gold", [c for c in gold if not c.correct]
    if not gold:
        return warn(name, "the task gives no right answers: add gold(row) -> str, and this is checked with them.")
    if not wrong:
        return ok(name, f"right answers score full marks in {len(gold)} rows", rows=len(gold))
    said = f"{shown(wrong[0].answer.text)} got {wrong[0].outcome.parts}, {shown(wrong[0].outcome.reason)}"
    text = f"{len(wrong)} of {len(gold)} right answers are not scored as right; row {shown(wrong[0].prompt.id)}: {said}"
    return fail(name, f"{text}. Mend score or gold.", wrong=len(wrong), rows=len(gold))


def nothing(empty: Sequence[Case]) -> Finding:
    name, paid = "reward/empty", [c for c in empty if c.correct or max(c.outcome.parts.values()) > 0]
    if not paid:
        return ok(name, f"an empty answer earns nothing in {len(empty)} rows", rows=len(empty))
    text = f"an empty answer earns {paid[0].outcome.parts} in {len(paid)} of {len(empty)} rows"
    return fail(name, f"{text}: saying nothing would be learned. Give it 0.", rows=len(paid))


def varies(scored: Sequence[Case], gold: Sequence[Case]) -> Finding:
    name, rewards = "reward/varies", {c.reward for c in scored}
    if len(rewards) > 1:
        return ok(name, f"{len(rewards)} different rewards, {min(rewards):g} to {max(rewards):g}")
    if gold or rewards != {0.0}:
        text = f"{len(scored)} answers, right and wrong, all got {rewards}" if scored else "no answer could be scored"
        return fail(name, f"{text}: a constant reward teaches nothing. Does score read the right field?")
    return warn(
        name, "nothing rehearsed here scored, and without gold(row) no right answer is known: add it to be sure."
    )


def cheapest(junk: Sequence[Case], full: float) -> Finding:
    """The shortest string that earns anything although it says nothing."""
    name, paid = "reward/cheapest", sorted((c for c in junk if c.reward > 0), key=lambda c: len(c.answer.text))
    if not paid:
        return ok(name, "no empty, blank or format-only answer earns anything")
    worst = max(paid, key=lambda c: c.reward)
    text = f"the cheapest string that scores is {shown(paid[0].answer.text)}: {paid[0].reward:g} of {full:g}"
    return _graded(name, text, worst, any(c.correct for c in paid), full)


def echo(echoes: Sequence[Case], full: float) -> Finding:
    name, paid = "reward/echo", [c for c in echoes if c.reward > 0]
    if not paid:
        return ok(name, f"repeating the prompt earns nothing in {len(echoes)} rows", rows=len(echoes))
    worst = max(paid, key=lambda c: c.reward)
    text = f"repeating the prompt earns {worst.reward:g} of {full:g} in {len(paid)} of {len(echoes)} rows"
    return _graded(name, text, worst, any(c.correct for c in paid), full)


def _graded(name: str, text: str, worst: Case, correct: bool, full: float) -> Finding:
    remedy = "The policy will find it: ask for more than that before paying, or lower the part's weight."
    if correct or worst.reward >= MOST * full:
        return fail(name, f"{text}. {remedy}", reward=worst.reward)
    if worst.reward > SOME * full:
        return warn(name, f"{text}. {remedy}", reward=worst.reward)
    return ok(name, text, reward=worst.reward)


def repetition(repeated: Sequence[Case], gold: Sequence[Case]) -> Finding:
    name, once = "reward/repetition", {c.prompt.id: c.reward for c in gold}
    more = [c for c in repeated if c.reward > once.get(c.prompt.id, c.reward)]
    if not more:
        return ok(name, f"an answer given {REPEATS} times earns no more than once")
    text = f"an answer given {REPEATS} times earns {more[0].reward:g}, once {once[more[0].prompt.id]:g}"
    return fail(name, f"{text}: count it once.", rows=len(more))


def often(kind: str, words: str, tried: Sequence[Case], full: float) -> Finding:
    paid = [c for c in tried if c.correct or c.reward >= MOST * full]
    text = f"{words} is accepted in {len(paid)} of {len(tried)} rows"
    if len(paid) <= OFTEN * len(tried):
        return ok(f"reward/{kind}", text, rate=len(paid) / len(tried))
    return warn(f"reward/{kind}", f"{text}: guessing pays. Is the grader too lenient?", rate=len(paid) / len(tried))


# ---- on what the model says


def signal(trial: Trial, seconds: float) -> Finding:
    """Scores the trial's samples and says how many groups would train."""
    name, parts, begin = "reward/signal", trial.parts, time.perf_counter()
    for group in trial.rolled:
        for s in group.samples:
            case = Case(prompt=group.prompt, kind="sample", answer=answer_of(group.prompt, s))
            left = time.perf_counter() - begin < seconds
            found = list(_scored(parts, parts.scorer, [case] if left else [], seconds))
            s.reward = found[0].reward if found and not found[0].outcome.failure else None
    rewards = [s.reward for g in trial.rolled for s in g.samples if s.reward is not None]
    alive = sum(len({s.reward for s in g.samples} - {None}) > 1 for g in trial.rolled)
    mean = statistics.fmean(rewards or [0.0])
    text = f"{alive} of {len(trial.rolled)} sampled groups have rewards that differ, mean reward {mean:.2f}"
    if alive:
        return ok(name, text, groups=alive, mean=mean)
    advice = "equal rewards train nothing: try an easier or harder task, more samples, or a warmer start."
    return warn(name, f"{text}; {advice}", groups=0, mean=mean)
