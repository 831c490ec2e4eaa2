"""Conversations and pairs as groups of tokens, and what becomes of those that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from cohort.errors import TaskError
from cohort.examples.rows import Conversation, Doubtful, Pair
from cohort.text import Tokenizer
from cohort.text.answers import RenderedConversation, Targets, render_conversation, render_document, render_plain
from cohort.text.plain import add_system
from cohort.types import Finish, Group, Message, Prompt, Provenance, Row, Sample

TooLong = Literal["error", "skip", "cut"]
T = TypeVar("T")
NUM_KEPT = 8  # rows that are kept as they are


@dataclass(kw_only=True, slots=True)
class EncodedExamples:
    """Examples as groups, ready for batches, and how many rows were left out, by the reason."""

    what: str = "rows"  # what is counted, for messages: "rows" or "held-out rows"
    groups: list[Group] = field(default_factory=list)
    num_rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first_left_out: dict[str, str] = field(default_factory=dict)  # by reason: the place of the first such row
    num_cut: int = 0  # examples that lost their end
    other_lines: list[str] = field(default_factory=list)  # what `describe` says besides, such as of held-out rows
    first_rows: list[Conversation | Pair] = field(default_factory=list)  # a few, from which `cohort check` makes probes

    def count_row(self, row: Conversation | Pair) -> None:
        """Counts a row that was read, and keeps it if it is one of the first."""
        self.num_rows += 1
        if len(self.first_rows) < NUM_KEPT:
            self.first_rows.append(row)

    def leave_out(self, reason: str, place: str) -> None:
        """Counts a row that no group is made of."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        self.first_left_out.setdefault(reason, place)

    def skip_row(self, reason: str, place: str) -> None:
        """Counts a row that was read and left out before it could become tokens."""
        self.num_rows += 1
        self.leave_out(reason, place)

    def describe(self) -> list[str]:
        """Returns one line per reason: how many rows were left out, and where the first of them is."""
        lines = [
            f"{self.what} left out, because {reason}: {num} of {self.num_rows} (first: {self.first_left_out[reason]})"
            for reason, num in self.left_out.items()
        ]
        if self.num_cut:
            lines.append(f"{self.what} cut at the limit of tokens: {self.num_cut} of {self.num_rows}")
        return lines + self.other_lines

    def require_groups(self) -> None:
        """Raises TaskError if no row became an example."""
        if not self.groups:
            why = "; ".join(self.describe()) or "there are none"
            raise TaskError(f"no row can be trained on: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleRenderer:
    """How messages become tokens: the settings of a run that conversations and pairs share."""

    tokenizer: Tokenizer
    template: str  # "text" = without a chat template
    system: str  # put before messages without a system message; "" = nothing

    def render(self, messages: Sequence[Message], tools: list[Any] | None, targets: Targets) -> RenderedConversation:
        """Returns a conversation as tokens, of which some are targets."""
        framed = add_system(messages, self.system)
        if self.template == "text":
            return render_plain(self.tokenizer, framed, targets)
        return render_conversation(self.tokenizer, framed, tools, targets)


def encode_conversations(
    rows: Iterable[Conversation],
    framing: ExampleRenderer,
    targets: Targets,
    max_tokens: int,
    too_long: TooLong,
    encoded: EncodedExamples | None = None,
) -> EncodedExamples:
    """Returns conversations and texts as groups of one sample. The loss is on their TARGET tokens.

    Those of more than `max_tokens` tokens raise TaskError, are left out, or lose their end, as `too_long` says. Raises
    TaskError, with file and line, for a conversation that the template cannot render. The groups are added to
    `encoded`, which may have counted rows already, and which is returned. None = to a new record, and if no row becomes
    an example, TaskError is raised.
    """
    is_new = encoded is None
    encoded = EncodedExamples() if encoded is None else encoded
    for row in rows:
        encoded.count_row(row)
        rendered = _render_at(row.place, partial(_render_row, row, framing, targets))
        num = len(rendered.tokens)
        if num > max_tokens:
            kept = _handle_long(encoded, row.place, num, max_tokens, too_long)
            rendered = RenderedConversation(tokens=rendered.tokens[:kept], provenance=rendered.provenance[:kept])
        if rendered.tokens and Provenance.TARGET not in rendered.provenance:
            encoded.leave_out("nothing to imitate is left of them at the limit of tokens", row.place)
        elif rendered.tokens:
            id = str(len(encoded.groups))
            encoded.groups.append(make_example_group(id, rendered.tokens, rendered.provenance, _name_row(row)))
    if is_new:
        encoded.require_groups()
    return encoded


def _render_row(row: Conversation, framing: ExampleRenderer, targets: Targets) -> RenderedConversation:
    """Returns the tokens of a conversation, or of a plain text."""
    if row.text:
        return render_document(framing.tokenizer, row.text)
    return framing.render(row.messages, row.tools, targets)


def encode_pairs(
    rows: Iterable[Pair],
    framing: ExampleRenderer,
    max_tokens: int,
    too_long: TooLong,
    equal: Doubtful,
    encoded: EncodedExamples | None = None,
) -> EncodedExamples:
    """Returns pairs as groups of two samples, the better answer first. The loss is on their TARGET tokens.

    `max_tokens` is the limit of a prompt with one of its answers; `too_long` is as in `encode_conversations`, where an
    answer loses its end. `equal` says what becomes of pairs whose answers are the same tokens. Raises TaskError, with
    file and line, for a pair that the template cannot render. `encoded` is as in `encode_conversations`.
    """
    is_new = encoded is None
    encoded = EncodedExamples() if encoded is None else encoded
    for row in rows:
        encoded.count_row(row)
        sides = _render_at(row.place, partial(_render_pair, row, framing))
        longest = max(len(side.tokens) for side in sides)
        if longest > max_tokens:
            kept = _handle_long(encoded, row.place, longest, max_tokens, too_long)
            if not kept:
                continue
            sides = [RenderedConversation(tokens=s.tokens[:kept], provenance=s.provenance[:kept]) for s in sides]
        group = make_pair_group(str(len(encoded.groups)), sides, row.prompt, _name_row(row))
        chosen, rejected = group.samples
        if not chosen.tokens or not rejected.tokens:
            encoded.leave_out("no answer is left of them at the limit of tokens", row.place)
        elif chosen.tokens == rejected.tokens:
            if equal == "error":
                raise TaskError(
                    f"{row.place}: both answers are the same, so neither is better; correct this row, or leave such "
                    "rows out with --data.equal skip"
                )
            encoded.leave_out("both answers are the same", row.place)
        else:
            encoded.groups.append(group)
    if is_new:
        encoded.require_groups()
    return encoded


def _name_row(row: Conversation | Pair) -> Row:
    """Returns what a group keeps of its row: where it is, and the key of its question."""
    return {"place": row.place, "question": row.key}


def _render_pair(row: Pair, framing: ExampleRenderer) -> list[RenderedConversation]:
    """Returns the tokens of the prompt with the better answer, and with the worse one."""
    return [framing.render([*row.prompt, *answer], row.tools, "last") for answer in (row.chosen, row.rejected)]


def _render_at(place: str, render: Callable[[], T]) -> T:
    """Returns what `render` returns. A TaskError of it gets the place of the row in front."""
    try:
        return render()
    except TaskError as error:
        raise TaskError(f"{place}: {error}") from error


def _handle_long(encoded: EncodedExamples, place: str, num: int, limit: int, too_long: TooLong) -> int:
    """Returns how many tokens of a long example are kept; 0 = none. Raises TaskError if `too_long` is error."""
    if too_long == "error":
        raise TaskError(
            f"{place} has {num} tokens, more than {limit}. Raise --data.max-tokens (the context of the model and "
            "--learner.token-budget are limits too), leave such rows out with --data.too-long skip, or cut them with "
            "--data.too-long cut."
        )
    if too_long == "skip":
        encoded.leave_out(f"they have more than {limit} tokens", place)
        return 0
    encoded.num_cut += 1
    return limit


def make_example_group(id: str, tokens: Sequence[int], provenance: Sequence[int], row: Row | None = None) -> Group:
    """Returns an example of supervised fine-tuning as a group with one sample. `provenance` says who wrote each token.

    Everything before the first token to imitate (TARGET) becomes the prompt, the rest the sample. Without such a token
    the sample is empty. `row` names the row that the example comes from; None = it is of no file.
    """
    rendered = RenderedConversation(tokens=list(tokens), provenance=list(provenance))
    group = _make_group("sft", id, [rendered], _count_context(rendered), [])
    group.prompt.row = row or {}
    return group


def make_pair_group(
    id: str, sides: Sequence[RenderedConversation], messages: list[Message], row: Row | None = None
) -> Group:
    """Returns two answers with their prompt as a group with two samples, the better one first.

    The prompt is what both have in common before the first token that is imitated; `messages` is the same as messages.
    `row` is as in `make_example_group`.
    """
    first, second = sides
    size = min(map(_count_context, sides))
    while first.tokens[:size] != second.tokens[:size]:
        size -= 1
    group = _make_group("dpo", id, sides, size, messages)
    group.prompt.row = row or {}
    return group


def _count_context(rendered: RenderedConversation) -> int:
    """Returns the number of tokens before the first target."""
    return next((i for i, p in enumerate(rendered.provenance) if p == Provenance.TARGET), len(rendered.tokens))


def _make_group(
    task: str, id: str, rendered: Sequence[RenderedConversation], num_prompt: int, messages: list[Message]
) -> Group:
    """Returns a group whose prompt is the first `num_prompt` tokens that all of `rendered` have in common."""
    prompt = Prompt(
        task=task,
        id=id,
        visit=0,
        row={},
        messages=messages,
        tokens=list(rendered[0].tokens[:num_prompt]),
        provenance=list(rendered[0].provenance[:num_prompt]),
    )
    samples = [
        Sample(
            tokens=list(one.tokens[num_prompt:]),
            provenance=list(one.provenance[num_prompt:]),
            # No policy sampled these tokens, so no log-probability was recorded.
            sampler_logprobs=[0.0] * (len(one.tokens) - num_prompt),
            finish=Finish.STOP,
        )
        for one in rendered
    ]
    return Group(prompt=prompt, samples=samples)
