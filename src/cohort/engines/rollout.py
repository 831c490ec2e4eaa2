"""Prompts -> scored groups: drive an engine, hand each sample to the graders as it finishes.

What comes back does not depend on who finished first: groups keep the order of their prompts, samples their index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cohort.clock import stage
from cohort.engines.base import Engine
from cohort.engines.member import Again, Member, Tasks, answer_of
from cohort.errors import TrainingStopped
from cohort.types import NOT_ACCEPTED, Group, Prompt

__all__ = ["Again", "Tasks", "answer_of", "collect", "roll", "stop_if_scoring_is_broken", "stream"]

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
                group.excluded = NOT_ACCEPTED
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
    """The same as they are complete, each with the place of its prompt."""
    members = {f"{n}/{i}": Member(prompt=p, index=i) for n, p in enumerate(prompts) for i in range(group_size)}
    for id, member in members.items():
        engine.submit(member.request(id, tasks))
    under_way, with_grader = set(members), 0
    missing = [group_size] * len(prompts)
    while under_way:
        events = engine.poll()
        assert events or with_grader, "an engine that has nothing under way has ended every request"
        for event in events:
            if event.sample is not None:
                answer = members[event.id].answer(event.sample)
                tasks.scorer.submit(event.id, members[event.id].prompt.row, answer)
                with_grader += 1
        for id, outcome in tasks.scorer.poll(0.0 if events else 1.0):
            member, n = members[id], int(id.partition("/")[0])
            with_grader -= 1
            member.take(outcome, tasks)
            if member.go_on(tasks):
                engine.submit(member.request(id, tasks))
                continue
            under_way.remove(id)
            missing[n] -= 1
            if not missing[n]:
                yield n, Group(prompt=prompts[n], samples=[members[f"{n}/{i}"].sample for i in range(group_size)])


def stop_if_scoring_is_broken(groups: Sequence[Group]) -> None:
    """Errors are not zeros: a few failures are counted and shown, many mean that no number can be trusted."""
    samples = [s for g in groups for s in g.samples]
    failed = [s.failure for s in samples if s.failure]
    if len(failed) > MAX_FAILED * len(samples):
        raise TrainingStopped(
            f"{len(failed)} of {len(samples)} samples could not be scored, more than {MAX_FAILED:.0%}; "
            f"the first: {failed[0]}. Mend the grader, then resume the run"
        )
