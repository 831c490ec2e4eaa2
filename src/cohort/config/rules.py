"""What a config must satisfy before anything is built: ranges, combinations, no setting without effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cohort.config.algos import CISPO, GMPO, Clipped, PassAtK
from cohort.config.flags import leaves, show
from cohort.config.schema import TARGETS, RunConfig, ThinkAgain
from cohort.errors import ConfigError, nearest

# Bounds of numbers: how they are worded, when they hold, and for which settings.
_BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "a finite number",
        math.isfinite,
        "optim.lr optim.eps optim.weight_decay optim.clip_norm eval.temperature",
    ),
    (
        "a finite number",
        math.isfinite,
        "algo.clip_low algo.clip_high algo.dual_clip algo.kl.weight algo.kl.target algo.entropy algo.entropy_target "
        "algo.tau_pos algo.tau_neg sampling.temperature learner.lora.alpha turns.below turns.cost",
    ),
    ("at least 1", lambda x: x >= 1, "steps batch.prompts batch.samples sampling.max_tokens engine.slots"),
    ("at least 1", lambda x: x >= 1, "learner.epochs learner.minibatches eval.samples"),
    ("at least 1", lambda x: x >= 1, "save.every save.keep_last"),
    (
        "at least 0",
        lambda x: x >= 0,
        "seed threads sampling.top_k algo.clip_high algo.kl.weight algo.kl.target algo.kl.refresh algo.entropy "
        "optim.lr algo.clip_low",
    ),
    ("at least 0", lambda x: x >= 0, "optim.warmup optim.weight_decay optim.clip_norm save.rollouts"),
    ("at least 0", lambda x: x >= 0, "learner.token_budget algo.entropy_target replay.prompts"),
    ("at least 0", lambda x: x >= 0, "turns.max_tokens turns.cost"),
    ("0 or above 1", lambda x: x == 0 or x > 1, "algo.dual_clip"),
    ("at least 2", lambda x: x >= 2, "algo.k"),
    ("at least 1", lambda x: x >= 1, "replay.steps turns.attempts"),
    ("at least 0", lambda x: x >= 0, "eval.every eval.problems eval.temperature learner.lora.rank"),
    ("above 0", lambda x: x > 0, "sampling.temperature optim.eps learner.lora.alpha algo.tau_pos algo.tau_neg"),
    ("above 0 and at most 1", lambda x: 0 < x <= 1, "sampling.top_p"),
    ("from 0 to 1", lambda x: 0 <= x <= 1, "algo.overlong optim.lr_floor"),
    ("at least 0 and below 1", lambda x: 0 <= x < 1, "sampling.min_p optim.beta1 optim.beta2"),
)


@dataclass(frozen=True, slots=True)
class Effect:
    """`settings` act only when `acts` holds; `through` are the settings that decide it."""

    settings: tuple[str, ...]
    through: tuple[str, ...]
    acts: Callable[[RunConfig], bool]
    because: str


def _truncates(config: RunConfig) -> bool:
    return config.sampling.top_p < 1 or config.sampling.top_k > 0 or config.sampling.min_p > 0


_EFFECTS = (
    Effect(
        ("algo.kl.estimator", "algo.kl.place", "algo.kl.to", "algo.kl.target", "algo.kl.refresh"),
        ("algo.kl.weight",),
        lambda c: c.algo.kl.weight > 0,
        "algo.kl.weight is 0; set --algo.kl.weight above 0",
    ),
    Effect(
        ("algo.kl.refresh",),
        ("algo.kl.to",),
        lambda c: c.algo.kl.to == "reference",
        "the divergence is from the sampler; set --algo.kl.to reference",
    ),
    Effect(
        ("algo.correction.level", "algo.correction.bounds"),
        ("algo.correction.kind",),
        lambda c: c.algo.correction.kind != "none",
        "nothing is corrected; set --algo.correction.kind truncate or mask",
    ),
    Effect(
        ("algo.baseline", "algo.scale"),
        ("algo",),
        lambda c: not isinstance(c.algo, PassAtK),
        "pass_at_k has its own; choose another --algo",
    ),
    Effect(
        ("replay.steps",),
        ("replay.prompts",),
        lambda c: c.replay.prompts > 0,
        "nothing is used again; set --replay.prompts above 0",
    ),
    Effect(
        ("optim.lr_floor",),
        ("optim.schedule",),
        lambda c: c.optim.schedule != "constant",
        "the schedule is constant; set --optim.schedule linear or cosine",
    ),
    Effect(
        ("sampling.allow_truncation",),
        ("sampling.top_p", "sampling.top_k", "sampling.min_p"),
        _truncates,
        "nothing is truncated; set --sampling.top-p, --sampling.top-k or --sampling.min-p",
    ),
    Effect(
        ("algo.clip_low", "algo.clip_high", "algo.dual_clip", "algo.tau_pos", "algo.tau_neg"),
        ("learner.epochs", "learner.minibatches"),
        lambda c: c.learner.epochs * c.learner.minibatches > 1,
        "with one update per batch the ratio is exactly 1; raise --learner.epochs or --learner.minibatches",
    ),
    Effect(
        ("eval.samples",),
        ("eval.temperature",),
        lambda c: c.eval.temperature > 0 or c.eval.samples == 1,
        "at temperature 0 all samples of a problem are equal; set --eval.temperature above 0",
    ),
    Effect(
        ("eval.turns",),
        ("turns",),
        lambda c: isinstance(c.turns, ThinkAgain),
        "there is one turn only; set --turns think_again",
    ),
    Effect(
        ("learner.lora.alpha", "learner.lora.targets", "learner.lora.base"),
        ("learner.lora.rank", "learner.lora.load"),
        lambda c: c.learner.lora.on,
        "there are no adapters; set --learner.lora.rank above 0",
    ),
    Effect(
        ("learner.lora.rank", "learner.lora.alpha", "learner.lora.targets"),
        ("learner.lora.load",),
        lambda c: c.learner.lora.load == "",
        "it comes with the adapters of --learner.lora.load",
    ),
)


def validate(config: RunConfig, given: Collection[str] = ()) -> None:
    """Raise a ConfigError naming the first setting that is out of range, impossible or without effect.

    `given` are the settings the user wrote. A setting counts as written, too, when a recipe moved it from its
    default, unless the user then changed what decides whether it acts (`--algo.kl 0` on a recipe with KL).
    """
    if config.task is None:
        raise ConfigError("the recipe sets no task; choose one with --task.")
    values = {name: leaf.value for name, leaf in leaves(config).items()}
    _check_ranges(values)
    _check_combinations(config, given)
    _check_algo(config)
    _check_reward(config)
    _check_effects(config, values, given)


def _check_ranges(values: dict[str, Any]) -> None:
    for wanted, holds, names in _BOUNDS:
        for name in names.split():
            if name in values and not holds(values[name]):
                raise ConfigError(f"{name} is {values[name]}; it must be {wanted}.")


def _check_algo(config: RunConfig) -> None:
    algo, correction = config.algo, config.algo.correction
    if config.replay.prompts and correction.kind == "none":
        raise ConfigError(
            "replay.prompts uses samples of older policies as if the current one had drawn them; "
            "add --algo.correction.kind truncate (or mask)."
        )
    low, high = correction.bounds
    if not 0 <= low <= 1 <= high < math.inf or low == high:
        raise ConfigError(f"algo.correction.bounds is {low} {high}; it must be two numbers with 1 between them.")
    in_groups = algo.baseline in ("mean", "leave_one_out") or isinstance(algo, PassAtK)
    if algo.scale in ("std", "mean") and not in_groups:
        raise ConfigError(
            f"algo.scale = {algo.scale} divides by what a group of equal rewards has none of, and algo.baseline = "
            f"{algo.baseline} gives such groups an advantage; set --algo.scale batch, centred or none."
        )
    if algo.dead != "keep" and not in_groups:
        raise ConfigError(
            f"algo.dead = {algo.dead}, but with baseline = {algo.baseline} groups of equal rewards have a gradient: "
            "set --algo.dead keep."
        )
    _check_kl(config)
    if isinstance(algo, CISPO) and algo.clip_high < 1:
        raise ConfigError(f"algo.clip_high is {algo.clip_high}: cispo's largest weight must be at least 1.")
    if isinstance(algo, Clipped) and not isinstance(algo, GMPO) and algo.clip_low > 1:
        raise ConfigError(f"algo.clip_low is {algo.clip_low}; it must be from 0 to 1.")
    if algo.entropy_target and algo.entropy > 1:
        raise ConfigError(f"algo.entropy is {algo.entropy}; with algo.entropy_target it must be at most 1.")
    if isinstance(algo, PassAtK) and algo.k > config.batch.samples:
        raise ConfigError(f"algo.k is {algo.k}, more than batch.samples = {config.batch.samples}; lower --algo.k.")


def _check_kl(config: RunConfig) -> None:
    kl, learner = config.algo.kl, config.learner
    if not kl.weight:
        return
    once = learner.epochs * learner.minibatches == 1 and not config.replay.prompts
    if kl.refresh and learner.lora.on:
        raise ConfigError("algo.kl.refresh needs a reference of its own; adapters have none: drop one of the two.")
    if kl.refresh == 1 and once:
        raise ConfigError("algo.kl.refresh = 1 with one update a batch: the reference is the policy; raise it.")
    if kl.to == "sampler" and once:
        raise ConfigError(
            "algo.kl.to = sampler with one update a batch: the sampler is the policy; use --algo.kl.to reference, "
            "or raise --learner.epochs or --learner.minibatches."
        )
    if kl.estimator == "k1" and kl.place == "loss":
        raise ConfigError(
            "algo.kl.estimator = k1 in the loss has a gradient of zero on average; use k2 or k3, or "
            "--algo.kl.place reward."
        )


def _check_combinations(config: RunConfig, given: Collection[str]) -> None:
    batch, sampling, learner = config.batch, config.sampling, config.learner
    if batch.samples < 2 and (config.algo.baseline in ("mean", "leave_one_out") or isinstance(config.algo, PassAtK)):
        raise ConfigError(
            "batch.samples is 1, but the baseline is the mean of the group: every advantage would be 0; "
            "set --batch.samples to 2 or more."
        )
    if learner.minibatches > batch.prompts:
        raise ConfigError(
            f"learner.minibatches is {learner.minibatches}, but a batch has only {batch.prompts} groups "
            "(batch.prompts) to divide; lower --learner.minibatches."
        )
    if 0 < learner.token_budget <= config.max_sampled:
        raise ConfigError(
            f"learner.token_budget is {learner.token_budget}, too small for a prompt and a completion of "
            f"{config.max_sampled} tokens (sampling.max_tokens, turns); raise --learner.token-budget."
        )
    if isinstance(config.turns, ThinkAgain):
        if not config.turns.words or not all(words.strip() for words in config.turns.words):
            raise ConfigError("turns.words must be one text or more, none of them empty.")
        if config.template == "text":
            raise ConfigError("--turns think_again needs a chat template for its turns; use --template chat.")
    if _truncates(config) and not sampling.allow_truncation:
        raise ConfigError(
            "top-p, top-k and min-p make the policy that acts differ from the one that is trained; "
            "remove them or add --sampling.allow-truncation True."
        )
    targets = learner.lora.targets
    if not targets or len(set(targets)) < len(targets):
        raise ConfigError(f"learner.lora.targets is {list(targets)}; name one matrix or more, each once.")
    for target in targets:
        if target not in TARGETS:
            raise ConfigError(f'learner.lora.targets has no "{target}".{nearest(target, TARGETS)}')
    if "" in sampling.stop:
        raise ConfigError("sampling.stop holds an empty string, which would stop at once; remove it.")
    updates = config.steps * learner.epochs * learner.minibatches
    if "optim.warmup" in given and config.optim.warmup >= updates:
        raise ConfigError(
            f"optim.warmup is {config.optim.warmup}, but the run makes only {updates} optimizer steps: "
            "the learning rate would never be reached; lower --optim.warmup."
        )


def reward_parts(task: Any) -> tuple[str, ...]:
    """The parts a task scores, in its own order."""
    return tuple(getattr(type(task), "parts", ("correct",)))


def _check_reward(config: RunConfig) -> None:
    parts = reward_parts(config.task)
    for part, weight in config.reward.items():
        if not math.isfinite(weight):
            raise ConfigError(f"reward.{part} is {weight}; it must be a finite number.")
        if part not in parts:
            raise ConfigError(f'unknown reward part "{part}" of task {type(config.task).name}.{nearest(part, parts)}')
    if all(config.reward.get(part, 1.0) == 0 for part in parts):
        raise ConfigError("every part of the reward weighs 0: there is nothing to learn; raise one of --reward.*.")


def _check_effects(config: RunConfig, values: dict[str, Any], given: Collection[str]) -> None:
    defaults = _defaults(config)
    for effect in _EFFECTS:
        if effect.acts(config):
            continue
        decided = any(name in given for name in effect.through)
        for name in effect.settings:
            moved = name in defaults and values.get(name) != defaults[name] and not decided
            if name in values and (name in given or moved):
                raise ConfigError(f"{show(name)} has no effect: {effect.because}, or drop it.")


def _defaults(config: RunConfig) -> dict[str, Any]:
    """Default of every setting of the sections, by dotted name."""
    found: dict[str, Any] = {}
    for section in ("sampling", "algo", "optim", "learner", "replay", "eval"):
        default = type(getattr(config, section))()
        found |= {name: leaf.value for name, leaf in leaves(default, f"{section}.").items()}
    return found
