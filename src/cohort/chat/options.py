"""The options of `cohort chat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cohort.config.rules import check_option_bounds
from cohort.config.section import AtLeast0, InnerShare, Seed, TemperatureOr0, Template, Text, Threads, TopP
from cohort.errors import ConfigError

DEFAULT_MAX_TOKENS = 1024  # of an answer, where neither the user nor a task sets a limit


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How `cohort chat` samples, and where."""

    system: Text = ""
    """A text that is put before the conversation, such as "Answer in one word."; empty = none."""
    temperature: TemperatureOr0 = 0.7
    """How much chance decides: 0 = always the most probable token (greedy), 1 = as the model's probabilities say. Below
    1, small models stay on topic."""
    top_p: TopP = 1.0
    """Sample from the most probable tokens that together have this probability; 1 = from all."""
    max_tokens: AtLeast0 = 0
    """Longest answer, in tokens; 0 = 1024, or with --task what the task needs, as far as the model's context allows."""
    seed: Seed = 0
    """Seed of sampling: the same seed and the same messages give the same answers."""
    template: Template = "chat"
    """How the conversation is rendered: chat = by the model's chat template, text = as raw text, for base models,
    FILE.jinja = by the chat template in this file."""
    task: str = ""
    """A task whose problems are asked, one at every empty line, with the grader's verdict on each answer: a name, or
    path/to/file.py:name. Its settings are --task.x; empty = none."""
    split: Literal["test", "validation", "train"] = "test"
    """With --task: which problems to ask. test = the held-out ones; validation = the part of the training problems that
    a run with --eval.split validation does not train on; train = all training problems. Look around in validation, and
    keep test for the end."""
    validation_share: InnerShare = 0.1
    """Share of the training problems that are in the validation split; give what the run had as
    --eval.validation-share."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to sample: auto = on a GPU if torch finds one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of weights and computation: auto = bfloat16 on a GPU, float32 on a CPU."""
    threads: Threads = 0
    """Number of CPU threads; 0 = all cores."""
    plain: bool = False
    """Print plain text without columns and control codes, as where there is no terminal."""

    def check(self) -> None:
        """Raises a ConfigError for values out of range and for options without effect.

        Without effect are --split without --task, --validation-share without that split, and --top-p at temperature 0.
        """
        check_option_bounds(self)
        if self.split != "test" and not self.task:
            raise ConfigError("--split has no effect without --task. Add --task TASK, or remove --split.")
        if self.validation_share != ChatOptions.validation_share and self.split != "validation":
            raise ConfigError(
                "--validation-share has no effect without --split validation. Add that, or remove --validation-share."
            )
        if self.temperature == 0 and self.top_p < 1:
            raise ConfigError("--top-p has no effect at temperature 0; remove it, or raise --temperature.")
