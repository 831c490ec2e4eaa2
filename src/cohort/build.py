"""The composition root: the only place that names concrete engines and learners."""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from cohort import bench
from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.checkpoint import Checkpoint
from cohort.config.document import dump, parse, variant_name
from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.config.rollout import RolloutConfig
from cohort.config.schema import NativeEngine, RunConfig
from cohort.device import DTYPES, available_bytes, find_device, find_dtype
from cohort.engines.base import Engine, require_for_training
from cohort.engines.factory import Subject, abilities_of, make_engine
from cohort.engines.sync import WeightSync
from cohort.errors import ConfigError, ModelError, RunError
from cohort.evaluate import evaluate as run_evaluation
from cohort.evaluate import rows_digest, sampling_facts
from cohort.learner.local import LocalLearner
from cohort.learner.plan import Load, Plan, plan_memory
from cohort.logs.forward import forwarded
from cohort.logs.sinks.registry import make_sinks
from cohort.logs.view import View, make_view
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.catalog import resolve
from cohort.models.config import ModelConfig, check_context
from cohort.models.decoder import Decoder
from cohort.models.files import LoadedModel, load_folder, save_folder
from cohort.models.lora import Adapters
from cohort.models.peft import load_adapters
from cohort.models.shapes import named_shape, random_decoder
from cohort.rollout.producer import Order, Producer
from cohort.rollout.settings import again_rules, drawings, room_between, sampling_of
from cohort.scoring.pool import ScoringPool, default_workers
from cohort.store.records import EvalSetting, Evaluation
from cohort.store.rundir import RunDirectory
from cohort.tasks.base import check_packages
from cohort.tasks.ref import TaskRef, grader_digest
from cohort.tasks.source import from_anywhere
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import RawText, Tokenizer
from cohort.train.replay import Replay
from cohort.train.rl import train as run_loop
from cohort.train.run import Hooks, Run
from cohort.types import Prompt

USUAL_PROMPT = 1024  # tokens: what a plan of memory supposes


@dataclass(kw_only=True)
class Parts:
    """Everything a run is made of."""

    config: RunConfig
    model: LoadedModel
    engine: Engine
    learner: LocalLearner
    sync: WeightSync  # from the learner to the engine
    scorer: ScoringPool
    producer: Producer  # of what is trained
    eval_producer: Producer  # of what is evaluated
    problems: list[Prompt]  # held out
    algo: Algorithm

    tokenizer: Tokenizer

    def evaluate(self, step: int) -> Evaluation:
        c = self.config
        setting = EvalSetting(
            task=c.task.name,
            split="test",
            num_problems=len(self.problems),
            num_samples=c.eval.samples,
            model=c.model,
            weights="",
            knobs=TaskRef.of(c.task).knobs,
            rows=rows_digest(self.problems),
            grader=grader_digest(c.task),
            template=c.template,
            engine=self.engine.name,
            place=f"{c.device} {c.learner.dtype}",
            sampling=sampling_facts(self.eval_producer.drawing.sampling),
            seed=c.seed,
            step=step,
            turns="first" if self.eval_producer.drawing.further is None else "all",
        )
        return run_evaluation(
            self.eval_producer, self.problems, setting, lambda p: self.tokenizer.spell(p.tokens), then="resume the run"
        )

    def checkpoint(self, step: int) -> Checkpoint:
        tensors, numbers = self.learner.state()
        # The number of steps is the one setting that may change, so a checkpoint does not know it.
        settings = dump(replace(self.config, steps=0))
        numbers |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "config": settings}
        numbers["algo"] = self.algo.state()
        if self.learner.adapters is not None:
            numbers["lora"] = asdict(self.learner.adapters.config)
        rollouts = self.producer.state()
        if rollouts["open"]:  # none after a step that waits for all its groups
            numbers["open"] = rollouts["open"]
        return Checkpoint(step=step, cursor=rollouts["cursor"], optimizer=tensors, numbers=numbers)

    def write_model(self, folder: Path) -> None:
        save_folder(self.model.decoder, self.model.hf_config, self.model.folder, folder)

    def restore(self, state: Checkpoint) -> None:
        """Become the state of a checkpoint. The weights are copied in place: engine and learner share them."""
        assert state.model is not None
        RunDirectory(state.model.parents[2], parse(state.numbers["config"], warn=False)).require_same(self.config)
        # Sums depend on the number of threads, so the run keeps its own, also where there are fewer cores.
        torch.set_num_threads(int(state.numbers["threads"]))
        decoder = self.model.decoder
        saved = load_folder(state.model, decoder.embed.dtype).decoder
        if self.learner.adapters is None:
            decoder.load_state_dict(saved.state_dict())
        self.learner.load_state(state.optimizer, state.numbers)
        self.algo.load_state(state.numbers["algo"])
        if self.learner.adapters is not None:
            _require_merged(decoder, saved, self.config.model)
        self.producer.load_state({"cursor": state.cursor, "open": state.numbers.get("open", [])})
        self.sync.send(state.step)

    def close(self) -> None:
        self.scorer.close()
        self.engine.close()


def settled(config: RunConfig) -> RunConfig:
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


def assemble(config: RunConfig) -> Parts:
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
    config: RunConfig, model: LoadedModel, device: torch.device, has_reference: bool, adapters: Adapters | None
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


def _suited(config: RunConfig, decoder: AnyDecoder) -> RunConfig:
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


def _require_merged(decoder: AnyDecoder, saved: AnyDecoder, model: str) -> None:
    """The base is read from the run's model again: with the adapters it must be what the checkpoint has."""
    for (name, p), q in zip(decoder.state_dict().items(), saved.state_dict().values(), strict=True):
        close = 4 * torch.finfo(p.dtype).eps
        if not torch.allclose(p.cpu(), q, rtol=close, atol=close * float(q.abs().max())):
            raise RunError(
                f"{model} is no longer the model this run was started from: with the checkpoint's adapters, {name} "
                "is not the checkpoint's; put the original back."
            )


def train(config: RunConfig, out: Path, log: str, *sinks: str) -> Path:
    """Run a recipe in a new run directory; returns where it is. Asked to stop, saves and raises KeyboardInterrupt."""
    views = make_sinks(sinks)
    if isinstance(data := getattr(config.task, "data", None), str) and data:
        config = replace(config, task=replace(config.task, data=from_anywhere(data)))
    parts = assemble(config)
    try:
        typed = shlex.join(["cohort", *sys.argv[1:]]) if sys.argv[1:2] == ["train"] else ""  # not from Python
        directory = RunDirectory.create(out, parts.config, command=typed)
        _run(parts, directory, log, views)
    finally:
        parts.close()
    return directory.path


def resume(path: Path, steps: int | None, log: str, *sinks: str) -> Path:
    """Continue a run exactly where it stopped, to `steps` if given; stops as `train` does."""
    views = make_sinks(sinks)
    directory = RunDirectory.open(path)
    directory.lock()  # a second writer is refused before it loads anything
    config = directory.config if steps is None else replace(directory.config, steps=steps)
    directory.require_same(config)
    parts = assemble(config)
    try:
        _run(parts, directory, log, views)
    finally:
        parts.close()
    return directory.path


def _run(parts: Parts, directory: RunDirectory, log: str, sinks: Mapping[str, View]) -> None:
    hooks = Hooks(
        evaluate=parts.evaluate, checkpoint=parts.checkpoint, write_model=parts.write_model, restore=parts.restore
    )
    with Run(directory, parts.config, hooks, make_view(log), sinks) as run, forwarded(run.event, run.notice):
        if parts.producer.drawing.sampling.truncates and run.step == 0:  # told once: a resumed run has it on record
            run.event("sampling", "top-p, top-k or min-p: the policy that acts is not the one that is trained")
        if (note := _idle_ratio(parts.config)) and run.step < parts.config.steps:
            run.notice("algo", note)
        replay = Replay(parts.config.replay, parts.config.seed, directory.rollouts)
        run_loop(run, parts.producer, parts.learner, parts.sync, parts.algo, replay)
        summary = run.finish()
    if not summary.complete:  # all is saved; whoever called must not go on as if it were done
        raise KeyboardInterrupt


def _idle_ratio(config: RunConfig) -> str:
    """Said where an algorithm is chosen for what it does to ratios, and these are all 1."""
    name = variant_name("algo", config.algo)
    alone = config.learner.epochs * config.learner.minibatches == 1
    if not alone or name not in ("gspo", "gspo_token", "cispo", "sapo", "gmpo"):
        return ""
    return f"with one update a batch every ratio is 1, and {name} is the plain policy gradient: see learner.minibatches"


def bench_engine(options: EngineBenchOptions) -> BenchResult:
    return bench.bench_engine(_bench_model(options), options)


def bench_learner(options: LearnerBenchOptions) -> BenchResult:
    return bench.bench_learner(_bench_model(options), options)


def bench_step(options: BenchOptions) -> BenchResult:
    return bench.bench_step(_bench_model(options), options)


def _bench_model(options: BenchOptions) -> Decoder:
    """The model to be measured, on its device; refuses what cannot be measured before anything is loaded."""
    device = find_device(options.device)
    use_threads(options.threads, device)
    dtype = DTYPES[find_dtype(options.dtype, device)]
    if options.weights == "random":
        config = named_shape(options.model)
        check_context(config, options.prompt_tokens + options.completion_tokens)
        return random_decoder(config, dtype, str(device))
    decoder = load_folder(resolve(options.model), dtype).decoder
    if not isinstance(decoder, Decoder):
        raise ModelError(f"{options.model} is no native model: the limits it could be measured against are not known")
    return decoder.to(device)
