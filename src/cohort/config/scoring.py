"""The settings of scoring: how many processes score, how long an answer may take, and what graders are given."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from cohort.config.section import Section, at_least, at_most
from cohort.errors import ConfigError
from cohort.system.secrets import hide_variables


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(Section):
    """How answers are scored. While all settings have their defaults, config.yaml has none of them."""

    workers: Annotated[int, at_least(0), at_most(256)] = 0
    """Processes that score answers and run tools and environments; 0 = one, or one per core less one where a grader's
    work depends on the answer. With tools, so many calls can be under way at once."""
    concurrency: Annotated[int, at_least(1), at_most(4_096)] = 64
    """Answers that are scored at once, all processes together, where scoring asks an outside service."""
    seconds: Annotated[float, at_least(0), at_most(86_400)] = 0.0
    """Time for scoring one answer; 0 = 10 s, or 120 s where scoring asks an outside service."""
    retries: Annotated[int, at_least(0), at_most(100)] = 3
    """Further tries, each after a longer pause, if an outside service fails. Then the sample has no reward."""
    env: tuple[str, ...] = ()
    """Names of environment variables, such as OPENAI_API_KEY, that graders are given. Their values are not recorded."""
    sandbox: Literal["auto", "none"] = "auto"
    """How programs that the model writes are confined: auto = in namespaces of the kernel, or not at all run; none =
    by limits of time and memory alone."""

    optional: ClassVar[bool] = True

    @property
    def is_on(self) -> bool:
        """Whether any setting differs from its default."""
        return self != ScoringConfig()

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if `env` has something that is no name of a variable. Ignores `user_settings`.

        The values of the variables are hidden in this process from now on.
        """
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                # What was given may be the key itself, so it is not shown.
                raise ConfigError(
                    "scoring.env has a text that is no name of an environment variable. Give names only, as in "
                    "--scoring.env OPENAI_API_KEY; the value stays in the environment."
                )
        hide_variables(self.env)

    def require_variables(self) -> None:
        """Raises a ConfigError if a variable that `env` names is not set, or is empty, in this process."""
        for name in self.env:
            if not os.environ.get(name):
                raise ConfigError(
                    f"scoring.env names {name}, which is not set. Set it before the command, as in export {name}=..., "
                    "or leave it out."
                )

    def require_keys(self, task: Any) -> None:
        """Raises a ConfigError if a judge of the task reads its key from a variable that `env` does not name.

        Judges in files of reward functions (task `rows`) are found too: such files are loaded.
        """
        if hasattr(task, "load_functions"):
            task.load_functions()
        # Without this module there is no judge, and importing it takes time.
        if "cohort.judge.judge" not in sys.modules:
            return
        from cohort.judge.finding import find_judges

        missing = [judge.key for judge in find_judges(task) if judge.key and judge.key not in self.env]
        if missing:
            names = " ".join(dict.fromkeys([*self.env, *missing]))
            raise ConfigError(
                f"a judge of the task {task.name} reads its key from the variable {missing[0]}, which graders are not "
                f"given. Hand it over by name: --scoring.env {names}."
            )
