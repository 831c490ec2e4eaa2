"""A reward that is no 0 or 1, and data without test rows. `cohort train examples/brief_answers.py:recipe`"""

import cohort
from cohort.config.schema import BatchConfig, OptimConfig, SamplingConfig

TOPICS = ("rain", "bread", "trains", "tea", "bees", "maps", "snow", "music", "rivers", "chess", "paper", "salt")


@cohort.task("brief_answers")
class BriefAnswers:
    """Answer in about twelve words."""

    accuracy = None  # no answer is right or wrong: evaluations report the mean reward

    def rows(self, split):
        return [{"topic": topic, "n": n} for topic in TOPICS for n in range(8)] if split == "train" else []

    def prompt(self, row):
        return [{"role": "user", "content": f"{row['n']}. Say something about {row['topic']}."}]

    def score(self, row, answer):
        return max(-1.0, -abs(len(answer.text.split()) - 12) / 12)


def recipe():
    batch, sampling = BatchConfig(prompts=8, samples=8), SamplingConfig(max_tokens=32)
    return cohort.RL(task=BriefAnswers(), steps=20, batch=batch, sampling=sampling, optim=OptimConfig(lr=3e-4))
