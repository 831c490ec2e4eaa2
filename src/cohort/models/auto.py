"""Any causal language model that transformers knows, as a decoder: slower than the native one, as exact.

The only module that imports `transformers`, and only when such a model is loaded. Nothing of the model's own is run
or unpickled: its class is one of transformers', its tensors were read from safetensors by `cohort.models.files`.

A foreign model attends by itself, so a packed stream is unfolded into ordinary sequences, a shared prompt once a
sibling, and its hidden states are put back where the stream has them: packed, padded and alone are one computation.

It stays in evaluation mode, in training too. Dropout would make the policy that is trained another one than the
policy that acted: its ratios would be noise around 1, and no two evaluations of a token would agree.

Letters: T tokens, d hidden, B sequences, n tokens of each.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cohort.data.layout import Layout, Span
from cohort.errors import ModelError
from cohort.models.decoder import Decoder
from cohort.models.functions import wide_product

log = logging.getLogger(__name__)

UNLIMITED = 1 << 20  # tokens, where a config names no limit: positions without a table
NOT_OURS = {  # keys of a config.json that choose foreign code, or what a forward returns
    *("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "fusion_config"),
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript"),
    "quantization_config",  # an empty one: others are refused
}
FAR = {torch.float64: 1e-4, torch.float32: 1e-4}  # mean difference of equal logits, in their standard deviations
FAR_ROUNDED = 0.1


@dataclass(frozen=True, kw_only=True)
class ForeignConfig:
    """What the rest of the package asks of a foreign model's config."""

    architecture: str  # the transformers class
    vocab_size: int
    max_positions: int

    @property
    def context(self) -> int:
        """Tokens a sequence may have. Windows, where the model has them, are its own affair."""
        return self.max_positions


class AutoDecoder(nn.Module):
    """tokens [T], layout -> final hidden states [T, d], by a model of transformers."""

    is_native = False

    def __init__(self, model: Any, architecture: str) -> None:
        super().__init__()
        self.model = model
        self.recompute = False  # never: transformers recomputes in training mode only
        embedding = model.get_input_embeddings()
        embedding.padding_idx = None  # or the gradient of a token that is also the pad token would be dropped
        self.config = ForeignConfig(
            architecture=architecture, vocab_size=embedding.weight.shape[0], max_positions=_positions(model.config)
        )
        self._places = "position_ids" in inspect.signature(model.base_model.forward).parameters
        self.train()

    @property
    def embed(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def train(self, mode: bool = True) -> AutoDecoder:
        """Evaluation mode, whatever is asked for."""
        return super().train(False)

    def forward(self, tokens: Tensor, layout: Layout | None = None) -> Tensor:
        """Without a layout the tokens are one sequence."""
        T = tokens.shape[0]
        form = (layout or Layout(spans=[Span(0, T, 0, 0)], num_tokens=T)).blocks(tokens.device)
        states = []
        for block in form.blocks:
            (b, lq), lk = block.queries.shape, block.keys.shape[1]
            real = F.pad(block.keys.diff(dim=1) != 0, (1, 0), value=True)  # padding repeats the last token
            hidden, _ = self.run(tokens.index_select(0, block.keys.flatten()).view(b, lk), real.long())
            own = block.offsets[:, None] + torch.arange(lq, device=tokens.device)  # [b, Lq], after the prompt
            row = torch.arange(b, device=tokens.device)[:, None] * lk
            # index_select: its backward is deterministic, that of indexing is not
            states.append(hidden.flatten(0, 1).index_select(0, (row + own.clamp(max=lk - 1)).flatten()))
        return torch.cat(states).index_select(0, form.order)

    def run(self, tokens: Tensor, mask: Tensor, cache: Any = None, keep: bool = False) -> tuple[Tensor, Any]:
        """Hidden states of tokens [B, n], and what the model remembers if it is to be kept.

        mask [B, m] has a 1 for every token, these and the cache's, and a 0 where a row is padded.
        """
        given: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "use_cache": keep}
        if cache is not None:
            given["past_key_values"] = cache
        if self._places:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = self.model.base_model(**given)
        return out.last_hidden_state, out.past_key_values if keep else None

    def one_sequence(self, tokens: Tensor) -> Tensor:
        """Final hidden states [T, d] of one sequence."""
        return self(tokens)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), named as the model's class names them."""
        return iter(self.model.named_parameters())

    def write(self, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
        """config.json and the weights, tied ones once, under the names they are published with."""
        model = self.model if dtype == self.embed.dtype else copy.deepcopy(self.model).to(dtype)
        model.save_pretrained(folder, max_shard_size=max_shard_bytes)
        (folder / "generation_config.json").unlink(missing_ok=True)  # the original's is copied, or there is none


AnyDecoder = Decoder | AutoDecoder


def foreign_decoder(
    folder: Path, hf_config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> AutoDecoder:
    """The decoder of a folder outside the native family; what could not be trained exactly is refused, in one line."""
    transformers = _transformers(hf_config)
    config, kind = _class(transformers, folder, hf_config)
    stored = dict(tensors)
    with _in_one_line(f"{folder}: transformers cannot load this {kind.__name__}"):
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=stored,
            dtype=dtype,
            attn_implementation=None,
            ignore_mismatched_sizes=True,  # told below
            output_loading_info=True,
        )
    for name, has, wants in found["mismatched_keys"]:
        raise ModelError(f'{folder}: tensor "{name}" is {list(has)}, config.json says {list(wants)}')
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{folder}: {some(missing)} missing: the checkpoint is incomplete, or config.json another's")
    if left := sorted(found["unexpected_keys"]):
        log.warning("%s: %s not used by %s", folder, some(left), kind.__name__)
    own = model.state_dict()
    if bits := sorted(n for n, t in stored.items() if n in own and own[n].is_floating_point() and _is_quantised(t)):
        raise ModelError(f'{folder}: tensor "{bits[0]}" is {stored[bits[0]].dtype}: quantised, which is not supported')
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # it may lie in the file, which may be overwritten
    model.generation_config = transformers.GenerationConfig()  # unused, and a faulty one could not be saved
    _check_parts(folder, model)
    decoder = AutoDecoder(model, kind.__name__)
    with _in_one_line(f"{folder}: {kind.__name__} cannot be run on padded rows with a cache"):
        _check_numbers(folder, decoder)
    return decoder


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """The boundary of foreign code: its classes raise whatever they like about a folder that is not in order."""
    try:
        yield
    except ModelError:
        raise
    except Exception as e:
        raise ModelError(f"{what}: {' '.join(str(e).split())[:200] or type(e).__name__}") from e


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """The class that config.json names; "" if it names none."""
    named = hf_config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _transformers(hf_config: Mapping[str, Any]) -> Any:
    try:
        import transformers
    except ImportError as e:
        name = architecture_of(hf_config) or hf_config.get("model_type")
        raise ModelError(f"{name} is not native and needs transformers: pip install 'cohort[transformers]'") from e
    transformers.logging.set_verbosity_error()  # a run's terminal is not its to write on
    transformers.logging.disable_progress_bar()
    return transformers


def _class(transformers: Any, folder: Path, hf_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The config as transformers reads it, and the class of the model: its own, never one that the folder brings."""
    kind, known = str(hf_config.get("model_type")), transformers.CONFIG_MAPPING
    if hf_config.get("quantization_config"):
        raise ModelError(f"{folder}: config.json has a quantization_config: use the original, unquantised weights")
    if kind not in known:
        brings = ", and code that comes with a model is not run" if "auto_map" in hf_config else ""
        raise ModelError(f'{folder}: transformers {transformers.__version__} has no model_type "{kind}"{brings}')
    with _in_one_line(f"{folder}: transformers cannot read this config.json"):
        config = known[kind].from_dict({k: v for k, v in hf_config.items() if k not in NOT_OURS})
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder} is an encoder-decoder ({kind}): only decoders can be sampled from and trained")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{folder}: transformers has no causal language model for model_type {kind}")
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    named = architecture_of(hf_config) or found.__name__
    if named.lower() != found.__name__.lower():  # transformers spells some otherwise than their authors
        raise ModelError(f"{folder} is a {named}; the causal language model of {kind} is {found.__name__}")
    return config, found


def _check_parts(folder: Path, model: Any) -> None:
    name, embedding, head = type(model).__name__, model.get_input_embeddings(), model.get_output_embeddings()
    taken = inspect.signature(model.base_model.forward).parameters
    if lacking := [p for p in ("input_ids", "attention_mask", "past_key_values", "use_cache") if p not in taken]:
        raise ModelError(f"{folder}: {name} takes no {lacking[0]}: such models are not supported")
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(f"{folder}: {name} has no plain embedding and linear head: such models are not supported")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"{folder}: {name} has a head with a bias, which the learner does not train: not supported")
    if head.weight.shape[0] != embedding.weight.shape[0]:
        raise ModelError(f"{folder}: {name} embeds {len(embedding.weight)} tokens and predicts {len(head.weight)}")


@torch.no_grad()
def _check_numbers(folder: Path, decoder: AutoDecoder) -> None:
    """Try out what learner and sampler rely on: a linear head, padding that changes nothing, a cache that remembers."""
    name, size = decoder.config.architecture, decoder.config.vocab_size
    long, short = (torch.arange(start, start + 7 * n, 7) % size for start, n in ((3, 9), (4, 5)))
    alone = torch.cat([_logits(decoder, row) for row in (long, short)])
    if not bool(alone.isfinite().all()):
        raise ModelError(f"{folder}: {name} gives logits that are not finite: its weights are damaged")
    louder = 100 / max(float(alone.abs().max()), 1e-6)  # small logits pass a soft cap nearly unchanged
    if _far(decoder, decoder(long), alone[:9]) or _far(decoder, decoder(long), _logits(decoder, long, louder) / louder):
        raise ModelError(
            f"{folder}: the logits of {name} are not its last hidden state times its head's matrix "
            "(soft-capped, scaled?): such models are not supported"
        )
    packed = decoder(torch.cat([long, short]), Layout(spans=[Span(0, 9, 0, 0), Span(9, 5, 9, 0)], num_tokens=14))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    rows = torch.stack([long, F.pad(short, (4, 0))])
    _, cache = decoder.run(rows[:, :7], mask[:, :7], keep=True)
    _, cache = decoder.run(rows[:, 7:8], mask[:, :8], cache, keep=True)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    last, _ = decoder.run(rows[[1, 1, 0], 8:], mask[[1, 1, 0]], cache, keep=True)
    if _far(decoder, packed, alone) or _far(decoder, last[:, 0], alone[[13, 13, 8]]):
        dtype = str(decoder.embed.dtype).removeprefix("torch.")
        raise ModelError(
            f"{folder}: {name} in {dtype} gives a padded or cached sequence other logits than one alone: "
            "it cannot be sampled from and trained exactly"
        )


def _logits(decoder: AutoDecoder, row: Tensor, factor: float = 1.0) -> Tensor:
    """As the model itself computes them, from what its head says times a factor."""
    handle = decoder.model.get_output_embeddings().register_forward_hook(lambda module, args, out: out * factor)
    try:
        logits: Tensor = decoder.model(input_ids=row[None], use_cache=False).logits[0]
    finally:
        handle.remove()
    return logits


def _far(decoder: AutoDecoder, hidden: Tensor, logits: Tensor) -> bool:
    """Are these not its logits? A NaN is not."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    off = (wide_product(hidden, decoder.head_weight) - wide).abs().mean()
    return not float(off) <= FAR.get(decoder.embed.dtype, FAR_ROUNDED) * float(wide.std())


def some(names: list[str]) -> str:
    """
    >>> some(["a"]), some(["a", "b", "c"])
    ('tensor "a"', 'tensor "a" and 2 more')
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f'tensor "{names[0]}"{more}'


def _is_quantised(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.itemsize == 1


def _positions(config: Any) -> int:
    """The longest sequence."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    found = [v for name in names if isinstance(v := getattr(config, name, None), int) and v > 0]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this it turns all rows of a batch by other angles
        found = [rope["original_max_position_embeddings"]]
    return found[0] if found else UNLIMITED
