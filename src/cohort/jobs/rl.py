"""The job of reinforcement learning: everything its loop needs, its evaluations, and how it is saved and described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cohort.algos.algorithm import Algorithm
from cohort.config.document import get_variant_name
from cohort.config.kinds import RL
from cohort.engines.base import Engine, Request, sample
from cohort.engines.sync import WeightSync
from cohort.evaluation.records import Evaluation
from cohort.jobs.base import TrainingJob
from cohort.jobs.task_eval import (
    describe_no_rows,
    evaluate_problems,
    notice_if_fewer_problems,
    suggest_evaluation,
)
from cohort.loops.reuse import RolloutReuse
from cohort.loops.rl import train
from cohort.models.catalog import notice_if_not_taught
from cohort.ranks.groups import GroupMover
from cohort.rollout.producer import Producer
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program_name
from cohort.run.store.records import RunDescription
from cohort.run.together import FollowingRun
from cohort.scoring.base import Pool
from cohort.tasks.base import list_own_tasks
from cohort.tasks.mix import list_specs
from cohort.text import Tokenizer
from cohort.types import Group, Key, Message, Prompt

# (title, metric) of the columns of the table of training in the run card.
CARD_COLUMNS = (
    ("reward", "reward/mean"),
    ("length", "length/mean"),
    ("entropy", "entropy"),
    ("gradient norm", "grad_norm"),
    ("dead groups", "groups/dead"),
)
# The name that stands for the task in groups of `RLJob.sample_groups`.
OWN_PROMPTS = "own prompts"
# (words, metric) of the metrics that the run card sums over all steps.
CARD_TOTALS = (("samples that could not be scored", "samples/failed"),)


@dataclass(kw_only=True)
class RLJob(TrainingJob):
    """A run of reinforcement learning: the model and its learner, and everything that samples and scores."""

    config: RL
    engine: Engine
    sync: WeightSync  # sends the learner's weights to the engine
    scorer: Pool
    producer: Producer  # makes the groups that are trained on
    eval_producer: Producer  # answers the problems of evaluations
    problems: list[Prompt]  # held out: never trained on
    num_problems_left_out: int = 0  # whose prompts are too long
    algo: Algorithm
    mover: GroupMover
    tokenizer: Tokenizer

    @property
    def evaluate(self) -> Callable[[int], Evaluation | None] | None:
        """A function that evaluates the current weights; None if the task has no held-out rows."""
        return self._evaluate if self.problems else None

    def _evaluate(self, step: int) -> Evaluation | None:
        """Samples and scores answers to the held-out problems with the current weights, and returns the evaluation.

        Ranks but the first return None.

        `step` is the number of completed steps. Raises TrainingStopped if many samples cannot be scored.
        """
        # The digest of the start: the workers keep that code, whatever happens to the file.
        grader = self.inputs.grader
        return evaluate_problems(
            self.config, self.eval_producer, self.problems, self.num_problems_left_out, grader, self.tokenizer, step
        )

    def sample_groups(self, prompts: Sequence[list[Message]], num_samples: int, visit: int = 0) -> list[Group]:
        """Samples answers to prompts that are in no task, with the sampling of the run. Returns one group per prompt.

        A prompt is a list of messages. Nothing is scored: set `reward` of every sample before the groups are trained
        on. `visit` says how often these prompts were sampled before; with an equal `visit`, place in `prompts` and run
        seed the random numbers are equal too. Raises ConfigError if a prompt is too long.
        """
        groups = [Group(prompt=self._make_prompt(number, m, visit), samples=[]) for number, m in enumerate(prompts)]
        requests = [
            Request(
                id=f"{group.prompt.id}/{index}",
                tokens=group.prompt.tokens,
                sampling=self.producer.settings.sampling,
                key=Key(
                    seed=self.config.seed,
                    purpose="train",
                    task=group.prompt.task,
                    prompt_id=group.prompt.id,
                    visit=visit,
                    sample=index,
                ),
            )
            for group in groups
            for index in range(num_samples)
        ]
        samples = sample(self.engine, requests)
        for group in groups:
            group.samples = [samples[f"{group.prompt.id}/{index}"] for index in range(num_samples)]
        return groups

    def _make_prompt(self, number: int, messages: list[Message], visit: int) -> Prompt:
        """Returns messages of the caller of `sample_groups` as a prompt, whose id is its number in that call."""
        rendered = self.producer.stream.render(messages)
        return Prompt(
            task=OWN_PROMPTS,
            id=str(number),
            visit=visit,
            row={},
            messages=messages,
            tokens=list(rendered.tokens),
            provenance=[int(p) for p in rendered.provenance],
            forced_text=rendered.forced_text,
        )

    def make_checkpoint(self, step: int) -> Checkpoint:
        """Returns the state of learner, prompt stream and algorithm after `step` completed steps, but no weights.

        Prompts that were begun and are not finished are part of it.
        """
        rollouts = self.producer.state()
        state = self.checkpoint_learner(step, rollouts["cursor"])
        state.numbers["algo"] = self.algo.state()
        # Prompts that were begun ahead of need. With rollout.order = rounds there are none.
        if rollouts["open"]:
            state.numbers["open"] = rollouts["open"]
        return state

    def restore(self, state: Checkpoint) -> None:
        """Restores learner, prompt stream and algorithm from a checkpoint, and sends the weights to the engine.

        Raises RunError if the checkpoint was made with other settings, or if adapters are trained and the base model
        has changed.
        """
        self.restore_learner(state)
        self.algo.load_state(state.numbers["algo"])
        self.producer.load_state({"cursor": state.cursor, "open": state.numbers.get("open", [])})
        self.sync.send(state.step)

    def describe(self) -> RunDescription:
        """Returns what terminal and run card say about this run: task, algorithm, batch, and which metrics to show."""
        stream = self.producer.stream
        # (what may be left out because its prompt is too long, how many are, of how many)
        counts = (
            ("training rows", stream.num_too_long, stream.num_rows),
            ("held-out problems", self.num_problems_left_out, self.num_problems_left_out + len(self.problems)),
        )
        why = "left out, because their prompts are too long"
        lines = [f"{what} {why}: {num} of {total}" for what, num, total in counts if num]
        idle = "" if self.problems else describe_no_rows(self.config)
        return replace(describe_run(self.config), left_out=tuple(lines), not_evaluated=idle)

    def notice_if_fewer_problems(self) -> str:
        """Returns a notice for the user if the task has fewer held-out rows than eval.problems asks for; else ""."""
        return notice_if_fewer_problems(self.config, len(self.problems) + self.num_problems_left_out)

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        """Returns commands to try after the run in directory `run` is complete, each as a list of words.

        They evaluate the model after `step` steps, export it, and train on (after the quickstart: train another
        recipe).
        """
        commands = suggest_commands(self.config, run, step)
        # Without held-out rows there is nothing to evaluate.
        return commands if self.problems else commands[1:]

    def run_loop(self, run: Run | FollowingRun) -> None:
        """Trains for every remaining step of `run`. First tells the user about what may surprise.

        That is truncated sampling and a grader that has changed, which are also recorded as events, rows that are left
        out or too few, importance ratios that are all 1, and a task that the bundled model was not taught.
        """
        self.scorer.keep_outcomes(None if run.directory is None else run.directory.outcomes, self.mover.world)
        # Only at the start: a resumed run has the event in its database.
        if self.producer.settings.sampling.truncates and run.step == 0:
            run.record_event(
                "sampling",
                "top-p, top-k or min-p is set: the policy that samples is not exactly the one that is trained",
            )
        self.record_changed_grader(run, self.config.task)
        for line in self.describe().left_out:
            run.show_notice("prompts", line)
        notices = {
            "evaluation": self.notice_if_fewer_problems(),
            "algo": notice_if_ratios_are_one(self.config),
            "model": self._notice_if_not_taught() if run.step == 0 else "",
        }
        for kind, notice in notices.items():
            if notice and run.step < self.config.steps:
                run.show_notice(kind, notice)
        rollouts = None if run.directory is None else run.directory.rollouts
        replay = RolloutReuse(self.config.replay, self.config.seed, rollouts)
        train(run, self.config, self.producer, self.learner, self.sync, self.algo, replay, self.mover)

    def _notice_if_not_taught(self) -> str:
        """Returns a notice about the first task, of several in a mixture, that the bundled model was not taught."""
        notices = (notice_if_not_taught(self.config.model, own.name) for own in list_own_tasks(self.config.task))
        return next(filter(None, notices), "")

    def close(self) -> None:
        """Ends the scoring workers and the engine."""
        self.scorer.close()
        self.engine.close()


def describe_run(config: RL) -> RunDescription:
    """Returns what terminal and run card say about a run with this config: task, algorithm, batch, metrics to show."""
    source = get_variant_name("task", config.task)
    # A mixture is described by its tasks, without their settings.
    mixed = ", ".join(spec.rpartition(":")[2] for spec in list_specs(config.task)) if source == "mix" else ""
    return RunDescription(
        source=f"{source} ({mixed})" if mixed else source,
        algo=get_variant_name("algo", config.algo),
        batch=f"{config.batch.prompts} prompts x {config.batch.samples} samples",
        columns=CARD_COLUMNS,
        totals=CARD_TOTALS,
        reads_back=config.replay.steps if config.replay.is_on else 0,
    )


def suggest_commands(config: RL, run: Path, step: int) -> list[list[str]]:
    """Returns commands to try after the run in directory `run` is complete, each as a list of words.

    They evaluate the model after `step` steps with the flags of `make_eval_flags`, export it, and train on (after the
    quickstart: train another recipe).
    """
    longer = [program_name(), "resume", str(run), "--steps", str(2 * config.steps)]
    return [
        suggest_evaluation(config, run, step, config.batch.too_long),
        [program_name(), "export", str(run), f"{run.name}-model"],
        # The quickstart suggests the next recipe in place of more steps, unless the user gave it another task.
        [program_name(), "train", "tiny_countdown"] if _is_quickstart(config) else longer,
    ]


def _is_quickstart(config: RL) -> bool:
    """Returns whether this is the quickstart with its own task."""
    return config.recipe == "quickstart" and get_variant_name("task", config.task) == "arithmetic"


def notice_if_ratios_are_one(config: RL) -> str:
    """Returns a notice for the user if the algorithm is known for its importance ratios and all are 1; else "".

    With one update per batch the weights have not changed since sampling, so every ratio is 1, and such an algorithm
    (GSPO, CISPO, SAPO, GMPO) is the plain policy gradient. Reused groups are not considered.
    """
    name = get_variant_name("algo", config.algo)
    if config.learner.updates_per_batch > 1 or name not in ("gspo", "gspo_token", "cispo", "sapo", "gmpo"):
        return ""
    return (
        f"with one update per batch every importance ratio is 1, and {name} is the plain policy gradient; "
        "raise learner.minibatches for more updates per batch"
    )
