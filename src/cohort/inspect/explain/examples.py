"""Report of a step of supervised fine-tuning: what was imitated, and which tokens surprised the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cohort.algos.imitation import Imitation
from cohort.config.document import get_variant_name
from cohort.config.imitation import SFT
from cohort.data.pack import make_batch
from cohort.inspect.explain.decode import show_prompt
from cohort.inspect.explain.given import (
    NUM_STRONGEST,
    compute_gradients,
    describe_logprobs,
    describe_place,
    describe_recorded,
    describe_updates,
    format_place,
    list_target_logprobs,
    require_logprobs,
    show_sample,
)
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
from cohort.inspect.explain.words import format_count, format_number
from cohort.types import Provenance

_WORDS = ReportPhrases(group="example", value="loss", share="loss", up="surprising", down="")
_SHOWN_METRICS = ("loss", "perplexity", "tokens", "grad_norm", "lr", "updates/bad")


def explain_examples(files: StepFiles, wanted: str = "") -> Report:
    """Returns the report of a step of supervised fine-tuning, with one of its examples in detail.

    `wanted` is the index or the id of an example; "" = the one with the largest share of the loss. Raises RunError if
    there is no such example, or the log-probabilities are missing.
    """
    config = files.config
    assert isinstance(config, SFT)
    require_logprobs(files)
    logprobs = [list_target_logprobs(group.samples[0]) for group in files.groups]
    # Sums of negative log-probabilities: the loss of the step is their sum over the number of targets.
    sums = [-math.fsum(values) for values in logprobs]
    total = math.fsum(sums)
    lines = [
        GroupLine(
            index=i,
            prompt_id=group.prompt.id,
            value=f"{_format_loss(logprobs[i])}, {format_count(len(logprobs[i]), 'token')}",
            share=sums[i] / total if total else 0.0,
            note=format_place(group),
        )
        for i, group in enumerate(files.groups)
    ]
    chosen = find_named_group(files.groups, wanted, sums)
    named = [
        f"step {files.number} of {config.steps}",
        config.recipe,
        config.model,
        get_variant_name("data", config.data),
    ]
    return Report(
        title=" · ".join(name for name in named if name),
        facts=_describe_step(files, logprobs),
        notes=describe_updates(files),
        groups=lines,
        group=_report_example(files, config, lines[chosen]),
        words=_WORDS,
    )


def _format_loss(logprobs: Sequence[float]) -> str:
    """Returns the mean negative log-probability as text; "none" if there are no targets."""
    return format_number(-math.fsum(logprobs) / len(logprobs)) if logprobs else "none"


def _describe_step(files: StepFiles, logprobs: Sequence[Sequence[float]]) -> list[Fact]:
    """Returns the facts about the step: how many examples and targets it has, its loss, and what was recorded."""
    samples = [group.samples[0] for group in files.groups]
    num_tokens = sum(len(g.prompt.tokens) + len(g.samples[0].tokens) for g in files.groups)
    flat = [value for row in logprobs for value in row]
    return [
        ("examples", f"{len(samples)}: {len(flat)} target tokens of {num_tokens}"),
        ("loss", f"{_format_loss(flat)} = mean negative log-probability of the target tokens, before the update"),
        *describe_recorded(files.metrics, _SHOWN_METRICS),
    ]


def _report_example(files: StepFiles, config: SFT, line: GroupLine) -> GroupReport:
    """Returns everything that is said about one example, token by token."""
    group = files.groups[line.index]
    batch = make_batch(files.groups, config.learner.minibatches, Provenance.TARGET)
    gradients = compute_gradients(files.groups, batch, Imitation())
    signal = math.fsum(abs(x) for row in gradients for values in row for x in values)
    sample = group.samples[0]
    # The rarer a token was by the model, the more the update moves the weights for it.
    tokens = show_sample(files, group, sample, gradients[line.index][0], signal, lambda logprob, _: -logprob)
    logprobs = list_target_logprobs(sample)
    num_turns = _count_turns(sample.provenance)
    return GroupReport(
        line=line,
        facts=[
            *describe_place(group),
            ("targets", f"{len(logprobs)} of {len(group.prompt.tokens) + len(sample.tokens)} tokens, in {num_turns}"),
            ("loss", f"{_format_loss(logprobs)}, {line.share or 0.0:.1%} of the loss of the step"),
            *_describe_surprises(tokens),
            *describe_logprobs(tokens),
        ],
        prompt=show_prompt(files.tokenizer, group),
        samples=[
            SampleReport(
                title="example",
                push=math.fsum(t.push for t in tokens),
                share=line.share,
                fate="" if logprobs else "it has no target tokens",
                facts=[],
                tokens=tokens,
            )
        ],
    )


def _count_turns(provenance: Sequence[int]) -> str:
    """Returns how many stretches of targets there are, as text."""
    marks = [p == Provenance.TARGET for p in provenance]
    starts = sum(here and not before for before, here in zip([False, *marks], marks, strict=False))
    return format_count(starts, "answer")


def _describe_surprises(tokens: Sequence[ShownToken]) -> list[Fact]:
    """Returns one fact: the targets with the lowest log-probabilities, the lowest first; none without targets."""
    targets = sorted((t for t in tokens if t.logprob is not None), key=lambda t: t.logprob or 0.0)
    rows = [f'"{t.text}" {t.logprob:.2f} (p {math.exp(t.logprob or 0.0):.2g})' for t in targets[:NUM_STRONGEST]]
    return [("surprising", ", ".join(rows))] if rows else []
