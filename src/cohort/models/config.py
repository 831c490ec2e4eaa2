"""The shape of a native decoder, read from a Hugging Face config.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import ModelError
from cohort.models.rope import Rope, make_rope
from cohort.system.json_text import show_value


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of one decoder of the Llama / Mistral / Qwen2 / Qwen3 family."""

    architecture: str  # name of the transformers class, such as "LlamaForCausalLM"
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
    tied: bool  # the head uses the embedding's weights
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head
    sliding_window: int | None = None  # tokens that a token sees, itself included; None = all up to itself

    @property
    def queries_per_kv(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_weights(self) -> int:
        """The number of weights of the decoder: all entries of its embedding, head, layers and norms."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        matrices = (rows + self.num_heads * self.head_dim + 3 * self.ff) * self.hidden
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        biases = rows * self.qkv_bias + self.hidden * self.out_bias + (2 * self.ff + self.hidden) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden * (1 if self.tied else 2)
        return embeddings + self.hidden + self.num_layers * (matrices + norms + biases)

    @property
    def context(self) -> int:
        """The largest number of tokens that a sequence may have.

        It is at most the sliding window, because attention here has no windows: in longer sequences a token would see
        more than it did when the model was trained.
        """
        return min(self.max_positions, self.sliding_window or self.max_positions)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Returns the config that is described by `hf`, the contents of a config.json from transformers 4 or 5.

        Raises ModelError for what the native decoder does not support, and for sizes that are missing or wrong.
        """
        architecture = _find_architecture(hf)
        family = FAMILIES[architecture]
        if hf.get("quantization_config"):
            raise ModelError(
                "config.json has a quantization_config: quantised weights are not supported, "
                "use the original, unquantised model"
            )
        # silu and swish are two names of the same function.
        if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelError(
                f"hidden_act {show_value(act)} in config.json is not supported, only silu is: use another model"
            )
        hidden = _read_count(hf, "hidden_size")
        num_heads = _read_count(hf, "num_attention_heads")
        # Without this key transformers assumes one KV head per query head for Llama, but fixed numbers for the others.
        if "num_key_value_heads" not in hf and family.model_type != "llama":
            raise ModelError(
                f"config.json has no num_key_value_heads, which {architecture} needs: add it, or use another model"
            )
        num_kv_heads = _read_count(hf, "num_key_value_heads", num_heads)
        head_dim = _read_count(hf, "head_dim", family.head_dim or hidden // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly: "
                "correct num_attention_heads or num_key_value_heads in config.json, or use another model"
            )
        if head_dim % 2:
            raise ModelError(
                f"head_dim {head_dim} in config.json is odd, but rotary embedding needs an even one: use another model"
            )
        positions = _read_count(hf, "max_position_embeddings", family.max_positions)
        rope = make_rope(_read_rope_parameters(hf), head_dim, positions)
        attention_bias = family.has_attention_bias_key and _read_switch(hf, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=_read_count(hf, "vocab_size"),
            hidden=hidden,
            num_layers=_read_count(hf, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ff=_read_count(hf, "intermediate_size"),
            norm_eps=_read_epsilon(hf),
            rope=rope,
            max_positions=max(positions, _compute_yarn_context(rope)),
            tied=_read_switch(hf, "tie_word_embeddings"),
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            mlp_bias=family.has_mlp_bias_key and _read_switch(hf, "mlp_bias"),
            qk_norm=family.qk_norm,
            sliding_window=_find_sliding_window(hf, family),
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes an architecture, and the defaults of transformers for keys that a config.json lacks."""

    model_type: str
    max_positions: int  # default
    head_dim: int | None = None  # default; None = hidden size / heads
    qkv_bias: bool = False  # q, k and v always have a bias
    has_attention_bias_key: bool = False  # "attention_bias" is read: it covers q, k, v and output
    has_mlp_bias_key: bool = False  # "mlp_bias" is read
    qk_norm: bool = False
    default_window: int | None = None  # sliding window where the key is missing; None = the family has no windows
    has_window_switch: bool = False  # the window counts only with "use_sliding_window"


# The architectures that the native decoder supports.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama", max_positions=2048, has_attention_bias_key=True, has_mlp_bias_key=True
    ),
    "MistralForCausalLM": Family(model_type="mistral", max_positions=131072, default_window=4096),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", max_positions=32768, qkv_bias=True, default_window=4096, has_window_switch=True
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        max_positions=32768,
        head_dim=128,
        has_attention_bias_key=True,
        qk_norm=True,
        default_window=4096,
        has_window_switch=True,
    ),
}


# The largest values that are read. They are far beyond every model, and keep a wrong number from taking all memory.
_MOST = {"head_dim": 1 << 16, "num_attention_heads": 1 << 20, "num_hidden_layers": 1 << 20}
_MOST_OF_OTHERS = 1 << 40


def read_context(hf: Mapping[str, Any]) -> int:
    """Returns max_position_embeddings in `hf`, the contents of a config.json of any architecture.

    It is the context in tokens, without regard to sliding windows and to stretching by YaRN. Raises ModelError if it is
    missing or not a positive integer.
    """
    return _read_count(hf, "max_position_embeddings")


def check_context(config: ModelConfig, needed: int) -> None:
    """Raises ModelError if sequences of `needed` tokens are longer than the model's sliding window or context."""
    if config.sliding_window is not None and needed > config.sliding_window:
        raise ModelError(
            f"the model's sliding window is {config.sliding_window} tokens, but prompt and completion take {needed}: "
            "lower --prompt-tokens or --completion-tokens, or set --model to one without a sliding window"
        )
    if needed > config.max_positions:
        raise ModelError(
            f"the model's context is {config.max_positions} tokens, but prompt and completion take {needed}: "
            "lower --prompt-tokens or --completion-tokens, or set --model to one with a longer context"
        )


def to_hf(config: ModelConfig, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the contents of a config.json for the model.

    With `original`, the contents of the config.json that the model was read from, returns a copy of it unchanged and
    does not use `config`. Otherwise the type of the weights is left out, and a rope that `make_rope` did not make
    raises ModelError.
    """
    # The original keeps keys that are unknown here, so that an exported model loads as the original does.
    if original is not None:
        return dict(original)
    family = FAMILIES[config.architecture]
    if not config.rope.parameters:
        raise ModelError(
            "the Rope in this ModelConfig has no parameters to write to config.json: create it with "
            "cohort.models.rope.make_rope"
        )
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
    if family.has_attention_bias_key:
        hf["attention_bias"] = config.out_bias
    if family.has_mlp_bias_key:
        hf["mlp_bias"] = config.mlp_bias
    if family.default_window is not None:
        hf["sliding_window"] = config.sliding_window
    if family.has_window_switch and config.sliding_window is not None:
        # 0 full-attention layers at the start: the window holds in all layers.
        hf |= {"use_sliding_window": True, "max_window_layers": 0}
    return hf


def _find_architecture(hf: Mapping[str, Any]) -> str:
    """Returns the first architecture that config.json names, or else the one of its model_type: a key of FAMILIES.

    Raises ModelError if it names none, or one that the native decoder does not support.
    """
    named = hf.get("architectures") or []
    if not isinstance(named, list):
        raise ModelError(
            f"config.json has architectures = {show_value(named)}, but it must be a list of names: correct the file, "
            "or use another model"
        )
    if not named:
        named = [name for name, family in FAMILIES.items() if family.model_type == hf.get("model_type")]
    if not named:
        raise ModelError(
            "config.json names no architecture: give the folder of a language model in Hugging Face format"
        )
    name = named[0]
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f'the native decoder does not support the architecture "{name}" in config.json: use a model of one of '
            f"these: {', '.join(FAMILIES)}"
        )
    return name


def _read_rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary embedding in config.json as one flat dict, such as {"rope_theta": 10000.0}.

    transformers 5 writes them under rope_parameters, transformers 4 as rope_theta and rope_scaling. The dict is empty
    if there are none. Raises ModelError if they differ by the type of layer.
    """
    nested = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(nested, Mapping):
        raise ModelError(
            f"config.json has {show_value(nested)} as rope_scaling or rope_parameters, but it must be a JSON object or "
            "null: correct the file, or use another model"
        )
    if any(isinstance(v, Mapping) for v in nested.values()):
        raise ModelError(
            "config.json has rope parameters per layer type, but all layers must have the same: use another model"
        )
    # Some keys may stand beside the nested object instead of in it.
    p = dict(nested)
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if p.get(key) is None and hf.get(key) is not None:
            p[key] = hf[key]
    return p


def _compute_yarn_context(rope: Rope) -> int:
    """Returns the context in tokens that YaRN, a way to stretch a rope, reaches.

    Returns 0 for other ropes, and if the parameters do not name the original context. Configs with YaRN often still
    state the context before stretching as max_position_embeddings.
    """
    p = rope.parameters
    if p["rope_type"] != "yarn" or "original_max_position_embeddings" not in p:
        return 0
    return int(p["original_max_position_embeddings"] * p["factor"])


def _find_sliding_window(hf: Mapping[str, Any], family: Family) -> int | None:
    """Returns the sliding window in tokens if any layer uses one by the config.json `hf`, else None.

    Where the key is missing, the family's default holds. Llama has no windows, and Qwen models use one only with
    "use_sliding_window". Raises ModelError for what is no window and no number of layers.
    """
    window = hf.get("sliding_window", family.default_window)
    if (
        window is None
        or family.default_window is None
        or (family.has_window_switch and not _read_switch(hf, "use_sliding_window"))
    ):
        return None
    if family.has_window_switch:
        # Newer configs list the type of each layer. Older ones say how many layers at the start have full attention.
        types = hf.get("layer_types")
        if isinstance(types, list):
            windowed = "sliding_attention" in types
        else:
            # Here 0 is a count too: all layers have the window.
            is_zero = type(hf.get("max_window_layers")) is int and hf["max_window_layers"] == 0
            full = 0 if is_zero else _read_count(hf, "max_window_layers", 28)
            windowed = full < _read_count(hf, "num_hidden_layers")
        if not windowed:
            return None
    return _read_count(hf, "sliding_window", family.default_window)


def _read_count(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns the positive integer under `key` in config.json, or the default where the key is missing or null.

    Raises ModelError for any other value, for one that no model has, and where there is neither a value nor a default.
    """
    value = hf.get(key)
    if value is None:
        value = default
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json has {key} = {show_value(value)} (None = missing), but it must be a positive integer: "
            "correct the file, or use another model"
        )
    most = _MOST.get(key, _MOST_OF_OTHERS)
    if value > most:
        raise ModelError(
            f"config.json has {key} = {show_value(value)}, more than any model has ({most}): correct the file, or use "
            "another model"
        )
    return value


def _read_epsilon(hf: Mapping[str, Any]) -> float:
    """Returns rms_norm_eps, 1e-6 where it is missing. Raises ModelError unless it is a number from 0 to 1."""
    value = hf.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ModelError(
            f"config.json has rms_norm_eps = {show_value(value)}, but it must be a small positive number such as 1e-6: "
            "correct the file, or use another model"
        )
    return float(value)


def _read_switch(hf: Mapping[str, Any], key: str) -> bool:
    """Returns the boolean under `key`, False where it is missing or null. Raises ModelError for anything else."""
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(
            f"config.json has {key} = {show_value(value)}, but it must be true or false: correct the file, or use "
            "another model"
        )
    return bool(value)


__all__ = ["FAMILIES", "ModelConfig", "Rope", "check_context", "make_rope", "to_hf"]
