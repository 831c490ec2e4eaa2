"""Report of a step of preference optimisation: how each pair is scored, and how much it weighs in the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cohort.algos.aggregate import Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.preferences import PreferenceLoss, uses_mean
from cohort.config.document import get_variant_name
from cohort.config.imitation import DPO
from cohort.config.preferences import PairLoss
from cohort.data.pack import make_batch
from cohort.inspect.explain.decode import show_prompt
from cohort.inspect.explain.given import (
    NUM_STRONGEST,
    compute_gradients,
    describe_logprobs,
    describe_place,
    describe_recorded,
    describe_updates,
    find_targets,
    format_place,
    list_target_logprobs,
    require_logprobs,
    show_sample,
)
from cohort.inspect.explain.group import describe_pushes
from cohort.inspect.explain.records import (
    Fact,
    GroupLine,
    GroupReport,
    Report,
    ReportPhrases,
    SampleReport,
    ShownToken,
)
from cohort.inspect.explain.step import StepFiles, find_named_group
from cohort.inspect.explain.words import format_number, format_signed
from cohort.types import Group, Provenance, Sample

_SIDES = ("chosen", "rejected")
_SHOWN_METRICS = (
    *("loss", "loss/pairs", "loss/nll", "reward/margin", "reward/accuracy", "kl/ref", "grad_norm", "lr"),
    "updates/bad",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairResult:
    """How a loss judges a pair: numbers of the better answer, and what they make of the pair."""

    rewards: tuple[float, float]  # beta times the scores, of the better and of the worse answer
    term: float  # of the loss, without imitation
    weight: float  # by how much the term falls per unit of the better answer's reward

    @property
    def margin(self) -> float:
        """The better answer's reward minus that of the worse one."""
        return self.rewards[0] - self.rewards[1]

    @property
    def ranking(self) -> str:
        """Whether the better answer has the higher reward, in words."""
        if self.margin == 0:
            return "a tie"
        return "ranked right" if self.margin > 0 else "ranked wrong"


def explain_pairs(files: StepFiles, wanted: str = "") -> Report:
    """Returns the report of a step of preference optimisation, with one of its pairs in detail.

    `wanted` is the index or the id of a pair; "" = the one with the largest share of the signal. Raises RunError if
    there is no such pair, or the log-probabilities are missing.
    """
    config = files.config
    assert isinstance(config, DPO)
    require_logprobs(files)
    batch = make_batch(files.groups, config.learner.minibatches, Provenance.TARGET, whole_groups=True)
    gradients = compute_gradients(files.groups, batch, PreferenceLoss(config.loss))
    signals = [math.fsum(abs(x) for values in row for x in values) for row in gradients]
    signal = math.fsum(signals)
    scores = [score_pair(config.loss, group) for group in files.groups]
    lines = [
        GroupLine(
            index=i,
            prompt_id=group.prompt.id,
            value=format_signed(scores[i].margin),
            share=signals[i] / signal if signal else 0.0,
            note="  ".join(x for x in (scores[i].ranking, format_place(group)) if x),
        )
        for i, group in enumerate(files.groups)
    ]
    chosen = find_named_group(files.groups, wanted, signals)
    variants = [get_variant_name("data", config.data), get_variant_name("loss", config.loss)]
    named = [f"step {files.number} of {config.steps}", config.recipe, config.model, *variants]
    return Report(
        title=" · ".join(name for name in named if name),
        facts=_describe_step(files, config.loss, scores),
        notes=[*describe_updates(files), *_explain_loss(config.loss)],
        groups=lines,
        group=_report_pair(files, config.loss, lines[chosen], scores[chosen], gradients[chosen], signal),
        words=_choose_words(config.loss),
    )


def _choose_words(config: PairLoss) -> ReportPhrases:
    """Returns the words of the report. Colours compare with the reference, if there is one."""
    if not config.has_reference:
        return ReportPhrases(group="pair", value="margin")
    return ReportPhrases(
        group="pair", value="margin", up="more likely than by the reference", down="less likely than by it"
    )


def score_pair(config: PairLoss, group: Group) -> PairResult:
    """Returns how a loss judges a pair with its recorded log-probabilities.

    The loss itself is evaluated, on this pair alone and without its imitation.
    """
    loss = PreferenceLoss(replace(config, nll=0.0))
    counts = [len(find_targets(sample)) for sample in group.samples]
    leaf = torch.tensor(
        [x for sample in group.samples for x in list_target_logprobs(sample)], dtype=torch.float64, requires_grad=True
    )
    zeros = torch.zeros(len(leaf), dtype=torch.float64)
    inputs = LossInputs(
        logprobs=leaf,
        entropy=zeros,
        old_logprobs=None,
        ref_logprobs=_collect_references(group) if config.has_reference else None,
        sampler_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        segments=torch.repeat_interleave(torch.arange(2), torch.tensor(counts)),
        totals=Totals(num_tokens=sum(counts), num_samples=2, num_prompts=1, num_first_tokens=counts[0]),
        num_samples=2,
    )
    term, tally = loss.loss(inputs)
    (gradient,) = torch.autograd.grad(term, [leaf])
    # A token of the better answer moves its reward by beta, or by beta over the number of its tokens.
    per_token = config.beta / counts[0] if uses_mean(config) else config.beta
    metrics = tally.to_metrics()
    return PairResult(
        rewards=(metrics["reward/chosen"], metrics["reward/rejected"]),
        term=float(term.detach()),
        weight=float(-gradient[0] / per_token),
    )


def _collect_references(group: Group) -> torch.Tensor | None:
    """Returns the log-probabilities of all targets by the reference [T]; None if the file has none."""
    values = [None if s.ref_logprobs is None else s.ref_logprobs[i] for s in group.samples for i in find_targets(s)]
    return None if None in values else torch.tensor(values, dtype=torch.float64)


def _describe_step(files: StepFiles, config: PairLoss, scores: Sequence[PairResult]) -> list[Fact]:
    """Returns the facts about the step: how many pairs are ranked right, mean margin and loss, what was recorded."""
    num = len(scores)
    right, ties = (sum(s.ranking == words for s in scores) for words in ("ranked right", "a tie"))
    margin = math.fsum(s.margin for s in scores) / num
    term = math.fsum(s.term for s in scores) / num
    return [
        ("pairs", f"{num}: {right} ranked right, {num - right - ties} wrong" + (f", {ties} ties" if ties else "")),
        ("margin", f"{format_signed(margin)} on average: reward of the better answer minus that of the worse one"),
        ("loss", f"{format_number(term)} = mean term of the pairs, before the update"),
        *describe_recorded(files.metrics, _SHOWN_METRICS),
    ]


def _explain_loss(config: PairLoss) -> list[str]:
    """Returns the notes about the loss that a reader needs."""
    score = "log-probability" if not config.has_reference else "log-probability minus that of the reference"
    per_token = ", per token" if uses_mean(config) else ""
    notes = [f"a reward is {config.beta:g} (loss.beta) x the score: {score}{per_token}."]
    if config.nll:
        notes.append(f"pushes include imitation of the better answers (loss.nll = {config.nll:g}).")
    return notes


def _report_pair(
    files: StepFiles,
    config: PairLoss,
    line: GroupLine,
    scores: PairResult,
    gradients: Sequence[Sequence[float]],
    signal: float,
) -> GroupReport:
    """Returns everything that is said about one pair: its scores, and both answers token by token."""
    group = files.groups[line.index]
    better, worse = map(format_signed, scores.rewards)
    weight = f"{scores.weight:.4f}: by so much the term falls per unit of the better answer's reward"
    return GroupReport(
        line=line,
        facts=[
            *describe_place(group),
            ("margin", f"{format_signed(scores.margin)} = {better} - ({worse}), {scores.ranking}"),
            ("loss term", f"{scores.term:.4f}"),
            ("weight", weight if scores.weight else "0: this pair has no gradient, its margin is large enough"),
        ],
        prompt=show_prompt(files.tokenizer, group),
        samples=[
            _report_answer(files, config, group, side, scores.rewards[side], gradients[side], signal)
            for side in range(len(_SIDES))
        ],
    )


def _report_answer(
    files: StepFiles,
    config: PairLoss,
    group: Group,
    side: int,
    reward: float,
    gradient: Sequence[float],
    signal: float,
) -> SampleReport:
    """Returns everything that is said about one answer of a pair. `side` is 0 for the better one."""
    sample = group.samples[side]

    def compare(logprob: float, reference: float | None) -> float | None:
        return logprob - reference if reference is not None and config.has_reference else None

    tokens = show_sample(files, group, sample, gradient, signal, compare)
    return SampleReport(
        title=_SIDES[side],
        push=math.fsum(t.push for t in tokens),
        share=math.fsum(map(abs, gradient)) / signal if signal else 0.0,
        fate="",
        facts=[
            *_describe_scores(config, sample, reward),
            *_describe_differences(tokens),
            *describe_pushes(tokens),
            *describe_logprobs(tokens),
        ],
        tokens=tokens,
    )


def _describe_scores(config: PairLoss, sample: Sample, reward: float) -> list[Fact]:
    """Returns the facts about an answer: its log-probability by policy and reference, its score and its reward."""
    logprobs = list_target_logprobs(sample)
    num = len(logprobs)
    total = math.fsum(logprobs)
    facts = [("policy", f"log-probability {total:.3f}, {total / num:.3f} per token of {num}")]
    if config.has_reference and sample.ref_logprobs is not None:
        reference = math.fsum(sample.ref_logprobs[i] for i in find_targets(sample))
        facts.append(("reference", f"log-probability {reference:.3f}, {reference / num:.3f} per token"))
    return [*facts, ("score", f"{format_signed(reward / config.beta)}, reward {format_signed(reward)}")]


def _describe_differences(tokens: Sequence[ShownToken]) -> list[Fact]:
    """Returns one fact: the tokens that differ most from the reference; none where nothing differs."""
    moved = [t for t in tokens if t.tint]
    strongest = sorted(moved, key=lambda t: -abs(t.tint or 0.0))[:NUM_STRONGEST]
    rows = [f'"{t.text}" {format_signed(t.tint or 0.0)}' for t in strongest]
    return [("moved most", f"{', '.join(rows)} against the reference")] if rows else []
