"""Checks of what the run will take: memory, computed from shapes, and time, from one small step. Both are estimates."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from cohort.config.imitation import describe_long_warmup
from cohort.config.schema import RunConfig
from cohort.data.pack import make_batch
from cohort.inspect.check.findings import Finding, fail, ok, warn
from cohort.inspect.check.given import GivenTrial, count_tokens
from cohort.inspect.check.trial import Trial, UpdateTrial, give_distinct_rewards, sample_trial
from cohort.learner.plan import MemoryDemand, state_bytes, update_bytes
from cohort.models.config import ModelConfig
from cohort.models.limits import count_kv_bytes
from cohort.system.kernel import find_memory_size

GIB = 2**30
WARN_SHARE = 0.8  # of the machine's memory: an estimate above it is a warning
MAX_SAMPLING_SECONDS = 10.0  # a batch, or a part of it, is sampled for the time estimate only if that takes no longer
_GROWTH = 4  # factor by which that part grows


def check_memory(trial: UpdateTrial) -> Finding:
    """Estimates the memory of a step and compares it with all memory of the machine: FAIL above it, warn above 80%.

    With a memory plan, which jobs on a GPU have, returns ok and repeats the plan: one that does not fit was refused
    when the job was built. Returns warn without an estimate for a model that runs on transformers' code.
    """
    name = "plan/memory"
    learner = trial.job.learner
    if learner.plan is not None:
        return ok(name, learner.plan.description, bytes=learner.plan.peak)
    if not isinstance(trial.job.model.config, ModelConfig):
        return warn(name, "not estimated: this model runs on transformers' code, so its shapes are not known")
    demand = _estimate_demand(trial)
    state = state_bytes(demand)
    kv = count_kv_bytes(demand.model, demand.bytes_per_number) * demand.kv_tokens
    update = update_bytes(demand, min(learner.token_budget, demand.batch_tokens), recompute=False)
    need = state + update + kv
    available = find_memory_size()
    sampling = f", KV {kv / GIB:.2g}" if demand.kv_tokens else ""
    parts = f"(weights and optimizer {state / GIB:.2g}, update {update / GIB:.2g}{sampling}), an estimate"
    if available is None:
        return warn(name, f"about {need / GIB:.2g} GiB {parts}; this system does not tell how much memory it has")
    text = f"about {need / GIB:.2g} of {available / GIB:.2g} GiB {parts}"
    if need <= WARN_SHARE * available:
        return ok(name, text, bytes=need)
    slots = " or engine.slots" if demand.kv_tokens else ""
    remedy = f"lower learner.token_budget{slots}, or train adapters (--learner.lora.rank 16)."
    return (fail if need > available else warn)(name, f"{text}; {remedy}", bytes=need)


def _estimate_demand(trial: UpdateTrial, num_ranks: int = 1) -> MemoryDemand:
    """Returns the sizes of the largest step that decide the memory of one of `num_ranks` ranks."""
    learner = trial.job.learner
    config = trial.job.model.config
    assert isinstance(config, ModelConfig)
    shape = _estimate_rollouts(trial) if isinstance(trial, Trial) else estimate_examples(trial)
    adapters = learner.adapters
    return MemoryDemand(
        model=config,
        bytes_per_number=trial.job.model.decoder.embed.itemsize,
        longest=shape.longest,
        batch_tokens=max(shape.longest, -(-shape.batch_tokens // num_ranks)),
        kv_tokens=-(-shape.kv_tokens // num_ranks),
        has_reference=learner.reference is not None,
        num_trained=None if adapters is None else adapters.num_params,
        frozen_bytes=0 if adapters is None else adapters.base_bytes,
        ranks=num_ranks,
    )


def check_ranks(trial: UpdateTrial, num_ranks: int) -> Finding:
    """Estimates the memory that each of several ranks needs, for every way to divide the model among them."""
    name = "plan/ranks"
    learner = trial.job.learner
    if not isinstance(trial.job.model.config, ModelConfig):
        return warn(name, "not estimated: this model runs on transformers' code, so its shapes are not known")
    demand = _estimate_demand(trial, num_ranks)
    kv = count_kv_bytes(demand.model, demand.bytes_per_number) * demand.kv_tokens
    budget = min(learner.token_budget, demand.batch_tokens)
    is_even = demand.model.ff % num_ranks == 0 and demand.num_trained is None
    needs = {}
    for shard in ("none", "optimizer", "full") if is_even else ("none", "optimizer"):
        divided = replace(demand, shard=shard)
        needs[shard] = state_bytes(divided) + update_bytes(divided, budget, recompute=False) + kv
    listed = ", ".join(f"{shard} {need / GIB:.2g}" for shard, need in needs.items())
    text = f"each of {num_ranks} ranks needs about this many GiB by learner.shard: {listed} (an estimate)"
    return ok(name, text, **{f"{shard}_bytes": float(need) for shard, need in needs.items()})


class StepShape(NamedTuple):
    """The sizes of the largest step that the settings allow, in tokens."""

    longest: int  # a sample with its prompt
    batch_tokens: int
    kv_tokens: int  # whose keys and values are held while sampling; 0 = nothing is sampled


def _estimate_rollouts(trial: Trial) -> StepShape:
    """Returns the largest step of reinforcement learning.

    Every sample counts as `sampling.max_tokens` long, every prompt as long as the longest prompt of the trial.
    """
    config = trial.job.config
    new = config.sampling.max_tokens
    rows = config.batch.prompts * config.batch.samples
    prompt = max(len(g.prompt.tokens) for g in trial.sampled)
    return StepShape(
        longest=prompt + new,
        batch_tokens=config.batch.prompts * prompt + rows * new,
        # The samples of a group share the KV of their prompt. Only as many completions as slots are decoded at once.
        kv_tokens=config.batch.prompts * prompt + min(rows, config.engine.slots) * new,
    )


def estimate_examples(trial: UpdateTrial) -> StepShape:
    """Returns the largest step on given answers: as long as the longest known group, that often."""
    assert isinstance(trial, GivenTrial)
    longest = max(map(count_tokens, [*trial.step_groups, *trial.known_groups]))
    return StepShape(longest=longest, batch_tokens=trial.batch_size * longest, kv_tokens=0)


def check_step_time(trial: Trial, scoring: float | None) -> Finding:
    """Measures sampling and one update, and returns a finding with the estimated time of a step and of the run.

    Measures a whole batch if sampling it should take at most 10 s, otherwise as large a part as that allows, scaled to
    the batch. `scoring`, the time of all scores of a step, is added; None = it was not measured. Returns FAIL if the
    update moves no weights, else ok. The update changes the weights, so this must be the last check.
    """
    name = "plan/time"
    job = trial.job
    config = job.config
    batch_size = config.batch.prompts * config.batch.samples
    trial = _sample_for_time(trial)
    give_distinct_rewards(trial)
    seconds = trial.sampling_seconds
    begin = time.perf_counter()
    size = _count_samples(trial)
    num_minibatches = config.learner.minibatches if size == batch_size else 1
    batch = make_batch(trial.groups, num_minibatches, whole_groups=job.algo.whole_groups)
    metrics = job.learner.update(batch, job.algo).metrics
    update = time.perf_counter() - begin
    if not metrics.get("updates/done"):
        return fail(name, "an update did not move the weights: the gradient is zero or not finite.")
    step = (seconds + update) * batch_size / size + (scoring or 0.0)
    measured = f"sampling {seconds:.2g} s and update {update:.2g} s of {size} samples"
    scored = "scoring, which was not measured, comes on top" if scoring is None else f"scoring {scoring:.2g} s"
    return _predict_time(config, step, measured, "" if size == batch_size else f"{batch_size}", f"; {scored}")


def check_warmup(config: RunConfig) -> list[Finding]:
    """Returns a warning if the warm-up covers half of the run or more; else nothing."""
    text = describe_long_warmup(config)
    return [warn("plan/warm-up", f"{text}.")] if text else []


def _predict_time(config: RunConfig, step: float, measured: str, scaled_to: str, further: str = "") -> Finding:
    """Returns the finding about the time of a step, in seconds, and of the whole run.

    `measured` says what was measured, and `scaled_to` what it was scaled to; "" = it was a whole step. `further` is
    what is in the time of a step besides.
    """
    # A few samples take nearly as long as many, so a scaled estimate is too high rather than too low.
    about = "at most about" if scaled_to else "about"
    total = f"{_format_seconds(step * config.steps)} for {config.steps} steps without evaluation"
    text = f"{about} {_format_seconds(step)} per step, {total}"
    scaled = f", scaled to {scaled_to}" if scaled_to else ""
    run = step * config.steps
    return ok("plan/time", f"{text}: an estimate, from {measured}{scaled}{further}", step_seconds=step, run_seconds=run)


def check_example_time(trial: GivenTrial) -> Finding:
    """Measures updates on given answers, and returns a finding with the estimated time of a step and of the run.

    Measures a whole step if that should take at most 10 s, otherwise as large a part as that allows, scaled by tokens.
    Returns FAIL if the update moves no weights. The update changes the weights, so this must be the last check.
    """
    config, groups = trial.job.config, trial.step_groups
    whole = sum(map(count_tokens, groups))
    num = len(trial.groups)
    size = sum(map(count_tokens, groups[:num]))
    # Twice, because the first update also does work that is done only once.
    seconds = min(trial.update(groups[:num]) for _ in range(2))
    while size < whole:
        larger = min(_GROWTH * num, len(groups))
        tokens = sum(map(count_tokens, groups[:larger]))
        if seconds * tokens / size > MAX_SAMPLING_SECONDS:
            break
        num, size, seconds = larger, tokens, trial.update(groups[:larger])
    if not trial.has_moved:
        return fail("plan/time", "an update did not move the weights: the gradient is zero or not finite.")
    measured = f"an update of {num} {trial.noun} with {size} tokens in {seconds:.2g} s"
    scaled_to = "" if size >= whole else f"{len(groups)} with {whole}"
    return _predict_time(config, seconds * whole / size, measured, scaled_to)


def _sample_for_time(trial: Trial) -> Trial:
    """Returns groups that were sampled to measure the time: those of a whole batch, or as many as 10 s allow.

    A few samples take nearly as long as many, so their time, scaled to the batch, would be several times too high.
    Therefore the number of samples grows until the next size would take too long, if it took as long per sample.
    """
    job = trial.job
    batch = job.config.batch
    prompts, samples = len(trial.sampled), len(trial.sampled[0].samples)
    # The trial was sampled once already. This second time measures without the work that is done only once.
    trial = sample_trial(job, prompts, samples)
    while prompts * samples < batch.prompts * batch.samples:
        if samples < batch.samples:
            samples = min(_GROWTH * samples, batch.samples)
        else:
            prompts = min(_GROWTH * prompts, batch.prompts)
        if trial.sampling_seconds * prompts * samples / _count_samples(trial) > MAX_SAMPLING_SECONDS:
            break
        trial = sample_trial(job, prompts, samples)
    return trial


def _count_samples(trial: Trial) -> int:
    """Returns the number of samples in all sampled groups of the trial."""
    return sum(len(g.samples) for g in trial.sampled)


def _format_seconds(seconds: float) -> str:
    """Returns a time as text with about two digits: in minutes from 120 s on, in hours from 120 minutes on.

    >>> _format_seconds(2.34), _format_seconds(110), _format_seconds(600), _format_seconds(86400)
    ('2.3 s', '110 s', '10 min', '24 h')
    """
    number, unit = seconds, "s"
    for size, name in ((60, "min"), (3600, "h")):
        if seconds >= 2 * size:
            number, unit = seconds / size, name
    # Two digits of a number from 100 on would be written with an exponent.
    return f"{number:.0f} {unit}" if number >= 99.5 else f"{number:.2g} {unit}"
