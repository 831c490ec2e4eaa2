"""Which Countdown problems an evaluation got right: those that + and - alone can solve, and the others.

    python benchmarks/countdown_operators.py EVALUATION.json

Reads what `cohort eval countdown` wrote. Also counts how many of the expressions it tried use * or /, how many answers
ended by themselves, and how many expressions, and different ones, those that were cut had tried.
"""

from __future__ import annotations

import argparse
import json
import re
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path

TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@cache
def values(nums: tuple[Fraction, ...], operators: str) -> frozenset[Fraction]:
    """Everything that uses each number once."""
    if len(nums) == 1:
        return frozenset(nums)
    found: set[Fraction] = set()
    for i, j in combinations(range(len(nums)), 2):
        a, b = nums[i], nums[j]
        rest = [nums[k] for k in range(len(nums)) if k not in (i, j)]
        joined = {a + b, a - b, b - a}
        if operators == "+-*/":
            joined |= {a * b} | ({a / b} if b else set()) | ({b / a} if a else set())
        for value in joined:
            found |= values(tuple(sorted([*rest, value])), operators)
    return frozenset(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path)
    a = parser.parse_args()
    items = json.loads(a.evaluation.read_text(encoding="utf-8"))["items"]
    kinds: dict[tuple[int, bool], list[float]] = {}
    tried: list[str] = []
    cut: list[list[str]] = []
    stopped: list[float] = []
    for item in items:
        left, target = item["id"].split("=")
        nums = tuple(sorted(Fraction(n) for n in left.split("-")))
        goal = Fraction(target)
        assert goal in values(nums, "+-*/"), f"{item['id']} has no solution"
        simple = goal in values(nums, "+-")
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
    print(f"{len(stopped)} answers ended by themselves, {sum(stopped):.0f} of them right")
    if cut:
        each, different = (sum(map(len, tags)) / len(cut) for tags in (cut, [{*tags} for tags in cut]))
        print(f"{len(cut)} answers were cut, after {each:.1f} expressions each, {different:.1f} of them different")


if __name__ == "__main__":
    main()
