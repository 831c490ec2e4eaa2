"""Check of what a run learns from: whether held-out rows are new to it."""

from __future__ import annotations

from cohort.inspect.check.findings import Finding, fail, ok, quote, warn
from cohort.tasks.stream import SharedRows

FAIL_SHARED_SHARE = 0.5  # of the held-out rows: more than this is a FAIL


def check_overlap(overlap: SharedRows) -> Finding:
    """Returns FAIL if more than half of the held-out rows ask the same as a training row, warn if some do, else ok."""
    name = "task/overlap"
    split, num, total = overlap.split, overlap.num_shared, overlap.num_rows
    if not num:
        return ok(name, f"none of {total} {split} rows asks the same as a training row", rows=total)
    held_out, trained = map(quote, overlap.first)
    text = (
        f"{num} of {total} {split} rows ask the same as a training row (first: {held_out} as {trained}), so the "
        "held-out accuracy shows in part what was learnt by heart. Take these rows out of one of the two splits."
    )
    return (fail if num > FAIL_SHARED_SHARE * total else warn)(name, text, shared=num, rows=total)
