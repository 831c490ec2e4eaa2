"""What a reader must know to judge the table of a sweep, in sentences: its notes, and how sure the winner is."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.sweep.plan import Plan
from cohort.sweep.records import CombinationRow, RunRecord, RunRow, SweepTable

SIGNIFICANT = 0.05  # p-values below are
_MAX_NAMED = 3  # combinations that the winner's sentence names
_MAX_MISSING = 5  # runs without a result that a note names
_WIDE = 0.5  # an interval of an accuracy at least so wide tells next to nothing
_FEW_PROBLEMS = 20  # with fewer the problems may be the cause of a wide interval


def make_notes(
    plan: Plan, runs: Sequence[RunRow], combinations: Sequence[CombinationRow], split: str, obstacle: str = ""
) -> list[str]:
    """Returns what a reader must know to judge the numbers, one sentence or two per line.

    `obstacle` says how the combinations were evaluated, if therefore none can be called the best; "" = one can.
    """
    has_results = any(row.num_seeds for row in combinations)
    has_rewards = any(row.training_reward is not None for row in combinations)
    notes = [
        _describe_choice(plan, split, has_rewards) if has_results else "No run has a result, so nothing is chosen."
    ]
    if obstacle:
        notes = [f"The combinations were evaluated {obstacle}: none can be called best."]
    if any(row.low is not None for row in combinations):
        notes.append(_describe_intervals(plan, combinations))
    if num := sum(row.difference is not None for row in combinations):
        many = f" Interval and p allow for the {num} comparisons." if num > 1 else ""
        notes.append(
            "Differences are to the best combination, on the same problems and seeds. p is below 0.05 where the "
            f"interval leaves out 0.{many} The best was chosen by the same numbers, so they look larger than they are."
        )
    elif not obstacle and sum(row.value is not None for row in combinations) > 1:
        notes.append("The combinations cannot be compared in pairs: their problems, graders or seeds differ.")
    if any(row.state == "stopped" for row in runs):
        notes.append("Runs marked with * were stopped by a rule. Their result is that of their last step.")
    missing = [row for row in runs if row.state in ("failed", "missing")]
    if missing:
        names = ", ".join(row.name for row in missing[:_MAX_MISSING])
        names += f" and {len(missing) - _MAX_MISSING} more" if len(missing) > _MAX_MISSING else ""
        notes.append(f"{len(missing)} of {len(runs)} runs have no result and are left out: {names}.")
    return notes


def note_undecided(records: Sequence[RunRecord]) -> list[str]:
    """Returns a note per rule that decided nothing in some runs, because they do not have its metric."""
    undecided = [rule for record in records if record.result is not None for rule in record.result.undecided]
    counts = {rule: f"{undecided.count(rule)} of {len(records)} runs" for rule in undecided}
    return [f"The rule {rule} decided nothing in {num}, which do not have its metric." for rule, num in counts.items()]


def _describe_choice(plan: Plan, split: str, has_rewards: bool) -> str:
    """Returns on which problems the choice was made, and what that means for the winner's result.

    `has_rewards` = runs that were not evaluated have training rewards.
    """
    if split == "validation":
        return (
            "The choice was made on the validation split, which no run was trained on. The result of the winner is "
            "still a little too good, because it was chosen: evaluate it once on the test split."
        )
    if split == "test":
        why = f" ({plan.split_note})" if plan.split_note else ""
        return (
            f"The choice was made on the test split{why}, so the result of the winner is too good, and no problems "
            "are left to measure it."
        )
    if has_rewards:
        return (
            "No run was evaluated, so nothing is chosen. The training reward is the mean of the last steps, on prompts "
            "that were trained on: --eval.split validation keeps some problems apart."
        )
    return "No run was evaluated, so nothing is chosen. The loss of training does not say which model is better."


def _describe_intervals(plan: Plan, combinations: Sequence[CombinationRow]) -> str:
    """Returns what the intervals cover, and why some are too wide to use."""
    if len(plan.seeds) == 1:
        return (
            "Intervals are 95%, over problems. With one seed they say nothing about how another seed would do: begin a "
            "new sweep with --seeds 3."
        )
    # Rewards have no scale of their own.
    shares = [row for row in combinations if row.accuracy is not None]
    wide = [row for row in shares if row.low is not None and row.high is not None and row.high - row.low >= _WIDE]
    text = "Intervals are 95%, over problems and seeds."
    if not wide:
        return text
    widest = max(wide, key=lambda row: (row.high or 0.0) - (row.low or 0.0))
    few = f"{len(plan.seeds)} seeds" + (" and so few problems" if widest.num_problems < _FEW_PROBLEMS else "")
    return (
        f"{text} One such as {widest.low:.3f} to {widest.high:.3f} means that {few} are too few to tell; sweep.md "
        "has the accuracy of each seed."
    )


def describe_best(table: SweepTable) -> list[str]:
    """Returns the winner with its result, and whether it can be told from the others: a sentence each; [] = none."""
    best = table.best
    if best is None or best.value is None:
        return []
    found = f"best: {_name_combination(best)} with {table.measure} {best.value:.3f}"
    others = [row for row in table.combinations if row is not best and row.value is not None]
    compared = [(row, row.difference) for row in others if row.difference is not None]
    equal = [row for row, difference in compared if difference.p >= SIGNIFICANT]
    if not compared:
        return [found]
    if not equal:
        which = "the other" if len(compared) == 1 else f"all {len(compared)} others"
        left = f" that it can be compared with, of {len(others)}" if len(compared) < len(others) else ""
        return [found, f"It is better than {which}{left} (p below {SIGNIFICANT})."]
    equal.sort(key=lambda row: -(row.value or 0.0))
    names = "; ".join(map(_name_combination, equal[:_MAX_NAMED]))
    more = f"; and {len(equal) - _MAX_NAMED} more" if len(equal) > _MAX_NAMED else ""
    num_seeds = max(5, 2 * len(table.seeds))
    return [
        found,
        f"It may be best by luck: {_count_equal(len(equal), len(others))} not distinguishable from it (p of "
        f"{SIGNIFICANT} or more): {names}{more}.",
        f"To tell them apart, make a new sweep of these with more seeds (--seeds {num_seeds}) or problems "
        "(--eval.problems).",
    ]


def _count_equal(num: int, num_others: int) -> str:
    """Returns how many of the others are meant, with the verb.

    >>> _count_equal(1, 1), _count_equal(1, 3), _count_equal(3, 3)
    ('the other one is', '1 of the 3 others is', 'all 3 others are')
    """
    if num_others == 1:
        return "the other one is"
    if num == num_others:
        return f"all {num} others are"
    return f"{num} of the {num_others} others {'is' if num == 1 else 'are'}"


def _name_combination(row: CombinationRow) -> str:
    """Returns the settings of a combination in words."""
    return " ".join(f"{name}={value}" for name, value in row.settings.items()) or "the recipe"
