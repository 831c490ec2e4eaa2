"""A loss of one's own in one file: tokens whose probability has moved far count less.

    cohort train quickstart --algo examples/own_loss.py:fading --learner.minibatches 2 --algo.width 0.3

The class has the settings, which become flags. `policy_loss` returns one loss term per token. All else (advantages,
masks, KL, sampler correction, aggregation, metrics, several epochs) is shared with the built-in algorithms.
"""

import cohort


@cohort.algorithm("fading")
class Fading(cohort.Policy):
    """Tokens that moved far count less."""

    width: float = 0.5
    """Log-ratio at which a token counts 1 / e as much."""

    def policy_loss(self, tokens):
        trust = (-((tokens.log_ratio.detach() / self.width) ** 2)).exp()
        return -trust * tokens.ratio * tokens.advantages
