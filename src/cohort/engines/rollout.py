"""Prompts -> scored groups: drive an engine, hand each sample to the graders as it finishes.

What comes back does not depend on who finished first: groups keep the order of their prompts, samples their index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from cohort.clock import stage
from cohort.engines.base import Engine
from cohort.engines.member import Again, Member, Tasks, answer_of
from cohort.errors import TrainingStopped
from cohort.fates import Fate
from cohort.types import Group, Prompt

__all__ = [
    "Again",
    "Tasks",
    "answer_of",
    "collect",
    "roll",
    "stop_if_many_failed",
    "stop_if_scoring_is_broken",
    "stream",
]

MAX_REFILLS = 10  # rounds of refill before a step goes on with fewer groups
MAX_FAILED = 0.05  # share of a step's samples that may fail to be scored


@stage("rollout")
def collect(
    engine: Engine, tasks: Tasks, num_prompts: int, group_size: int, accept: Callable[[Group], bool]
) -> list[Group]:
    """`num_prompts` accepted groups, and before them, marked as excluded, those that were not accepted."""
    groups: list[Group] = []
    missing = num_prompts
    for _ in range(MAX_REFILLS):
        fresh = roll(engine, tasks, tasks.stream.next(missing), group_size)
        for group in fresh:
            if accept(group):
                missing -= 1
            else:
                group.excluded = Fate.NOT_ACCEPTED
        groups += fresh
        if not missing:
            break
    stop_if_scoring_is_broken(groups)
    return groups


def roll(engine: Engine, tasks: Tasks, prompts: Sequence[Prompt], group_size: int) -> list[Group]:
    """Sample and score one group per prompt."""
    groups = dict(stream(engine, tasks, prompts, group_size))
    return [groups[n] for n in range(len(prompts))]


def stream(engine: Engine, tasks: Tasks, prompts: Sequence[Prompt], group_size: int) -> Iterator[tuple[int, Group]]:
    """The same as they are complete, each with the place of its prompt.

    Turns go in rounds: who gets another is asked again when all have been scored, in their order. Otherwise what is
    sampled together, and with it the last bits of a log-probability, would depend on how quick the graders are.
    """
    members = {f"{n}/{i}": Member(prompt=p, index=i) for n, p in enumerate(prompts) for i in range(group_size)}
    missing = [group_size] * len(prompts)
    going_on = list(members)
    while going_on:
        for id in going_on:
            engine.submit(members[id].request(id, tasks))
        again: set[str] = set()
        for id in _turn(engine, tasks, members, len(going_on)):
            if members[id].go_on(tasks):
                again.add(id)
                continue
            n = int(id.partition("/")[0])
            missing[n] -= 1
            if not missing[n]:  # nobody needs its members any more: a long evaluation must not keep them all
                yield n, Group(prompt=prompts[n], samples=[members.pop(f"{n}/{i}").sample for i in range(group_size)])
        going_on = [id for id in going_on if id in again]


def _turn(engine: Engine, tasks: Tasks, members: Mapping[str, Member], num: int) -> Iterator[str]:
    """One turn of `num` members, sampled and scored: who they are, as they are scored."""
    with_grader = 0
    while num:
        events = engine.poll(0.0 if with_grader else 1.0)
        assert events or with_grader or not engine.idle, "an engine that is idle has ended every request"
        for event in events:
            if event.sample is not None:
                member = members[event.id]
                tasks.scorer.submit(event.id, member.prompt.row, member.answer(event.sample))
                with_grader += 1
        for id, outcome in tasks.scorer.poll(0.0 if events else 1.0):
            members[id].take(outcome, tasks)
            with_grader -= 1
            num -= 1
            yield id


def stop_if_scoring_is_broken(groups: Sequence[Group]) -> None:
    """Errors are not zeros: a few failures are counted and shown, many mean that no number can be trusted."""
    failed = [s.failure for g in groups for s in g.samples if s.failure]
    stop_if_many_failed(failed, sum(len(g.samples) for g in groups), "resume the run")


def stop_if_many_failed(failed: Sequence[str], of: int, then: str) -> None:
    if len(failed) > MAX_FAILED * of:
        raise TrainingStopped(
            f"{len(failed)} of {of} samples could not be scored, more than {MAX_FAILED:.0%}; "
            f"the first: {failed[0]}. Mend the grader, then {then}"
        )
