"""The accuracy of a Countdown evaluation by kind of problem: those that + and - can solve, and the others.

    python benchmarks/countdown_operators.py EVALUATION.json

It reads the file that `cohort eval countdown` wrote. It also counts how many of the tried expressions use * or /, how
many answers ended before the length limit, and how many expressions, and different expressions, the cut answers tried.
"""

from __future__ import annotations

import argparse
import json
import re
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path

# An expression that an answer tried.
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@cache
def compute_reachable_values(nums: tuple[Fraction, ...], operators: str) -> frozenset[Fraction]:
    """Returns all values of expressions that use each of the sorted `nums` once. `operators` is "+-" or "+-*/"."""
    if len(nums) == 1:
        return frozenset(nums)
    values: set[Fraction] = set()
    # Joins two numbers in every way, then solves the smaller problem with the result in their place.
    for i, j in combinations(range(len(nums)), 2):
        a = nums[i]
        b = nums[j]
        rest = [nums[k] for k in range(len(nums)) if k not in (i, j)]
        results = {a + b, a - b, b - a}
        if operators == "+-*/":
            results |= {a * b} | ({a / b} if b else set()) | ({b / a} if a else set())
        for value in results:
            values |= compute_reachable_values(tuple(sorted([*rest, value])), operators)
    return frozenset(values)


def main() -> None:
    """Reads an evaluation and prints its table and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path)
    a = parser.parse_args()
    items = json.loads(a.evaluation.read_text(encoding="utf-8"))["items"]
    # Scores of answers by (count of numbers, whether + and - are enough).
    kinds: dict[tuple[int, bool], list[float]] = {}
    tried: list[str] = []
    # The expressions of each answer that was cut, and the scores of those that ended before the limit.
    cut: list[list[str]] = []
    stopped: list[float] = []
    for item in items:
        numbers, target = item["id"].split("=")
        nums = tuple(sorted(Fraction(n) for n in numbers.split("-")))
        goal = Fraction(target)
        assert goal in compute_reachable_values(nums, "+-*/"), f"{item['id']} has no solution"
        simple = goal in compute_reachable_values(nums, "+-")
        for answer in item["answers"]:
            tags = TAG.findall(answer["text"])
            tried += tags
            if answer["finish"] == "length":
                cut.append(tags)
            else:
                stopped.append(answer["correct"])
            kinds.setdefault((len(nums), simple), []).append(answer["correct"])
    print("| numbers | + and - suffice | answers | right |\n|---:|---|---:|---:|")
    for (count, simple), right in sorted(kinds.items()):
        share = f"{sum(right):.0f} ({sum(right) / len(right):.1%})"
        print(f"| {count} | {'yes' if simple else 'no'} | {len(right)} | {share} |")
    with_product = sum(bool(re.search(r"[*/]", tag)) for tag in tried)
    print(f"\n{len(tried)} expressions in answer tags, {with_product} with * or /")
    print(f"{len(stopped)} answers ended before the length limit, {sum(stopped):.0f} of them right")
    if cut:
        each, different = (sum(map(len, tags)) / len(cut) for tags in (cut, [{*tags} for tags in cut]))
        print(f"{len(cut)} answers were cut, after {each:.1f} expressions each, {different:.1f} of them different")


if __name__ == "__main__":
    main()
