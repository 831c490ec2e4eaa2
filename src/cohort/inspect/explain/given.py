"""What reports about given answers share, examples and pairs: gradients, shown tokens, and facts about rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.data.batch import Batch, Microbatch
from cohort.data.pack import longest_sample, pack
from cohort.errors import RunError
from cohort.inspect.explain.decode import decode_sample
from cohort.inspect.explain.records import Fact, ShownToken
from cohort.inspect.explain.step import StepFiles
from cohort.inspect.explain.words import format_number
from cohort.learner.minibatch import scatter_to_samples
from cohort.types import Group, Provenance, Sample

NUM_STRONGEST = 5  # tokens that are named in words
_BUDGET = 65536  # tokens per microbatch; no model runs, so memory does not limit it


def require_logprobs(files: StepFiles) -> None:
    """Raises RunError if the rollout file lacks log-probabilities of a sample."""
    if any(sample.old_logprobs is None for group in files.groups for sample in group.samples):
        raise RunError(
            f"the rollout file of step {files.number} has no log-probabilities, so it is damaged or of a program of "
            "its own. Choose another step with --step."
        )


def find_targets(sample: Sample) -> list[int]:
    """Returns the indices of the tokens of a sample that are imitated or compared."""
    return [i for i, p in enumerate(sample.provenance) if p == Provenance.TARGET]


def list_target_logprobs(sample: Sample) -> list[float]:
    """Returns the log-probability of every target of a sample, by the policy that the update saw."""
    assert sample.old_logprobs is not None
    return [sample.old_logprobs[i] for i in find_targets(sample)]


def compute_gradients(groups: Sequence[Group], batch: Batch, loss: Loss) -> list[list[list[float]]]:
    """Returns dL/dlogprob of every token, by group, sample and token: the first one of its minibatch.

    `batch` is made of the groups as the run made it. A loss sees no model: recorded log-probabilities are enough.
    """
    by_id: dict[object, list[float]] = {}
    for minibatch in pack(batch, max(longest_sample(batch), _BUDGET), share=False):
        c = minibatch.counts
        totals = Totals(
            num_tokens=c.num_tokens,
            num_samples=c.num_samples,
            num_prompts=c.num_prompts,
            num_first_tokens=c.num_first_tokens,
        )
        pieces = [(micro.segments, _differentiate(micro, loss, totals)) for micro in minibatch.microbatches]
        by_id |= {batch.ids[n]: values.tolist() for n, values in scatter_to_samples(batch, pieces).items()}
    return [
        [by_id.get(id, [0.0] * len(sample.tokens)) for id, sample in zip(group.ids(), group.samples, strict=True)]
        for group in groups
    ]


def _differentiate(micro: Microbatch, loss: Loss, totals: Totals) -> torch.Tensor:
    """Returns dL/dlogprob [N] of the targets of a microbatch whose log-probabilities are the recorded ones."""
    assert micro.old_logprobs is not None, "the samples have no log-probabilities"
    leaf = micro.old_logprobs.double().requires_grad_()
    weights = loss.weigh_tokens(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
    inputs = LossInputs(
        logprobs=leaf,
        entropy=torch.zeros_like(leaf),
        old_logprobs=None,
        ref_logprobs=None if micro.ref_logprobs is None else micro.ref_logprobs.double(),
        sampler_logprobs=micro.sampler_logprobs.double(),
        advantages=micro.advantages.double(),
        weights=weights.double(),
        segments=micro.segments,
        totals=totals,
        num_samples=micro.num_samples,
    )
    (gradient,) = torch.autograd.grad(loss.loss(inputs)[0], [leaf])
    return gradient


def show_sample(
    files: StepFiles,
    group: Group,
    sample: Sample,
    gradient: Sequence[float],
    signal: float,
    tint: Callable[[float, float | None], float | None],
) -> list[ShownToken]:
    """Returns the tokens of a sample as a report shows them.

    `gradient` is dL/dlogprob of each token, `signal` that of the whole step. `tint` gives what the colour of a target
    shows, from its log-probability and that of the reference (None = there is no reference).
    """
    texts = decode_sample(files.tokenizer, group, sample)
    shown = [
        ShownToken(text=text, id=id, provenance=p)
        for text, id, p in zip(texts, sample.tokens, sample.provenance, strict=True)
    ]
    references = sample.ref_logprobs
    for i, logprob in zip(find_targets(sample), list_target_logprobs(sample), strict=True):
        reference = None if references is None else references[i]
        shown[i] = ShownToken(
            text=texts[i],
            id=sample.tokens[i],
            provenance=sample.provenance[i],
            # A token is pushed against its gradient; minus zero would look like a push.
            push=-gradient[i] if gradient[i] else 0.0,
            share=abs(gradient[i]) / signal if signal else 0.0,
            logprob=logprob,
            ref_logprob=reference,
            tint=tint(logprob, reference),
        )
    return shown


def describe_logprobs(tokens: Sequence[ShownToken]) -> list[Fact]:
    """Returns one fact: every target with its log-probability, for readers who have no mouse; none without targets."""
    rows = [f'"{t.text}" {t.logprob:.2f}' for t in tokens if t.logprob is not None]
    return [("log-probs", " ".join(rows))] if rows else []


def describe_place(group: Group) -> list[Fact]:
    """Returns the facts about where a group comes from: its row, and how often it was trained on before."""
    place = str(group.prompt.row.get("place", ""))
    return [("row", place), ("trained on", f"in pass {group.prompt.visit + 1} over the data")] if place else []


def format_place(group: Group) -> str:
    """Returns where a group comes from in few words, such as "rows.jsonl, line 7"; "" if it is of no file."""
    return str(group.prompt.row.get("place", "")).rpartition("/")[2]


def describe_recorded(metrics: Mapping[str, float], names: Sequence[str]) -> list[Fact]:
    """Returns one fact: the metrics of these names that the run recorded; none if it recorded none of them."""
    recorded = [f"{name} {format_number(metrics[name])}" for name in names if name in metrics]
    return [("recorded", ", ".join(recorded))] if recorded else []


def describe_updates(files: StepFiles) -> list[str]:
    """Returns the notes that reports about given answers share."""
    notes = [files.problem] if files.problem else []
    if files.config.learner.minibatches > 1:
        notes.append(
            f"the step had {files.config.learner.minibatches} minibatches; log-probabilities are those that the "
            "optimizer step of the example's own minibatch saw."
        )
    if files.config.learner.epochs > 1:
        notes.append(f"the step had {files.config.learner.epochs} epochs; the report shows the first one.")
    return notes + files.note_missing_tokenizer()
