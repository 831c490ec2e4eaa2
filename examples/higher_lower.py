"""A game as an environment in one file: name a number, and be told whether it is higher or lower.

    cohort train examples/higher_lower.py:higher_lower

The number is the value of a sum, so that the bundled model can play. An episode is one object. `start` returns the
first message, `step` is given each answer of the model and returns a reply, or the reward at the end.
"""

import re
from dataclasses import replace

import cohort
from cohort.config.schema import Conversation
from cohort.recipes.tiny import quickstart
from cohort.tasks.arithmetic import Arithmetic


class Game:
    """One game. It is lost when the conversation has no turn left."""

    def start(self, row, draws):
        # The words change from visit to visit, and are the same for all samples of a group.
        words = draws.for_group("words").choice(("What is {}?", "Calculate {}.", "Compute {}."))
        self.number = row["answer"]
        return words.format(row["expression"])

    def step(self, answer):
        found = re.search(r"<answer>(-?\d{1,9})</answer>", answer.text)
        if found is None:
            return "Write a number between <answer> and </answer>."
        guess = int(found[1])
        if guess == self.number:
            return cohort.Step(parts={"correct": 1.0})
        return "Higher." if guess < self.number else "Lower."


@cohort.task("higher_lower")
class HigherLower:
    """Name the value of a sum within a few guesses."""

    max_terms: int = 3

    def rows(self, split):
        return Arithmetic(max_terms=self.max_terms, train_size=2000, test_size=500).rows(split)

    def environment(self):
        return Game()


def higher_lower():
    """The game with the bundled model: three guesses."""
    return replace(quickstart(), task=HigherLower(), reward={}, turns=Conversation(max_turns=3))
