"""Small random models outside the native family, as objects of transformers and as folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from cohort.models.auto import AutoDecoder
from cohort.models.catalog import resolve_model
from cohort.models.files import SIDE_FILES, load_folder

# Every sequence of the tests is longer than the window, so a window that is counted wrongly shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 3,
        "max_position_embeddings": 256,
        "bos_token_id": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 2},
    # Counts positions from the mask, and projects its embedding.
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 16,
    },
    # Scales its embedding. Its layers with a sliding window have a separate kind of cache.
    "gemma3_text": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Its head is not tied to its embedding.
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
    },
}


def make_foreign_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Returns a model of transformers with random weights.

    The weights are large enough that a wrong context changes log-probabilities visibly.
    """
    values = {"vocab_size": 512, "eos_token_id": 2, "pad_token_id": 0, **FAMILIES.get(family, {}), **changes}
    config = transformers.CONFIG_MAPPING[family](**values)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            centre = 1.0 if "norm" in name.lower() or ".ln_" in name else 0.0
            matrix = p.ndim > 1
            p.copy_(
                centre * (not name.endswith("bias"))
                + torch.randn(p.shape, generator=generator) * (0.3 if matrix else 0.1)
            )
    return model


def write_foreign_folder(folder: Path, family: str = "gpt_neo", seed: int = 0, **changes: Any) -> Path:
    """Writes the model of `make_foreign_model` with the tokenizer and template of `tiny`, and returns its folder."""
    make_foreign_model(family, seed, **changes).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in SIDE_FILES:
        if (resolve_model("tiny") / name).is_file():
            shutil.copyfile(resolve_model("tiny") / name, folder / name)
    return folder


def load_foreign(folder: Path, dtype: torch.dtype = torch.float32) -> AutoDecoder:
    """Returns the folder's decoder. GPT-Neo computes attention in fp32; in float64 this is replaced with float64."""
    decoder = load_folder(folder, dtype).decoder
    assert isinstance(decoder, AutoDecoder)
    for module in decoder.modules() if dtype == torch.float64 else ():
        if type(module).__name__ == "GPTNeoSelfAttention":
            module._attn = MethodType(_attend_exactly, module)
    return decoder


def _attend_exactly(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
    """Replaces GPT-Neo's attention, in the type of its inputs. Returns mixed values and attention weights."""
    scores = query @ key.transpose(-1, -2)
    lq, lk = query.shape[-2], key.shape[-2]
    scores = scores.masked_fill(~self.bias[:, :, lk - lq : lk, :lk], torch.finfo(scores.dtype).min)
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return weights @ value, weights


def compute_plain_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """Returns the log-probabilities of the completion's tokens by definition: log_softmax of one sequence's logits."""
    tokens = torch.tensor([*prompt, *completion])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    positions = torch.arange(len(prompt), len(tokens))
    return F.log_softmax(logits / temperature, dim=-1)[positions - 1, tokens[positions]]
