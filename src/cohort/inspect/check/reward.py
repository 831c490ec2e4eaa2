"""Checks of the reward: the task's grader scores right answers, empty ones and attempts to cheat.

Scoring goes through the same pool of worker processes that a run uses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from cohort.errors import TaskError
from cohort.inspect.check.cases import (
    NUM_REPEATS,
    Case,
    advise_on_failure,
    is_failed,
    make_cases,
    score_cases,
    score_golds,
)
from cohort.inspect.check.continuous import check_continuous
from cohort.inspect.check.findings import Finding, fail, ok, quote, warn
from cohort.inspect.check.samples import check_signal, score_samples
from cohort.inspect.check.trial import Trial
from cohort.jobs.build import RLJob
from cohort.logs.escape import escape_line
from cohort.scoring.start import choose_num_workers, start_scorer
from cohort.tasks.base import Task
from cohort.tasks.calls import resolve_row
from cohort.tasks.parts import NO_PART
from cohort.types import Prompt

# Rows of the training and of the test split that answers are made for.
NUM_TRAIN = 12
NUM_TEST = 4
PASS_SECONDS = 10.0  # for one pass over the answers; the answers that are not reached in that time are left out
NUM_SERVICE_ROWS = 4  # rows of both splits together, where every answer costs a request to an outside service
GOLD_SECONDS = 2.0  # for the right answers of rows beyond these
GOLD_BATCH = 16  # rows whose right answers are scored before the clock is looked at
WARN_STEP_SECONDS = 5.0  # time of all scores of a step
# Shares of the reward of a right answer that a worthless answer may earn.
FAIL_REWARD_SHARE = 0.5
WARN_REWARD_SHARE = 0.2
WARN_ROW_SHARE = 0.2  # of the rows: how often a wrong answer may be accepted
CHEAP_KINDS = ("empty", "whitespace", "skeleton")


def check_reward(trial: Trial, seconds: float = PASS_SECONDS) -> Iterator[Finding]:
    """Runs all checks of the task's grader and yields their findings.

    Takes the next prompts of the job's prompt stream and some problems of the test split. `seconds` limits each pass
    over the answers; answers that are not reached in that time are left out. The rewards of the trial's own samples are
    stored in the samples. If the grader breaks the rules for tasks (TaskError), or scores no answer at all, one FAIL
    says so and the other checks are not run.
    """
    job = trial.job
    task = job.config.task
    stream = job.producer.stream
    rows = stream.next_prompts(min(NUM_TRAIN, stream.num_rows)) + job.problems[:NUM_TEST]
    # Only a played episode has a reward. The sampled ones were played with the task's own environment. A mixture may
    # have both kinds of tasks.
    scored_alone = [prompt for prompt in rows if not _has_environment(task, prompt)]
    if len(scored_alone) < len(rows):
        yield ok("reward/environment", "rewards come from the environment, which played the sampled episodes")
    if not scored_alone:
        yield check_signal(trial, score_samples(trial, seconds))
        return
    rows = scored_alone
    if task.service:
        rows = rows[:: max(1, len(rows) // NUM_SERVICE_ROWS)][:NUM_SERVICE_ROWS]
    try:
        cases = make_cases(task, rows)
        scored = list(score_cases(job, job.scorer, cases, seconds))
        further = _score_further_golds(job, scored)
        yield check_failures([*scored, *further])
        # What the other checks compare are scores, so answers without one are left out.
        judged = [c for c in scored if not c.outcome.failure]
        if not judged:
            yield warn("reward/verdicts", "the other checks of the reward did not run, because they need scores.")
            return
        yield check_speed(job, scored)
        # What the model says may earn what no made-up answer does.
        samples = score_samples(trial, seconds)
        said = [c for c in samples if not c.outcome.failure]
        gold = [c for c in (*judged, *further) if c.kind == "gold" and not c.outcome.failure]
        yield from check_verdicts(job, [*judged, *said], {"sample", *(c.kind for c in cases)}, gold)
        if task.service:
            kept = "what an outside service says is kept in the run's journal, so a resumed run gets the same scores"
            yield ok("reward/repeatable", f"not scored twice: {kept}")
        else:
            yield check_repeatable(job, judged, seconds)
            yield check_order(job, judged, seconds)
        yield check_signal(trial, samples)
    except TaskError as error:
        yield fail(
            "reward/contract",
            f"{escape_line(str(error), 300)}. Correct the grader; the reward checks after this did not run.",
        )


def _score_further_golds(job: RLJob, scored: Sequence[Case]) -> list[Case]:
    """Returns scored right answers of rows that are not among `scored`: as many as a quick grader scores in 2 s.

    Returns none where right answers are not known, where every answer costs a request to a service, and for a grader
    that is not quick.
    """
    seconds = [c.seconds for c in scored if c.kind == "gold" and not c.outcome.failure]
    if not seconds or job.config.task.service or GOLD_BATCH * statistics.median(seconds) > GOLD_SECONDS:
        return []
    return score_golds(job, _list_further_prompts(job, {c.prompt.id for c in scored}), GOLD_SECONDS)


def _list_further_prompts(job: RLJob, tried: set[str]) -> Iterator[list[Prompt]]:
    """Yields the prompts that are scored alone and whose ids are not among `tried`, each once, in small lists."""
    task, stream = job.config.task, job.producer.stream
    problems = iter(job.problems)
    seen = set(tried)
    # Shares of a mixture may bring some rows many times before others.
    for _ in range(0, 2 * stream.num_rows + len(job.problems), GOLD_BATCH):
        drawn = [*stream.next_prompts(GOLD_BATCH), *islice(problems, GOLD_BATCH)]
        fresh = {p.id: p for p in drawn if p.id not in seen and not _has_environment(task, p)}
        seen |= fresh.keys()
        yield list(fresh.values())


def _has_environment(task: Task, prompt: Prompt) -> bool:
    """Returns whether only a played episode of a row has a reward."""
    return hasattr(resolve_row(task, prompt.row)[0], "environment")


# ---- the grader itself


def check_failures(scored: Sequence[Case]) -> Finding:
    """Returns FAIL if the grader could not score some answer, for instance because it raised an exception, else ok."""
    name = "reward/failures"
    # A task may say that no part of its reward applies to an answer. That is no mistake of the grader.
    idle = [c for c in scored if c.outcome.failure == NO_PART]
    failed = [c for c in scored if is_failed(c)]
    if not failed:
        also = f"; to {len(idle)} of them no part of the reward applies" if idle else ""
        return ok(name, f"all {len(scored)} answers could be scored{also}", answers=len(scored))
    # In full: an exception and its message are what the user needs.
    problem = escape_line(failed[0].outcome.failure, 300)
    first = f'the first, {failed[0].kind} text {quote(failed[0].answer.text)}: "{problem}"'
    text = f"{len(failed)} of {len(scored)} answers could not be scored; {first}"
    return fail(name, f"{text}{advise_on_failure(problem)}", failed=len(failed))


def check_speed(job: RLJob, scored: Sequence[Case]) -> Finding:
    """Returns how long scoring takes in a step: warn if that is more than 5 s, else ok. A slow grader is no mistake.

    Leaves out the first score, which waits for its worker, and failures, which are tried again; without other scores
    the time is 0. Where answers are programs, those of the task itself are timed; without any, nothing is.
    """
    name = "reward/speed"
    scoring = job.config.scoring
    is_service = job.config.task.service
    per_step = job.config.batch.prompts * job.config.batch.samples
    timed = [c for c in scored[1:] if not c.outcome.failure]
    if job.config.task.needs_sandbox:
        # Only right answers are programs. Others are judged without a run, or by one that ends at once.
        timed = [c for c in timed if c.kind in ("gold", "other")]
        if not timed:
            text = "not measured: programs were not run, because no row has a solution; each has up to --task.seconds"
            return ok(name, text)
    each = statistics.median([c.seconds for c in timed] or [0.0])
    at_once = scoring.concurrency if is_service else scoring.workers or choose_num_workers(job.config.task)
    total = math.ceil(per_step / at_once) * each
    how = f", {at_once} at once" if at_once > 1 else ""
    text = f"{each:.2g} s per score{how}: about {total:.2g} s for the {per_step} scores of a step"
    if total <= WARN_STEP_SECONDS:
        return ok(name, text, seconds=each, step=total)
    flag = "--scoring.concurrency" if is_service else "--scoring.workers"
    advice = "" if is_service else ", or write async def score if it waits for a service"
    return warn(name, f"{text}. Raise {flag}{advice}, or make the grader quicker.", seconds=each, step=total)


def check_repeatable(job: RLJob, scored: Sequence[Case], seconds: float) -> Finding:
    """Scores the same answers again, in the job's own workers. Returns FAIL if some score is another one, else ok.

    Stops after `seconds` and compares what was scored until then. Compares reward parts only.
    """
    again = score_cases(job, job.scorer, scored, seconds)
    remedy = "A score may depend on the row and the answer alone: no clock, no counter, no unseeded random numbers."
    return _compare_scores("reward/repeatable", list(zip(scored, again, strict=False)), "scored twice", remedy)


def check_order(job: RLJob, scored: Sequence[Case], seconds: float) -> Finding:
    """Scores the same answers in reverse order in a new worker process. Returns FAIL if some score differs, else ok.

    Stops after `seconds` and compares what was scored until then. Compares reward parts only.
    """
    turned = list(scored)[::-1]
    with start_scorer(job.config.task, job.config.scoring) as pool:
        again = list(score_cases(job, pool, turned, seconds))
    remedy = "The grader remembers something between answers, or depends on its process: it must do neither."
    how = "scored in another order by another worker"
    return _compare_scores("reward/order", list(zip(turned, again, strict=False)), how, remedy)


def _compare_scores(name: str, pairs: Sequence[tuple[Case, Case]], how: str, remedy: str) -> Finding:
    """Returns FAIL if the reward parts of some pair differ, else ok. Each pair is one answer scored twice.

    `name` is that of the check. The text of the finding says `how` the answers were scored and, for a FAIL, the
    `remedy`.
    """
    differ = [(a, b) for a, b in pairs if a.outcome.parts != b.outcome.parts]
    if not differ:
        return ok(name, f"{len(pairs)} answers {how}: the same scores", answers=len(pairs))
    a, b = differ[0]
    text = (
        f"{len(differ)} of {len(pairs)} answers {how} got different scores: {a.outcome.parts}, then {b.outcome.parts}"
    )
    return fail(name, f"{text}. {remedy}", differ=len(differ))


# ---- what the grader rewards


def check_verdicts(
    job: RLJob, scored: Sequence[Case], made: Iterable[str], all_gold: Sequence[Case]
) -> Iterator[Finding]:
    """Runs the checks of what the grader rewards, for each kind of answer, and yields their findings.

    `scored` must not contain answers that could not be scored. `made` are the kinds of all answers: a check none of
    whose answers was scored is a warning. `all_gold` are right answers, also those of rows for which no other kind was
    tried. A reward without an accuracy has checks of its own. The checks of a repeated,
    of another row's and of half an answer are left out if there are no such answers.
    """
    kinds: dict[str, list[Case]] = {kind: [] for kind in made}
    for case in scored:
        kinds[case.kind].append(case)
    if job.config.task.accuracy is None:
        yield from check_continuous({**kinds, "gold": all_gold})
        return
    gold = kinds.get("gold", [])
    # The full reward is that of the best gold answer or, without gold answers, that of full marks in every part.
    most = job.producer.settings.compute_reward(dict.fromkeys(job.config.task.parts, 1.0))
    full = max([c.reward for c in gold], default=most)
    has_gold = "gold" in kinds
    yield check_gold(job, all_gold) if gold or not has_gold else _warn_of_no_scores("reward/gold", "right")
    empty = kinds.get("empty", [])
    yield check_empty(empty) if empty else _warn_of_no_scores("reward/empty", "empty")
    yield check_variation(scored, gold, has_gold, job.scorer.conversation is not None)
    cheap = [c for kind in CHEAP_KINDS for c in kinds.get(kind, [])]
    yield check_cheapest(cheap, full) if cheap else _warn_of_no_scores("reward/cheapest", "empty or format-only")
    echoes = kinds.get("echo", [])
    yield check_echo(echoes, full) if echoes else _warn_of_no_scores("reward/echo", "copied")
    if (repeated := kinds.get("repeated")) is not None:
        can_compare = repeated and gold
        yield check_repetition(repeated, gold) if can_compare else _warn_of_no_scores("reward/repetition", "repeated")
    for kind, words in (("other", "another row's right answer"), ("truncated", "the first half of a right answer")):
        if (tried := kinds.get(kind)) is not None:
            name = f"reward/{kind}"
            yield check_acceptance(kind, words, tried, full) if tried else _warn_of_no_scores(name, kind)


def _warn_of_no_scores(name: str, kind: str) -> Finding:
    """Returns the finding of the check `name` if none of its answers, which `kind` describes, was scored."""
    return warn(name, f"not checked: no {kind} answer got a score. Either the grader fails on them, or it is too slow.")


def check_gold(job: RLJob, gold: Sequence[Case]) -> Finding:
    """Returns FAIL if some right answer of the task is not scored as correct, warn if the task gives none, else ok."""
    name = "reward/gold"
    task = job.config.task
    wrong = [c for c in gold if not c.correct]
    if not gold:
        return warn(name, "not checked: the task gives no right answers. Add gold(row) -> str to the task.")
    num_rows = job.producer.stream.num_rows + len(job.problems)
    if not wrong:
        text = f"the right answers of {len(gold)} of {num_rows} rows have {task.accuracy} = 1, the accuracy"
        return ok(name, text, rows=len(gold))
    first = wrong[0]
    score = f"{quote(first.answer.text)} got {first.outcome.parts}, {quote(first.outcome.reason)}"
    # Who wrote no class has no method to correct: the rows themselves hold the right answers.
    own, row = resolve_row(task, first.prompt.row)
    place = escape_line(own.locate_gold(row), 300) if hasattr(own, "locate_gold") else ""
    where = f"row {quote(first.prompt.id)}{place and f' ({place})'}"
    remedy = "Correct that column or the tests of the row" if place else "Correct score or gold of the task"
    text = f"{len(wrong)} of {len(gold)} right answers are not scored as right; {where}: {score}"
    return fail(name, f"{text}. {remedy}.", wrong=len(wrong), rows=len(gold))


def check_empty(empty: Sequence[Case]) -> Finding:
    """Returns FAIL if an empty answer is correct or has a reward part above 0, whatever its coefficient, else ok."""
    name = "reward/empty"
    paid = [c for c in empty if c.correct or max(c.outcome.parts.values()) > 0]
    if not paid:
        return ok(name, f"an empty answer earns nothing in {len(empty)} rows", rows=len(empty))
    text = f"an empty answer earns {paid[0].outcome.parts} in {len(paid)} of {len(empty)} rows"
    return fail(name, f"{text}: the policy would learn to say nothing. Score an empty answer 0.", rows=len(paid))


def check_variation(scored: Sequence[Case], gold: Sequence[Case], has_gold: bool, has_tools: bool = False) -> Finding:
    """Returns FAIL if all answers got the same reward, else ok.

    `scored` has samples of the model too. Returns only warn if the reward is always 0 and no right answers (`gold`)
    were scored, or if the task `has_tools`: the answers that are made up here make no calls. `has_gold` = the task
    gives right answers.
    """
    name = "reward/varies"
    rewards = {c.reward for c in scored}
    if len(rewards) > 1:
        return ok(name, f"{len(rewards)} different rewards, {min(rewards):g} to {max(rewards):g}")
    if has_tools:
        text = f"{len(scored)} answers without a call of a tool, right and wrong, all got {rewards}"
        return warn(name, f"{text}: only conversations with calls can earn more, and none was tried here.")
    if gold or rewards != {0.0}:
        text = f"{len(scored)} answers, right and wrong, all got {rewards}"
        return fail(name, f"{text}: a constant reward teaches nothing. Does score read the right field?")
    if has_gold:
        return warn(name, "all answers that could be scored got the reward 0, and no right answer is among them.")
    text = "all answers tried here got the reward 0, and without gold(row) no right answer is known"
    return warn(name, f"{text}. Add gold(row) -> str to the task, so that right answers can be tried too.")


def check_cheapest(junk: Sequence[Case], full: float) -> Finding:
    """Judges what the best-paid answer without content earns; the text names the shortest one that is paid.

    Returns FAIL for half of `full`, the reward of a right answer, or more, or if a paid one counts as correct; warn
    above a fifth; else ok. `junk` are the empty, blank and format-only answers.
    """
    name = "reward/cheapest"
    paid = sorted((c for c in junk if c.reward > 0), key=lambda c: len(c.answer.text))
    if not paid:
        return ok(name, "no empty, blank or format-only answer earns anything")
    worst = max(paid, key=lambda c: c.reward)
    text = f"the shortest answer without content that scores is {quote(paid[0].answer.text)}"
    text += f": {paid[0].reward:g} of {full:g}"
    return _judge_payment(name, text, worst, any(c.correct for c in paid), full)


def check_echo(echoes: Sequence[Case], full: float) -> Finding:
    """Judges what an answer earns that only repeats the prompt: the best-paid one counts.

    Returns FAIL for half of `full`, the reward of a right answer, or more, or if a paid one counts as correct; warn
    above a fifth; else ok.
    """
    name = "reward/echo"
    paid = [c for c in echoes if c.reward > 0]
    if not paid:
        return ok(name, f"repeating the prompt earns nothing in {len(echoes)} rows", rows=len(echoes))
    worst = max(paid, key=lambda c: c.reward)
    text = f"repeating the prompt earns {worst.reward:g} of {full:g} in {len(paid)} of {len(echoes)} rows"
    return _judge_payment(name, text, worst, any(c.correct for c in paid), full)


def _judge_payment(name: str, text: str, worst: Case, correct: bool, full: float) -> Finding:
    """Returns FAIL if `worst` earns at least half of the `full` reward, warn above a fifth, else ok.

    `worst` is the best-paid of some worthless answers. `correct` says whether any of them counts as correct, which
    always fails. `text` begins the text of the finding.
    """
    remedy = "The policy will find this: require more before any reward, or lower the coefficient of that part."
    if correct or worst.reward >= FAIL_REWARD_SHARE * full:
        return fail(name, f"{text}. {remedy}", reward=worst.reward)
    if worst.reward > WARN_REWARD_SHARE * full:
        return warn(name, f"{text}. {remedy}", reward=worst.reward)
    return ok(name, text, reward=worst.reward)


def check_repetition(repeated: Sequence[Case], gold: Sequence[Case]) -> Finding:
    """Returns FAIL if giving a right answer 50 times earns more than giving it once in the same row, else ok."""
    name = "reward/repetition"
    once = {c.prompt.id: c.reward for c in gold}
    more = [c for c in repeated if c.reward > once.get(c.prompt.id, c.reward)]
    if not more:
        return ok(name, f"an answer given {NUM_REPEATS} times earns no more than once")
    text = f"an answer given {NUM_REPEATS} times earns {more[0].reward:g}, given once {once[more[0].prompt.id]:g}"
    return fail(name, f"{text}: count a repeated answer once.", rows=len(more))


def check_acceptance(kind: str, words: str, tried: Sequence[Case], full: float) -> Finding:
    """Returns warn if wrong answers of one kind are accepted in more than a fifth of the rows, else ok.

    An answer is accepted if it is correct or earns at least half of the `full` reward. `words` describes the kind.
    Where right answers earn nothing, no reward accepts an answer.
    """
    paid = [c for c in tried if c.correct or 0 < full * FAIL_REWARD_SHARE <= c.reward]
    text = f"{words} is accepted in {len(paid)} of {len(tried)} rows"
    if len(paid) <= WARN_ROW_SHARE * len(tried):
        return ok(f"reward/{kind}", text, rate=len(paid) / len(tried))
    return warn(f"reward/{kind}", f"{text}: guessing pays. Is the grader too lenient?", rate=len(paid) / len(tried))
