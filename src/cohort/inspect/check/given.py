"""Checks of the update on given answers: it trains the targets alone, and compares pairs as their loss is defined.

Every check goes through the run's own rows, packer, loss and learner. It compares them with a definition that uses none
of these: one sequence at a time, sums of log-probabilities, and known values.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cohort.algos.algorithm import Loss
from cohort.algos.imitation import Imitation
from cohort.algos.preferences import PreferenceLoss, uses_mean
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from cohort.data.pack import make_batch
from cohort.inspect.check.findings import Finding, fail, ok
from cohort.inspect.check.trial import BackwardPass, UpdateTrial, compare_gradients
from cohort.inspect.check.update import (
    check_batch_cuts,
    check_single_sequences,
    compute_logprobs_alone,
    get_tolerance,
    judge_gradient_gaps,
)
from cohort.inspect.explain.pairs import score_pair
from cohort.jobs.dpo import DPOJob
from cohort.jobs.sft import SFTJob
from cohort.loops.learning import annotate, store_logprobs
from cohort.types import Group, Provenance, Sample

# The loss of every pair where both answers have the score 0, as the papers have it.
_KNOWN_STARTS: dict[type[PairLoss], tuple[str, Callable[[float], float]]] = {
    Sigmoid: ("ln 2", lambda beta: math.log(2.0)),
    Robust: ("ln 2", lambda beta: math.log(2.0)),
    Hinge: ("1", lambda beta: 1.0),
    IPO: ("1 / (2 beta)^2", lambda beta: 0.25 / beta**2),
}


@dataclass(kw_only=True)
class GivenTrial(UpdateTrial):
    """The job of a run on given answers, and a few groups of its first step."""

    job: SFTJob | DPOJob
    step_groups: list[Group] = field(default_factory=list)  # all groups of the first step
    known_groups: list[Group] = field(default_factory=list)  # all groups of the run, as far as they are known ahead
    has_moved: bool = False  # whether `update` has moved the weights

    loss_on: ClassVar[Provenance] = Provenance.TARGET
    noun: ClassVar[str] = "examples"

    @property
    def loss(self) -> Loss:
        """The imitation of target tokens."""
        return Imitation()

    @property
    def batch_size(self) -> int:
        """The number of groups per step."""
        return len(self.step_groups)

    def prepare(self, groups: list[Group]) -> list[Group]:
        """Returns copies of the groups with all that their loss needs."""
        return copy.deepcopy(groups)

    def update(self, groups: Sequence[Group]) -> float:
        """Trains on the groups as a step does, and returns the seconds that it took. The weights change."""
        begin = time.perf_counter()
        ready = self.prepare(list(groups))
        batch = make_batch(ready, 1, self.loss_on, whole_groups=self.whole_groups)
        metrics = self.job.learner.update(batch, self.loss).metrics
        self.has_moved |= bool(metrics.get("updates/done"))
        return time.perf_counter() - begin


class PairTrial(GivenTrial):
    """The job of a run on pairs, and a few pairs of its first step."""

    job: DPOJob

    noun: ClassVar[str] = "pairs"

    @property
    def loss(self) -> PreferenceLoss:
        """The loss of the run."""
        return self.job.loss

    def prepare(self, groups: list[Group]) -> list[Group]:
        """Returns copies of the pairs with log-probabilities of the reference, if their loss has one."""
        groups = copy.deepcopy(groups)
        learner, needs = self.job.learner, self.loss.needs(groups)
        if needs and learner.reference is None and learner.adapters is None:
            # They are to be stored at the start of the run, where the policy is its own reference.
            store_logprobs(groups, "ref_logprobs", learner.annotate(groups, {"old"}, self.loss_on).old)
        else:
            annotate(learner, groups, needs, self.loss_on)
        return groups


def make_given_trial(job: SFTJob | DPOJob) -> GivenTrial:
    """Returns a trial with up to three groups of the run's first step: a short one, a middle one, one of many turns."""
    step_groups = job.stream.list_groups(0) if isinstance(job, DPOJob) else job.groups(0)
    ordered = sorted(step_groups, key=count_tokens)
    most_turns = max(ordered, key=lambda g: max(len(find_turns(s)) for s in g.samples))
    chosen: list[Group] = []
    for group in (ordered[0], ordered[len(ordered) // 2], most_turns, *ordered):
        if len(chosen) < 3 and not any(group is one for one in chosen):
            chosen.append(group)
    kind = PairTrial if isinstance(job, DPOJob) else GivenTrial
    trial = kind(job=job, step_groups=step_groups, known_groups=[*job.encoded.groups, *job.held_out])
    trial.groups = trial.prepare(chosen)
    return trial


def count_tokens(group: Group) -> int:
    """Returns the number of tokens of a group whose samples each have a prompt of their own."""
    return sum(len(group.prompt.tokens) + len(sample.tokens) for sample in group.samples)


def find_turns(sample: Sample) -> list[tuple[int, int]]:
    """Returns (begin, end) of each stretch of neighbouring targets of a sample."""
    marks = [p == Provenance.TARGET for p in sample.provenance]
    edges = [i for i, (before, here) in enumerate(zip([False, *marks], [*marks, False], strict=True)) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_given_update(trial: GivenTrial) -> Iterator[Finding]:
    """Runs all checks of the update on given answers and yields their findings. No weight changes."""
    base = trial.run_backward(trial.groups)
    yield check_targets(trial, base)
    yield check_what_follows(trial, base)
    yield check_loss(trial, base)
    yield check_push(trial, base)
    if isinstance(trial, PairTrial):
        yield check_start(trial, base)
        yield check_symmetry(trial)
    yield from check_single_sequences(trial, base)
    yield from check_batch_cuts(trial, base)


# ---- which tokens are trained


def check_targets(trial: GivenTrial, base: BackwardPass) -> Finding:
    """Returns FAIL if the trained token ids are not exactly those of provenance TARGET, with a weight each, else ok."""
    name = "update/targets"
    trained = trial.collect_trained_tokens()
    count = others = 0
    for n, group, i in trial.enumerate_samples():
        sample = group.samples[i]
        wanted = [id for id, p in zip(sample.tokens, sample.provenance, strict=True) if p == Provenance.TARGET]
        row = base.tokens.get(n, [])
        # A pair that is far apart already may have no gradient at all.
        in_loss = sum(t.gradient != 0.0 for t in row) or len(row) * trial.whole_groups
        if trained.get(n, []) != wanted or in_loss != len(wanted):
            text = f"an answer has {len(wanted)} target tokens, {len(trained.get(n, []))} are trained"
            return fail(name, f"{text}, {in_loss} with a gradient. Only targets may be trained, and all of them.")
        count += len(wanted)
        others += len(group.prompt.tokens) + len(sample.tokens) - len(wanted)
    text = f"the {count} target tokens of {len(trial.groups)} {trial.noun} have a gradient, the {others} others none"
    return ok(name, text, targets=count, others=others)


def check_what_follows(trial: GivenTrial, base: BackwardPass) -> Finding:
    """Returns FAIL if tokens behind the last target, or advantages of tokens that are no targets, change the gradient.

    Every answer gets the begin of its prompt behind it, as tokens that the model did not write, and an advantage for
    every token that is no target. Neither may change anything.
    """
    changed = copy.deepcopy(trial.groups)
    for group in changed:
        added = group.prompt.tokens[:8]
        for sample in group.samples:
            sample.tokens += added
            sample.provenance += [int(Provenance.ENVIRONMENT)] * len(added)
            sample.sampler_logprobs += [0.0] * len(added)
            sample.token_advantages = [float(p != Provenance.TARGET) for p in sample.provenance]
            if sample.ref_logprobs is not None:
                sample.ref_logprobs = [*sample.ref_logprobs, *[0.0] * len(added)]
    gaps = [compare_gradients(trial.run_backward(changed).gradient, base.gradient)]
    return judge_gradient_gaps(trial, "what-follows", gaps, "Only tokens of provenance TARGET may be in the loss.")


# ---- what the loss does with these tokens


def check_loss(trial: GivenTrial, base: BackwardPass) -> Finding:
    """Returns FAIL if the loss is not the one that follows from log-probabilities computed one sequence at a time.

    Pairs get a made-up reference, because with their own one all margins are 0 at first, whatever is added up.
    """
    name = "update/loss"
    alone = [compute_logprobs_alone(trial, g, s).tolist() for g in trial.groups for s in g.samples]
    if isinstance(trial, PairTrial):
        groups = make_distant_pairs(trial, alone)
        metrics = trial.run_backward(groups).metrics
        compared = [(metrics[key], value) for key, value in compute_pair_loss(trial.loss.config, groups).items()]
        what = "that of the margins, computed one answer at a time"
    else:
        flat = [value for row in alone for value in row]
        compared = [(base.metrics["loss"], -math.fsum(flat) / len(flat))]
        what = "the mean negative log-probability of the targets, computed one example at a time"
    gap = max(abs(got - expected) / max(1e-2, abs(expected)) for got, expected in compared)
    got, expected = compared[0]
    numbers = f"{got:.6g}, {expected:.6g} expected"
    if gap <= max(get_tolerance(trial)):
        return ok(name, f"the loss is {what} ({numbers})", loss=expected, gap=gap)
    return fail(name, f"the loss is not {what}: {numbers}. Its denominator, or the tokens in it, are wrong.", gap=gap)


def make_distant_pairs(trial: PairTrial, logprobs: Sequence[Sequence[float]]) -> list[Group]:
    """Returns copies of the trial's pairs with log-probabilities, and far from their reference, if the loss has one.

    `logprobs` are those of the targets, one list per answer. The rewards of both answers are about 1 apart, the more
    the later a pair comes.
    """
    groups = copy.deepcopy(trial.groups)
    rows = iter(logprobs)
    for number, group in enumerate(groups):
        for i, sample in enumerate(group.samples):
            row = next(rows)
            values = iter(row)
            sample.old_logprobs = [next(values) if p == Provenance.TARGET else 0.0 for p in sample.provenance]
            total = (0.5 + 0.25 * number) / trial.loss.config.beta * (-1.0 if i == 0 else 0.7)
            shift = total if uses_mean(trial.loss.config) else total / max(1, len(row))
            if trial.loss.config.has_reference:
                sample.ref_logprobs = [x + shift for x in sample.old_logprobs]
    return groups


def compute_pair_loss(config: PairLoss, groups: Sequence[Group]) -> dict[str, float]:
    """Returns loss and mean margin of pairs by the formulas of the papers, in plain Python, by the names of metrics.

    The policy's log-probabilities are the old ones of the samples. A loss that is not known here is left out.
    """
    rewards = [[_compute_reward(config, sample) for sample in group.samples] for group in groups]
    margins = [better - worse for better, worse in rewards]
    found = {"reward/margin": math.fsum(margins) / len(margins)}
    formula = _FORMULAS.get(type(config))
    if formula is None:
        return found
    better = [x for g in groups for x in _list_target_values(g.samples[0], g.samples[0].old_logprobs)]
    nll = -config.nll * math.fsum(better) / len(better)
    terms = [formula(config, *row) for row in rewards]
    return {"loss": math.fsum(terms) / len(terms) + nll, **found}


def _log_sigmoid(x: float) -> float:
    """Returns log(1 / (1 + exp(-x))) without overflow."""
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def _smooth_term(config: Any, x: float) -> float:
    """Returns the negative log-sigmoid, if a share of the pairs is the wrong way round."""
    share = config.label_smoothing
    return -(1.0 - share) * _log_sigmoid(x) - share * _log_sigmoid(-x)


def _log_odds(logprob: float) -> float:
    """Returns the log of p / (1 - p), where p is the probability."""
    return logprob - math.log(-math.expm1(logprob))


# The term of a pair, from the rewards of both answers: beta times their scores.
_FORMULAS: dict[type[PairLoss], Callable[[Any, float, float], float]] = {
    Sigmoid: lambda c, better, worse: _smooth_term(c, better - worse),
    SimPO: lambda c, better, worse: _smooth_term(c, better - worse - c.gamma),
    Hinge: lambda c, better, worse: max(0.0, 1.0 - (better - worse)),
    IPO: lambda c, better, worse: ((better - worse) / c.beta - 0.5 / c.beta) ** 2,
    Robust: lambda c, better, worse: (
        (c.label_smoothing * _log_sigmoid(worse - better) - (1 - c.label_smoothing) * _log_sigmoid(better - worse))
        / (1 - 2 * c.label_smoothing)
    ),
    ORPO: lambda c, better, worse: -c.beta * _log_sigmoid(_log_odds(better / c.beta) - _log_odds(worse / c.beta)),
}


def check_push(trial: GivenTrial, base: BackwardPass) -> Finding:
    """Returns FAIL unless the gradient makes targets more likely, and those of a pair's worse answer less likely."""
    name = "update/direction"
    wrong = num = 0
    for n, _, i in trial.enumerate_samples():
        # Below 0 an update makes the token more likely.
        sign = 1.0 if trial.whole_groups and i == 1 else -1.0
        row = base.tokens.get(n, [])
        wrong += sum(t.gradient * sign < 0 for t in row)
        num += sum(t.gradient != 0 for t in row)
    if wrong or not num:
        text = f"{wrong} of {num} targets are pushed to the wrong side" if num else "no target is pushed at all"
        return fail(name, f"{text}: a sign is inverted, or the loss does not depend on them.", wrong=wrong)
    what = "better answers become more likely, worse ones less likely"
    return ok(name, f"{what if trial.whole_groups else 'targets become more likely'} ({num} tokens)", tokens=num)


# ---- pairs


def check_start(trial: PairTrial, base: BackwardPass) -> Finding:
    """Returns FAIL unless all margins are 0 and the loss has its known value while the policy is its own reference.

    A loss without a reference has margins from the beginning: returns ok.
    """
    name = "pairs/start"
    config = trial.loss.config
    if not config.has_reference:
        return ok(name, "does not apply: this loss has no reference")
    gaps = [
        abs(token.logprob - reference)
        for n, group, i in trial.enumerate_samples()
        for token, reference in zip(
            base.tokens.get(n, []), _list_target_values(group.samples[i], group.samples[i].ref_logprobs), strict=False
        )
    ]
    most = max(gaps, default=math.inf)
    text = "policy and reference are the same: all margins are 0" if most == 0 else f"margins are 0 (within {most:.1e})"
    if not most <= get_tolerance(trial)[1]:
        text = f"the reference is not the model before training: log-probabilities of a token differ by {most:.2g}"
        return fail(name, f"{text}. It must be the same model, before the first update.", gap=most)
    known = next((value for kind, value in _KNOWN_STARTS.items() if type(config) is kind), None)
    if known is None:
        return ok(name, text, gap=most)
    words, expected = known[0], known[1](config.beta)
    got = base.metrics["loss/pairs"]
    if abs(got - expected) > get_tolerance(trial)[1] * max(1.0, expected):
        return fail(name, f"{text}, but the loss is {got:.6g} and must be {words} = {expected:.6g}.", loss=got)
    return ok(name, f"{text}, and the loss is {words} = {got:.6g}", gap=most, loss=got)


def _list_target_values(sample: Sample, values: Sequence[float] | None) -> list[float]:
    """Returns those of the values per token that belong to targets; [] if there are no values."""
    return [value for value, p in zip(values or [], sample.provenance, strict=False) if p == Provenance.TARGET]


def check_symmetry(trial: PairTrial) -> Finding:
    """Swaps better and worse answers of all pairs. Returns FAIL unless every margin changes its sign exactly, else ok.

    The margins must not be 0, so every pair gets a made-up reference.
    """
    name = "pairs/symmetry"
    found = trial.job.learner.annotate(trial.groups, {"old"}, trial.loss_on).old
    assert found is not None
    logprobs = found.by_id()
    samples = [(id, sample) for group in trial.groups for id, sample in zip(group.ids(), group.samples, strict=True)]
    groups = make_distant_pairs(trial, [_list_target_values(sample, logprobs[id]) for id, sample in samples])
    for group in groups:
        here = score_pair(trial.loss.config, group).margin
        there = score_pair(trial.loss.config, replace(group, samples=group.samples[::-1])).margin
        if here != -there or here == 0:
            text = f"a pair has the margin {here:.6g}, and {there:.6g} with its answers swapped"
            return fail(name, f"{text}: the sign must turn, because both answers are scored alike.")
    return ok(name, f"swapped answers turn the sign of every margin, exactly ({len(groups)} pairs)")


def _compute_reward(config: PairLoss, sample: Sample) -> float:
    """Returns beta times the score of an answer, added up in plain Python."""
    logprobs, references = (_list_target_values(sample, row) for row in (sample.old_logprobs, sample.ref_logprobs))
    score = math.fsum(logprobs) - (math.fsum(references) if config.has_reference else 0.0)
    return config.beta * (score / len(logprobs) if uses_mean(config) else score)
