"""A trial: a few groups sampled as a run samples them, and gradients computed on them with every token recorded."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.data.batch import Batch
from cohort.data.pack import longest_sample, make_batch, pack_minibatch
from cohort.engines.base import Engine, Event, Request
from cohort.jobs.base import TrainingJob
from cohort.jobs.build import RLJob
from cohort.learner.base import MicrobatchOptions
from cohort.loops.learning import annotate
from cohort.rollout.producer import Producer
from cohort.rollout.settings import make_again_rules
from cohort.tasks.environment import AgainRules, Episodes, KeyedDraws, Opening, Past, Step, ThinkAgain
from cohort.types import Answer, Finish, Group, Outcome, Provenance, Row
from cohort.world import World


class LossToken(NamedTuple):
    """One token in the loss: the loss's inputs for it and dL/dlogprob."""

    logprob: float
    weight: float
    advantage: float
    gradient: float  # dL/dlogprob: below 0, an update makes the token more likely


@dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """Result of one forward and backward pass over some groups."""

    gradient: dict[str, Tensor]  # by parameter name, on the host
    metrics: dict[str, float]
    tokens: dict[int, list[LossToken]]  # by the number of the sample, counted over all groups


@dataclass(kw_only=True)
class UpdateTrial:
    """The job of a run and a few groups on which its update is tried. Subclasses say what the loss is."""

    job: TrainingJob
    groups: list[Group] = field(default_factory=list)  # to train on

    loss_on: ClassVar[Provenance]  # of the tokens that the loss may touch

    @property
    def whole_groups(self) -> bool:
        """Whether the loss compares the samples of a group."""
        return self.loss.whole_groups

    @property
    def loss(self) -> Loss:
        """The loss of the run."""
        raise NotImplementedError

    def turn_groups(self) -> list[Group]:
        """Returns the groups in the opposite order, and the samples of each too, where their order means nothing."""
        return [g if self.whole_groups else replace(g, samples=g.samples[::-1]) for g in self.groups[::-1]]

    def make_batch(self, groups: Sequence[Group]) -> Batch:
        """Returns the groups as a batch with one minibatch, made as the training loop makes it."""
        return make_batch(groups, loss_on=self.loss_on, whole_groups=self.whole_groups)

    def enumerate_samples(self) -> Iterator[tuple[int, Group, int]]:
        """Yields (number, group, index) of each sample in `groups`.

        The number counts samples over all groups from 0, the index counts them within the group.
        """
        places = ((g, i) for g in self.groups for i in range(len(g.samples)))
        return ((n, g, i) for n, (g, i) in enumerate(places))

    @property
    def longest_sequence(self) -> int:
        """The largest number of tokens that a prompt and one of its samples have together; 1 if `groups` is empty.

        The token budget of a microbatch cannot be smaller.
        """
        return max((len(g.prompt.tokens) + len(s.tokens) for g in self.groups for s in g.samples), default=1)

    def run_backward(
        self, groups: Sequence[Group], options: MicrobatchOptions | None = None, world: World | None = None
    ) -> BackwardPass:
        """Computes the gradient of an update on `groups` and returns it with metrics and every token of the loss.

        Changes no weights. The tokens are by number of the sample, counted from 0 over all samples of `groups`; samples
        that are not in the loss have no key. `options` says how the batch is divided into microbatches (None = as in
        the run). `world` says which rank of how many ranks computes (None = the run's own).
        """
        loss = _RecordingLoss(self.loss)
        batch = self.make_batch(groups)
        result = self.job.learner.compute_gradient(batch, cast(Loss, loss), options, world)
        # The batch numbers the samples that it packed; the trial numbers all samples of the groups.
        places = {id: place for place, id in enumerate(id for g in groups for id in g.ids())}
        tokens = {places[batch.ids[number]]: row for number, row in loss.tokens.items()}
        return BackwardPass(gradient=result.tensors, metrics=result.metrics, tokens=tokens)

    def collect_trained_tokens(self) -> dict[int, list[int]]:
        """Returns the token ids that an update on `groups` trains, per sample, in order.

        The keys number the samples over all groups from 0. Samples that are not trained have no key.
        """
        batch = self.make_batch(self.groups)
        places = {id: place for place, id in enumerate(id for g in self.groups for id in g.ids())}
        trained: dict[int, list[int]] = {}
        budget = max(longest_sample(batch), self.job.learner.token_budget)
        for micro in pack_minibatch(batch, 0, budget).microbatches:
            for number, target in zip(micro.segments.tolist(), micro.targets.tolist(), strict=True):
                trained.setdefault(places[batch.ids[number]], []).append(target)
        return trained


@dataclass(kw_only=True)
class Trial(UpdateTrial):
    """The job of a run of reinforcement learning and a few groups that it sampled.

    `groups` are copies of these with distinct rewards and advantages.
    """

    job: RLJob
    sampled: list[Group]  # as sampled; the reward checks fill in their rewards
    drawn_tokens: dict[tuple[str, int], list[int]]  # by prompt id and sample: token ids from the engine's events
    sampling_seconds: float

    loss_on: ClassVar[Provenance] = Provenance.SAMPLED

    @property
    def loss(self) -> Loss:
        """The algorithm of the run."""
        return self.job.algo

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        """Computes advantages as the training loop does it before an update, and returns `groups`, the same objects.

        Changes them in place. Samples lose their old and reference log-probabilities, and get new ones from the learner
        where the algorithm needs them; then the algorithm sets advantages and masks of samples and `excluded` of
        groups.
        """
        learner = self.job.learner
        algo = self.job.algo
        # Log-probabilities of a copied sample may belong to other tokens than the sample has now.
        for sample in (s for g in groups for s in g.samples):
            sample.old_logprobs = sample.ref_logprobs = None
        annotate(learner, groups, algo.needs())
        groups = algo.advantages(groups)
        annotate(learner, groups, algo.loss_needs())
        return groups


def sample_trial(job: RLJob, num_prompts: int, num_samples: int) -> Trial:
    """Samples up to `num_prompts` groups of up to `num_samples` samples, with the run's own engine and settings.

    Takes the next prompts of the job's prompt stream, and never more than the batch of the run has. Returns a Trial
    with the groups as `sampled`, the token ids that the engine reported and the seconds that sampling took. The grader
    is not run, so a broken one cannot end the trial: the reward has its own checks.
    """
    batch = job.config.batch
    engine = _RecordingEngine(job.engine)
    stream = job.producer.stream
    prompts = stream.next_prompts(min(num_prompts, batch.prompts))
    drawing = replace(job.producer.settings, group_size=min(num_samples, batch.samples))
    # Tools and environments decide how a conversation goes on, so they are run.
    scorer = _ZeroRewardScorer(make_again_rules(job.config)) if job.scorer.conversation is None else job.scorer
    producer = Producer(cast(Engine, engine), scorer, stream, drawing, job.producer.order)
    begin = time.perf_counter()
    groups = producer.roll_out(prompts)
    seconds = time.perf_counter() - begin
    return Trial(job=job, sampled=groups, drawn_tokens=engine.drawn_tokens, sampling_seconds=seconds)


def give_distinct_rewards(trial: Trial) -> None:
    """Sets `trial.groups` to copies of the sampled groups that every algorithm can train on, with advantages.

    In each group the rewards fall evenly from 1, all different, and no sample counts as failed or cut off.
    """
    groups = copy.deepcopy(trial.sampled)
    for group in groups:
        for i, s in enumerate(group.samples):
            s.failure = ""
            s.finish = Finish.STOP
            s.reward = 1.0 - i / len(group.samples)
            s.turn_rewards = []
    trial.groups = trial.compute_advantages(groups)


def compare_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """Returns (mean, largest) of the differences between two gradients, each for the parameter where it is worst.

    Both gradients are by parameter name. Differences are divided by the parameter's largest |entry| in `expected`, but
    at least by a thousandth of the largest |entry| of all parameters there. A parameter that one side lacks counts as 0
    there. NaN stays NaN. Two empty gradients give (0, 0).
    """
    # A parameter whose gradient should be 0 (a bias of keys) has only rounding errors, which are as large as itself.
    # It is therefore compared with at least a thousandth of the largest gradient of all parameters.
    top = max((float(g.abs().max()) for g in expected.values()), default=0.0)
    gaps = [torch.zeros(2, dtype=torch.float64)]
    for name in expected.keys() | got.keys():
        known = expected[name] if name in expected else torch.zeros_like(got[name])
        other = got[name] if name in got else torch.zeros_like(known)
        gap = (other - known).abs().double() / (max(float(known.abs().max()), 1e-3 * top) or 1.0)
        gaps.append(torch.stack([gap.mean(), gap.max()]))
    mean, most = torch.stack(gaps).amax(0).tolist()
    return mean, most


class _RecordingLoss:
    """The loss of an algorithm that also records its inputs and dL/dlogprob of every token."""

    def __init__(self, algo: Loss) -> None:
        self.algo = algo
        self.per_token = algo.per_token
        self.whole_groups = algo.whole_groups
        self.tokens: dict[int, list[LossToken]] = {}  # by the batch's number of the sample

    def weigh_tokens(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the token weights of the wrapped algorithm, called with the same arguments."""
        return self.algo.weigh_tokens(*args, **kwargs)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the loss and tally of the wrapped algorithm, and adds every token with dL/dlogprob to `tokens`.

        Keeps the graph, so that the caller can do its own backward pass.
        """
        loss, tally = self.algo.loss(inputs)
        # The learner still needs the graph for its own backward pass.
        gradient = torch.autograd.grad(loss, inputs.logprobs, retain_graph=True)[0]
        columns = (inputs.logprobs, inputs.weights, inputs.advantages, gradient)
        for segment, *row in zip(inputs.segments.tolist(), *(c.tolist() for c in columns), strict=True):
            self.tokens.setdefault(segment, []).append(LossToken(*row))
        return loss, tally


class _RecordingEngine:
    """An engine that also records the tokens in its events, by prompt id and sample."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.drawn_tokens: dict[tuple[str, int], list[int]] = {}
        self._places: dict[str, tuple[str, int]] = {}  # prompt id and sample, by request id

    def submit(self, request: Request) -> None:
        """Passes a request on to the wrapped engine and remembers which prompt and sample it is for."""
        self._places[request.id] = (request.key.prompt_id, request.key.sample)
        self.engine.submit(request)

    @property
    def idle(self) -> bool:
        """Whether the wrapped engine has no request in progress and no event to report."""
        return self.engine.idle

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Returns the new events of the wrapped engine, waiting up to `timeout` seconds, and records their tokens."""
        events = self.engine.poll(timeout)
        for event in events:
            self.drawn_tokens.setdefault(self._places[event.id], []).extend(event.tokens)
        return events

    def forget(self, id: str) -> None:
        """Lets the wrapped engine drop the KV that it keeps for an ended request."""
        self.engine.forget(id)


class _ZeroRewardEnvironment:
    """An environment that ends after one answer and rewards nothing."""

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        """Returns an opening that adds no messages to the prompt."""
        return Opening(messages=[])

    def step(self, answer: Answer) -> Step:
        """Returns a last turn without replies and without reward parts, whatever the answer is."""
        return Step(parts={})

    def close(self, answer: Answer, limit: Finish) -> Step:
        """Returns the same."""
        return Step(parts={})


class _ZeroRewardScorer:
    """A stand-in for the scoring pool that gives every answer no reward, without running the task's grader.

    Conversations continue as in the run: after a low reward, `again` can ask for a further attempt.
    """

    scores_groups = False

    def __init__(self, again: AgainRules | None) -> None:
        inner = _ZeroRewardEnvironment()
        self.episodes = Episodes(lambda: inner if again is None else ThinkAgain(inner, again))
        self.done: list[tuple[str, Outcome]] = []

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        """Makes an outcome without reward parts at once; `poll` returns it under `id`. The grader is not run.

        `past` is the conversation so far; None = the task has a single turn. With `past`, the outcome may contain a
        request for a further attempt and its cost.
        """
        # Without a past the task has a single turn, and the conversation ends.
        step = Step() if past is None else self.episodes.step(row, past, answer)
        self.done.append((id, Outcome(replies=step.replies, cost=step.cost)))

    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        """Is not called: without rewards the answers of a group need not be together."""
        raise AssertionError("answers are submitted one by one")

    def drop(self, id: str) -> None:
        """Forgets the outcome of the answer that was submitted under `id`, if `poll` has not returned it yet."""
        self.done = [(other, outcome) for other, outcome in self.done if other != id]

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Returns (id, outcome) of the answers submitted since the last call and not dropped, in order of submission.

        Never waits: `timeout` has no effect.
        """
        done, self.done = self.done, []
        return done
