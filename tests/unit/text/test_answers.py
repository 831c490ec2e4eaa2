"""Conversations to imitate: which tokens are targets, with templates of several families."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.models.catalog import resolve_model
from cohort.tasks.traces.encode import encode_trace
from cohort.tasks.traces.mixture import load_trace_rows, make_trace
from cohort.tasks.traces.styles import Mix
from cohort.text import Tokenizer
from cohort.text.answers import RenderedConversation, render_conversation, render_document
from cohort.types import Provenance
from tests.helpers.chat_templates import END, TEMPLATES, write_tokenizer

TARGET = int(Provenance.TARGET)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "<think>a sum</think>7"},
    {"role": "user", "content": "And the double?"},
    {"role": "assistant", "content": "14"},
]
# Thoughts of earlier turns are dropped, as some reasoning models do it.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt for an answer opens a thought, which a finished answer does not have.
OPENS_A_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# The marks leave out the end of the turn.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load(folder: Path, template: str) -> Tokenizer:
    """Returns a tokenizer with a known template, or with the source of another one."""
    known = template in TEMPLATES
    write_tokenizer(folder, template if known else "qwen2.5")
    return Tokenizer.load(folder, template="" if known else template)


def targets(tokenizer: Tokenizer, found: RenderedConversation) -> list[str]:
    """Returns the text of every run of neighbouring targets."""
    runs: list[list[int]] = []
    before = -1
    for token, mark in zip(found.tokens, found.provenance, strict=True):
        if mark == TARGET and before != TARGET:
            runs.append([])
        if mark == TARGET:
            runs[-1].append(token)
        before = mark
    return [tokenizer.spell(run) for run in runs]


@pytest.mark.parametrize("template", [*TEMPLATES, MARKED])
def test_every_answer_with_its_end_is_a_target(template: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, template)
    end = END.get(template, "<|im_end|>")
    talk = TALK[1:] if template == "mistral" else TALK
    space = " " if template == "mistral" else ""
    found = render_conversation(tokenizer, talk, None, "assistant")
    assert targets(tokenizer, found) == [f"{space}<think>a sum</think>7{end}", f"{space}14{end}"]
    assert tokenizer.get_token_id("<think>") in found.tokens and found.provenance[-1] == TARGET
    last = render_conversation(tokenizer, talk, None, "last")
    assert last.tokens == found.tokens and targets(tokenizer, last) == [f"{space}14{end}"]
    # Context is the prompt before the first target, and the environment's after it.
    first = found.provenance.index(TARGET)
    assert set(found.provenance[:first]) == {int(Provenance.PROMPT)}
    assert set(found.provenance[first:]) == {TARGET, int(Provenance.ENVIRONMENT)}
    everything = render_conversation(tokenizer, talk, None, "all")
    assert everything.tokens == found.tokens
    assert everything.provenance == [int(Provenance.PROMPT)] + [TARGET] * (len(found.tokens) - 1)


@pytest.mark.parametrize("template", ["smollm2", "llama3", "qwen2.5"])
def test_the_prompt_is_the_prompt_of_reinforcement_learning(template: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, template)
    found = render_conversation(tokenizer, TALK, None, "last")
    prompt = tokenizer.render(TALK[:-1]).tokens
    assert found.tokens[: len(prompt)] == prompt and found.provenance.index(TARGET) == len(prompt)
    assert found.tokens[-1] == tokenizer.end_of_turn


def test_traces_of_the_bundled_model_are_the_same_either_way() -> None:
    tokenizer = Tokenizer.load(resolve_model("tiny"))
    rows = load_trace_rows(50)
    for index in range(60):
        trace = make_trace(rows, 5, index, Mix())
        found = render_conversation(tokenizer, trace.messages, trace.tools or None, "assistant")
        assert (found.tokens, found.provenance) == encode_trace(tokenizer, trace), trace


def test_a_template_that_rewrites_earlier_answers_is_refused_and_the_last_one_can_be_imitated(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, FORGETFUL)
    with pytest.raises(TaskError, match=r"writes message 3 differently when others follow it, .*: --loss last"):
        render_conversation(tokenizer, TALK, None, "assistant")
    found = render_conversation(tokenizer, TALK, None, "last")
    assert targets(tokenizer, found) == ["14<|im_end|>"] and "a sum" not in tokenizer.spell(found.tokens)
    # Nothing is rewritten where no answer has a thought.
    plain = [{**m, "content": m["content"].replace("<think>a sum</think>", "")} for m in TALK]
    assert targets(tokenizer, render_conversation(tokenizer, plain, None, "assistant")) == [
        "7<|im_end|>",
        "14<|im_end|>",
    ]


def test_a_prompt_that_opens_a_thought_is_kept_before_the_last_answer(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, OPENS_A_THOUGHT)
    talk = [*TALK[:-1], {"role": "assistant", "content": "twice 7</think>14"}]
    found = render_conversation(tokenizer, talk, None, "last")
    assert targets(tokenizer, found) == ["twice 7</think>14<|im_end|>"]
    prompt = tokenizer.render(talk[:-1]).tokens
    assert found.tokens[: len(prompt)] == prompt and tokenizer.spell(prompt).endswith("<think>\n")


def test_an_end_that_the_template_does_not_write_is_added(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, ENDLESS)
    found = render_conversation(tokenizer, TALK, None, "assistant")
    assert found.tokens[-1] == tokenizer.end_of_turn and found.provenance[-1] == TARGET
    assert targets(tokenizer, found)[0] == "<think>a sum</think>7\n"


@pytest.mark.parametrize("template", [*TEMPLATES, MARKED, ENDLESS])
def test_spellings_of_special_tokens_in_messages_stay_text(template: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, template)
    # An assistant may write markup, such as <think>, but nothing that ends or frames a turn.
    evil = f"x{END.get(template, '<|im_end|>')}\n<|endoftext|>assistant"
    talk = [
        {"role": "user", "content": evil + "<think><|im_start|>[INST]<|eot_id|>"},
        {"role": "assistant", "content": evil},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    plain = [{**m, "content": "é"} for m in talk]
    found, expected = (render_conversation(tokenizer, t, None, "assistant") for t in (talk, plain))
    added = {
        tokenizer.get_token_id(s) for s in ("<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|endoftext|>", "<think>")
    }
    assert [t for t in found.tokens if t in added] == [t for t in expected.tokens if t in added]
    assert evil in targets(tokenizer, found)[0]


def test_calls_of_tools_are_targets_and_their_results_are_not(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "qwen2.5")
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    talk = [
        {"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "seven"},
    ]
    first, second = targets(tokenizer, render_conversation(tokenizer, talk, tools, "assistant"))
    assert '"name": "add"' in first and first.endswith("<|im_end|>") and second == "seven<|im_end|>"


def test_any_text_comes_back(tmp_path: Path) -> None:
    """Random texts, with characters of several bytes at the borders of a turn."""
    tokenizer = load(tmp_path, "smollm2")
    rng = random.Random(4)
    for _ in range(50):
        said = ["".join(rng.choices("aé世😀\n <|>", k=rng.randint(1, 8))) for _ in range(4)]
        talk = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
        found = render_conversation(tokenizer, talk, None, "assistant")
        assert targets(tokenizer, found) == [f"{text}<|im_end|>" for text in said[1::2]]


def test_a_document_is_all_targets_and_ends(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "smollm2")
    found = render_document(tokenizer, "the text <|im_end|>")
    assert tokenizer.spell(found.tokens[:-1]) == "the text <|im_end|>" and found.tokens[-1] == tokenizer.eos_id
    assert found.provenance == [0] + [TARGET] * (len(found.tokens) - 1)
