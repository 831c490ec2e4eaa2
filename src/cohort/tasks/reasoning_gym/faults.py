"""What was found wrong with data sets of reasoning-gym, and the version in which it was found.

`benchmarks/reasoning_gym_check.py` measures every data set of the installed version and compares the result with these
tables. docs/reasoning_gym.md has the measurements.
"""

from __future__ import annotations

import os
from typing import Any

TRIED = "0.1.25"  # the version that the tables speak of

# Data sets that cannot be used, with the reason. A reason continues "it is refused because".
REFUSED = {
    "coin_flip": 'its grader accepts errors of 0.0001, so that "0" is right for almost every row',
    "composite": "it mixes other data sets; write a mixture instead: --task.dataset chain_sum:2,leg_counting:1",
    "game_of_life_halting": "its grader gives full marks to any text",
    "list_functions": "its rows depend on which rows were made before",
    "propositional_logic": "one fixed answer, such as P or Q, is a right conclusion in most rows",
    "puzzle24": "its grader does not compare the numbers, so that one solution is right for every row",
}
# Data sets whose rows follow the hash seed of Python, which is another one in each process.
HASHED = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
# Data sets without a right answer in the rows. Those with a key have one in the metadata, under that key.
EXAMPLE_KEYS = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
WITHOUT_GOLD = frozenset({"boxnet", "rush_hour"})
# Data sets whose graders run the answer as Python: directly, or through sympy's parser.
EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
PARSED_BY_SYMPY = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)


def find_fault(name: str) -> str:
    """Returns why the data set `name` cannot be used in this process, with what to do; "" if it can.

    >>> find_fault("chain_sum"), find_fault("game_of_life_halting")
    ('', 'its grader gives full marks to any text')
    """
    if name in REFUSED:
        return REFUSED[name]
    # The processes that score answers inherit the variable.
    if name in HASHED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        return "every process makes other rows of it; start Python with the environment variable PYTHONHASHSEED=0"
    return ""


def find_setting_fault(name: str, config: Any) -> str:
    """Returns why the data set `name` cannot be used with its settings `config`, with what to do; "" if it can."""
    if name == "basic_arithmetic" and not config.allow_parentheses:
        signs = {*config.operators}
        if signs & {*"+-"} and signs & {*"*/"}:
            return (
                "without parentheses its right answers are computed from left to right, so that 3 - 5 * 5 is -10; set "
                "--task.operators + - or --task.allow-parentheses true"
            )
    return ""
