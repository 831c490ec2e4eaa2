"""Tests of the files of the bundled model `tiny`: tokenizer, chat template, weights, and the script that makes them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.algos.imitation import Imitation
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.learner.local import LocalLearner
from cohort.loops.sft import make_sft_batch
from cohort.models.catalog import resolve_model
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder, initialise
from cohort.models.files import load_folder
from cohort.tasks.traces import encode, mixture
from cohort.tasks.traces.styles import CALCULATOR
from cohort.text import Tokenizer
from cohort.types import Provenance
from scripts.tiny import tokenizer as made
from scripts.tiny import train as script
from scripts.tiny.train import CONFIG

FOLDER = Path(made.FOLDER)
TOKENIZER = Tokenizer.load(FOLDER)
TALK = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 12*3?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12*3"}}}],
    },
    {"role": "tool", "name": "calculator", "content": "36"},
]


@given(st.text())
def test_any_text_survives(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate is not text
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


def test_every_digit_is_a_token() -> None:
    ids = TOKENIZER.encode("a10 2345 - 6789")
    spelled = [TOKENIZER.decode([i]) for i in ids]
    assert [s for s in spelled if any(c.isdigit() for c in s)] == list("1023456789")


def test_a_sum_is_short() -> None:
    prompt = TOKENIZER.render([{"role": "user", "content": "What is 12+7*3?"}]).tokens
    assert len(prompt) == 18
    thought = "<think>7*3=21, 12+21=33</think><answer>33</answer>"
    assert len(TOKENIZER.encode(thought, markup=True)) == 21


def test_decoding_keeps_tags_and_drops_the_end_of_turn() -> None:
    ids = [*TOKENIZER.encode("<think>1</think><answer>2</answer>", markup=True), TOKENIZER.end_of_turn]
    assert len(ids) == 7
    assert TOKENIZER.decode(ids) == "<think>1</think><answer>2</answer>"


def test_the_template_writes_all_roles() -> None:
    text = TOKENIZER.decode(TOKENIZER.render(TALK, [CALCULATOR]).tokens, skip_special=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.\nTools:\n"
        + json.dumps(CALCULATOR["function"])
        + '\nCall: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n'
        "<|im_start|>user\nWhat is 12*3?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "calculator", "arguments": {"expression": "12*3"}}'
        "</tool_call><|im_end|>\n<|im_start|>tool\n36<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("tools", [None, [CALCULATOR]])
def test_transformers_reads_the_same_tokens(tools: list[dict] | None) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(FOLDER))
    rendered = theirs.apply_chat_template(TALK, tools=tools, add_generation_prompt=True, tokenize=False)
    assert theirs.encode(rendered, add_special_tokens=False) == TOKENIZER.render(TALK, tools).tokens
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (2, 0, 512)


@pytest.mark.slow
def test_the_committed_tokenizer_is_what_the_script_makes(tmp_path: Path) -> None:
    from cohort.text.template import ChatTemplate

    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"), {})
    made.save_tokenizer(made.train_tokenizer(made.make_corpus(template)), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_the_shape_meets_its_requirements() -> None:
    assert CONFIG["vocab_size"] % 64 == 0 and CONFIG["head_dim"] in (32, 64)
    assert CONFIG["num_key_value_heads"] >= 2 and CONFIG["num_key_value_heads"] % 2 == 0
    assert CONFIG["num_attention_heads"] > CONFIG["num_key_value_heads"]
    assert json.loads((FOLDER / "config.json").read_text()).items() >= CONFIG.items()


def test_the_checkpoint_is_small_and_loads_in_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = resolve_model("tiny")
    assert sum(f.stat().st_size for f in folder.glob("*")) <= 8_000_000
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    tokens = torch.tensor(TOKENIZER.render(TALK, [CALCULATOR]).tokens)
    ours = load_folder(folder).decoder
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        hidden = ours(tokens, torch.arange(len(tokens)), _make_causal_attention(len(tokens)))
        assert torch.allclose(ours.logits(hidden), expected, atol=1e-4)


def _make_causal_attention(length: int):  # type: ignore[no-untyped-def]
    """Returns causal attention over one sequence of this length."""
    import torch
    import torch.nn.functional as F

    mask = torch.ones(length, length, dtype=torch.bool).tril()

    def attend(layer, q, k, v):  # type: ignore[no-untyped-def]
        heads = q.flatten(1, 2).transpose(0, 1)  # [H, T, D]
        out = F.scaled_dot_product_attention(
            heads[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).view(q.shape)

    return attend


def test_the_script_makes_the_model_that_its_updates_written_out_make(tmp_path: Path) -> None:
    """The script's updates are repeated one by one: first those on skills, then on habits. All bits are equal."""
    args = argparse.Namespace(
        out=tmp_path / "made", seed=3, updates=5, batch=6, lr=1.5e-3, rows=40, probe=0, workers=1, device="cpu"
    )
    stream = script.make_batches(args)
    next(stream)
    script.train_model(args, stream)
    decoder = Decoder(ModelConfig.from_hf(CONFIG))
    initialise(decoder, 3)
    optim = OptimConfig(lr=1.5e-3, schedule="cosine", warmup=200, lr_floor=0.02, beta2=0.98, weight_decay=0.05)
    learner = LocalLearner(decoder, LearnerConfig(token_budget=script.TOKEN_BUDGET), optim, num_updates=5)
    rows, tokenizer = mixture.load_trace_rows(40), Tokenizer.load(script.SOURCE)
    for update, mix in enumerate([script.SKILL] * 4 + [script.HABITS]):
        traces = [mixture.make_trace(rows, 3, 6 * update + i, mix) for i in range(6)]
        examples = [encode.encode_trace(tokenizer, trace) for trace in traces]
        assert all(provenance[-1] == Provenance.TARGET for _, provenance in examples)
        learner.update(make_sft_batch(examples), Imitation())
    found = load_folder(tmp_path / "made", torch.bfloat16).decoder.state_dict()
    for name, tensor in decoder.state_dict().items():
        assert found[name].equal(tensor.to(torch.bfloat16)), name
