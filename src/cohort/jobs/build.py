"""Builds jobs from configs: loads model, tokenizer and task, and connects engine, learner, scorer and producers.

This is the composition root of training: loops and runs see protocols, and only this module names concrete classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.config.document import get_variant_name
from cohort.config.engines import VllmEngine
from cohort.config.imitation import DPO, SFT
from cohort.config.kinds import RL
from cohort.config.rollout import RolloutConfig
from cohort.config.schema import Conversation, NativeEngine, RunConfig
from cohort.engines.base import ComparableEngine, Engine, require_for_training
from cohort.engines.factory import EngineModel, get_abilities, make_engine
from cohort.engines.fleet.room import has_given_servers, is_elsewhere, leave_room
from cohort.engines.sync import Canary, WeightSync
from cohort.errors import ConfigError
from cohort.evaluation.evaluate import digest_rows
from cohort.jobs.imitation import build_dpo_job, build_sft_job
from cohort.jobs.inputs import InputDigests, settle_inputs
from cohort.jobs.memory import check_room_beside, plan_ranks
from cohort.jobs.parts import configure_torch, digest_files, load_model, make_adapters, make_frozen_copy
from cohort.jobs.rl import RLJob
from cohort.jobs.start import RunnableJob, resume_run, start_run
from cohort.learner.local import LocalLearner
from cohort.learner.plan import MemoryDemand
from cohort.models.config import ModelConfig
from cohort.models.device import choose_device, choose_dtype, measure_total_bytes
from cohort.models.files import LoadedModel
from cohort.models.lora import Adapters
from cohort.ranks.agree import agree_on_errors
from cohort.ranks.groups import GroupMover
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.rollout.producer import Order, Producer
from cohort.rollout.settings import (
    make_again_rules,
    make_conversation_rules,
    make_episode_settings,
    make_sampling,
    max_environment_tokens,
)
from cohort.scoring.base import Pool
from cohort.scoring.start import start_scorer
from cohort.tasks.base import check_packages
from cohort.tasks.ref import compute_grader_digest
from cohort.tasks.stream import TaskStream
from cohort.text import PromptRenderer, Tokenizer
from cohort.text.framing import read_template
from cohort.types import Prompt
from cohort.world import ONE_PROCESS, Grid, World

log = logging.getLogger(__name__)
C = TypeVar("C", bound=RunConfig)

# The length of a prompt that the plan of GPU memory assumes: the task is not read yet when the plan is made.
ASSUMED_PROMPT_TOKENS = 1024


def resolve_machine_settings(config: RL) -> RL:
    """Returns the config with device, dtype, order of rollouts and engine weights decided for this machine.

    The run records the result. Resumed on another machine it keeps these settings, or is refused. Raises ConfigError if
    device is cuda and there is no GPU, or `engine.weights` asks for what works on a CPU only.
    """
    device = choose_device(config.device)
    learner = replace(config.learner, dtype=choose_dtype(config.learner.dtype, device))
    engine = config.engine
    if config.rollout.order == "auto":
        # Rounds make the bits of a run independent of the speed of graders, but they wait for the slowest answer.
        config = replace(config, rollout=RolloutConfig(order="rounds" if device.type == "cpu" else "continuous"))
    if device.type == "cpu":
        return replace(config, device="cpu", learner=learner)
    if isinstance(engine, NativeEngine) and engine.weights != "shared":
        if config.device == "cuda":
            raise ConfigError(
                f"engine.weights = {engine.weights} works on a CPU only, and device is cuda: set --engine.weights "
                "shared, or --device cpu."
            )
        # The device was chosen automatically, so a recipe that was written for a CPU still works.
        engine = replace(engine, weights="shared")
    return replace(config, device="cuda", learner=learner, engine=engine)


def build_rl_job(config: RL, world: World = ONE_PROCESS) -> RLJob:
    """Loads model and task, makes engine, learner and scoring workers, and returns the job that joins them.

    `world` are the ranks that train together. Sets torch's threads. Raises CohortError if the config cannot work,
    before any file of the run is written.
    """
    # All ranks must join: it comes before anything that may fail on one of them.
    grid = world.split(config.learner.tensor)
    _check_engine(config, world)
    config = resolve_machine_settings(config)
    check_packages(config.task)
    device = choose_device(config.device)
    configure_torch(config.threads, device)
    folder, model, config = load_model(config, device)
    tokenizer = Tokenizer.load(folder, config.date, read_template(config.template))
    sampling = make_sampling(config.sampling, tokenizer)
    algo = build_algorithm(config.algo, config.max_sampled_tokens)
    agree_on_errors(grid.whole, lambda: leave_room(config.engine, device))
    learner = _make_learner(config, model, algo, device, grid)
    plan = learner.plan
    num_compared = config.algo.num_compared
    if plan is None and not config.learner.token_budget:
        learner.token_budget *= num_compared
    longest, limit = _choose_lengths(config, model, tokenizer, learner.token_budget)
    # Samples that are compared with each other, each with its prompt, are in one microbatch.
    learner.expect_samples(num_compared * (limit + longest))
    stream = _make_stream(config, tokenizer, limit)
    problems = stream.render_held_out(config.eval.problems, config.eval.split, or_fewer=True)
    subject = EngineModel(
        decoder=model.decoder,
        decode=tokenizer.decode,
        context=limit + longest,
        reserve=0 if plan is None else plan.update,
        folder=folder,
        tokenizer=tokenizer,
        is_divided=grid.tensor.size > 1 or learner.config.shard == "full",
        threads=config.threads,
        dtype=config.learner.dtype,
    )
    engine = make_engine(config.engine, subject)
    sync = WeightSync(get_weights=learner.weights, engine=engine, canary=_make_canary(engine, learner, config, model))
    # A server that is given may have the weights of an earlier run.
    sync.start(load_first=config.learner.lora.base == "nf4" or has_given_servers(config.engine))
    scorer = make_scorer(config, tokenizer)
    training, evaluation = make_episode_settings(
        config, sampling, tokenizer, context=limit + longest if isinstance(config.turns, Conversation) else 0
    )
    order: Order = "continuous" if config.rollout.order == "continuous" else "rounds"
    return RLJob(
        config=config,
        model=model,
        inputs=_digest_inputs(config, folder, stream, problems),
        engine=engine,
        learner=learner,
        sync=sync,
        scorer=scorer,
        producer=Producer(engine, scorer, stream, training, order, world),
        eval_producer=Producer(engine, scorer, stream, evaluation, order, world),
        problems=problems,
        num_problems_left_out=stream.num_skipped,
        algo=algo,
        mover=GroupMover(world, grid),
        tokenizer=tokenizer,
    )


def _check_engine(config: RL, world: World) -> None:
    """Raises ConfigError if the engine cannot be trained with, or not in this way."""
    name = get_variant_name("engine", config.engine)
    s = config.sampling
    require_for_training(get_abilities(config.engine), name, truncates=s.top_p < 1 or s.top_k > 0 or s.min_p > 0)
    # vLLM uses torch's group of processes, of which there is one: it would take the ranks for its own.
    if isinstance(config.engine, VllmEngine) and not config.engine.is_served and world.size > 1:
        raise ConfigError(
            f"vLLM in the process that trains needs that this is one, and this run has {world.size} ranks: set "
            "--engine.place server, or start one process, without torchrun."
        )


def _make_canary(engine: Engine, learner: LocalLearner, config: RL, model: LoadedModel) -> Canary | None:
    """Returns what proves that weights arrive in the engine; None if it samples from the learner's own storage."""
    if not isinstance(engine, ComparableEngine):
        return None
    return Canary(
        engine=engine,
        compute=learner.compute_logprobs,
        vocab_size=model.config.vocab_size,
        dtype=config.learner.dtype,
    )


def _make_learner(config: RL, model: LoadedModel, algo: Algorithm, device: torch.device, grid: Grid) -> LocalLearner:
    """Returns the learner of a run for one of the ranks of `grid`, with adapters and a reference if it needs them."""
    adapters = make_adapters(config, model.decoder)
    # With adapters the base weights are the reference, and no frozen copy is needed.
    has_reference = "ref" in algo.needs() | algo.loss_needs() and adapters is None
    demand = _estimate_demand(config, model, has_reference, adapters, grid)
    plan, settings = plan_ranks(demand, config.learner, device, grid)
    if plan is not None and isinstance(config.engine, VllmEngine) and not config.engine.is_served:
        check_room_beside(plan, config.engine.memory, measure_total_bytes(device))
    learner = LocalLearner(
        model.decoder,
        settings,
        config.optim,
        num_updates=config.steps * config.learner.updates_per_batch,
        temperature=config.sampling.temperature,
        reference=make_frozen_copy(model) if has_reference else None,
        refresh_every=config.algo.kl.refresh,
        adapters=adapters,
        world=grid,
    )
    learner.apply_plan(plan)
    return learner


def make_scorer(config: RL, tokenizer: Tokenizer) -> Pool:
    """Starts the workers that score the answers of a run, and run its tools and environments."""
    turns = config.turns
    rules = make_conversation_rules(turns, tokenizer) if isinstance(turns, Conversation) else None
    return start_scorer(config.task, config.scoring, make_again_rules(config), rules)


def _make_stream(config: RL, tokenizer: Tokenizer, max_prompt_tokens: int) -> TaskStream:
    """Reads the rows of the task, and returns the stream of training prompts of at most `max_prompt_tokens` tokens.

    Raises ConfigError if there are fewer rows than a step needs, or if the system prompt alone is too long.
    """
    format = config.turns.format if isinstance(config.turns, Conversation) else "auto"
    renderer = PromptRenderer(tokenizer, config.template, config.system, None if format == "auto" else format)
    renderer.check_system(max_prompt_tokens)
    stream = TaskStream(
        config.task,
        renderer,
        config.seed,
        max_prompt_tokens=max_prompt_tokens,
        too_long=config.batch.too_long,
        validation_share=config.eval.validation_share if config.eval.split == "validation" else 0.0,
    )
    stream.check_enough_rows(config.batch.prompts)
    return stream


def _estimate_demand(
    config: RL, model: LoadedModel, has_reference: bool, adapters: Adapters | None, grid: Grid
) -> MemoryDemand | None:
    """Returns the sizes of a step on one rank that decide its memory; None if the model's shapes are not known.

    That is so for a model that Cohort does not implement itself. `has_reference` = a frozen copy of the model is needed
    as well. `adapters` = only these are trained; None = all weights. Prompts are assumed to have up to
    ASSUMED_PROMPT_TOKENS, because the task is read later.
    """
    if not isinstance(model.config, ModelConfig):
        return None
    new = config.max_sampled_tokens
    prompt = max(1, min(ASSUMED_PROMPT_TOKENS, model.config.context - new))
    # A rank samples its own prompts, and trains on those that its row of the grid has.
    sampled = -(-config.batch.prompts // grid.whole.size)
    trained = -(-config.batch.prompts // grid.data.size)
    samples = config.batch.samples
    # vLLM in this process gives its memory up for the update. An engine in another process has a share of its own.
    keeps_kv = not (isinstance(config.engine, VllmEngine) or is_elsewhere(config.engine))
    return MemoryDemand(
        model=model.config,
        bytes_per_number=model.decoder.embed.itemsize,
        # Samples that are compared with each other are in one microbatch.
        longest=config.algo.num_compared * (prompt + new),
        batch_tokens=trained * (prompt + samples * new),
        kv_tokens=keeps_kv * (sampled * prompt + min(sampled * samples, config.engine.slots) * new),
        has_reference=has_reference,
        num_trained=None if adapters is None else adapters.num_params,
        frozen_bytes=0 if adapters is None else adapters.base_bytes,
    )


def _choose_lengths(config: RL, model: LoadedModel, tokenizer: Tokenizer, budget: int) -> tuple[int, int]:
    """Returns the most tokens of a completion, all turns together, and those of the longest prompt before it.

    The longest sample, prompt included, must fit into one microbatch of `budget` tokens, as often as samples are
    compared, and into the model's context. Raises ConfigError if no prompt fits.
    """
    num_compared = config.algo.num_compared
    longest = config.max_sampled_tokens + max_environment_tokens(config, tokenizer)
    if isinstance(config.turns, Conversation):
        # A conversation ends when it has no room left, so half of the context is kept for long prompts. Where a prompt
        # is shorter, the conversation may use the rest.
        longest = min(longest, min(model.config.context, budget // num_compared) // 2)
    return longest, _compute_prompt_limit(longest, model, budget, num_compared)


def _compute_prompt_limit(longest: int, model: LoadedModel, budget: int, num_compared: int = 1) -> int:
    """Returns the length in tokens of the longest prompt that fits before a completion of `longest` tokens.

    Both together must fit into the model's context, and `num_compared` times into one microbatch of `budget` tokens.
    Raises ConfigError if no prompt fits.
    """
    context = model.config.context
    room = min(context, budget // num_compared) - longest
    if longest >= context:
        raise ConfigError(
            f"A completion may have {longest} tokens, all turns together, which leaves no room for a prompt in the "
            f"model's context of {context} tokens. Lower --sampling.max_tokens (with more turns also --turns.attempts)."
        )
    if room < 1:
        twice = f", which holds {num_compared} of them with their prompts" if num_compared > 1 else ""
        raise ConfigError(
            f"A completion may have {longest} tokens, all turns together, which leaves no room for a prompt in a "
            f"microbatch of {budget} tokens{twice}. Lower --sampling.max_tokens, or raise --learner.token_budget."
        )
    return room


def train(config: RunConfig, out: Path, log: str, *sinks: str, name: str | None = None) -> Path:
    """Trains a config in a new run directory below `out`, and returns the path of that directory.

    `log` names the terminal output ("auto", "live", "plain" or "json"), `sinks` the programs that also get the metrics.
    `name` is that of the run directory; None = a new one from date and recipe. Relative paths of model,
    adapters and data are made absolute. If a signal stops the run, saves a checkpoint and raises KeyboardInterrupt.
    """
    try:
        return start_run(settle_inputs(config), build_job, out, log, sinks, name, join_ranks(config.device))
    finally:
        leave_ranks()


def resume(path: Path, steps: int | None, log: str, *sinks: str, changes: Sequence[str] = ()) -> Path:
    """Continues the run in `path` from its newest checkpoint, and returns `path`.

    `steps` is the new total number of steps, not less than before; None keeps the run's number. `changes` are other
    settings with new values, as words of a command line. `log`, `sinks` and signals: see `train`.
    """
    try:
        # The device is not known before the run is read, and only the first rank can read it.
        return resume_run(path, build_job, steps, log, sinks, join_ranks("auto"), changes)
    finally:
        leave_ranks()


def build_job(config: RunConfig, world: World = ONE_PROCESS) -> RunnableJob:
    """Returns the job of a config, by its class, for one of the ranks of `world`."""
    check_ranks(config, world)
    if isinstance(config, SFT):
        return build_sft_job(config, world)
    if isinstance(config, DPO):
        return build_dpo_job(config, world)
    assert isinstance(config, RL), f"nothing is built for the kind {config.kind}"
    return build_rl_job(config, world)


def check_ranks(config: RunConfig, world: World) -> None:
    """Raises ConfigError if the settings cannot work on this number of ranks. Warns of one that has no effect.

    A run that was begun on several ranks keeps its settings on one.
    """
    tensor, shard = config.learner.tensor, config.learner.shard
    if world.size == 1 and shard in ("optimizer", "full"):
        log.warning("learner.shard = %s has no effect, because there is one rank; --ranks N starts more", shard)
    if world.size % tensor:
        raise ConfigError(
            f"learner.tensor is {tensor}, which does not divide the number of ranks, {world.size}: set --ranks to a "
            f"multiple of {tensor}, or another --learner.tensor."
        )


def _digest_inputs(config: RL, folder: Path, stream: TaskStream, problems: Sequence[Prompt]) -> InputDigests:
    """Returns digests of the model in `folder`, of the adapters that the config loads, of the task's rows and grader.

    `stream` has the rows for training, `problems` those of evaluations.
    """
    rows = stream.compute_digest()
    return replace(
        digest_files(config, folder),
        train_rows=rows.content,
        train_order=rows.order,
        held_out_rows=digest_rows(problems),
        grader=compute_grader_digest(stream.task),
    )
