"""The shape of a decoder, read from a Hugging Face config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import ModelError, nearest
from cohort.models.rope import Rope, make_rope


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder of the Llama / Mistral / Qwen2 / Qwen3 family."""

    architecture: str  # the transformers class, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ff: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool  # head = embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a token sees this many, itself included; None = all before it

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def context(self) -> int:
        """Tokens a sequence may have: beyond a sliding window, attention is not what the model was trained with."""
        return min(self.max_positions, self.sliding_window or self.max_positions)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json, as transformers 4 or transformers 5 writes it."""
        architecture = _architecture(hf)
        family = FAMILIES[architecture]
        if hf.get("quantization_config"):
            raise ModelError(
                "config.json has a quantization_config: quantised weights are not supported, use the original"
            )
        if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelError(f'hidden_act "{act}" in config.json is not supported: only silu is')
        hidden, num_heads = _count(hf, "hidden_size"), _count(hf, "num_attention_heads")
        if "num_key_value_heads" not in hf and family.model_type != "llama":
            raise ModelError("config.json has no num_key_value_heads")
        num_kv_heads = _count(hf, "num_key_value_heads", num_heads)
        head_dim = _count(hf, "head_dim", family.head_dim or hidden // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
        positions = _count(hf, "max_position_embeddings", family.max_positions)
        rope = make_rope(_rope_parameters(hf), head_dim, positions)
        attention_bias = family.attention_bias_key and bool(hf.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_count(hf, "vocab_size"),
            hidden=hidden,
            num_layers=_count(hf, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ff=_count(hf, "intermediate_size"),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_positions=max(positions, _stretched(rope)),
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            mlp_bias=family.mlp_bias_key and bool(hf.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(hf, family),
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes an architecture, and what transformers assumes where its config.json is silent."""

    model_type: str
    max_positions: int
    head_dim: int | None = None
    qkv_bias: bool = False  # always there
    attention_bias_key: bool = False  # "attention_bias" is read: q, k, v and output
    mlp_bias_key: bool = False
    qk_norm: bool = False
    window: int | None = None  # sliding window when the key is missing
    window_switch: bool = False  # the window counts only with "use_sliding_window"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_type="llama", max_positions=2048, attention_bias_key=True, mlp_bias_key=True),
    "MistralForCausalLM": Family(model_type="mistral", max_positions=131072, window=4096),
    "Qwen2ForCausalLM": Family(model_type="qwen2", max_positions=32768, qkv_bias=True, window=4096, window_switch=True),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        max_positions=32768,
        head_dim=128,
        attention_bias_key=True,
        qk_norm=True,
        window=4096,
        window_switch=True,
    ),
}


def context_of(hf: Mapping[str, Any]) -> int:
    """Tokens a sequence may have, of any model, by its config.json alone."""
    return _count(hf, "max_position_embeddings")


def check_context(config: ModelConfig, needed: int) -> None:
    """Refuse a run of `needed` tokens a sequence that the model's attention or positions do not cover."""
    if config.sliding_window is not None and needed > config.sliding_window:
        raise ModelError(
            f"the model's sliding window is {config.sliding_window} tokens and the run needs {needed}: "
            "shorten prompts or completions, or use a model without a sliding window"
        )
    if needed > config.max_positions:
        raise ModelError(
            f"the model's context is {config.max_positions} tokens and the run needs {needed}: "
            "shorten prompts or completions, or use a model with a longer context"
        )


def to_hf(config: ModelConfig, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json for the model. The original one, where there is one, is kept as it is."""
    if original is not None:
        return dict(original)
    family = FAMILIES[config.architecture]
    if not config.rope.parameters:
        raise ModelError("this model's rope has no parameters to write: make it with make_rope")
    scaling = dict(config.rope.parameters)
    theta = scaling.pop("rope_theta")
    hf: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ff,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "tie_word_embeddings": config.tied,
    }
    if family.attention_bias_key:
        hf["attention_bias"] = config.out_bias
    if family.mlp_bias_key:
        hf["mlp_bias"] = config.mlp_bias
    if family.window is not None:
        hf["sliding_window"] = config.sliding_window
    if family.window_switch and config.sliding_window is not None:
        hf |= {"use_sliding_window": True, "max_window_layers": 0}
    return hf


def _architecture(hf: Mapping[str, Any]) -> str:
    named = hf.get("architectures") or []
    if not named:
        named = [name for name, family in FAMILIES.items() if family.model_type == hf.get("model_type")]
    if not named:
        raise ModelError("config.json names no architecture: is this a language model in Hugging Face format?")
    name = str(named[0])
    if name not in FAMILIES:
        raise ModelError(f'architecture "{name}" is not supported.{nearest(name, FAMILIES)}')
    return name


def _rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict: rope_parameters (transformers 5), or rope_theta and rope_scaling (transformers 4)."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ModelError("config.json gives each layer type its own rope: only one for all layers is supported")
    p = dict(given)
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if p.get(key) is None and hf.get(key) is not None:
            p[key] = hf[key]
    return p


def _stretched(rope: Rope) -> int:
    """YaRN configs often still state the context before stretching."""
    p = rope.parameters
    if p["rope_type"] != "yarn" or "original_max_position_embeddings" not in p:
        return 0
    return int(p["original_max_position_embeddings"] * p["factor"])


def _sliding_window(hf: Mapping[str, Any], family: Family) -> int | None:
    """The window in force, if it is in force in any layer."""
    window = hf.get("sliding_window", family.window)
    if window is None or family.window is None or (family.window_switch and not hf.get("use_sliding_window", False)):
        return None
    if family.window_switch:
        if hf.get("layer_types") is not None:
            windowed = "sliding_attention" in hf["layer_types"]
        else:
            windowed = int(hf.get("max_window_layers", 28)) < int(hf["num_hidden_layers"])
        if not windowed:
            return None
    return int(window)


def _count(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} = {value!r} in config.json: a positive integer is needed")
    return value


__all__ = ["FAMILIES", "ModelConfig", "Rope", "check_context", "make_rope", "to_hf"]
