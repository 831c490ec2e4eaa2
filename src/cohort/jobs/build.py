"""The composition root: the only place that names concrete engines and learners."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.document import variant_name
from cohort.config.kinds import RL, SFT
from cohort.config.rollout import RolloutConfig
from cohort.config.schema import NativeEngine, RunConfig
from cohort.engines.base import require_for_training
from cohort.engines.factory import Subject, abilities_of, make_engine
from cohort.engines.sync import WeightSync
from cohort.errors import ConfigError
from cohort.jobs import life
from cohort.jobs.rl import Parts
from cohort.jobs.sft import SFTParts, examples_of
from cohort.learner.local import LocalLearner
from cohort.learner.plan import Load, Plan, plan_memory
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.catalog import resolve
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder
from cohort.models.device import DTYPES, available_bytes, find_device, find_dtype
from cohort.models.files import LoadedModel, load_folder
from cohort.models.lora import Adapters
from cohort.models.peft import load_adapters
from cohort.rollout.producer import Order, Producer
from cohort.rollout.settings import again_rules, drawings, room_between, sampling_of
from cohort.scoring.pool import ScoringPool, default_workers
from cohort.tasks.base import check_packages
from cohort.tasks.source import from_anywhere
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import RawText, Tokenizer

C = TypeVar("C", bound=RunConfig)

USUAL_PROMPT = 1024  # tokens: what a plan of memory supposes


def settled(config: RL) -> RL:
    """With what depends on the machine decided: the run records it and goes on so elsewhere, or says that it cannot."""
    device = find_device(config.device)
    learner, engine = replace(config.learner, dtype=find_dtype(config.learner.dtype, device)), config.engine
    if config.rollout.order == "auto":
        config = replace(config, rollout=RolloutConfig(order="rounds" if device.type == "cpu" else "continuous"))
    if device.type == "cpu":
        return replace(config, device="cpu", learner=learner)
    if isinstance(engine, NativeEngine) and engine.weights != "shared":
        if config.device == "cuda":
            raise ConfigError(f"engine.weights = {engine.weights} is for CPUs: on a GPU drop it.")
        engine = replace(engine, weights="shared")
    return replace(config, device="cuda", learner=learner, engine=engine)


def use_threads(threads: int, device: torch.device) -> None:
    """Settle everything in torch that could make two equal runs differ, as far as that is free on a GPU."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    # The same as use_deterministic_algorithms(True), which also imports the compiler: a second at every start.
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else "default")


def assemble(config: RL) -> Parts:
    """Load the model and the task and connect the parts; refuses what cannot work before anything is written."""
    require_for_training(abilities_of(config.engine), variant_name("engine", config.engine))
    config = settled(config)
    check_packages(config.task)
    device = find_device(config.device)
    use_threads(config.threads, device)
    folder = resolve(config.model)
    model = load_folder(folder, DTYPES[config.learner.dtype])
    model.decoder.to(device)
    config = _suited(config, model.decoder)
    tokenizer = Tokenizer.load(folder)
    sampling = sampling_of(config.sampling, tokenizer)
    algo = build_algorithm(config.algo, config.max_sampled)
    updates = config.learner.epochs * config.learner.minibatches
    adapters = _adapters(config, model.decoder)
    has_reference = "ref" in algo.needs() and adapters is None
    plan = _plan(config, model, device, has_reference, adapters)
    learner = LocalLearner(
        model.decoder,
        config.learner,
        config.optim,
        num_updates=config.steps * updates,
        temperature=sampling.temperature,
        reference=_frozen_copy(model) if has_reference else None,
        adapters=adapters,
    )
    learner.follow(plan)
    learner.refresh_every = config.algo.kl.refresh
    longest = config.max_sampled + room_between(config, tokenizer)
    limit = _prompt_limit(longest, model, learner.token_budget)
    learner.least_budget = limit + longest
    stream = TaskStream(config.task, renderer(tokenizer, config.template), config.seed, max_prompt_tokens=limit)
    stream.check(config.batch.prompts)
    problems = stream.held_out(config.eval.problems)
    subject = Subject(
        decoder=model.decoder,
        decode=tokenizer.decode,
        context=limit + longest,
        reserve=0 if plan is None else plan.update,
    )
    engine = make_engine(config.engine, subject)
    scorer = ScoringPool(config.task, default_workers(config.task), again=again_rules(config))
    training, evaluation = drawings(config, sampling, tokenizer)
    order: Order = "continuous" if config.rollout.order == "continuous" else "rounds"
    return Parts(
        config=config,
        model=model,
        engine=engine,
        learner=learner,
        sync=WeightSync(weights=learner.weights, engine=engine),
        scorer=scorer,
        producer=Producer(engine, scorer, stream, training, order),
        eval_producer=Producer(engine, scorer, stream, evaluation, order),
        problems=problems,
        algo=algo,
        tokenizer=tokenizer,
    )


def renderer(tokenizer: Tokenizer, template: str) -> Renderer:
    """How prompts become tokens: by the chat template unless raw text was asked for."""
    return tokenizer if template == "chat" else RawText(tokenizer)


def _plan(
    config: RL, model: LoadedModel, device: torch.device, has_reference: bool, adapters: Adapters | None
) -> Plan | None:
    """How a GPU's memory is used; a CPU's is the system's affair. How long prompts are is not known yet: a guess."""
    if device.type != "cuda" or not isinstance(model.config, ModelConfig):  # of others the shapes are not known
        return None
    batch, new = config.batch, config.max_sampled
    prompt = max(1, min(USUAL_PROMPT, model.config.context - new))
    rows = batch.prompts * batch.samples
    load = Load(
        model=model.config,
        width=model.decoder.embed.itemsize,
        longest=prompt + new,
        batch_tokens=batch.prompts * prompt + rows * new,
        kv_tokens=batch.prompts * prompt + min(rows, config.engine.slots) * new,
        has_reference=has_reference,
        trained=None if adapters is None else adapters.num_params,
        base=0 if adapters is None else adapters.base_bytes,
    )
    return plan_memory(load, available_bytes(device), config.learner.token_budget)


def _prompt_limit(longest: int, model: LoadedModel, budget: int) -> int:
    """The longest prompt that fits the model's context and one microbatch together with its completion."""
    context = model.config.context
    room = min(context, budget) - longest
    if room < 1:
        raise ConfigError(
            f"completions of {longest} tokens (sampling.max_tokens, turns) leave no room for a prompt in the "
            f"model's context of {context} and learner.token_budget = {budget}; lower them or raise the budget"
        )
    return room


def _frozen_copy(model: LoadedModel) -> AnyDecoder:
    frozen = copy.deepcopy(model.decoder)
    frozen.requires_grad_(False)
    return frozen


def _suited(config: C, decoder: AnyDecoder) -> C:
    """For a model outside the native family: a prompt is computed once a sample, so microbatches are packed so."""
    if not isinstance(decoder, AutoDecoder):
        return config
    if config.learner.lora.on:
        raise ConfigError(f"learner.lora is for native models, {decoder.config.architecture} is none: leave it out")
    return replace(config, learner=replace(config.learner, prefix_sharing=False))


def _adapters(config: RunConfig, decoder: AnyDecoder) -> Adapters | None:
    lora = config.learner.lora
    if not isinstance(decoder, Decoder):
        return None
    if lora.load:
        found = load_adapters(lora.load)
        return Adapters(decoder, replace(found.config, base=lora.base), config.seed, found.tensors)
    return Adapters(decoder, lora, config.seed) if lora.rank else None


def train(config: RunConfig, out: Path, log: str, *sinks: str) -> Path:
    """Run a config in a new run directory; returns where it is. Asked to stop, saves and raises KeyboardInterrupt."""
    if isinstance(config, RL) and isinstance(data := getattr(config.task, "data", None), str) and data:
        config = replace(config, task=replace(config.task, data=from_anywhere(data)))
    return life.start(config, _work, out, log, sinks)


def resume(path: Path, steps: int | None, log: str, *sinks: str) -> Path:
    """Continue a run exactly where it stopped, to `steps` if given; stops as `train` does."""
    return life.go_on(path, _work, steps, log, sinks)


def _work(config: RunConfig) -> life.Work:
    """The job of a config, by its kind."""
    if isinstance(config, SFT):
        return assemble_sft(config)
    assert isinstance(config, RL), f"nothing is built for the kind {config.kind}"
    return assemble(config)


def assemble_sft(config: SFT) -> SFTParts:
    """Load the model and the examples of supervised fine-tuning."""
    device = find_device(config.device)
    learner = replace(config.learner, dtype=find_dtype(config.learner.dtype, device))
    config = replace(config, device="cpu" if device.type == "cpu" else "cuda", learner=learner)
    use_threads(config.threads, device)
    folder = resolve(config.model)
    model = load_folder(folder, DTYPES[config.learner.dtype])
    model.decoder.to(device)
    config = _suited(config, model.decoder)
    return SFTParts(
        config=config,
        model=model,
        learner=LocalLearner(
            model.decoder,
            config.learner,
            config.optim,
            num_updates=config.steps * config.learner.updates,
            adapters=_adapters(config, model.decoder),
        ),
        examples=examples_of(config, Tokenizer.load(folder)),
    )
