"""The options of `cohort chat`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cohort.config.options import CONVERSATION_OPTIONS
from cohort.config.rules import check_option_bounds
from cohort.config.schema import Conversation
from cohort.config.scoring import ScoringConfig
from cohort.config.section import (
    AtLeast0,
    AtLeast1,
    FiniteAbove0,
    InnerShare,
    Seed,
    TemperatureOr0,
    Template,
    Text,
    Threads,
    TopP,
)
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
    max_turns: AtLeast1 = 8
    """With a task that has tools or an environment: most turns of a model per problem."""
    max_calls: AtLeast1 = 16
    """With such a task: most calls of tools per problem."""
    max_total: AtLeast0 = 0
    """With such a task: most tokens after the prompt, replies included; 0 = what the context allows."""
    max_characters: AtLeast1 = 2_000
    """With such a task: most characters of a tool's result that a model is shown; the rest is cut."""
    call_seconds: FiniteAbove0 = 5.0
    """With such a task: time for the calls of one turn. A tool that takes longer is stopped."""
    call_format: Literal["auto", "hermes", "llama3", "tags"] = "auto"
    """With such a task: how models write calls of tools (see cohort eval --help); auto = by each chat template."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to sample: auto = on a GPU if torch finds one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of weights and computation: auto = bfloat16 on a GPU, float32 on a CPU."""
    threads: Threads = 0
    """Number of CPU threads; 0 = all cores."""
    plain: bool = False
    """Print plain text without columns and control codes, as where there is no terminal."""

    @property
    def conversation(self) -> Conversation:
        """The limits of conversations, for tasks with tools or an environment."""
        return Conversation(**{name: getattr(self, option) for option, name in CONVERSATION_OPTIONS.items()})

    def check_conversation(self, task: str, has_conversations: bool) -> None:
        """Raises a ConfigError for limits of conversations that have no effect, and for --template text with them.

        `task` is the name of the task; "" = there is none. `has_conversations` = it has tools or an environment.
        """
        if has_conversations and self.template == "text":
            raise ConfigError(
                f"the task {task} has conversations, which need a chat template for the replies. Remove --template "
                "text, or bring a template with --template FILE.jinja."
            )
        given = [name for name in CONVERSATION_OPTIONS if getattr(self, name) != getattr(ChatOptions, name)]
        if given and not has_conversations:
            subject = f"the task {task} has" if task else "a chat without --task has"
            raise ConfigError(
                f"{subject} neither tools nor an environment, so that limits of conversations have no effect: remove "
                f"--{', --'.join(given).replace('_', '-')}."
            )

    def check(self) -> None:
        """Raises a ConfigError for values out of range and for options without effect.

        Without effect are --split and --scoring without --task, --validation-share without that split, and --top-p at
        temperature 0. Also if a variable of --scoring.env is not set.
        """
        check_option_bounds(self)
        self.scoring.check(())
        self.scoring.require_variables()
        if self.scoring.is_on and not self.task:
            raise ConfigError("--scoring has no effect without --task. Add --task TASK, or remove --scoring.")
        if self.split != "test" and not self.task:
            raise ConfigError("--split has no effect without --task. Add --task TASK, or remove --split.")
        if self.validation_share != ChatOptions.validation_share and self.split != "validation":
            raise ConfigError(
                "--validation-share has no effect without --split validation. Add that, or remove --validation-share."
            )
        if self.temperature == 0 and self.top_p < 1:
            raise ConfigError("--top-p has no effect at temperature 0; remove it, or raise --temperature.")
