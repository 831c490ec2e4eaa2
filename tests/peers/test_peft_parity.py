"""Tests of our adapters against the PEFT library (files, logits, gradients) and of NF4 against bitsandbytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from cohort.config.schema import TARGETS, LoraConfig
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder, hf_views, redirect_gradients
from cohort.models.lora import Adapters
from cohort.models.nf4 import CODE, QuantisedMatrix, make_dynamic_code, quantise
from cohort.models.peft import load_adapters, save_adapters

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
LORA = LoraConfig(rank=4, alpha=6.0)


def make_base_model(case: str) -> Any:
    """Returns the model of transformers for a case, with random weights."""
    name, changes = CASES[case]
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**BASE | changes))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    return model.eval()


def copy_to_decoder(model: Any) -> Decoder:
    """Returns our decoder with the weights of a model of transformers."""
    decoder = Decoder(ModelConfig.from_hf(model.config.to_dict() | {"architectures": [type(model).__name__]}))
    state = model.state_dict()
    for name, view in hf_views(decoder):
        view.copy_(state[name].view(view.shape))
    model.model.rotary_emb.inv_freq = decoder.inv_freq.clone()  # may differ in the last bit
    return decoder


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one sequence."""
    T, K, g, D = q.shape
    heads = (q.reshape(T, K * g, D), k.repeat_interleave(g, 1), v.repeat_interleave(g, 1))
    mixed = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in heads), is_causal=True)
    return mixed[0].transpose(0, 1).reshape(T, K, g, D)


def compute_logits(decoder: Decoder) -> Tensor:
    """Returns the logits of TOKENS."""
    embedded = decoder.embed.detach().index_select(0, TOKENS).requires_grad_()
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), attend_causally, embedded))


def randomise_factors(adapters: Adapters) -> Adapters:
    """Fills A and B with random numbers, so that a wrong place or scale shows, and merges. Returns the adapters."""
    generator = torch.Generator().manual_seed(3)
    for tensor in adapters.tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    adapters.merge()
    return adapters


def assert_close(mine: Tensor, theirs: Tensor, bound: float = 1e-5) -> None:
    """Asserts that the tensors differ by at most `bound`, relative to their largest entry if that is above 1."""
    assert theirs.abs().max() > 0
    assert (mine - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "v_proj"), ("up_proj",)], ids=["all", "two", "one"])
@pytest.mark.parametrize("case", CASES)
def test_adapters_we_save_are_pefts_with_our_logits_and_gradients(case: str, targets: Any, tmp_path: Path) -> None:
    model = make_base_model(case)
    decoder = copy_to_decoder(model)
    plain = model(TOKENS[None]).logits[0].detach()
    config = LoraConfig(rank=4, alpha=6.0, targets=targets)
    adapters = randomise_factors(Adapters(decoder, config))
    save_adapters(adapters.tensors(), config, str(tmp_path), tmp_path / "adapters")
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapters", is_trainable=True)
    expected = theirs(TOKENS[None]).logits[0]
    with redirect_gradients(decoder, adapters.collectors()):
        mine = compute_logits(decoder)
        assert_close(mine.detach(), expected.detach())
        assert (expected - plain).abs().max() > 0.1  # the adapters do something
        F.cross_entropy(mine[:-1], TOKENS[1:]).backward()
    F.cross_entropy(expected[:-1], TOKENS[1:]).backward()
    wanted = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    got = {}
    for name, adapter in adapters.by_name.items():
        got |= {f"base_model.model.{name}.lora_{x}.weight": getattr(adapter, x).grad for x in "AB"}
    assert got.keys() == wanted.keys() and len(got) == 4 * len(targets)
    for name, gradient in wanted.items():
        assert (got[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("case", CASES)
def test_adapters_peft_saves_are_ours_with_the_same_logits(case: str, tmp_path: Path) -> None:
    model = make_base_model(case)
    decoder = copy_to_decoder(model)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=list(TARGETS), task_type="CAUSAL_LM", lora_dropout=0.1)
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape) * 0.2)
    theirs.save_pretrained(tmp_path)
    found = load_adapters(tmp_path)
    assert (found.config.rank, found.config.alpha, found.config.targets) == (5, 7.0, TARGETS)
    adapters = Adapters(decoder, found.config, start=found.tensors)
    assert_close(compute_logits(decoder).detach(), theirs.eval()(TOKENS[None]).logits[0].detach())
    with adapters.hold_base(), theirs.disable_adapter():
        assert_close(compute_logits(decoder).detach(), theirs(TOKENS[None]).logits[0].detach())


def test_the_files_are_those_that_peft_writes(tmp_path: Path) -> None:
    """PEFT writes the same tensors under the same names, and every setting that we write has the same value there."""
    model = make_base_model("llama-untied")
    adapters = randomise_factors(Adapters(copy_to_decoder(model), LORA))
    save_adapters(adapters.tensors(), LORA, str(tmp_path), tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    mine, again = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("ours", "theirs"))
    assert mine.keys() == again.keys() and all(torch.equal(mine[n], again[n]) for n in mine)
    written, rewritten = (json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("ours", "theirs"))
    for settings in (written, rewritten):
        settings["target_modules"] = sorted(settings["target_modules"])
    assert written.items() <= rewritten.items()


@pytest.mark.parametrize("variant", [{"use_rslora": True}, {"use_dora": True}, {"bias": "all"}])
def test_pefts_other_variants_are_refused_by_name(variant: dict[str, Any], tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **variant)
    peft.get_peft_model(make_base_model("llama-biases"), config).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=next(iter(variant))):
        load_adapters(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (300, 320)])
def test_nf4_has_the_bits_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    spread = torch.rand(shape[0], 1, generator=generator)
    matrix = (torch.randn(shape, generator=generator) * spread * 0.1).to(dtype)
    codes, state = bnb.quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")
    mine = quantise(matrix)
    assert torch.equal(mine.codes.flatten(), codes.flatten())
    assert torch.equal(mine.peaks, state.state2.absmax) and torch.equal(mine.mean, state.offset)
    # The 8-bit search of bitsandbytes sometimes takes the second nearest value.
    code, exact = make_dynamic_code(torch.device("cpu")), matrix.float().view(-1, 64).abs().amax(-1) - mine.mean
    exact = exact / mine.peaks.repeat_interleave(256)[: len(exact)]
    ours, theirs = (code[scales.int()] for scales in (mine.scales, state.absmax))
    assert (mine.scales.int() - state.absmax.int()).abs().max() <= 1
    assert ((ours - exact).abs() <= (theirs - exact).abs() + 1e-7).all()
    assert (mine.scales == state.absmax).float().mean() >= 0.98
    # The same bits give the same numbers.
    same = QuantisedMatrix(
        codes=mine.codes,
        scales=state.absmax,
        peaks=mine.peaks,
        mean=mine.mean,
        num_columns=shape[1],
        dtype=dtype,
    )
    torch.testing.assert_close(same.read_rows(0, shape[0]), bnb.dequantize_4bit(codes, state), rtol=1e-6, atol=0)


def test_both_codes_are_those_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(CODE), bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(make_dynamic_code(torch.device("cpu")), bnb.create_dynamic_map())
