"""A few groups sampled as a run samples them, and one forward and backward watched from outside."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.data.pack import make_batch, pack_minibatch
from cohort.engines.base import Engine, Event, Request
from cohort.jobs.build import Parts
from cohort.learner.base import Cut
from cohort.loops.learning import annotate
from cohort.rollout.producer import Producer
from cohort.tasks.environment import AgainRules, Episodes, KeyedDraws, Opening, Past, Step, ThinkAgain
from cohort.types import Answer, Finish, Group, Outcome, Row
from cohort.world import World


class Token(NamedTuple):
    """What the loss was given for one token, and what it gave back."""

    logprob: float
    weight: float
    advantage: float
    slope: float  # of the loss, on the log-probability


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One forward and backward."""

    gradient: dict[str, Tensor]  # by parameter, on the host
    metrics: dict[str, float]
    tokens: dict[int, list[Token]]  # by sample, counted over the groups


@dataclass(kw_only=True)
class Trial:
    """The parts of a run and a few groups of it."""

    parts: Parts
    rolled: list[Group]  # as sampled; scoring fills in their rewards
    drawn: dict[tuple[str, int], list[int]]  # by prompt id and sample: the tokens the engine told as it drew them
    seconds: float  # of sampling
    groups: list[Group] = field(default_factory=list)  # copies with a signal, to be trained on

    def samples(self) -> Iterator[tuple[int, Group, int]]:
        """(number over all groups, group, number in its group)"""
        places = ((g, i) for g in self.groups for i in range(len(g.samples)))
        return ((n, g, i) for n, (g, i) in enumerate(places))

    def graded(self, groups: list[Group]) -> list[Group]:
        """As the loop does between rollout and update."""
        learner, algo = self.parts.learner, self.parts.algo
        for sample in (s for g in groups for s in g.samples):
            sample.old_logprobs = sample.ref_logprobs = None  # a copy's may be of other tokens
        annotate(learner, groups, algo.needs())
        return algo.advantages(groups)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample with its prompt: no microbatch may be smaller."""
        return max((len(g.prompt.tokens) + len(s.tokens) for g in self.groups for s in g.samples), default=1)

    def backward(self, groups: Sequence[Group], cut: Cut | None = None, world: World | None = None) -> Seen:
        """The gradient of an update on these groups, and what the loss was given for each token."""
        loss, batch = _Watched(self.parts.algo), make_batch(groups)
        found = self.parts.learner.gradient(batch, cast(Loss, loss), cut, world)
        places = {id: place for place, id in enumerate(id for g in groups for id in g.ids())}
        tokens = {places[batch.ids[number]]: row for number, row in loss.tokens.items()}
        return Seen(gradient=found.tensors, metrics=found.metrics, tokens=tokens)

    def trained(self) -> dict[int, list[int]]:
        """The ids that an update trains, by sample (counted over the groups)."""
        batch = make_batch(self.groups)
        places = {id: place for place, id in enumerate(id for g in self.groups for id in g.ids())}
        found: dict[int, list[int]] = {}
        for micro in pack_minibatch(batch, 0, max(self.longest, self.parts.learner.token_budget)).microbatches:
            for number, target in zip(micro.segments.tolist(), micro.targets.tolist(), strict=True):
                found.setdefault(places[batch.ids[number]], []).append(target)
        return found


def sample(parts: Parts, num_prompts: int, num_samples: int) -> Trial:
    """Through the run's own rollout; the reward is rehearsed elsewhere, so that a broken one does not end this."""
    batch, engine = parts.config.batch, _Listening(parts.engine)
    stream = parts.producer.stream
    prompts = stream.next(min(num_prompts, batch.prompts))
    drawing = replace(parts.producer.drawing, group_size=min(num_samples, batch.samples))
    producer = Producer(cast(Engine, engine), _Unscored(parts.scorer.again), stream, drawing, parts.producer.order)
    begin = time.perf_counter()
    rolled = producer.roll(prompts)
    return Trial(parts=parts, rolled=rolled, drawn=engine.drawn, seconds=time.perf_counter() - begin)


def give_signal(trial: Trial) -> None:
    """Groups to train on: no two rewards alike, so that every algorithm has a signal, and nothing is failed or cut."""
    groups = copy.deepcopy(trial.rolled)
    for group in groups:
        for i, s in enumerate(group.samples):
            s.failure, s.finish = "", Finish.STOP
            s.reward = 1.0 - i / len(group.samples)
    trial.groups = trial.graded(groups)


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """(mean, most) of the worst parameter, relative to its largest entry; NaN stays NaN.

    Entries that should be 0 and are rounding (a bias of keys) are held to a thousandth of the largest gradient of all.
    """
    top = max((float(g.abs().max()) for g in expected.values()), default=0.0)
    gaps = [torch.zeros(2, dtype=torch.float64)]
    for name in expected.keys() | got.keys():
        known = expected[name] if name in expected else torch.zeros_like(got[name])
        other = got[name] if name in got else torch.zeros_like(known)
        gap = (other - known).abs().double() / (max(float(known.abs().max()), 1e-3 * top) or 1.0)
        gaps.append(torch.stack([gap.mean(), gap.max()]))
    mean, most = torch.stack(gaps).amax(0).tolist()
    return mean, most


class _Watched:
    """An algorithm's loss; keeps what it was given and its slope."""

    def __init__(self, algo: Loss) -> None:
        self.algo, self.per_token = algo, algo.per_token
        self.tokens: dict[int, list[Token]] = {}

    def weigh(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.algo.weigh(*args, **kwargs)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        loss, tally = self.algo.loss(inputs)
        slope = torch.autograd.grad(loss, inputs.logprobs, retain_graph=True)[0]
        columns = (inputs.logprobs, inputs.weights, inputs.advantages, slope)
        for segment, *row in zip(inputs.segments.tolist(), *(c.tolist() for c in columns), strict=True):
            self.tokens.setdefault(segment, []).append(Token(*row))
        return loss, tally


class _Listening:
    """An engine, and by prompt and sample the tokens it told."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name = engine, engine.name
        self.drawn: dict[tuple[str, int], list[int]] = {}
        self._places: dict[str, tuple[str, int]] = {}

    def submit(self, request: Request) -> None:
        self._places[request.id] = (request.key.prompt_id, request.key.sample)
        self.engine.submit(request)

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def poll(self, timeout: float = 0.0) -> list[Event]:
        events = self.engine.poll(timeout)
        for event in events:
            self.drawn.setdefault(self._places[event.id], []).extend(event.tokens)
        return events


class _Worthless:
    """An environment in which every answer is worth nothing."""

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        return Opening(messages=[])

    def step(self, answer: Answer) -> Step:
        return Step(parts={})


class _Unscored:
    """In the place of graders: every answer is worth nothing, at once. Conversations go on as in the run."""

    def __init__(self, again: AgainRules | None) -> None:
        inner = _Worthless()
        self.episodes = Episodes(lambda: inner if again is None else ThinkAgain(inner, again))
        self.done: list[tuple[str, Outcome]] = []

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None) -> None:
        step = Step() if past is None else self.episodes.step(row, past, answer)
        self.done.append((id, Outcome(replies=step.replies, cost=step.cost)))

    def drop(self, id: str) -> None:
        self.done = [(other, outcome) for other, outcome in self.done if other != id]

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        done, self.done = self.done, []
        return done
