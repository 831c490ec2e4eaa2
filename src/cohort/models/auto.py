"""Decoders for every causal language model that transformers knows and the native decoder does not.

Such a model is called foreign here. It is slower than the native decoder and equally exact. This is the only module
that imports `transformers`, and it does so only when a foreign model is loaded. Code from the model's folder is never
run and nothing is unpickled: the model's class comes from transformers, and `cohort.models.files` reads its tensors
from safetensors files.

A foreign model has its own attention, which knows nothing of packed streams. A packed stream is therefore unfolded into
ordinary padded sequences, with one copy of a shared prompt per sibling. Afterwards the hidden states are put back into
the order of the stream. So packed, padded and single sequences give the same numbers.

The model stays in evaluation mode, during training too. With dropout, the policy that is trained would differ from the
policy that sampled: ratios would be noise around 1, and two evaluations of the same token would disagree.

Letters: T tokens, d hidden size, B sequences, n tokens per sequence.
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
from cohort.models.functions import multiply_wide
from cohort.models.hub import locate_download
from cohort.models.shards import TensorSpec

log = logging.getLogger(__name__)

# Longest sequence (tokens) of a model whose config names no limit, because it has no table of positions.
UNLIMITED_POSITIONS = 1 << 20
# Keys of a config.json that select code from outside transformers or change what a forward returns.
IGNORED_CONFIG_KEYS = {
    *("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "fusion_config"),
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript"),
    "quantization_config",  # only an empty one gets this far: _find_class refuses all others
}
# Two ways to compute the same logits may differ by this much on average, in standard deviations of the logits.
MAX_DIFFERENCE = {torch.float64: 1e-4, torch.float32: 1e-4}
MAX_DIFFERENCE_ROUNDED = 0.1  # the same for types that round more, such as bf16


@dataclass(frozen=True, kw_only=True)
class ForeignConfig:
    """Those facts of a foreign model's config that the rest of the package reads."""

    architecture: str  # name of the transformers class
    vocab_size: int
    max_positions: int

    @property
    def context(self) -> int:
        """The largest number of tokens that a sequence may have, also where the model has sliding windows."""
        return self.max_positions


class AutoDecoder(nn.Module):
    """A model of transformers as a decoder: computes final hidden states [T, d] from tokens [T] and their layout."""

    is_native = False

    def __init__(self, model: Any, architecture: str) -> None:
        super().__init__()
        self.model = model
        # Always False: transformers recomputes activations in training mode only, which this model never enters.
        self.recompute = False
        embedding = model.get_input_embeddings()
        # With a padding index, torch drops the embedding's gradient for every token equal to the padding token.
        embedding.padding_idx = None
        self.config = ForeignConfig(
            architecture=architecture,
            vocab_size=embedding.weight.shape[0],
            max_positions=_find_max_positions(model.config),
        )
        self._takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
        self.train()

    @property
    def embed(self) -> Tensor:
        """The weights of the input embedding, [vocab, d], without copying."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the output head, [vocab, d]: logits are hidden states times its transpose."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def train(self, mode: bool = True) -> AutoDecoder:
        """Puts the model into evaluation mode, so without dropout, even if `mode` is True. Returns this decoder."""
        return super().train(False)

    def forward(self, tokens: Tensor, layout: Layout | None = None) -> Tensor:
        """Returns the final hidden states [T, d] of tokens [T], in their order. Several sequences may lie end to end.

        `layout` says which tokens see which others. None means that all tokens are one sequence.
        """
        T = tokens.shape[0]
        form = (layout or Layout(spans=[Span(0, T, 0, 0)], num_tokens=T)).make_blocks(tokens.device)
        states = []
        for block in form.blocks:
            (b, lq), lk = block.queries.shape, block.keys.shape[1]
            # Padding repeats the last token, so an entry is real where the index differs from the one before it.
            real = F.pad(block.keys.diff(dim=1) != 0, (1, 0), value=True)
            hidden, _ = self.run_padded(tokens.index_select(0, block.keys.flatten()).view(b, lk), real.long())
            # Only the span's own tokens are kept: its copy of the prompt comes first and ends at the offset.
            column = block.offsets[:, None] + torch.arange(lq, device=tokens.device)  # [b, Lq]
            row_start = torch.arange(b, device=tokens.device)[:, None] * lk
            # index_select has a deterministic backward, plain indexing has not.
            states.append(hidden.flatten(0, 1).index_select(0, (row_start + column.clamp(max=lk - 1)).flatten()))
        return torch.cat(states).index_select(0, form.order)

    def run_padded(
        self, tokens: Tensor, mask: Tensor, cache: Any = None, keep_cache: bool = False
    ) -> tuple[Tensor, Any]:
        """Runs the model on padded rows of tokens [B, n], one sequence per row.

        `cache` has the keys and values of earlier tokens (None: there are none) and is extended in place. `mask` [B, m]
        has a column for each position in the cache and then for each of `tokens`: 1 for a token, 0 for padding. Returns
        the final hidden states [B, n, d] and the cache (None unless `keep_cache`).
        """
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "use_cache": keep_cache}
        if cache is not None:
            inputs["past_key_values"] = cache
        if self._takes_positions:
            # Positions count tokens, not columns: padding on the left must not shift a sequence.
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = self.model.base_model(**inputs)
        return out.last_hidden_state, out.past_key_values if keep_cache else None

    def forward_one_sequence(self, tokens: Tensor) -> Tensor:
        """Returns the final hidden states [T, d] of tokens [T] that are one sequence."""
        return self(tokens)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Returns an iterator of (name, parameter) over all weights, by the names that the transformers class uses."""
        return iter(self.model.named_parameters())

    def weight_specs(self) -> dict[str, TensorSpec]:
        """Returns shape and type of every weight, by the names of `named_weights`."""
        return {name: TensorSpec(shape=tuple(p.shape), dtype=p.dtype) for name, p in self.named_weights()}

    def write_model(self, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
        """Writes config.json and the weights, converted to `dtype`, into `folder`, under the names of published models.

        Files have at most `max_shard_bytes`, or one larger tensor. A head tied to the embedding is left out.
        """
        model = self.model if dtype == self.embed.dtype else copy.deepcopy(self.model).to(dtype)
        model.save_pretrained(folder, max_shard_size=max_shard_bytes)
        # transformers writes a default one. `save_folder` copies the original's afterwards, if the original has one.
        (folder / "generation_config.json").unlink(missing_ok=True)


AnyDecoder = Decoder | AutoDecoder


def load_foreign_decoder(
    folder: Path, hf_config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> AutoDecoder:
    """Returns a decoder, computed by transformers, for a model that the native decoder does not support.

    `hf_config` has the contents of config.json, `tensors` are the stored (name, tensor) pairs, and the weights become
    `dtype`. `folder` is only for messages. Raises ModelError if transformers is missing, if it does not know the model
    or the tensors do not fit, or if the model could not be trained exactly.
    """
    transformers = _import_transformers(hf_config)
    config, kind = _find_class(transformers, folder, hf_config)
    stored = dict(tensors)
    with _raise_model_error(folder, f"cannot load this {kind.__name__}"):
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=stored,
            dtype=dtype,
            attn_implementation=None,
            # Wrong sizes are reported below, in one line.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for name, stored_shape, needed_shape in report["mismatched_keys"]:
        raise ModelError(
            f'{folder}: tensor "{name}" is {list(stored_shape)}, config.json says {list(needed_shape)}: '
            "they are of different models. Use a folder whose config.json and weights belong together"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{folder}: {summarise_tensors(missing)} missing: the weights are incomplete, or config.json is of another "
            f"model. Restore them; for a fetched model, delete {locate_download(folder)} and run `cohort pull MODEL`"
        )
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s: %s not used by %s", folder, summarise_tensors(unused), kind.__name__)
    own = model.state_dict()
    # Integer tensors are refused only where the model computes with floats; some models have true integer buffers.
    if packed := sorted(n for n, t in stored.items() if n in own and own[n].is_floating_point() and _is_quantised(t)):
        raise ModelError(
            f'{folder}: tensor "{packed[0]}" is {stored[packed[0]].dtype}: quantised weights are not supported, '
            "use the original, unquantised model"
        )
    # A tensor may still lie in the mapped file. It is copied because the file may be overwritten later.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    # The generation config is unused here, but a faulty one would make saving fail.
    model.generation_config = transformers.GenerationConfig()
    _check_interface(folder, model)
    decoder = AutoDecoder(model, kind.__name__)
    with _raise_model_error(folder, f"cannot run {kind.__name__} on padded rows with a cache"):
        _check_outputs(folder, decoder)
    return decoder


@contextmanager
def _raise_model_error(folder: Path, what: str) -> Iterator[None]:
    """Turns every Exception that the block raises, except a ModelError, into a ModelError of one line.

    The message names the model's folder and `what` transformers cannot do. It raises exceptions of all kinds.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as e:
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise ModelError(
            f"{folder}: the package transformers {what}: {reason}; upgrade it (pip install -U transformers), "
            "or use another model"
        ) from e


def read_architecture(hf_config: Mapping[str, Any]) -> str:
    """Returns the first class name under "architectures" in the contents of a config.json, or "" if there is none."""
    named = hf_config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _import_transformers(hf_config: Mapping[str, Any]) -> Any:
    """Returns the module transformers, with its warnings and progress bars turned off.

    If it is not installed, raises ModelError with the command to install it. `hf_config` only names the model there.
    """
    try:
        import transformers
    except ImportError as e:
        name = read_architecture(hf_config) or hf_config.get("model_type")
        raise ModelError(
            f"{name} is not a model of the native decoder and needs the package transformers: "
            "install it with pip install 'cohort[transformers]'"
        ) from e
    # Warnings and progress bars of transformers would disturb the terminal view of a run.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _find_class(transformers: Any, folder: Path, hf_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the model's config as an object of transformers, and the class of the model in transformers.

    `folder` is only named in messages. Raises ModelError if the model is quantised, unknown to transformers, not a
    causal language model, or of another class than transformers has for it.
    """
    kind = str(hf_config.get("model_type"))
    known = transformers.CONFIG_MAPPING
    if hf_config.get("quantization_config"):
        raise ModelError(f"{folder}: config.json has a quantization_config: use the original, unquantised model")
    if kind not in known:
        note = ", and code that comes with a model is not run" if "auto_map" in hf_config else ""
        raise ModelError(
            f'{folder}: transformers {transformers.__version__} has no model_type "{kind}"{note}: '
            "upgrade it (pip install -U transformers), or use another model"
        )
    with _raise_model_error(folder, "cannot read this config.json"):
        config = known[kind].from_dict({k: v for k, v in hf_config.items() if k not in IGNORED_CONFIG_KEYS})
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder} is an encoder-decoder ({kind}): use a decoder-only language model")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{folder}: transformers has no causal language model for model_type {kind}: use another model"
        )
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    named = read_architecture(hf_config) or model_class.__name__
    # Case is ignored: transformers capitalises some names differently from the authors of the models.
    if named.lower() != model_class.__name__.lower():
        raise ModelError(
            f"{folder}: config.json names the class {named}; the causal language model of {kind} is "
            f"{model_class.__name__}: use a model of that class"
        )
    return config, model_class


def _check_interface(folder: Path, model: Any) -> None:
    """Raises ModelError unless the model takes masks and a cache, and has embedding and head of one size (no bias)."""
    name = type(model).__name__
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    parameters = inspect.signature(model.base_model.forward).parameters
    if lacking := [p for p in ("input_ids", "attention_mask", "past_key_values", "use_cache") if p not in parameters]:
        raise ModelError(f"{folder}: {name} takes no {lacking[0]}, which training needs: use another model")
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(f"{folder}: {name} has no plain embedding and linear head: use another model")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"{folder}: {name} has a head with a bias, which cannot be trained: use another model")
    if head.weight.shape[0] != embedding.weight.shape[0]:
        raise ModelError(
            f"{folder}: {name} embeds {len(embedding.weight)} tokens and predicts {len(head.weight)}, "
            "but both must be the same number: use another model"
        )


@torch.no_grad()
def _check_outputs(folder: Path, decoder: AutoDecoder) -> None:
    """Runs the model on two short sequences and raises ModelError if its outputs could not be trained exactly.

    Logits must be finite, and the last hidden state times the head's matrix. Padding must change nothing. A sequence
    that is continued from a cache must have the same logits as one without a cache.
    """
    name, size = decoder.config.architecture, decoder.config.vocab_size
    # Arbitrary token ids: one sequence of 9 tokens, one of 5.
    long, short = (torch.arange(start, start + 7 * n, 7) % size for start, n in ((3, 9), (4, 5)))
    alone = torch.cat([_compute_logits(decoder, row) for row in (long, short)])
    if not bool(alone.isfinite().all()):
        raise ModelError(
            f"{folder}: {name} gives logits that are not finite, so its weights seem damaged. Restore the files; "
            f"for a fetched model, delete {locate_download(folder)} and run `cohort pull MODEL`"
        )
    # A soft cap leaves small logits nearly unchanged. Scaled up to 100 they show it.
    louder = 100 / max(float(alone.abs().max()), 1e-6)
    if _differs_from_logits(decoder, decoder(long), alone[:9]) or _differs_from_logits(
        decoder, decoder(long), _compute_logits(decoder, long, louder) / louder
    ):
        raise ModelError(
            f"{folder}: the logits of {name} are not its last hidden state times its head's matrix "
            "(they may be soft-capped or scaled), so it cannot be trained exactly: use another model"
        )
    # Both sequences packed into one stream, which `forward` unfolds into rows padded on the right.
    packed = decoder(torch.cat([long, short]), Layout(spans=[Span(0, 9, 0, 0), Span(9, 5, 9, 0)], num_tokens=14))
    # The sampler's way: padded on the left, seven tokens at once, then one at a time from the cache. In between the
    # cache's rows are duplicated and reordered.
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    rows = torch.stack([long, F.pad(short, (4, 0))])
    _, cache = decoder.run_padded(rows[:, :7], mask[:, :7], keep_cache=True)
    _, cache = decoder.run_padded(rows[:, 7:8], mask[:, :8], cache, keep_cache=True)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    last, _ = decoder.run_padded(rows[[1, 1, 0], 8:], mask[[1, 1, 0]], cache, keep_cache=True)
    if _differs_from_logits(decoder, packed, alone) or _differs_from_logits(decoder, last[:, 0], alone[[13, 13, 8]]):
        dtype = str(decoder.embed.dtype).removeprefix("torch.")
        raise ModelError(
            f"{folder}: {name} in {dtype} gives a padded or cached sequence other logits than one alone: "
            "it cannot be sampled from and trained exactly, use another model"
        )


def _compute_logits(decoder: AutoDecoder, row: Tensor, factor: float = 1.0) -> Tensor:
    """Returns the logits [n, vocab] that the transformers model itself computes for one sequence of tokens `row` [n].

    The output of the head's matrix is multiplied by `factor` before the model's later operations, such as a soft cap.
    """
    handle = decoder.model.get_output_embeddings().register_forward_hook(lambda module, args, out: out * factor)
    try:
        logits: Tensor = decoder.model(input_ids=row[None], use_cache=False).logits[0]
    finally:
        handle.remove()
    return logits


def _differs_from_logits(decoder: AutoDecoder, hidden: Tensor, logits: Tensor) -> bool:
    """Returns whether hidden states [n, d] times the head's matrix differ from `logits` [n, vocab] beyond rounding."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    difference = (multiply_wide(hidden, decoder.head_weight) - wide).abs().mean()
    limit = MAX_DIFFERENCE.get(decoder.embed.dtype, MAX_DIFFERENCE_ROUNDED) * float(wide.std())
    # "not <=" instead of ">": a NaN counts as a difference.
    return not float(difference) <= limit


def summarise_tensors(names: list[str]) -> str:
    """Returns text for messages: the first of the tensor names (at least one) in quotes, and how many others there are.

    >>> summarise_tensors(["a"]), summarise_tensors(["a", "b", "c"])
    ('tensor "a"', 'tensor "a" and 2 more')
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f'tensor "{names[0]}"{more}'


def _is_quantised(tensor: Tensor) -> bool:
    """Returns whether a stored tensor consists of integers or 8-bit floats, as quantised weights do."""
    return not tensor.is_floating_point() or tensor.itemsize == 1


def _find_max_positions(config: Any) -> int:
    """Returns the most tokens that a sequence may have by a transformers config, or UNLIMITED_POSITIONS."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limits = [v for name in names if isinstance(v := getattr(config, name, None), int) and v > 0]
    rope = getattr(config, "rope_parameters", None) or {}
    # Beyond its original context, LongRoPE uses other angles for all rows of a batch as soon as one row is longer.
    if rope.get("rope_type") == "longrope":
        limits = [rope["original_max_position_embeddings"]]
    return limits[0] if limits else UNLIMITED_POSITIONS
