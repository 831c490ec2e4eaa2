"""The problems of a task, asked one after the other in a chat, and the grader's verdicts on the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cohort.chat.conversation import Exchange, ModelTurn
from cohort.chat.options import ChatOptions
from cohort.chat.playing import PURPOSE
from cohort.config.kinds import RL
from cohort.config.scoring import ScoringConfig
from cohort.errors import CohortError, ConfigError, TaskError
from cohort.run.directory import RunDirectory
from cohort.scoring.base import Pool
from cohort.scoring.start import start_scorer
from cohort.tasks.base import Task, has_conversations, load_rows
from cohort.tasks.calls import make_messages
from cohort.tasks.conversation import ConversationRules, open_episode
from cohort.tasks.environment import KeyedDraws, Opening
from cohort.tasks.splits import cut_validation
from cohort.types import Answer, Key, Message, Outcome, Row

POLL_SECONDS = 0.1  # after which a look is taken whether the user has stopped the scoring


class TaskProblems:
    """The rows of a task in their order, scoring workers, and the number of right answers per model."""

    def __init__(
        self, task: Task, split: str, validation_share: float = 0.1, scoring: ScoringConfig | None = None
    ) -> None:
        self.task = task
        self._scoring = scoring  # settings; None = the default ones
        self.has_conversations = has_conversations(task)  # whether a problem is an episode of several turns
        self.split = split
        self.validation_share = validation_share  # of the training rows, for the split "validation"
        self._rows = _load_split(task, split, validation_share)
        self._next = 0
        self._pool = None if self.has_conversations else start_scorer(task, scoring)
        # Workers that run tools and environments, by the rules of conversations: models may write calls differently.
        self._players: dict[ConversationRules, Pool] = {}
        if self.has_conversations:
            # A broken tool or environment shows at once.
            self.open_row(self._rows[0]["id"], seed=0)
        # Problems that were scored and that were answered rightly, by the place of the model.
        self.num_scored: Counter[int] = Counter()
        self.num_right: Counter[int] = Counter()

    def take_row(self, seed: int = 0) -> tuple[Row, list[Message]]:
        """Returns the next row and its prompt, or the opening of its episode. Raises ConfigError after the last row.

        What an environment draws depends on `seed`.
        """
        if self._next >= len(self._rows):
            raise ConfigError(f"these were all {len(self._rows)} {self.split} problems of {self.task.name}.")
        row = self._rows[self._next]
        self._next += 1
        if self.has_conversations:
            return row, self.open_row(row["id"], seed)[1].messages
        return row, make_messages(self.task, row)

    def open_row(self, id: str, seed: int) -> tuple[Row, Opening]:
        """Returns the row with this id, and the messages and tools with which its episodes begin."""
        row = next(row for row in self._rows if row["id"] == id)
        key = Key(seed=seed, purpose=PURPOSE, task=self.task.name, prompt_id=id, visit=0, sample=-1)
        return row, open_episode(self.task, row, KeyedDraws(key)).describe()

    def list_tools(self, id: str, seed: int) -> list[str]:
        """Returns the names of the tools that the models are offered for a row."""
        if not self.has_conversations:
            return []
        return [str(tool["function"]["name"]) for tool in self.open_row(id, seed)[1].tools]

    def get_player(self, rules: ConversationRules) -> Pool:
        """Returns the workers that run tools and environments by these rules. They are started at their first use."""
        if rules not in self._players:
            self._players[rules] = start_scorer(self.task, self._scoring, rules=rules)
        return self._players[rules]

    def describe_next(self) -> str:
        """Returns which problem the last one was, such as "countdown, problem 3 of 200 (test)"."""
        return f"{self.task.name}, problem {self._next} of {len(self._rows)} ({self.split})"

    def describe_split(self, label: str, run: Path) -> str:
        """Returns what the split is to the run that a model comes from; "" if there is nothing to say.

        `label` is the name of the model. Only a run with the same task is considered. None of its code is run.
        """
        try:
            config = RunDirectory.open(run).config
        except CohortError:
            return ""
        if not isinstance(config, RL) or config.task.name != self.task.name:
            return ""
        share = config.eval.validation_share
        share_flag = "" if share == ChatOptions.validation_share else f" --validation-share {share:g}"
        match self.split, config.eval.split:
            case "test", "validation":
                return (
                    f"{label} was evaluated on the validation split. These are test problems; --split validation"
                    f"{share_flag} shows the others."
                )
            case "validation", "test":
                return f"{label} was trained on these problems too; --split test has some that are new to it."
            case "validation", "validation" if share != self.validation_share:
                return (
                    f"{label} had a validation split of {share:g} of the training problems; --validation-share "
                    f"{share:g} shows it."
                )
            case "validation", "validation":
                return f"{label} was evaluated on these validation problems, and not trained on them."
        return ""

    def score(self, exchange: Exchange, is_stopped: Callable[[], bool]) -> Exchange:
        """Returns the exchange, whose messages are the prompt of a row, with the grader's outcomes.

        Answers that the user cut, and those that are not scored before `is_stopped()`, get none. First attempts count
        in `num_scored` and `num_right`, and the exchange has the counts so far. Raises TaskError if the grader gives
        something that is no score.
        """
        assert self._pool is not None, "conversations are scored when they are played"
        row = next(row for row in self._rows if row["id"] == exchange.row)
        for place, turn in enumerate(exchange.turns):
            if turn is not None and turn.finish != "abort":
                self._pool.submit(str(place), row, make_answer(exchange, turn))
        outcomes: dict[str, Outcome] = {}
        try:
            while self._pool.num_pending and not is_stopped():
                outcomes |= dict(self._pool.poll(POLL_SECONDS))
        finally:
            for place in range(len(exchange.turns)):
                self._pool.drop(str(place))
        turns = [
            turn if turn is None or str(place) not in outcomes else replace(turn, outcome=outcomes[str(place)])
            for place, turn in enumerate(exchange.turns)
        ]
        return self.count(replace(exchange, turns=tuple(turns)))

    def count(self, exchange: Exchange) -> Exchange:
        """Returns an exchange that has outcomes with the counts so far. Its own count only in a first attempt."""
        if exchange.attempt == 0:
            outcomes = {place: turn.outcome for place, turn in enumerate(exchange.turns) if turn and turn.outcome}
            self.num_scored.update(place for place, outcome in outcomes.items() if not outcome.failure)
            self.num_right.update(place for place, outcome in outcomes.items() if self.is_right(outcome))
        counts = tuple((self.num_right[place], self.num_scored[place]) for place in range(len(exchange.turns)))
        has_counts = bool(self.num_scored) and self.task.accuracy is not None
        return replace(exchange, counts=counts if has_counts else ())

    def is_right(self, outcome: Outcome) -> bool:
        """Returns whether the grader calls an answer right. A task without an accuracy calls none so."""
        return self.task.accuracy is not None and outcome.parts.get(self.task.accuracy) == 1.0

    def forget_counts(self) -> None:
        """Begins to count anew, because the models are others."""
        self.num_scored.clear()
        self.num_right.clear()

    def describe_outcome(self, turn: ModelTurn | None) -> str:
        """Returns the grader's verdict on an answer as text: right or wrong, every part, and the reason.

        Without an accuracy no answer is right or wrong.
        """
        if turn is None or turn.outcome is None:
            return "not scored"
        outcome = turn.outcome
        if outcome.failure:
            failed = "the conversation" if self.has_conversations else "the grader"
            return f"not scored, because {failed} failed: {outcome.failure}"
        parts = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items())
        reason = f"\n{outcome.reason}" if outcome.reason else ""
        earned = f", earned {sum(turn.earned):g} in its turns" if turn.earned else ""
        verdict = "RIGHT" if self.is_right(outcome) else "WRONG"
        return f"{'SCORED' if self.task.accuracy is None else verdict} ({parts}{earned}){reason}"

    def close(self) -> None:
        """Ends the scoring workers."""
        for pool in (self._pool, *self._players.values()):
            if pool is not None:
                pool.close()


def _load_split(task: Task, split: str, validation_share: float) -> list[Row]:
    """Returns the rows of a split. Those of "validation" are a share of the training rows, as in a run.

    Raises TaskError if the split has no rows.
    """
    if split != "validation":
        return load_rows(task, split)
    rows = cut_validation(load_rows(task, "train"), validation_share)[1]
    if not rows:
        raise TaskError(
            f'task "{task.name}" has no validation rows: they are a share of {validation_share:g} of its training '
            "rows; set another --validation-share, or give the task more rows."
        )
    return rows


def make_answer(exchange: Exchange, turn: ModelTurn) -> Answer:
    """Returns a model's answer to a task's prompt as the grader sees it."""
    full = turn.forced_text + turn.text
    # A prompt with forced text ends with a message of the assistant, which the answer repeats in full.
    before = exchange.messages[:-1] if turn.forced_text else exchange.messages
    conversation = [*before, {"role": "assistant", "content": full}]
    return Answer(
        text=turn.text, full=full, finish=turn.finish, num_tokens=len(turn.written), conversation=conversation
    )
