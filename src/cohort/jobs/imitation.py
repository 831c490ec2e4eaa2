"""Builds the jobs that learn from given answers, SFT and DPO: reads their rows, and encodes and divides them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from cohort.algos.preferences import PreferenceLoss
from cohort.config.imitation import (
    DPO,
    SFT,
    Conversations,
    ExampleRows,
    PairRows,
    SumPairs,
    TaskAnswers,
    Traces,
    describe_long_warmup,
)
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.evaluation.evaluate import digest_rows
from cohort.examples.encode import EncodedExamples, ExampleRenderer, encode_conversations, encode_pairs
from cohort.examples.from_task import make_task_conversations
from cohort.examples.mapped import Preference, load_map
from cohort.examples.rows import Conversation, Pair, RowRules, hash_question, read_conversations, read_pairs
from cohort.examples.stream import ExampleStream, KeyedRow, count_steps, cut_held_out
from cohort.examples.sums import make_sum_pairs
from cohort.jobs.dpo import DPOJob
from cohort.jobs.inputs import InputDigests
from cohort.jobs.memory import plan_ranks
from cohort.jobs.parts import configure_torch, digest_files, load_model, make_adapters, make_frozen_copy
from cohort.jobs.sft import SFTJob, make_trace_source
from cohort.jobs.task_eval import TaskProblems, make_evaluator, read_problems
from cohort.learner.local import LocalLearner
from cohort.learner.plan import MemoryDemand
from cohort.models.config import ModelConfig
from cohort.models.device import choose_device, choose_dtype
from cohort.models.files import LoadedModel
from cohort.models.lora import Adapters
from cohort.ranks.groups import GroupMover
from cohort.tasks.base import load_rows
from cohort.tasks.places import locate_rows
from cohort.tasks.ref import compute_grader_digest
from cohort.tasks.splits import cut_validation
from cohort.text import Tokenizer
from cohort.text.framing import read_template
from cohort.types import Group
from cohort.world import ONE_PROCESS, Grid, World

log = logging.getLogger(__name__)
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


def build_sft_job(config: SFT, world: World = ONE_PROCESS) -> SFTJob:
    """Loads the model, the examples and the task, and returns the job of supervised fine-tuning.

    `world` are the ranks that train together. Sets torch's threads. Writes no run files. Raises TaskError, with file
    and line, for rows that cannot be trained on.
    """
    grid = world.split(config.learner.tensor)
    config, start = _begin(config)
    problems = read_problems(config, start.model, start.tokenizer)
    if isinstance(config.data, Traces):
        job = SFTJob(
            config=config,
            model=start.model,
            inputs=_digest_problems(digest_files(config, start.folder), config, problems),
            learner=_make_learner(config, start, make_adapters(config, start.model.decoder), grid),
            groups=make_trace_source(config, start.tokenizer),
        )
    else:
        job = _build_example_job(config, start, problems, grid)
    job.mover = GroupMover(world, grid)
    _warn_of_long_warmup(job.config)
    if problems is not None:
        job.evaluator = make_evaluator(job.config, problems, start.model, job.learner, start.tokenizer, world)
    return job


def _build_example_job(config: SFT, start: _RunModel, problems: TaskProblems | None, grid: Grid) -> SFTJob:
    """Returns the job of supervised fine-tuning on known examples: rows of a file, or the right answers of a task.

    `grid` are all ranks.
    """
    data = config.data
    assert isinstance(data, Conversations | TaskAnswers)
    framing = ExampleRenderer(tokenizer=start.tokenizer, template=config.template, system=config.system)
    limit = _choose_limit(config, data, start.model)
    counted = EncodedExamples()
    train, held_out = _read_conversation_splits(config, problems, counted)
    encoded, held = _encode_splits(
        config,
        _leave_out_problems(train, problems, counted),
        held_out,
        counted,
        lambda rows, into: encode_conversations(rows, framing, config.loss, limit, data.too_long, into),
    )
    config = _settle_steps(config, encoded, config.batch.examples)
    learner = _make_planned_learner(config, start, [*encoded.groups, *held], config.batch.examples, problems, grid)
    stream = ExampleStream(groups=encoded.groups, size=config.batch.examples, seed=config.seed)
    digests = _digest_examples(digest_files(config, start.folder), encoded.groups, held)
    return SFTJob(
        config=config,
        model=start.model,
        inputs=_digest_problems(digests, config, problems),
        learner=learner,
        groups=stream.list_groups,
        encoded=encoded,
        held_out=held,
    )


def build_dpo_job(config: DPO, world: World = ONE_PROCESS) -> DPOJob:
    """Loads the model, the pairs and the task, and returns the job of preference optimisation.

    `world` are the ranks that train together. Sets torch's threads. Writes no run files. Raises TaskError, with file
    and line, for rows that cannot be trained on.
    """
    grid = world.split(config.learner.tensor)
    config, start = _begin(config)
    problems = read_problems(config, start.model, start.tokenizer)
    framing = ExampleRenderer(tokenizer=start.tokenizer, template=config.template, system=config.system)
    data = config.data
    limit = _choose_limit(config, data, start.model) if isinstance(data, PairRows) else start.model.config.context
    too_long, equal = (data.too_long, data.equal) if isinstance(data, PairRows) else ("error", "skip")
    counted = EncodedExamples()
    train, held_out = _read_pair_splits(config, counted)
    encoded, held = _encode_splits(
        config,
        _leave_out_problems(train, problems, counted),
        held_out,
        counted,
        lambda rows, into: encode_pairs(rows, framing, limit, too_long, equal, into),
    )
    config = _settle_steps(config, encoded, config.batch.pairs)
    _warn_of_long_warmup(config)
    # With adapters the reference is the model without them, and no frozen copy is needed.
    has_copy = config.loss.has_reference and config.reference == "copy" and not config.learner.lora.is_on
    groups = [*encoded.groups, *held]
    learner = _make_planned_learner(config, start, groups, config.batch.pairs, problems, grid, has_copy)
    digests = _digest_examples(digest_files(config, start.folder), encoded.groups, held)
    job = DPOJob(
        config=config,
        model=start.model,
        inputs=_digest_problems(digests, config, problems),
        learner=learner,
        stream=ExampleStream(groups=encoded.groups, size=config.batch.pairs, seed=config.seed),
        encoded=encoded,
        held_out=held,
        loss=PreferenceLoss(config.loss),
        tokenizer=start.tokenizer,
        mover=GroupMover(world, grid),
    )
    if problems is not None:
        job.evaluator = make_evaluator(config, problems, start.model, learner, start.tokenizer, world)
    return job


def _read_conversation_splits(
    config: SFT, problems: TaskProblems | None, counted: EncodedExamples
) -> tuple[list[Conversation], list[Conversation]]:
    """Returns the training conversations and the held-out ones. Rows that are left out are counted in `counted`.

    Where the answers of a task are imitated, those to the problems of the evaluations are held out.
    """
    data = config.data
    if isinstance(data, TaskAnswers):
        assert problems is not None, "the config checks that there is a task"
        rows = load_rows(config.task, "train")
        if config.eval.split == "validation":
            rows, _ = cut_validation(rows, config.eval.validation_share)
        held_out = [prompt.row for prompt in problems.prompts]
        train, held = (list(make_task_conversations(config.task, some)) for some in (rows, held_out))
        return train, held
    assert isinstance(data, Conversations)
    rules = _make_rules(data, Conversation, counted)
    return _read_splits(
        data, counted, lambda split: read_conversations(data.path, split, data.format, data.columns, rules)
    )


def _read_pair_splits(config: DPO, counted: EncodedExamples) -> tuple[list[Pair], list[Pair]]:
    """Returns the training pairs and the held-out ones. Rows that are left out are counted in `counted`."""
    data = config.data
    if isinstance(data, SumPairs):
        return make_sum_pairs("train", data.rows), make_sum_pairs("test", data.held_out_rows)
    rules = _make_rules(data, Preference, counted)
    return _read_splits(data, counted, lambda split: read_pairs(data.path, split, data.columns, rules))


def _make_rules(data: ExampleRows, record: type[Any], counted: EncodedExamples) -> RowRules:
    """Returns how raw rows are read: with the user's function, if there is one, which may return a `record`."""
    convert = load_map(data.map, record) if data.map else None
    return RowRules(convert=convert, empty=data.empty, leave_out=counted.skip_row)


def _read_splits(
    data: ExampleRows, counted: EncodedExamples, read: Callable[[str], Iterable[K]]
) -> tuple[list[K], list[K]]:
    """Returns the rows to train on, and those that are held out: of the test split, or a share of the rows.

    Rows of training whose question is held out too are left out. `read` reads the rows of a split, and counts those
    that are left out in `counted`.
    """
    if not data.path:
        raise ConfigError(
            "the run has no data. Name a file with --data.path, for example --data.path rows.jsonl, or owner/name of a "
            "data set on the Hugging Face hub."
        )
    _require_splits(data)
    rows = list(read(data.train_split))
    if not rows:
        counted.require_groups()
    if not data.held_out_split:
        train, held_out = cut_held_out(rows, data.held_out)
        if not train:
            raise ConfigError(
                f"all {len(rows)} rows of {data.path} are held out: lower --data.held-out (now {data.held_out:g})."
            )
        return train, held_out
    held_out = list(read(data.held_out_split))
    asked = {row.key for row in held_out}
    train = [row for row in rows if row.key not in asked]
    if not train:
        raise ConfigError(
            f"every row of the split {data.train_split} of {data.path} is in its split {data.held_out_split} too: name "
            "other files or splits."
        )
    return train, held_out


def _require_splits(data: ExampleRows) -> None:
    """Raises ConfigError if splits are named of one file that has none."""
    is_named = data.train_split != "train" or data.test_split
    if is_named and "{split}" not in data.path and not locate_rows(data.path, data.train_split).remote:
        raise ConfigError(
            f"{data.path} is one file, which has no splits. Write the word split in braces in --data.path, where the "
            "names of your files have the split, or remove --data.train-split and --data.test-split."
        )


def _leave_out_problems(rows: Sequence[K], problems: TaskProblems | None, counted: EncodedExamples) -> list[K]:
    """Returns the rows without those that ask a problem of the evaluations. These are counted in `counted`."""
    asked = {hash_question(prompt.messages) for prompt in problems.prompts} if problems else set()
    kept = []
    for row in rows:
        if row.key in asked:
            counted.skip_row("they ask a problem of the evaluations", row.place)
        else:
            kept.append(row)
    return kept


def _encode_splits(
    config: SFT | DPO,
    train: Sequence[K],
    held_out: Sequence[K],
    counted: EncodedExamples,
    encode: Callable[[Sequence[K], EncodedExamples], EncodedExamples],
) -> tuple[EncodedExamples, list[Group]]:
    """Returns the training rows as groups, added to `counted`, and the first `eval.problems` held-out rows as groups.

    `encode` adds the groups of rows to a record. Raises TaskError if no row can be trained on.
    """
    encoded = encode(train, counted)
    encoded.require_groups()
    held = encode(held_out[: config.eval.problems or None], EncodedExamples(what="held-out rows"))
    encoded.other_lines = held.describe()
    return encoded, held.groups


def _choose_limit(config: RunConfig, data: ExampleRows | TaskAnswers, model: LoadedModel) -> int:
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


def _warn_of_long_warmup(config: RunConfig) -> None:
    """Warns in the log if the warm-up covers half of the run or more. Before the rows are read that is not known."""
    if warning := describe_long_warmup(config):
        log.warning("%s", warning)


def _make_learner(
    config: SFT | DPO, start: _RunModel, adapters: Adapters | None, grid: Grid, has_reference: bool = False
) -> LocalLearner:
    """Returns the learner of a run, with a frozen copy of the model if it needs one as a reference.

    `grid` are all ranks.
    """
    return LocalLearner(
        start.model.decoder,
        config.learner,
        config.optim,
        num_updates=config.steps * config.learner.updates_per_batch,
        reference=make_frozen_copy(start.model) if has_reference else None,
        adapters=adapters,
        world=grid,
    )


def _make_planned_learner(
    config: SFT | DPO,
    start: _RunModel,
    groups: Sequence[Group],
    size: int,
    problems: TaskProblems | None,
    grid: Grid,
    has_reference: bool = False,
) -> LocalLearner:
    """Returns the learner of a run with known examples, of which a step has `size`: its token budget fits them.

    `grid` are all ranks.

    On a GPU the memory is planned, that of answers to `problems` too. An automatic budget is at least as large as the
    longest group, in which every sample has a prompt of its own.
    """
    adapters = make_adapters(config, start.model.decoder)
    longest = max(map(_count_tokens, groups))
    budget = config.learner.token_budget
    demand = None
    # The shapes of models outside the native family are not known.
    if isinstance(start.model.config, ModelConfig):
        demand = MemoryDemand(
            model=start.model.config,
            bytes_per_number=start.model.decoder.embed.itemsize,
            longest=longest,
            batch_tokens=-(-size // grid.data.size) * longest,
            kv_tokens=0 if problems is None else problems.num_kv_tokens,
            has_reference=has_reference,
            num_trained=None if adapters is None else adapters.num_params,
            frozen_bytes=0 if adapters is None else adapters.base_bytes,
        )
    plan, settings = plan_ranks(demand, config.learner, start.device, grid)
    learner = _make_learner(replace(config, learner=settings), start, adapters, grid, has_reference)
    learner.apply_plan(plan)
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


def _digest_problems(digests: InputDigests, config: SFT | DPO, problems: TaskProblems | None) -> InputDigests:
    """Returns the digests with those of the problems of the config's task and of its grader, if it has a task."""
    if problems is None:
        return digests
    held = hashlib.sha256(f"{digests.held_out_rows} {digest_rows(problems.prompts)}".encode())
    return replace(digests, held_out_rows=held.hexdigest()[:16], grader=compute_grader_digest(config.task))


def _hash_group(group: Group) -> bytes:
    """Returns a hash of the tokens of a group and of their provenance."""
    digest = hashlib.sha256(np.array(group.prompt.tokens, dtype=np.int64).tobytes())
    for sample in group.samples:
        digest.update(np.array([sample.tokens, sample.provenance], dtype=np.int64).tobytes())
    return digest.digest()
