"""Checks that the token stream of a conversation is what the chat template writes for its messages."""

from __future__ import annotations

from collections.abc import Iterator

from cohort.inspect.check.findings import Finding, ok, warn
from cohort.inspect.check.trial import Trial
from cohort.rollout.episode import join_messages
from cohort.types import Group, Provenance, Sample


def check_drift(trial: Trial) -> Iterator[Finding]:
    """Yields one finding about the sampled conversations of several turns; nothing if there are none.

    Each is rendered whole, from its messages, and compared with its token stream up to the last turn. They may differ
    where the text of an answer has other tokens than those that were sampled; any other difference is a warning.
    """
    talks = [(group, sample) for group in trial.sampled for sample in group.samples if sample.messages]
    if not talks:
        return
    differing = [(group, sample) for group, sample in talks if not _is_rendered_stream(trial, group, sample)]
    odd = [(group, sample) for group, sample in differing if _encodes_as_sampled(trial, sample)]
    if odd:
        group = odd[0][0]
        yield warn(
            "conversation/stream",
            f"{len(odd)} of {len(talks)} conversations are not what the chat template writes for their messages, first "
            f'that of row "{group.prompt.id}": the template changes earlier turns once others follow. What is trained '
            "is what was sampled; use a template whose turns stay, if the model will be used with whole conversations.",
        )
        return
    text = f"{len(talks) - len(differing)} of {len(talks)} conversations equal a whole render of their messages"
    if differing:
        text += ", and the others but for tokens that encoding their text again would change"
    yield ok("conversation/stream", f"{text}.")


def _is_rendered_stream(trial: Trial, group: Group, sample: Sample) -> bool:
    """Returns whether the stream before the last turn is what the messages before it are rendered to."""
    last = _split_sampled(sample)[-1]
    stream = [*group.prompt.tokens, *sample.tokens][: -len(last)]
    messages = join_messages(group.prompt.messages, sample.messages[:-1])
    return trial.job.producer.stream.render(messages, group.prompt.tools).tokens == stream


def _encodes_as_sampled(trial: Trial, sample: Sample) -> bool:
    """Returns whether encoding the text of every turn again gives the tokens that were sampled."""
    tokenizer = trial.job.tokenizer
    for tokens in _split_sampled(sample):
        end = tokens[:-1] if tokens[-1] in tokenizer.stop_ids else tokens
        if tokenizer.encode(tokenizer.decode(end), markup=True) != end:
            return False
    return True


def _split_sampled(sample: Sample) -> list[list[int]]:
    """Returns the tokens of each turn of the policy."""
    turns: list[list[int]] = []
    before = -1
    for token, provenance in zip(sample.tokens, sample.provenance, strict=True):
        if provenance == Provenance.SAMPLED:
            turns += [[]] if before != Provenance.SAMPLED else []
            turns[-1].append(token)
        before = provenance
    return turns
