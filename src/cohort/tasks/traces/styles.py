"""The conversations: who asks what, and how it is answered. Deterministic in the seed.

Styles are mixed on purpose, so that reinforcement learning has something to find out:
`direct` answers at once and is mostly wrong, `think` works step by step and is right, `broken` lacks tags.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cohort.config.section import Section, Share
from cohort.errors import ConfigError
from cohort.tasks.traces import scratchpad, search
from cohort.types import Message

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
SYSTEMS = (
    "You are a helpful assistant.",
    "Give the final answer in <answer> tags.",
    "Answer the question.",
    "You are a careful calculator.",
)


TRIES = (0, 0, 1, 1, 2, 3, 4)  # misses before the hit
GUESSED = 0.2  # share of the questions that are guessed although the calculator is there


@dataclass(frozen=True, kw_only=True)
class Mix(Section):
    """Shares of the styles, and how often an answer at once is right."""

    think: Share = 0.20
    """Share of the answers that work step by step, and are right."""
    broken: Share = 0.14
    """Share of those that lack tags; the rest answers at once."""
    right: Share = 0.24
    """How often an answer at once is right: mean over the tasks."""
    system: Share = 0.15
    """Share of the conversations with a system message."""

    def check(self, given: Collection[str]) -> None:
        if self.think + self.broken > 1:
            raise ConfigError(f"data.think + data.broken is {self.think + self.broken:g}; it must be at most 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One conversation to imitate, and whether its answer is right and well-formed."""

    task: str
    style: str
    messages: list[Message]
    right: bool
    tools: list[dict[str, Any]] | None = None


def arithmetic(rng: random.Random, question: str, expression: str, mix: Mix) -> Trace:
    """Step by step, or a guess: sums of two terms are guessed right more often than those of three."""
    steps, value = scratchpad.solve(expression)
    work = ", ".join(steps)
    likely = mix.right * (1.5 if len(steps) == 1 else 0.75)
    guess = value if rng.random() < likely else slip(rng, value)
    style = pick_style(rng, mix)
    said = written(rng, style, work, str(value if style == "think" else guess))
    right = style == "think" or (style == "direct" and guess == value)
    return Trace(task="arithmetic", style=style, messages=opening(rng, question, mix) + said, right=right)


def countdown(rng: random.Random, question: str, numbers: list[int], target: int, mix: Mix) -> Trace:
    """Trial and error up to a hit, or a guess."""
    ways = list(search.tries(numbers))
    hit = next((w for w in ways if w.value == target), None)
    misses = [w for w in ways if w.value != target]
    style = pick_style(rng, mix) if hit else "direct"  # some targets need fractions, which are not searched
    guess = hit if hit and (not misses or rng.random() < mix.right) else rng.choice(misses)
    tried = [rng.choice(misses) for _ in range(rng.choice(TRIES))] if misses else []
    last = hit if hit and style == "think" else guess
    said = written(rng, style, "\n".join(w.text for w in [*tried, last]), last.expression)
    right = style != "broken" and last.value == target
    return Trace(task="countdown", style=style, messages=opening(rng, question, mix) + said, right=right)


def calculator(rng: random.Random, question: str, expression: str, mix: Mix) -> Trace:
    """A question with the calculator at hand: mostly it is called, sometimes the answer is guessed."""
    value = scratchpad.solve(expression)[1]
    if rng.random() < GUESSED:
        style, guess = "direct", value if rng.random() < mix.right else slip(rng, value)
        reply = written(rng, style, "", str(guess))
    else:
        style, guess = "tool", value
        call = {"name": "calculator", "arguments": {"expression": expression}}
        reply = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": str(value)},
            *written(rng, "direct", "", str(value)),
        ]
    messages = opening(rng, question, mix) + reply
    return Trace(task="calculator", style=style, messages=messages, tools=[CALCULATOR], right=guess == value)


def written(rng: random.Random, style: str, work: str, answer: str) -> list[Message]:
    """The assistant's turn. A broken one is what a grader that wants <answer>...</answer> cannot accept."""
    direct = f"<answer>{answer}</answer>"
    thought = f"<think>{work}</think>"
    if style == "broken":
        forms = (answer, f"The answer is {answer}.", f"<answer>{answer}", thought + answer, thought)
        text = rng.choices(forms, weights=(3, 3, 2, 1, 1))[0]
    else:
        text = thought + direct if style == "think" else direct
    return [{"role": "assistant", "content": text}]


def pick_style(rng: random.Random, mix: Mix) -> str:
    """One of think, broken and direct, in the shares of the mix."""
    u = rng.random()
    return "think" if u < mix.think else "broken" if u < mix.think + mix.broken else "direct"


def opening(rng: random.Random, question: str, mix: Mix) -> list[Message]:
    """The question, sometimes after a system message."""
    system = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < mix.system else []
    return [*system, {"role": "user", "content": question}]


def slip(rng: random.Random, value: int) -> int:
    """A wrong answer of the right size: a digit misread, an off-by-a-little, a carry lost."""
    digits = list(str(abs(value)))
    at = rng.randrange(len(digits))
    digits[at] = rng.choice([d for d in "123456789" if d != digits[at]])
    misread = int("".join(digits)) * (-1 if value < 0 else 1)
    return rng.choice((misread, misread, value + rng.choice((-2, -1, 1, 2)), value + rng.choice((-10, 10))))
