"""Checks of the rows of a run on given answers: what is left of them, and how the chat template writes them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from cohort.config.imitation import SFT
from cohort.examples.encode import ExampleRenderer
from cohort.examples.rows import Conversation
from cohort.inspect.check.findings import Finding, fail, ok, quote, warn
from cohort.inspect.check.given import GivenTrial, find_turns
from cohort.logs.escape import escape_line
from cohort.text import Tokenizer
from cohort.text.answers import Targets, render_document
from cohort.text.framing import read_template
from cohort.text.plain import add_system
from cohort.types import Group, Message, Provenance

WARN_LEFT_OUT_SHARE = 0.1  # of the rows
NUM_SPECIAL = 8  # special tokens whose text is put into a row
NUM_SHOWN_TURNS = 3
_NUM_CONTEXT = 4  # tokens that are shown before a turn


def check_rows(trial: GivenTrial) -> Iterator[Finding]:
    """Runs all checks of the rows and yields their findings."""
    yield check_left_out(trial)
    yield check_lengths(trial)
    yield check_targets_exist(trial)
    yield check_held_out(trial)
    yield check_shared_questions(trial)


def list_groups(trial: GivenTrial) -> list[Group]:
    """Returns all training groups or, of data without end, those of the first step."""
    return trial.job.encoded.groups or trial.step_groups


def check_left_out(trial: GivenTrial) -> Finding:
    """Returns how many rows were read and left out, and why: warn if many were, or if examples lost their end."""
    name = "data/rows"
    encoded = trial.job.encoded
    if not encoded.num_rows:
        return ok(name, f"synthetic data: {len(trial.step_groups)} {trial.noun} per step, new ones in every step")
    num_left_out = sum(encoded.left_out.values())
    text = f"{encoded.num_rows} rows to train on, {len(encoded.groups)} {trial.noun}"
    lines = [escape_line(line, 300) for line in encoded.describe()]
    details = {"rows": encoded.num_rows, "left_out": num_left_out, "cut": encoded.num_cut}
    if not lines:
        return ok(name, f"{text}, none left out", **details)
    is_much = num_left_out > WARN_LEFT_OUT_SHARE * encoded.num_rows or encoded.num_cut
    return (warn if is_much else ok)(name, f"{text}; {'; '.join(lines)}", **details)


def check_lengths(trial: GivenTrial) -> Finding:
    """Returns the median and the largest number of tokens, beside the limit: FAIL above it, else ok."""
    name = "data/lengths"
    config = trial.job.config
    lengths = [len(g.prompt.tokens) + len(s.tokens) for g in list_groups(trial) for s in g.samples]
    context = trial.job.model.config.context
    limit = getattr(config.data, "max_tokens", 0) or min(context, config.learner.token_budget or context)
    median, longest = statistics.median(lengths), max(lengths)
    text = f"median {median:.0f} tokens, longest {longest}, limit {limit}"
    details = {"median": median, "longest": longest, "limit": limit}
    if longest > limit:
        return fail(name, f"{text}: set --data.too-long skip or cut, or raise --data.max-tokens.", **details)
    return ok(name, text, **details)


def check_targets_exist(trial: GivenTrial) -> Finding:
    """Returns FAIL if there is no target token at all, or an answer without one, else how many there are."""
    name = "data/targets"
    samples = [(g, s) for g in list_groups(trial) for s in g.samples]
    counts = [s.provenance.count(Provenance.TARGET) for _, s in samples]
    total = sum(counts)
    num_tokens = sum(len(g.prompt.tokens) + len(s.tokens) for g, s in samples)
    if not all(counts):
        text = f"{counts.count(0)} of {len(counts)} answers have no target token, so nothing is learned from them"
        return fail(name, f"{text}. Remove these rows, or look at --loss and the chat template.", targets=total)
    text = f"{total} target tokens of {num_tokens}, {total / len(counts):.0f} per answer"
    return ok(name, text, targets=total, tokens=num_tokens)


def check_held_out(trial: GivenTrial) -> Finding:
    """Returns how many examples are held out, and their share: warn if there are none."""
    name = "data/held-out"
    num, num_train = len(trial.job.held_out), len(list_groups(trial))
    if not num and not trial.job.encoded.num_rows:
        return ok(name, "nothing is held out: every step has new synthetic data", held_out=0)
    if not num:
        text = "nothing is held out, so it will not be seen whether the model learns the rows by heart"
        return warn(name, f"{text}; --data.held-out 0.05 holds out a share of them.", held_out=0)
    share = num / (num + num_train)
    limited = f", at most {limit} (eval.problems)" if num == (limit := trial.job.config.eval.problems) else ""
    text = f"{num} {trial.noun} are held out and measured{limited}, {num_train} are trained on: {share:.1%}"
    return ok(name, text, held_out=num, share=share)


def check_shared_questions(trial: GivenTrial) -> Finding:
    """Returns FAIL if a question that is trained on is also held out, else ok."""
    name = "data/shared-questions"
    held_out = {question for g in trial.job.held_out if (question := g.prompt.row.get("question"))}
    shared = [g for g in list_groups(trial) if g.prompt.row.get("question") in held_out]
    if shared:
        first = escape_line(str(shared[0].prompt.row.get("place", "")), 200)
        text = f"{len(shared)} of the training rows ask what is held out too (first: {first})"
        return fail(name, f"{text}: the held-out numbers would be too good. Remove them.", shared=len(shared))
    text = "no question that is held out is trained on" if held_out else "does not apply: no question is held out"
    return ok(name, text, shared=0)


# ---- the chat template


def check_template(trial: GivenTrial) -> Iterator[Finding]:
    """Runs all checks of how conversations become tokens, and yields their findings.

    Checks that need messages use the first rows; synthetic traces have none.
    """
    config = trial.job.config
    tokenizer = Tokenizer.load(trial.job.model.folder, config.date, read_template(config.template))
    yield check_end_tokens(trial, tokenizer)
    yield show_turns(trial, tokenizer)
    renderer = ExampleRenderer(tokenizer=tokenizer, template=config.template, system=config.system)
    conversations = [one for row in trial.job.encoded.first_rows for one in _list_conversations(row)]
    if not conversations:
        return
    targets = config.loss if isinstance(config, SFT) else "last"
    yield check_special_text(renderer, conversations, targets)
    if any(row.messages for row in conversations):
        yield check_prompts(renderer, conversations, targets)
    if config.template != "text" and any(row.messages for row in conversations):
        yield check_whole(renderer, conversations, targets)


def _list_conversations(row: Any) -> list[Conversation]:
    """Returns a row as conversations: itself, or the prompt of a pair with each of its answers."""
    if isinstance(row, Conversation):
        return [row]
    answers = (row.chosen, row.rejected)
    return [
        Conversation(messages=[*row.prompt, *answer], place=row.place, key=row.key, tools=row.tools)
        for answer in answers
    ]


def check_end_tokens(trial: GivenTrial, tokenizer: Tokenizer) -> Finding:
    """Returns FAIL if a turn that is imitated has no end token among its targets, else ok.

    Warns where an example lost its end at the limit of tokens, and its turn with it.
    """
    name = "template/end-token"
    stops = {*tokenizer.stop_ids, tokenizer.end_of_turn}
    samples = [s for g in list_groups(trial) for s in g.samples]
    ends = [s.tokens[end - 1] in stops for s in samples for _, end in find_turns(s)]
    num_lost = ends.count(False)
    num_cut = trial.job.encoded.num_cut
    # A pair counts once where one or both of its answers lost their end.
    if num_lost > num_cut * max(len(g.samples) for g in list_groups(trial)):
        text = f"{num_lost} of {len(ends)} turns are trained without their end token"
        return fail(name, f"{text}: the model would not learn to stop.", lost=num_lost, turns=len(ends))
    if num_lost:
        text = f"{num_lost} of {len(ends)} turns were cut at the limit of tokens, and have no end token"
        return warn(name, f"{text}. --data.too-long skip leaves them out.", lost=num_lost, turns=len(ends))
    spelled = quote(tokenizer.spell([tokenizer.end_of_turn]))
    return ok(name, f"all {len(ends)} turns that are imitated end with a stop token, {spelled}", turns=len(ends))


def show_turns(trial: GivenTrial, tokenizer: Tokenizer) -> Finding:
    """Returns a finding that shows where the turns of one example begin and end, so that a user can read it."""
    group = max(trial.groups, key=lambda g: len(find_turns(g.samples[0])))
    sample = group.samples[0]
    tokens = [*group.prompt.tokens, *sample.tokens]
    offset = len(group.prompt.tokens)
    turns = find_turns(sample)
    shown = []
    for begin, end in turns[:NUM_SHOWN_TURNS]:
        before = tokenizer.spell(tokens[max(0, offset + begin - _NUM_CONTEXT) : offset + begin])
        shown.append(f"after {quote(before)} comes {quote(tokenizer.spell(tokens[offset + begin : offset + end]))}")
    rest = f" (and {len(turns) - NUM_SHOWN_TURNS} more)" if len(turns) > NUM_SHOWN_TURNS else ""
    place = escape_line(str(group.prompt.row.get("place", "one example")), 200)
    return ok("template/turns", f"{place}: {'; then '.join(shown)}{rest}", turns=len(turns))


def check_special_text(renderer: ExampleRenderer, conversations: Sequence[Conversation], targets: Targets) -> Finding:
    """Puts the text of special tokens into rows. Returns FAIL if one of them becomes a special token, else ok.

    Messages of users get the text of up to eight special tokens, those of the assistant that of stop tokens.
    """
    name = "template/special-text"
    tokenizer = renderer.tokenizer
    stops = set(tokenizer.stop_ids)
    special = [*sorted(stops), *sorted(tokenizer.special_ids - stops)][:NUM_SPECIAL]
    told = " ".join(tokenizer.spell([id]) for id in special)
    ended = " ".join(tokenizer.spell([id]) for id in sorted(stops))
    watched = tokenizer.special_ids | stops
    for row in conversations:
        changed = Conversation(
            messages=[_add_text(m, ended if m["role"] == "assistant" else told) for m in row.messages],
            place=row.place,
            key=row.key,
            text=f"{row.text} {told}" if row.text else "",
            tools=row.tools,
        )
        before, after = (_render(renderer, one, targets) for one in (row, changed))
        num_before, num_after = (sum(id in watched for id in tokens) for tokens in (before, after))
        if num_after != num_before:
            text = f"text such as {quote(told)} in a row became {num_after - num_before} special tokens"
            return fail(name, f"{text}: a row could end turns or begin new ones.", became=num_after - num_before)
    return ok(name, f"text such as {quote(told)} in a row stays text", rows=len(conversations))


def _add_text(message: Message, text: str) -> Message:
    """Returns a copy of a message with `text` at its end; the message itself if its content is no text."""
    content = message.get("content")
    return {**message, "content": f"{content} {text}"} if isinstance(content, str) and content else message


def _render(renderer: ExampleRenderer, row: Conversation, targets: Targets) -> list[int]:
    """Returns the tokens of a conversation, or of a plain text, as the run makes them."""
    if row.text:
        return render_document(renderer.tokenizer, row.text).tokens
    return renderer.render(row.messages, row.tools, targets).tokens


def check_prompts(renderer: ExampleRenderer, conversations: Sequence[Conversation], targets: Targets) -> Finding:
    """Compares the tokens before the last answer with the prompt that a sampler would get for it.

    Returns warn where they differ, because then the model is trained after other tokens than it will see, else ok.
    """
    name = "template/prompt"
    tokenizer = renderer.tokenizer
    rows = [row for row in conversations if row.messages]
    differing = []
    for row in rows:
        framed = add_system(row.messages, renderer.system)
        asked = framed[:-1]
        if not asked or asked[-1]["role"] == "assistant":
            continue
        if renderer.template == "text":
            prompt = tokenizer.render_text(asked).tokens
        else:
            prompt = tokenizer.render(asked, row.tools).tokens
        if _render(renderer, row, targets)[: len(prompt)] != prompt:
            differing.append(row.place)
    good = "the tokens before the last answer are the prompt that the model will get"
    bad = "have other tokens before the last answer than the prompt that the model will get: it learns another context"
    return _judge_drift(name, rows, differing, good, bad)


def check_whole(renderer: ExampleRenderer, conversations: Sequence[Conversation], targets: Targets) -> Finding:
    """Compares the tokens of conversations with those of the chat template rendered whole.

    Returns warn where they differ before the last target, because the template then writes the last answer in another
    way than the model will write it, else ok.
    """
    name = "template/whole"
    rows = [row for row in conversations if row.messages]
    differing = []
    for row in rows:
        chat = renderer.tokenizer.guard_chat(add_system(row.messages, renderer.system), row.tools)
        text = chat.template.render(chat.messages, chat.tools, generation_prompt=False)
        whole, _ = renderer.tokenizer.encode_pieces(chat, [text])
        tokens = _render(renderer, row, targets)
        # A template may write no stop token after the last answer; then one is added.
        if tokens != whole[: len(tokens)] and tokens[:-1] != whole:
            differing.append(row.place)
    good = "the tokens are those of the chat template rendered whole"
    bad = "have other tokens than the chat template rendered whole: it writes finished answers in another way"
    return _judge_drift(name, rows, differing, good, bad)


def _judge_drift(name: str, rows: Sequence[Conversation], differing: Sequence[str], good: str, bad: str) -> Finding:
    """Returns warn with the text `bad` if the tokens of some rows differ, else ok with the text `good`."""
    if not differing:
        return ok(name, f"{good} ({len(rows)} conversations)", differing=0)
    first = escape_line(differing[0], 200)
    text = f"{len(differing)} of {len(rows)} conversations (first: {first}) {bad}"
    return warn(name, f"{text}.", differing=len(differing))
