"""Builds the jobs that learn from given answers, SFT and DPO: reads their rows, and encodes and divides them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from cohort.algos.preferences import PreferenceLoss
from cohort.config.imitation import DPO, SFT, Conversations, ExampleRows, PairRows, SumPairs, Traces
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.examples.encode import EncodedExamples, ExampleRenderer, encode_conversations, encode_pairs
from cohort.examples.rows import Conversation, Pair, read_conversations, read_pairs
from cohort.examples.stream import ExampleStream, KeyedRow, count_steps, cut_held_out
from cohort.examples.sums import make_sum_pairs
from cohort.jobs.dpo import DPOJob
from cohort.jobs.inputs import InputDigests
from cohort.jobs.parts import configure_torch, digest_files, load_model, make_adapters, make_frozen_copy
from cohort.jobs.sft import SFTJob, make_trace_source
from cohort.learner.local import LocalLearner
from cohort.learner.plan import MemoryDemand, plan_memory
from cohort.models.config import ModelConfig
from cohort.models.device import available_bytes, choose_device, choose_dtype
from cohort.models.files import LoadedModel
from cohort.models.lora import Adapters
from cohort.text import Tokenizer
from cohort.text.framing import read_template
from cohort.types import Group

C = TypeVar("C", SFT, DPO)
K = TypeVar("K", bound=KeyedRow)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunModel:
    """What both kinds of run begin with."""

    folder: Path
    model: LoadedModel
    tokenizer: Tokenizer
    device: torch.device


def _begin(config: C) -> tuple[C, _RunModel]:
    """Returns the config with device and dtype decided, and the model on its device with its tokenizer."""
    device = choose_device(config.device)
    learner = replace(config.learner, dtype=choose_dtype(config.learner.dtype, device))
    config = replace(config, device="cpu" if device.type == "cpu" else "cuda", learner=learner)
    configure_torch(config.threads, device)
    folder, model, config = load_model(config, device)
    tokenizer = Tokenizer.load(folder, config.date, read_template(config.template))
    return config, _RunModel(folder=folder, model=model, tokenizer=tokenizer, device=device)


def build_sft_job(config: SFT) -> SFTJob:
    """Loads the model and the examples, and returns the job of supervised fine-tuning.

    Sets torch's threads. Writes no run files. Raises TaskError, with file and line, for rows that cannot be trained on.
    """
    config, start = _begin(config)
    if isinstance(config.data, Traces):
        return SFTJob(
            config=config,
            model=start.model,
            inputs=digest_files(config, start.folder),
            learner=_make_learner(config, start, make_adapters(config, start.model.decoder)),
            groups=make_trace_source(config, start.tokenizer),
        )
    assert isinstance(config.data, Conversations)
    framing = ExampleRenderer(tokenizer=start.tokenizer, template=config.template, system=config.system)
    limit = _choose_limit(config, config.data, start.model)
    data = config.data

    def encode(rows: Sequence[Conversation]) -> EncodedExamples:
        return encode_conversations(rows, framing, config.loss, limit, data.too_long)

    train, held_out = _read_splits(data, lambda split: read_conversations(data.path, split, data.format, data.columns))
    encoded = encode(train)
    held = encode(held_out[: config.eval.problems or None]).groups if held_out else []
    config = _settle_steps(config, encoded, config.batch.examples)
    learner = _make_planned_learner(config, start, [*encoded.groups, *held], config.batch.examples)
    stream = ExampleStream(groups=encoded.groups, size=config.batch.examples, seed=config.seed)
    return SFTJob(
        config=config,
        model=start.model,
        inputs=_digest_examples(digest_files(config, start.folder), encoded.groups, held),
        learner=learner,
        groups=stream.list_groups,
        encoded=encoded,
        held_out=held,
    )


def build_dpo_job(config: DPO) -> DPOJob:
    """Loads the model and the pairs, and returns the job of preference optimisation.

    Sets torch's threads. Writes no run files. Raises TaskError, with file and line, for rows that cannot be trained on.
    """
    config, start = _begin(config)
    framing = ExampleRenderer(tokenizer=start.tokenizer, template=config.template, system=config.system)
    train, held_out = _read_pair_splits(config)
    data = config.data
    limit = _choose_limit(config, data, start.model) if isinstance(data, PairRows) else start.model.config.context
    too_long, equal = (data.too_long, data.equal) if isinstance(data, PairRows) else ("error", "skip")
    encoded = encode_pairs(train, framing, limit, too_long, equal)
    wanted = held_out[: config.eval.problems or None]
    held = encode_pairs(wanted, framing, limit, too_long, equal).groups if wanted else []
    config = _settle_steps(config, encoded, config.batch.pairs)
    # With adapters the reference is the model without them, and no frozen copy is needed.
    has_copy = config.loss.has_reference and config.reference == "copy" and not config.learner.lora.is_on
    learner = _make_planned_learner(config, start, [*encoded.groups, *held], config.batch.pairs, has_copy)
    return DPOJob(
        config=config,
        model=start.model,
        inputs=_digest_examples(digest_files(config, start.folder), encoded.groups, held),
        learner=learner,
        stream=ExampleStream(groups=encoded.groups, size=config.batch.pairs, seed=config.seed),
        encoded=encoded,
        held_out=held,
        loss=PreferenceLoss(config.loss),
        tokenizer=start.tokenizer,
    )


def _read_pair_splits(config: DPO) -> tuple[list[Pair], list[Pair]]:
    """Returns the training pairs and the held-out ones."""
    data = config.data
    if isinstance(data, SumPairs):
        return make_sum_pairs("train", data.rows), make_sum_pairs("test", data.held_out_rows)
    return _read_splits(data, lambda split: read_pairs(data.path, split, data.columns))


def _read_splits(data: ExampleRows, read: Callable[[str], Iterable[K]]) -> tuple[list[K], list[K]]:
    """Returns the rows to train on, and those that are held out: of the test file, or a share of the rows.

    Rows of training whose question is held out too are left out. `read` reads the rows of a split.
    """
    if not data.path:
        raise ConfigError(
            "the run has no data. Name a file with --data.path, for example --data.path rows.jsonl, or owner/name of a "
            "data set on the Hugging Face hub."
        )
    rows = list(read("train"))
    if "{split}" not in data.path:
        train, held_out = cut_held_out(rows, data.held_out)
        if not train:
            raise ConfigError(
                f"all {len(rows)} rows of {data.path} are held out: lower --data.held-out (now {data.held_out:g})."
            )
        return train, held_out
    held_out = list(read("test"))
    asked = {row.key for row in held_out}
    train = [row for row in rows if row.key not in asked]
    if not train:
        raise ConfigError(f"every row of the train file of {data.path} is in its test file too: name other files.")
    return train, held_out


def _choose_limit(config: RunConfig, data: ExampleRows, model: LoadedModel) -> int:
    """Returns the longest example in tokens: the setting, but at most the model's context and a given token budget."""
    room = min(model.config.context, config.learner.token_budget or model.config.context)
    if data.max_tokens > room:
        raise ConfigError(
            f"data.max_tokens is {data.max_tokens}, but the model's context has {model.config.context} tokens and the "
            f"token budget is {config.learner.token_budget or 'automatic'}: set --data.max-tokens to {room} or less."
        )
    return data.max_tokens or room


def _settle_steps(config: C, encoded: EncodedExamples, size: int) -> C:
    """Returns the config with the number of steps that its passes over the data take, if it has passes."""
    if not config.passes:
        return config
    return replace(config, steps=count_steps(config.passes, len(encoded.groups), size), passes=0.0)


def _make_learner(
    config: SFT | DPO, start: _RunModel, adapters: Adapters | None, has_reference: bool = False
) -> LocalLearner:
    """Returns the learner of a run, with a frozen copy of the model if it needs one as a reference."""
    return LocalLearner(
        start.model.decoder,
        config.learner,
        config.optim,
        num_updates=config.steps * config.learner.updates_per_batch,
        reference=make_frozen_copy(start.model) if has_reference else None,
        adapters=adapters,
    )


def _make_planned_learner(
    config: SFT | DPO, start: _RunModel, groups: Sequence[Group], size: int, has_reference: bool = False
) -> LocalLearner:
    """Returns the learner of a run with known examples, of which a step has `size`: its token budget fits them.

    On a GPU the memory is planned. An automatic budget is at least as large as the longest group, in which every sample
    has a prompt of its own.
    """
    adapters = make_adapters(config, start.model.decoder)
    longest = max(map(_count_tokens, groups))
    learner = _make_learner(config, start, adapters, has_reference)
    budget = config.learner.token_budget
    # The shapes of models outside the native family are not known.
    if start.device.type == "cuda" and isinstance(start.model.config, ModelConfig):
        demand = MemoryDemand(
            model=start.model.config,
            bytes_per_number=start.model.decoder.embed.itemsize,
            longest=longest,
            batch_tokens=size * longest,
            kv_tokens=0,
            has_reference=has_reference,
            num_trained=None if adapters is None else adapters.num_params,
            frozen_bytes=0 if adapters is None else adapters.base_bytes,
        )
        learner.apply_plan(plan_memory(demand, available_bytes(start.device), budget))
    if not budget:
        learner.token_budget = max(learner.token_budget, longest)
    learner.expect_samples(longest)
    return learner


def _count_tokens(group: Group) -> int:
    """Returns the number of tokens of a group whose samples each have a prompt of their own."""
    return sum(len(group.prompt.tokens) + len(sample.tokens) for sample in group.samples)


def _digest_examples(digests: InputDigests, groups: Sequence[Group], held_out: Sequence[Group]) -> InputDigests:
    """Returns the digests with those of the examples: their tokens, and which of them are targets."""
    content, order = hashlib.sha256(), hashlib.sha256()
    hashes = [_hash_group(group) for group in groups]
    for one in hashes:
        order.update(one)
    for one in sorted(hashes):
        content.update(one)
    held = hashlib.sha256(b"".join(_hash_group(group) for group in held_out))
    return replace(
        digests,
        train_rows=content.hexdigest()[:16],
        train_order=order.hexdigest()[:16],
        held_out_rows=held.hexdigest()[:16],
    )


def _hash_group(group: Group) -> bytes:
    """Returns a hash of the tokens of a group and of their provenance."""
    digest = hashlib.sha256(np.array(group.prompt.tokens, dtype=np.int64).tobytes())
    for sample in group.samples:
        digest.update(np.array([sample.tokens, sample.provenance], dtype=np.int64).tobytes())
    return digest.digest()
