"""How many prompts a step needs where an algorithm rejects groups, and how many may be begun ahead of that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

# Rounds of prompts per step, replacements of rejected groups included. After them a step continues with fewer groups.
MAX_REFILLS = 10
# The estimated share of rejected groups is never taken to be larger than this.
MAX_REJECTION_RATE = 0.9
# The number of recent groups from which that share is estimated.
RATE_WINDOW = 256
# The estimate counts so many accepted groups in addition, so that the first few rejections do not decide it.
PRIOR_ACCEPTED = 8


def count_needed_prompts(verdicts: Sequence[bool | None], num: int) -> int:
    """Returns how many prompts a step needs to get `num` accepted groups, if each rejected group is replaced.

    `verdicts` has, in the order of the prompts, whether the group of each was accepted; None = not known yet, which
    counts as accepted, so the result is a lower bound until all are known. There are at most MAX_REFILLS rounds: the
    first takes `num` prompts, each later one as many as the round before had rejections. After the last, `num` may not
    be reached.

    >>> count_needed_prompts([], 3), count_needed_prompts([True, False, None], 3)
    (3, 4)
    >>> count_needed_prompts([True, False, True, False], 3)
    5
    """
    total = 0
    missing = num
    # Each round takes as many prompts as groups are missing, and learns how many of them were rejected.
    for _ in range(MAX_REFILLS):
        this_round = verdicts[total : total + missing]
        total += missing
        missing = sum(verdict is False for verdict in this_round)
        if not missing:
            break
    return total


class RejectionRate:
    """Estimates the share of rejected groups. It decides which prompts are begun ahead, never what is trained on."""

    def __init__(self) -> None:
        self._rejected: deque[bool] = deque(maxlen=RATE_WINDOW)

    def record(self, rejected: bool) -> None:
        """Adds one group to those from which the rate is estimated. Only the last RATE_WINDOW groups count.

        `rejected` = the algorithm did not accept the group.
        """
        self._rejected.append(rejected)

    def estimate_replacements(self, num: int) -> int:
        """Returns how many groups will probably be needed to replace the rejected ones among `num` open groups.

        A replacement may be rejected as well, so this is the sum num * (rate + rate^2 + ...), rounded up. The rate is
        at most MAX_REJECTION_RATE, and 0 before the first rejection.
        """
        rate = min(MAX_REJECTION_RATE, sum(self._rejected) / (len(self._rejected) + PRIOR_ACCEPTED))
        return math.ceil(num * rate / (1.0 - rate))
