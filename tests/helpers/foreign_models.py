"""Small random models outside the native family, as folders, and what transformers itself makes of them."""

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
from cohort.models.catalog import resolve
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
    "opt": {  # counts positions from the mask, and projects its embedding
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 16,
    },
    "gemma3_text": {  # scales its embedding, and its window has a cache of its own
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neox": {  # its head is not its embedding
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
    },
}


def model_of(family: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' model with random weights, large enough that a wrong context changes log-probabilities visibly."""
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


def folder_of(folder: Path, family: str = "gpt_neo", seed: int = 0, **changes: Any) -> Path:
    """That model as a folder, with the tokenizer and template of `tiny`."""
    model_of(family, seed, **changes).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in SIDE_FILES:
        if (resolve("tiny") / name).is_file():
            shutil.copyfile(resolve("tiny") / name, folder / name)
    return folder


def foreign(folder: Path, dtype: torch.dtype = torch.float32) -> AutoDecoder:
    """The folder's decoder; in float64 with attention that is computed in float64 too, as GPT-Neo's is not."""
    decoder = load_folder(folder, dtype).decoder
    assert isinstance(decoder, AutoDecoder)
    for module in decoder.modules() if dtype == torch.float64 else ():
        if type(module).__name__ == "GPTNeoSelfAttention":
            module._attn = MethodType(_exact_attention, module)
    return decoder


def _exact_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
    scores, lq, lk = query @ key.transpose(-1, -2), query.shape[-2], key.shape[-2]
    scores = scores.masked_fill(~self.bias[:, :, lk - lq : lk, :lk], torch.finfo(scores.dtype).min)
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return weights @ value, weights


def plain_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """One sequence, all of transformers' logits, log_softmax: the definition."""
    tokens = torch.tensor([*prompt, *completion])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    at = torch.arange(len(prompt), len(tokens))
    return F.log_softmax(logits / temperature, dim=-1)[at - 1, tokens[at]]
