"""What a run of reinforcement learning says of itself: in its header and card, at its start, after its end."""

from __future__ import annotations

from pathlib import Path

from cohort import checkpoint
from cohort.config.document import variant_name
from cohort.config.flags import leaves, show
from cohort.config.kinds import RL
from cohort.store.environment import program
from cohort.store.records import About

COLUMNS = (
    ("reward", "reward/mean"),
    ("length", "length/mean"),
    ("entropy", "entropy"),
    ("gradient norm", "grad_norm"),
    ("dead groups", "groups/dead"),
)
TOTALS = (
    ("samples that could not be scored", "samples/failed"),
    ("samples left out of the loss", "samples/masked"),
)


def about(config: RL) -> About:
    """What the header and the card say."""
    return About(
        source=variant_name("task", config.task),
        algo=variant_name("algo", config.algo),
        batch=f"{config.batch.prompts} prompts x {config.batch.samples} samples",
        columns=COLUMNS,
        totals=TOTALS,
        reads_back=config.replay.steps if config.replay.on else 0,
    )


def next_commands(config: RL, run: Path, step: int) -> list[list[str]]:
    """What is worth trying with a complete run: evaluate its model as the run did, export it, go on."""
    task, model = variant_name("task", config.task), run / "checkpoints" / checkpoint.name(step) / "model"
    longer = [program(), "resume", str(run), "--steps", str(2 * config.steps)]
    return [
        [program(), "eval", task, "--model", str(model), *_eval_flags(config)],
        [program(), "export", str(run), f"{run.name}-model"],
        [program(), "train", "tiny_countdown"] if config.recipe == "quickstart" else longer,
    ]


def _eval_flags(config: RL) -> list[str]:
    """What makes an evaluation outside the run like those in it, as far as it is not the default."""
    flags = []
    if config.template != "chat":
        flags += ["--template", config.template]
    if config.eval.temperature != 1.0:
        flags += ["--temperature", f"{config.eval.temperature:g}"]
    if config.sampling.max_tokens != config.task.max_tokens:
        flags += ["--max-tokens", str(config.sampling.max_tokens)]
    for name, leaf in leaves(config.task, "task.").items():
        default = getattr(type(config.task), name.removeprefix("task."), None)
        if leaf.value != default and not isinstance(leaf.value, tuple):
            flags.append(f"{show(name)}={leaf.value}")
    return flags


def idle_ratio(config: RL) -> str:
    """Said where an algorithm is chosen for what it does to ratios, and these are all 1."""
    name = variant_name("algo", config.algo)
    if config.learner.updates > 1 or name not in ("gspo", "gspo_token", "cispo", "sapo", "gmpo"):
        return ""
    return f"with one update a batch every ratio is 1, and {name} is the plain policy gradient: see learner.minibatches"
