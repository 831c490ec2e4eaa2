"""Builds jobs from configs: loads model, tokenizer and task, and connects engine, learner, scorer and producers.

This is the composition root of training: loops and runs see protocols, and only this module names concrete classes.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.document import get_variant_name
from cohort.config.kinds import RL, SFT
from cohort.config.rollout import RolloutConfig
from cohort.config.schema import NativeEngine, RunConfig
from cohort.engines.base import require_for_training
from cohort.engines.factory import EngineModel, get_abilities, make_engine
from cohort.engines.sync import WeightSync
from cohort.errors import ConfigError
from cohort.jobs.rl import RLJob
from cohort.jobs.sft import SFTJob, make_example_source
from cohort.jobs.start import RunnableJob, resume_run, start_run
from cohort.learner.local import LocalLearner
from cohort.learner.plan import MemoryDemand, MemoryPlan, plan_memory
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.catalog import resolve_model
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder
from cohort.models.device import DTYPES, available_bytes, choose_device, choose_dtype
from cohort.models.files import LoadedModel, load_folder
from cohort.models.lora import Adapters
from cohort.models.peft import load_adapters
from cohort.rollout.producer import Order, Producer
from cohort.rollout.settings import make_again_rules, make_episode_settings, make_sampling, max_environment_tokens
from cohort.scoring.pool import ScoringPool, choose_num_workers
from cohort.tasks.base import check_packages
from cohort.tasks.source import make_data_path_absolute
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import RawTextRenderer, Tokenizer

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


def configure_torch(threads: int, device: torch.device) -> None:
    """Sets torch's number of threads (0 = all cores that this process may use).

    On a CPU, makes torch raise for nondeterministic operations. On a GPU deterministic algorithms would cost time, so
    equal runs may differ in the last bits there.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    # Equivalent to use_deterministic_algorithms(True), which would also import the compiler: a second at every start.
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else "default")


def build_rl_job(config: RL) -> RLJob:
    """Loads model and task, makes engine, learner and scoring workers, and returns the job that joins them.

    Sets torch's threads. Raises CohortError if the config cannot work, before any file of the run is written.
    """
    require_for_training(get_abilities(config.engine), get_variant_name("engine", config.engine))
    config = resolve_machine_settings(config)
    check_packages(config.task)
    device = choose_device(config.device)
    configure_torch(config.threads, device)
    folder, model, config = _load_model(config, device)
    tokenizer = Tokenizer.load(folder)
    sampling = make_sampling(config.sampling, tokenizer)
    algo = build_algorithm(config.algo, config.max_sampled_tokens)
    updates = config.learner.epochs * config.learner.minibatches
    adapters = _make_adapters(config, model.decoder)
    # With adapters the base weights are the reference, and no frozen copy is needed.
    has_reference = "ref" in algo.needs() and adapters is None
    plan = _plan_gpu_memory(config, model, device, has_reference, adapters)
    learner = LocalLearner(
        model.decoder,
        config.learner,
        config.optim,
        num_updates=config.steps * updates,
        temperature=sampling.temperature,
        reference=_make_frozen_copy(model) if has_reference else None,
        refresh_every=config.algo.kl.refresh,
        adapters=adapters,
    )
    learner.apply_plan(plan)
    # The longest sample, prompt included, must fit into one microbatch and into the model's context.
    longest = config.max_sampled_tokens + max_environment_tokens(config, tokenizer)
    limit = _compute_prompt_limit(longest, model, learner.token_budget)
    learner.expect_samples(limit + longest)
    stream = TaskStream(config.task, make_renderer(tokenizer, config.template), config.seed, max_prompt_tokens=limit)
    stream.check_enough_rows(config.batch.prompts)
    problems = stream.render_held_out(config.eval.problems)
    subject = EngineModel(
        decoder=model.decoder,
        decode=tokenizer.decode,
        context=limit + longest,
        reserve=0 if plan is None else plan.update,
    )
    engine = make_engine(config.engine, subject)
    scorer = ScoringPool(config.task, choose_num_workers(config.task), again=make_again_rules(config))
    training, evaluation = make_episode_settings(config, sampling, tokenizer)
    order: Order = "continuous" if config.rollout.order == "continuous" else "rounds"
    return RLJob(
        config=config,
        model=model,
        engine=engine,
        learner=learner,
        sync=WeightSync(get_weights=learner.weights, engine=engine),
        scorer=scorer,
        producer=Producer(engine, scorer, stream, training, order),
        eval_producer=Producer(engine, scorer, stream, evaluation, order),
        problems=problems,
        algo=algo,
        tokenizer=tokenizer,
    )


def make_renderer(tokenizer: Tokenizer, template: str) -> Renderer:
    """Returns the object that turns messages into tokens.

    `template` is "chat" for the model's chat template; any other value joins the messages as plain text.
    """
    return tokenizer if template == "chat" else RawTextRenderer(tokenizer)


def _plan_gpu_memory(
    config: RL, model: LoadedModel, device: torch.device, has_reference: bool, adapters: Adapters | None
) -> MemoryPlan | None:
    """Returns how GPU memory is divided among weights, microbatches and KV; None = no plan.

    There is no plan on a CPU, or for a model that Cohort does not implement itself. `has_reference` = a frozen copy of
    the model is needed as well. `adapters` = only these are trained; None = all weights. Prompts are assumed to have up
    to ASSUMED_PROMPT_TOKENS, because the task is read later.
    """
    # The shapes of models outside the native family are not known.
    if device.type != "cuda" or not isinstance(model.config, ModelConfig):
        return None
    batch = config.batch
    new = config.max_sampled_tokens
    prompt = max(1, min(ASSUMED_PROMPT_TOKENS, model.config.context - new))
    rows = batch.prompts * batch.samples
    demand = MemoryDemand(
        model=model.config,
        bytes_per_number=model.decoder.embed.itemsize,
        longest=prompt + new,
        batch_tokens=batch.prompts * prompt + rows * new,
        kv_tokens=batch.prompts * prompt + min(rows, config.engine.slots) * new,
        has_reference=has_reference,
        num_trained=None if adapters is None else adapters.num_params,
        frozen_bytes=0 if adapters is None else adapters.base_bytes,
    )
    return plan_memory(demand, available_bytes(device), config.learner.token_budget)


def _compute_prompt_limit(longest: int, model: LoadedModel, budget: int) -> int:
    """Returns the length in tokens of the longest prompt that fits before a completion of `longest` tokens.

    Both together must fit into the model's context and into one microbatch of `budget` tokens. Raises ConfigError if no
    prompt fits.
    """
    context = model.config.context
    room = min(context, budget) - longest
    if longest >= context:
        raise ConfigError(
            f"A completion may have {longest} tokens, all turns together, which leaves no room for a prompt in the "
            f"model's context of {context} tokens. Lower --sampling.max_tokens (with more turns also --turns.attempts)."
        )
    if room < 1:
        raise ConfigError(
            f"A completion may have {longest} tokens, all turns together, which leaves no room for a prompt in a "
            f"microbatch of {budget} tokens. Lower --sampling.max_tokens, or raise --learner.token_budget."
        )
    return room


def _load_model(config: C, device: torch.device) -> tuple[Path, LoadedModel, C]:
    """Finds or fetches the model that the config names, and loads it.

    Returns its folder, the model on the device, and the config adapted to the model's architecture.
    """
    folder = resolve_model(config.model)
    model = load_folder(folder, DTYPES[config.learner.dtype])
    model.decoder.to(device)
    return folder, model, _adapt_to_architecture(config, model.decoder)


def _make_frozen_copy(model: LoadedModel) -> AnyDecoder:
    """Returns a copy of the model whose weights are never trained, for use as the reference policy."""
    frozen = copy.deepcopy(model.decoder)
    frozen.requires_grad_(False)
    return frozen


def _adapt_to_architecture(config: C, decoder: AnyDecoder) -> C:
    """Returns the config, with `learner.prefix_sharing` off if Cohort does not implement the model itself.

    Such a model (`AutoDecoder`, from transformers) computes a prompt once per sample, not once per group. Raises
    ConfigError if the config asks for adapters, which such a model cannot have.
    """
    if not isinstance(decoder, AutoDecoder):
        return config
    if config.learner.lora.is_on:
        raise ConfigError(
            f"learner.lora needs a model that Cohort implements itself, and {decoder.config.architecture} is not one: "
            "train without adapters (--learner.lora.rank 0, no --learner.lora.load), or use another --model."
        )
    return replace(config, learner=replace(config.learner, prefix_sharing=False))


def _make_adapters(config: RunConfig, decoder: AnyDecoder) -> Adapters | None:
    """Returns the LoRA adapters of `decoder` that the config asks for, new or read from learner.lora.load.

    Freezes the decoder's own weights then. None, and nothing is changed, if the config asks for no adapters, or the
    model is not one that Cohort implements itself.
    """
    lora = config.learner.lora
    if not isinstance(decoder, Decoder):
        return None
    if lora.load:
        loaded = load_adapters(lora.load)
        return Adapters(decoder, replace(loaded.config, base=lora.base), config.seed, loaded.tensors)
    return Adapters(decoder, lora, config.seed) if lora.rank else None


def train(config: RunConfig, out: Path, log: str, *sinks: str) -> Path:
    """Trains a config in a new run directory below `out`, and returns the path of that directory.

    `log` names the terminal output ("auto", "live", "plain" or "json"), `sinks` the programs that also get the metrics.
    A relative path in `task.data` is made absolute. If a signal stops the run, saves a checkpoint and raises
    KeyboardInterrupt.
    """
    # Stored as an absolute path, so that the run can be resumed from another folder.
    if isinstance(config, RL) and isinstance(data := getattr(config.task, "data", None), str) and data:
        config = replace(config, task=replace(config.task, data=make_data_path_absolute(data)))
    return start_run(config, _build_job, out, log, sinks)


def resume(path: Path, steps: int | None, log: str, *sinks: str) -> Path:
    """Continues the run in `path` from its newest checkpoint, and returns `path`.

    `steps` is the new total number of steps, not less than before; None keeps the run's number. `log`, `sinks` and
    signals: see `train`.
    """
    return resume_run(path, _build_job, steps, log, sinks)


def _build_job(config: RunConfig) -> RunnableJob:
    """Returns the job of a config: an RLJob or an SFTJob, by the class of the config."""
    if isinstance(config, SFT):
        return build_sft_job(config)
    assert isinstance(config, RL), f"nothing is built for the kind {config.kind}"
    return build_rl_job(config)


def build_sft_job(config: SFT) -> SFTJob:
    """Loads the model and the examples, and returns the job of supervised fine-tuning.

    Sets torch's threads. Writes no run files.
    """
    device = choose_device(config.device)
    learner = replace(config.learner, dtype=choose_dtype(config.learner.dtype, device))
    config = replace(config, device="cpu" if device.type == "cpu" else "cuda", learner=learner)
    configure_torch(config.threads, device)
    folder, model, config = _load_model(config, device)
    return SFTJob(
        config=config,
        model=model,
        learner=LocalLearner(
            model.decoder,
            config.learner,
            config.optim,
            num_updates=config.steps * config.learner.updates_per_batch,
            adapters=_make_adapters(config, model.decoder),
        ),
        examples=make_example_source(config, Tokenizer.load(folder)),
    )
