"""The job of reinforcement learning: everything its loop needs, its evaluations, and how it is saved and described."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.algos.algorithm import Algorithm
from cohort.config.document import get_variant_name
from cohort.config.flags import collect_settings, format_flag
from cohort.config.kinds import RL
from cohort.engines.base import Engine
from cohort.engines.sync import WeightSync
from cohort.evaluation.evaluate import describe_sampling, digest_rows
from cohort.evaluation.evaluate import evaluate as run_evaluation
from cohort.evaluation.records import EvalSetting, Evaluation
from cohort.jobs.base import TrainingJob
from cohort.loops.reuse import RolloutReuse
from cohort.loops.rl import train
from cohort.rollout.producer import Producer
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program_name
from cohort.run.store.records import RunDescription
from cohort.scoring.pool import ScoringPool
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.text import Tokenizer
from cohort.types import Prompt

# (title, metric) of the columns of the table of training in the run card.
CARD_COLUMNS = (
    ("reward", "reward/mean"),
    ("length", "length/mean"),
    ("entropy", "entropy"),
    ("gradient norm", "grad_norm"),
    ("dead groups", "groups/dead"),
)
# (words, metric) of the metrics that the run card sums over all steps.
CARD_TOTALS = (
    ("samples that could not be scored", "samples/failed"),
    ("samples left out of the loss", "samples/masked"),
)


@dataclass(kw_only=True)
class RLJob(TrainingJob):
    """A run of reinforcement learning: the model and its learner, and everything that samples and scores."""

    config: RL
    engine: Engine
    sync: WeightSync  # sends the learner's weights to the engine
    scorer: ScoringPool
    producer: Producer  # makes the groups that are trained on
    eval_producer: Producer  # answers the problems of evaluations
    problems: list[Prompt]  # held out: never trained on
    algo: Algorithm

    tokenizer: Tokenizer

    def evaluate(self, step: int) -> Evaluation:
        """Samples and scores answers to the held-out problems with the current weights, and returns the evaluation.

        `step` is the number of completed steps. Raises TrainingStopped if many samples cannot be scored.
        """
        c = self.config
        setting = EvalSetting(
            task=c.task.name,
            split="test",
            num_problems=len(self.problems),
            num_samples=c.eval.samples,
            model=c.model,
            # The run and the step name these weights.
            weights="",
            knobs=TaskRef.from_task(c.task).settings,
            rows=digest_rows(self.problems),
            grader=compute_grader_digest(c.task),
            template=c.template,
            engine=self.engine.name,
            place=f"{c.device} {c.learner.dtype}",
            sampling=describe_sampling(self.eval_producer.settings.sampling),
            seed=c.seed,
            step=step,
            turns="first" if self.eval_producer.settings.later_turns is None else "all",
        )
        return run_evaluation(
            self.eval_producer, self.problems, setting, lambda p: self.tokenizer.spell(p.tokens), then="resume the run"
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
        return describe_run(self.config)

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        """Returns commands to try after the run in directory `run` is complete, each as a list of words.

        They evaluate the model after `step` steps, export it, and train on (after the quickstart: train another
        recipe).
        """
        return suggest_commands(self.config, run, step)

    def run_loop(self, run: Run) -> None:
        """Trains for every remaining step of `run`. First tells the user about settings that may surprise.

        These are truncated sampling, which is also recorded as an event, and importance ratios that are all 1.
        """
        # Only at the start: a resumed run has the event in its database.
        if self.producer.settings.sampling.truncates and run.step == 0:
            run.record_event(
                "sampling",
                "top-p, top-k or min-p is set: the policy that samples is not exactly the one that is trained",
            )
        if (note := notice_if_ratios_are_one(self.config)) and run.step < self.config.steps:
            run.show_notice("algo", note)
        replay = RolloutReuse(self.config.replay, self.config.seed, run.directory.rollouts)
        train(run, self.config, self.producer, self.learner, self.sync, self.algo, replay)

    def close(self) -> None:
        """Ends the scoring workers and the engine."""
        self.scorer.close()
        self.engine.close()


def describe_run(config: RL) -> RunDescription:
    """Returns what terminal and run card say about a run with this config: task, algorithm, batch, metrics to show."""
    return RunDescription(
        source=get_variant_name("task", config.task),
        algo=get_variant_name("algo", config.algo),
        batch=f"{config.batch.prompts} prompts x {config.batch.samples} samples",
        columns=CARD_COLUMNS,
        totals=CARD_TOTALS,
        reads_back=config.replay.steps if config.replay.is_on else 0,
    )


def suggest_commands(config: RL, run: Path, step: int) -> list[list[str]]:
    """Returns commands to try after the run in directory `run` is complete, each as a list of words.

    They evaluate the model after `step` steps with the flags of `_make_eval_flags`, export it, and train on (after the
    quickstart: train another recipe).
    """
    task = get_variant_name("task", config.task)
    model = run / "checkpoints" / checkpoint.folder_name(step) / "model"
    longer = [program_name(), "resume", str(run), "--steps", str(2 * config.steps)]
    return [
        [program_name(), "eval", task, "--model", str(model), *_make_eval_flags(config)],
        [program_name(), "export", str(run), f"{run.name}-model"],
        # The quickstart suggests the next recipe in place of more steps.
        [program_name(), "train", "tiny_countdown"] if config.recipe == "quickstart" else longer,
    ]


def _make_eval_flags(config: RL) -> list[str]:
    """Returns flags, as words, that make `cohort eval` use the run's prompts and sampling in evaluations.

    They are template, temperature, limit of tokens and settings of the task, each only if it differs from the default.
    Settings with several values and the numbers of problems and samples are left out.
    """
    flags = []
    if config.template != "chat":
        flags += ["--template", config.template]
    if config.eval.temperature != 1.0:
        flags += ["--temperature", f"{config.eval.temperature:g}"]
    if config.sampling.max_tokens != config.task.max_tokens:
        flags += ["--max-tokens", str(config.sampling.max_tokens)]
    for name, leaf in collect_settings(config.task, "task.").items():
        default = getattr(type(config.task), name.removeprefix("task."), None)
        # Settings with several values are left out: they do not fit into one --name=value.
        if leaf.value != default and not isinstance(leaf.value, tuple):
            flags.append(f"{format_flag(name)}={leaf.value}")
    return flags


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
