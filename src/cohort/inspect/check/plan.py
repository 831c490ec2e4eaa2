"""What the run will take: memory, from shapes; time, from one small step. Both are estimates."""

from __future__ import annotations

import os
import time

from cohort.data.pack import make_batch
from cohort.inspect.check.findings import Finding, fail, ok, warn
from cohort.inspect.check.trial import Trial, give_signal, sample
from cohort.learner.plan import Load, state_bytes, update_bytes
from cohort.models.config import ModelConfig
from cohort.models.limits import kv_bytes

GIB = 2**30
TIGHT = 0.8  # of the memory there is
PATIENCE = 10.0  # seconds that sampling a whole batch may take here


def memory(trial: Trial) -> Finding:
    """A GPU's was planned when the parts were put together: what does not fit was refused there."""
    name, learner = "plan/memory", trial.parts.learner
    if learner.plan is not None:
        return ok(name, learner.plan.words, bytes=learner.plan.peak)
    if not isinstance(trial.parts.model.config, ModelConfig):
        return warn(name, "not estimated: the model is outside the native family, and its shapes are not known")
    load = _load(trial, trial.parts.model.config)
    state, kv = state_bytes(load), kv_bytes(load.model, load.width) * load.kv_tokens
    update = update_bytes(load, min(learner.token_budget, load.batch_tokens), recompute=False)
    need, there = state + update + kv, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"about {need / GIB:.2g} of {there / GIB:.2g} GiB (weights and optimizer {state / GIB:.2g}, "
    text += f"update {update / GIB:.2g}, KV {kv / GIB:.2g}), an estimate"
    if need <= TIGHT * there:
        return ok(name, text, bytes=need)
    remedy = "lower learner.token_budget or engine.slots, or train adapters (--learner.lora.rank 16)."
    return (fail if need > there else warn)(name, f"{text}; {remedy}", bytes=need)


def _load(trial: Trial, model: ModelConfig) -> Load:
    parts, config = trial.parts, trial.parts.config
    new, rows = config.sampling.max_tokens, config.batch.prompts * config.batch.samples
    prompt = max(len(g.prompt.tokens) for g in trial.rolled)
    adapters = parts.learner.adapters
    return Load(
        model=model,
        width=parts.model.decoder.embed.itemsize,
        longest=prompt + new,
        batch_tokens=config.batch.prompts * prompt + rows * new,
        kv_tokens=config.batch.prompts * prompt + min(rows, config.engine.slots) * new,
        has_reference=parts.learner.reference is not None,
        trained=None if adapters is None else adapters.num_params,
        base=0 if adapters is None else adapters.base_bytes,
    )


def one_step(trial: Trial, score_seconds: float) -> Finding:
    """A whole step where that is quick, else the few groups scaled. Moves the weights: the last check."""
    name, parts, config = "plan/time", trial.parts, trial.parts.config
    asked, few = config.batch.prompts * config.batch.samples, trial.rolled
    seconds = sample(parts, len(few), len(few[0].samples)).seconds  # again: the first time much was got ready
    if seconds * asked / _count(trial) <= PATIENCE:
        trial = sample(parts, config.batch.prompts, config.batch.samples)
        give_signal(trial)
        seconds = trial.seconds
    begin, size = time.perf_counter(), _count(trial)
    parts_of = config.learner.minibatches if size == asked else 1
    metrics = parts.learner.update(make_batch(trial.groups, parts_of), parts.algo).metrics
    update = time.perf_counter() - begin
    if not metrics.get("updates/done"):
        return fail(name, "an update did not move the weights: the gradient is zero or not finite.")
    step = (seconds + update) * asked / size + score_seconds * asked
    about = "about" if size == asked else "at most about"  # a few samples cost nearly as much as many
    text = f"{about} {_words(step)} a step, {_words(step * config.steps)} for {config.steps} steps without evaluation"
    measured = f"sampling {seconds:.2g} s and update {update:.2g} s of {size} samples"
    scaled = "" if size == asked else f", scaled to {asked}"
    return ok(name, f"{text}: an estimate, from {measured}{scaled}", step_seconds=step)


def _count(trial: Trial) -> int:
    return sum(len(g.samples) for g in trial.rolled)


def _words(seconds: float) -> str:
    """
    >>> _words(2.34), _words(600), _words(86400)
    ('2.3 s', '10 min', '24 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
