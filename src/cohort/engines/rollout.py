"""Prompts -> scored groups: drive an engine, hand each sample to the graders as it finishes.

What comes back does not depend on who finished first: groups keep the order of their prompts, samples their index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cohort.clock import stage
from cohort.engines.base import Engine, Request
from cohort.errors import TrainingStopped
from cohort.scoring.pool import ScoringPool
from cohort.tasks.stream import TaskStream
from cohort.types import NOT_ACCEPTED, Answer, Group, Key, Outcome, Prompt, Sample, Sampling

MAX_REFILLS = 10  # rounds of refill before a step goes on with fewer groups
MAX_FAILED = 0.05  # share of a step's samples that may fail to be scored


@dataclass(kw_only=True, slots=True)
class Tasks:
    """Where prompts come from and how samples are drawn and scored."""

    stream: TaskStream
    scorer: ScoringPool
    sampling: Sampling
    weights: Mapping[str, float]  # of the reward's parts; a part not named weighs 1
    seed: int
    purpose: str = "train"

    def key(self, prompt: Prompt, index: int) -> Key:
        return Key(
            seed=self.seed,
            purpose=self.purpose,
            task=prompt.task,
            prompt_id=prompt.id,
            visit=prompt.visit,
            sample=index,
        )

    def reward(self, parts: Mapping[str, float]) -> float:
        return sum(self.weights.get(name, 1.0) * value for name, value in parts.items())


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
    places: dict[str, tuple[Prompt, int]] = {}
    for n, prompt in enumerate(prompts):
        for i in range(group_size):
            id = f"{n}/{i}"
            places[id] = (prompt, i)
            engine.submit(Request(id=id, tokens=prompt.tokens, sampling=tasks.sampling, key=tasks.key(prompt, i)))
    samples: dict[str, Sample] = {}
    unscored = set(places)
    while events := engine.poll():
        for event in events:
            if event.sample is not None:
                samples[event.id] = event.sample
                prompt = places[event.id][0]
                tasks.scorer.submit(event.id, prompt.row, answer_of(prompt, event.sample))
        unscored -= _take(tasks, samples, tasks.scorer.poll(0.0))
    assert samples.keys() == places.keys(), "an engine that has nothing under way has ended every request"
    while unscored:
        unscored -= _take(tasks, samples, tasks.scorer.poll(1.0))
    return [
        Group(prompt=prompt, samples=[samples[f"{n}/{i}"] for i in range(group_size)])
        for n, prompt in enumerate(prompts)
    ]


def _take(tasks: Tasks, samples: Mapping[str, Sample], outcomes: Sequence[tuple[str, Outcome]]) -> set[str]:
    for id, outcome in outcomes:
        sample = samples[id]
        sample.parts, sample.reason, sample.failure = dict(outcome.parts), outcome.reason, outcome.failure
        sample.reward = None if outcome.failure else tasks.reward(outcome.parts)
    return {id for id, _ in outcomes}


def answer_of(prompt: Prompt, sample: Sample) -> Answer:
    """What the grader sees: the completion alone, and with the prefix the policy was made to continue."""
    full = prompt.forced_text + sample.text
    history = prompt.messages[:-1] if prompt.forced_text else prompt.messages
    return Answer(
        text=sample.text,
        full=full,
        finish=str(sample.finish),
        num_tokens=len(sample.tokens),
        conversation=[*history, {"role": "assistant", "content": full}],
    )


def stop_if_scoring_is_broken(groups: Sequence[Group]) -> None:
    """Errors are not zeros: a few failures are counted and shown, many mean that no number can be trusted."""
    samples = [s for g in groups for s in g.samples]
    failed = [s.failure for s in samples if s.failure]
    if len(failed) > MAX_FAILED * len(samples):
        raise TrainingStopped(
            f"{len(failed)} of {len(samples)} samples could not be scored, more than {MAX_FAILED:.0%}; "
            f"the first: {failed[0]}. Mend the grader, then resume the run"
        )
