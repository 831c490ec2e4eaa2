"""Examples as groups: what is trained on, what is left out, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.examples.encode import EncodedExamples, ExampleRenderer, encode_conversations, encode_pairs
from cohort.examples.rows import Conversation, Pair
from cohort.examples.stream import ExampleStream, count_steps, cut_held_out
from cohort.examples.sums import make_sum_pairs
from cohort.models.catalog import resolve_model
from cohort.text import Tokenizer
from cohort.types import Group, Provenance

TARGET = int(Provenance.TARGET)
TOKENIZER = Tokenizer.load(resolve_model("tiny"))
CHAT = ExampleRenderer(tokenizer=TOKENIZER, template="chat", system="")


def talk(*texts: str, place: str = "rows.jsonl, line 1") -> Conversation:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return Conversation(messages=messages, place=place, key=texts[0])


def pair(prompt: str, chosen: str, rejected: str, place: str = "rows.jsonl, line 1") -> Pair:
    answers: list[Any] = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    question = [{"role": "user", "content": prompt}]
    return Pair(prompt=question, chosen=answers[0], rejected=answers[1], place=place, key=prompt)


def whole(group: Group, sample: int = 0) -> list[int]:
    return [*group.prompt.tokens, *group.samples[sample].tokens]


def test_a_conversation_becomes_a_group_of_one_sample() -> None:
    encoded = encode_conversations(
        [talk("1+1?", "2"), talk("2+2?", "4", "sure?", "yes")], CHAT, "assistant", 100, "error"
    )
    first, second = encoded.groups
    prompt = TOKENIZER.render([{"role": "user", "content": "1+1?"}]).tokens
    assert first.prompt.tokens == prompt and first.samples[0].provenance == [TARGET] * len(first.samples[0].tokens)
    assert first.samples[0].tokens == [*TOKENIZER.encode("2"), TOKENIZER.end_of_turn]
    assert TOKENIZER.spell(whole(second)).count("<|im_end|>") == 4 and second.samples[0].provenance.count(2) > 0
    assert [g.prompt.id for g in encoded.groups] == ["0", "1"] and encoded.describe() == []


def test_a_system_prompt_is_put_before_those_without_one() -> None:
    framing = ExampleRenderer(tokenizer=TOKENIZER, template="chat", system="Be brief.")
    [group] = encode_conversations([talk("1+1?", "2")], framing, "assistant", 100, "error").groups
    assert "system\nBe brief." in TOKENIZER.spell(group.prompt.tokens)


def test_without_a_template_the_prompt_is_plain_text() -> None:
    framing = ExampleRenderer(tokenizer=TOKENIZER, template="text", system="")
    [group] = encode_conversations([talk("1+1?", "2")], framing, "assistant", 100, "error").groups
    assert TOKENIZER.spell(group.prompt.tokens) == "1+1?\n\n"
    assert group.samples[0].tokens == [*TOKENIZER.encode("2"), TOKENIZER.eos_id]


def test_long_examples_are_refused_left_out_or_cut() -> None:
    rows = [talk("1+1?", "2"), talk("1+1?", "2" * 50, place="rows.jsonl, line 2")]
    with pytest.raises(TaskError, match=r"rows.jsonl, line 2 has \d+ tokens, more than 30\. .* --data.too-long skip"):
        encode_conversations(rows, CHAT, "assistant", 30, "error")
    skipped = encode_conversations(rows, CHAT, "assistant", 30, "skip")
    assert len(skipped.groups) == 1
    [line] = skipped.describe()
    assert line == "rows left out, because they have more than 30 tokens: 1 of 2 (first: rows.jsonl, line 2)"
    cut = encode_conversations(rows, CHAT, "assistant", 30, "cut")
    assert [len(whole(g)) for g in cut.groups][1] == 30 and cut.describe() == [
        "rows cut at the limit of tokens: 1 of 2"
    ]


def test_an_example_that_loses_its_answer_is_left_out_and_counted() -> None:
    rows = [talk("1+1?", "2"), talk("word " * 30, "2", place="rows.jsonl, line 2")]
    encoded = encode_conversations(rows, CHAT, "assistant", 30, "cut")
    assert len(encoded.groups) == 1 and "nothing to imitate is left" in encoded.describe()[0]


def test_no_example_at_all_is_an_error_with_the_reasons() -> None:
    with pytest.raises(
        TaskError, match="no row can be trained on: rows left out, because they have more than 5 tokens: 1"
    ):
        encode_conversations([talk("1+1?", "2")], CHAT, "assistant", 5, "skip")


def test_a_pair_shares_its_prompt_and_the_better_answer_comes_first() -> None:
    [group] = encode_pairs([pair("1+1?", "2", "3")], CHAT, 100, "error", "error").groups
    assert group.prompt.tokens == TOKENIZER.render([{"role": "user", "content": "1+1?"}]).tokens
    assert [TOKENIZER.decode(s.tokens) for s in group.samples] == ["2", "3"]
    assert all(s.provenance == [TARGET] * len(s.tokens) for s in group.samples)
    # Tokens that both answers begin with are targets of both.
    [group] = encode_pairs([pair("1+1?", "two 2", "two 3")], CHAT, 100, "error", "error").groups
    assert [TOKENIZER.decode(s.tokens) for s in group.samples] == ["two 2", "two 3"]


def test_doubtful_pairs_are_refused_or_left_out() -> None:
    rows = [pair("1+1?", "2", "3"), pair("1+1?", "2", "2", place="rows.jsonl, line 2")]
    with pytest.raises(TaskError, match=r"rows.jsonl, line 2: both answers are the same, .* --data.equal skip"):
        encode_pairs(rows, CHAT, 100, "error", "error")
    encoded = encode_pairs(rows, CHAT, 100, "error", "skip")
    assert len(encoded.groups) == 1 and "both answers are the same: 1 of 2" in encoded.describe()[0]
    rows[1] = pair("1+1?", "2" * 50, "3", place="rows.jsonl, line 2")
    assert len(encode_pairs(rows, CHAT, 30, "skip", "skip").groups) == 1
    # Answers that are equal once they are cut are equal.
    rows[1] = pair("1+1?", "2" * 50, "2" * 51, place="rows.jsonl, line 2")
    assert "both answers are the same" in encode_pairs(rows, CHAT, 30, "cut", "skip").describe()[0]


def make_stream(num: int, size: int, seed: int = 0) -> ExampleStream:
    rows = [talk(f"{n}?", str(n)) for n in range(num)]
    return ExampleStream(
        groups=encode_conversations(rows, CHAT, "assistant", 100, "error").groups, size=size, seed=seed
    )


def test_every_pass_has_every_example_once_in_an_order_of_its_own() -> None:
    stream = make_stream(10, 4)
    seen = [g.prompt for step in range(5) for g in stream.list_groups(step)]  # two passes
    first, second = seen[:10], seen[10:]
    assert sorted(p.id for p in first) == sorted(p.id for p in second) == sorted(map(str, range(10)))
    assert [p.id for p in first] != [p.id for p in second]
    assert {p.visit for p in first} == {0} and {p.visit for p in second} == {1}
    assert [g.prompt.id for g in stream.list_groups(3)] == [g.prompt.id for g in make_stream(10, 4).list_groups(3)]
    assert [g.prompt.id for g in stream.list_groups(0)] != [g.prompt.id for g in make_stream(10, 4, 1).list_groups(0)]


def test_ids_are_unique_in_a_batch_that_is_larger_than_the_data() -> None:
    groups = make_stream(3, 8).list_groups(0)
    ids = [id for g in groups for id in g.ids()]
    assert len(set(ids)) == 8


def test_a_step_may_write_into_its_groups() -> None:
    stream = make_stream(3, 3)
    stream.list_groups(0)[0].samples[0].ref_logprobs = [1.0]
    assert all(g.samples[0].ref_logprobs is None for g in stream.list_groups(0))


def test_passes_become_steps() -> None:
    assert [count_steps(p, 100, 32) for p in (0.01, 0.32, 1, 3)] == [1, 1, 4, 10]


def test_held_out_rows_are_chosen_by_their_question() -> None:
    rows = [talk(f"{n % 200}?", str(n)) for n in range(400)]  # every question twice
    train, held = cut_held_out(rows, 0.2)
    assert len(train) + len(held) == 400 and 40 <= len(held) <= 120
    assert not {r.key for r in train} & {r.key for r in held}
    larger = cut_held_out(rows, 0.4)[1]
    assert {r.key for r in held} <= {r.key for r in larger}
    assert cut_held_out(rows, 0.0) == (rows, [])


def test_synthetic_pairs_are_about_different_sums_in_both_splits() -> None:
    train, test = make_sum_pairs("train", 300), make_sum_pairs("test", 100)
    assert len(train) == 300 and len(test) == 100 and not {p.key for p in train} & {p.key for p in test}
    assert make_sum_pairs("train", 10) == train[:10]
    assert all(p.chosen != p.rejected for p in train)


def test_counts_start_at_nothing() -> None:
    assert EncodedExamples().describe() == []
