"""Tests of our decoder, model files and chat rendering against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from cohort.models.catalog import pull
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.files import load_folder, save_folder
from cohort.text import Tokenizer
from tests.helpers.chat_templates import TEMPLATES, write_tokenizer

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 64}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases-yarn": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
}


class WideNorm(nn.Module):
    """RMS norm in the input's own precision: transformers computes it in fp32 even for float64."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one sequence."""
    T, K, g, D = q.shape
    heads = (q.reshape(T, K * g, D), k.repeat_interleave(g, 1), v.repeat_interleave(g, 1))
    mixed = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in heads), is_causal=True)
    return mixed[0].transpose(0, 1).reshape(T, K, g, D)


def make_peer(case: str, dtype: torch.dtype) -> Any:
    """Returns the model of transformers for a case, with random weights, norms and biases included."""
    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**BASE | changes, attn_implementation="sdpa")
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            centre = 1.0 if p.ndim == 1 and p.numel() in (16, 32) else 0.0
            p.copy_(centre + torch.randn(p.shape, generator=generator) * 0.2)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if "RMSNorm" in type(module).__name__:
                    setattr(parent, child, WideNorm(module))
    return model


def copy_to_decoder(model: Any, dtype: torch.dtype) -> Decoder:
    """Returns our decoder with the weights of a model of transformers."""
    decoder = Decoder(ModelConfig.from_hf(model.config.to_dict() | {"architectures": [type(model).__name__]})).to(dtype)
    state = model.state_dict()
    for name, view in hf_views(decoder):
        view.copy_(state[name].view(view.shape))
    # Frequencies of transformers may differ in the last bit (see models/rope.py). Compare them, then use ours in both.
    rope = model.model.rotary_emb
    torch.testing.assert_close(decoder.inv_freq, rope.inv_freq.float(), rtol=2.5e-7, atol=0)
    assert decoder.config.rope.scale == pytest.approx(rope.attention_scaling, rel=1e-12)
    rope.inv_freq = decoder.inv_freq.clone()
    return decoder


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str, dtype: torch.dtype, bound: float) -> None:
    model = make_peer(case, dtype)
    decoder = copy_to_decoder(model, dtype)
    tokens = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    theirs = model(tokens[None]).logits[0]
    mine = decoder.logits(decoder(tokens, torch.arange(50), attend_causally))
    assert theirs.abs().max() > 0.1
    assert (theirs - mine).abs().max() <= bound * max(1.0, float(theirs.detach().abs().max()))
    # A smooth function of all logits, whose gradient reaches every parameter.
    (F.log_softmax(theirs, -1) * weight).sum().backward()
    (F.log_softmax(mine, -1) * weight).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    checked = 0
    for name, gradient in hf_views(decoder, select=lambda p: p.grad):
        expected = gradients[name]
        assert expected.abs().max() > 0, name
        difference = (to_hf_shape(name, gradient) - expected).abs().max() / expected.abs().max()
        assert difference <= bound, (name, float(difference))
        checked += 1
    assert checked == len(gradients)


@pytest.mark.parametrize("case", CASES)
def test_export_is_loaded_by_transformers_with_identical_logits(case: str, tmp_path: Path) -> None:
    model = make_peer(case, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_folder(tmp_path / "theirs")
    save_folder(loaded.decoder, loaded.hf_config, None, tmp_path / "kept", max_shard_bytes=9000)
    save_folder(loaded.decoder, None, None, tmp_path / "fresh")
    assert (tmp_path / "kept" / "model.safetensors.index.json").is_file()
    tokens = torch.arange(40)[None] * 7 % 96
    expected = model.eval()(tokens).logits
    for folder in ("kept", "fresh"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        assert type(again) is type(model)
        assert torch.equal(again(tokens).logits, expected), folder


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "What is 12 + 30?\n\n  Think first: the answer, then é 世界 🙂."}],
    "system": [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": " hi "}],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c  "},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Adds & multiplies <numbers>",
            "parameters": {"type": "object", "properties": {"x": {"type": "number"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"x": 1.5, "é": ["ü"]}}}
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "1.5 * 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"result": 3.0}'},
]


def load_both_tokenizers(folder: Path, template: str, in_vocab: bool) -> tuple[Any, Tokenizer]:
    """Writes a tokenizer folder and returns it as loaded by transformers and by us."""
    write_tokenizer(folder, template, in_vocab)
    return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)


def render_theirs(theirs: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Returns the tokens of a conversation as rendered by transformers."""
    return theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("in_vocab", [True, False], ids=["vocab-first", "vocab-last"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_equals_transformers(template: str, in_vocab: bool, tmp_path: Path) -> None:
    theirs, mine = load_both_tokenizers(tmp_path, template, in_vocab)
    for name, messages in CONVERSATIONS.items():
        expected = render_theirs(theirs, messages, add_generation_prompt=True)
        rendered = mine.render(messages)
        assert rendered.tokens == expected, name
        assert mine.decode(expected, skip_special=False) == theirs.decode(expected), name
        assert mine.decode(expected) == theirs.decode(expected, skip_special_tokens=True), name
        prefixed = [
            *messages,
            {"role": "assistant", "content": "<think>So the answer:"},
        ]  # a trimming template would cut a final space
        assert mine.render(prefixed).tokens == render_theirs(theirs, prefixed, continue_final_message=True), name


@pytest.mark.parametrize("in_vocab", [True, False], ids=["vocab-first", "vocab-last"])
def test_tools_equal_transformers(in_vocab: bool, tmp_path: Path) -> None:
    theirs, mine = load_both_tokenizers(tmp_path, "qwen2.5", in_vocab)
    expected = render_theirs(theirs, WITH_TOOLS, tools=TOOLS, add_generation_prompt=True)
    assert mine.render(WITH_TOOLS, TOOLS).tokens == expected
    assert expected.count(mine.get_token_id("<tool_call>")) == 2  # the template's instructions, and the call


def test_the_exported_tokenizer_is_the_same(tmp_path: Path) -> None:
    """A folder written by save_folder has the tokenizer and template transformers reads."""
    theirs = make_peer("llama-tied", torch.float32)
    theirs.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", "llama3")
    loaded = load_folder(tmp_path / "model")
    save_folder(loaded.decoder, loaded.hf_config, loaded.folder, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = CONVERSATIONS["system"]
    expected = Tokenizer.load(tmp_path / "model").render(messages).tokens
    assert render_theirs(again, messages, add_generation_prompt=True) == expected


@pytest.mark.slow
def test_smollm2_as_transformers_reads_the_same_folder() -> None:
    """The pulled model: its folder gives transformers and us the same tokens and the same logits."""
    folder = pull("smollm2-135m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, words = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France? Answer 1 word. é 世界 🙂 123"}]
    tokens = tokenizer.render(messages).tokens
    assert tokens == render_theirs(words, messages, add_generation_prompt=True)
    decoder = load_folder(folder).decoder
    with torch.no_grad():
        expected = torch.log_softmax(theirs(torch.tensor([tokens])).logits[0], -1)
        hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), attend_causally)
        difference = (torch.log_softmax(decoder.logits(hidden), -1) - expected).abs()
    assert difference.mean() <= 1e-5
    assert difference.max() <= 2e-4
    assert tokenizer.decode(expected[-1].argmax()[None].tolist()).strip() in ("Paris", "The", "France")
