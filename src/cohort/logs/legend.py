"""The metrics in the line of a step, with their labels and what they mean."""

from __future__ import annotations

from collections.abc import Mapping

# Metric: (label, meaning).
STEP_LINE = {
    "reward/mean": ("reward", "mean reward of the step's samples"),
    "length/mean": ("length", "mean tokens per completion"),
    "groups/dead": ("dead", "share of groups whose rewards are all equal: most algorithms learn nothing from them"),
    "loss": ("loss", "loss of the update; often near 0, and no sign of progress: watch the reward"),
    "perplexity": ("perplexity", "of the examples that are imitated (sft)"),
    "grad_norm": ("grad", "norm of the gradient before clipping"),
    "entropy": ("entropy", "nats per token: how undecided the policy is; near 0 = always the same answer"),
    "lr": ("lr", "learning rate"),
    "calls/timeout": ("timeouts", "calls of tools in the step that took too long and were stopped"),
    "calls/crash": ("crashes", "samples of the step that failed because the process of their tools died"),
    "time/scoring/retries": ("retries", "answers of the step that were scored again because scoring failed"),
    "sampler_gap/max": ("gap", "largest difference between sampler's and learner's log-probabilities; tiny is right"),
}
FURTHER = (
    ("TASK", "of a mixture: mean reward of this task's samples"),
    ("tok/s", "tokens sampled, or in the loss of sft and dpo, per second of the step"),
    ("eta", "time until the run ends"),
)


def list_task_rewards(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns label and mean reward of each task of a mixture; [] if the metrics are of a single task.

    >>> list_task_rewards({"reward/mean": 0.5, "reward/mean/gsm8k": 0.25})
    [('gsm8k', 0.25)]
    """
    prefix = "reward/mean/"
    return [(name.removeprefix(prefix), value) for name, value in metrics.items() if name.startswith(prefix)]


def format_legend() -> str:
    """Returns one line per label of a step's line, with its meaning.

    >>> print(format_legend().splitlines()[0])
      reward      mean reward of the step's samples
    """
    return "\n".join(f"  {label:<10}  {meaning}" for label, meaning in (*STEP_LINE.values(), *FURTHER))
