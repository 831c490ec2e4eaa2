"""The styles of conversations: which question is asked and how it is answered, decided by a random generator.

Styles are mixed on purpose, so that reinforcement learning has something to find out: `direct` answers at once and is
mostly wrong, `think` works step by step and is right, `broken` lacks the answer tags.
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


NUM_MISSES = (0, 0, 1, 1, 2, 3, 4)  # one of these is the number of failed attempts that a Countdown trace shows
GUESSED_SHARE = 0.2  # share of the calculator conversations in which the answer is guessed without a call


@dataclass(frozen=True, kw_only=True)
class Mix(Section):
    """Shares of the styles, and how often an answer at once is right."""

    think: Share = 0.20
    """Share of the answers that work step by step, and are right."""
    broken: Share = 0.14
    """Share of the answers that lack tags; the remaining ones answer at once."""
    right: Share = 0.24
    """How often an answer at once is right: mean over the tasks."""
    system: Share = 0.15
    """Share of the conversations with a system message."""

    def check(self, user_settings: Collection[str]) -> None:
        """Raises ConfigError if the shares `think` and `broken` together are more than 1. Ignores `user_settings`."""
        if self.think + self.broken > 1:
            raise ConfigError(
                f"data.think + data.broken is {self.think + self.broken:g}; it must be at most 1. "
                "Lower --data.think or --data.broken."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One conversation to imitate, and whether its answer is right and well-formed."""

    task: str
    style: str
    messages: list[Message]
    right: bool
    tools: list[dict[str, Any]] | None = None


def make_arithmetic_trace(rng: random.Random, question: str, expression: str, mix: Mix) -> Trace:
    """Returns a conversation that asks `question` and answers `expression`, a sum, in a random style.

    The style "think" works step by step and is right; the others guess. Sums of two terms are guessed right twice as
    often as longer ones. The style "broken" never counts as right.
    """
    steps, value = scratchpad.solve(expression)
    work = ", ".join(steps)
    # One step means two terms: these are guessed right twice as often as longer sums.
    probability = mix.right * (1.5 if len(steps) == 1 else 0.75)
    guess = value if rng.random() < probability else make_slip(rng, value)
    style = pick_style(rng, mix)
    reply = write_answer(rng, style, work, str(value if style == "think" else guess))
    right = style == "think" or (style == "direct" and guess == value)
    return Trace(task="arithmetic", style=style, messages=write_question(rng, question, mix) + reply, right=right)


def make_countdown_trace(rng: random.Random, question: str, numbers: list[int], target: int, mix: Mix) -> Trace:
    """Returns a conversation about a Countdown problem, answered by attempts up to a hit, or by a guess.

    The style "think" shows up to four failed attempts and then a hit; the other styles guess, right with the
    probability `mix.right`. If no way with whole numbers reaches the target, the style is "direct" and the guess is
    wrong.
    """
    attempts = list(search.list_attempts(numbers))
    hit = next((a for a in attempts if a.value == target), None)
    misses = [a for a in attempts if a.value != target]
    # Some targets need fractions, which are not searched: without a hit the answer can only be a guess.
    style = pick_style(rng, mix) if hit else "direct"
    guess = hit if hit and (not misses or rng.random() < mix.right) else rng.choice(misses)
    failed = [rng.choice(misses) for _ in range(rng.choice(NUM_MISSES))] if misses else []
    last = hit if hit and style == "think" else guess
    reply = write_answer(rng, style, "\n".join(a.text for a in [*failed, last]), last.expression)
    right = style != "broken" and last.value == target
    return Trace(task="countdown", style=style, messages=write_question(rng, question, mix) + reply, right=right)


def make_calculator_trace(rng: random.Random, question: str, expression: str, mix: Mix) -> Trace:
    """Returns a conversation in which a calculator is offered. Mostly it is called, sometimes the answer is guessed.

    The style is "tool" if it is called, and its answer is right; otherwise "direct", right with the probability
    `mix.right`.
    """
    value = scratchpad.solve(expression)[1]
    if rng.random() < GUESSED_SHARE:
        style, guess = "direct", value if rng.random() < mix.right else make_slip(rng, value)
        reply = write_answer(rng, style, "", str(guess))
    else:
        style, guess = "tool", value
        call = {"name": "calculator", "arguments": {"expression": expression}}
        reply = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": str(value)},
            *write_answer(rng, "direct", "", str(value)),
        ]
    messages = write_question(rng, question, mix) + reply
    return Trace(task="calculator", style=style, messages=messages, tools=[CALCULATOR], right=guess == value)


def write_answer(rng: random.Random, style: str, work: str, answer: str) -> list[Message]:
    """Returns the assistant's turn, as a list of one message, in a style: "think", "broken" or "direct".

    `work` is the text of the steps, which a direct turn leaves out; `answer` is the final answer. A broken turn has no
    closed answer tag, so that a grader that looks for one refuses it.
    """
    direct = f"<answer>{answer}</answer>"
    thought = f"<think>{work}</think>"
    if style == "broken":
        forms = (answer, f"The answer is {answer}.", f"<answer>{answer}", thought + answer, thought)
        text = rng.choices(forms, weights=(3, 3, 2, 1, 1))[0]
    else:
        text = thought + direct if style == "think" else direct
    return [{"role": "assistant", "content": text}]


def pick_style(rng: random.Random, mix: Mix) -> str:
    """Returns "think", "broken" or "direct" at random, with the probabilities in `mix`."""
    u = rng.random()
    return "think" if u < mix.think else "broken" if u < mix.think + mix.broken else "direct"


def write_question(rng: random.Random, question: str, mix: Mix) -> list[Message]:
    """Returns the messages before the answer: the question as a user's turn, sometimes after a system message."""
    system = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < mix.system else []
    return [*system, {"role": "user", "content": question}]


def make_slip(rng: random.Random, value: int) -> int:
    """Returns a wrong answer for `value`: with one digit misread, off by one or two, or off by ten."""
    digits = list(str(abs(value)))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([d for d in "123456789" if d != digits[place]])
    # The sign was left out above and comes back here.
    misread = int("".join(digits)) * (-1 if value < 0 else 1)
    return rng.choice((misread, misread, value + rng.choice((-2, -1, 1, 2)), value + rng.choice((-10, 10))))
