"""The job of preference optimisation: its pairs, how held-out pairs are measured, and how it is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cohort.algos.preferences import PreferenceLoss, rank_pairs
from cohort.config.document import get_variant_name
from cohort.config.imitation import DPO
from cohort.evaluation.records import EvalAnswer, EvalItem, EvalSetting, Evaluation
from cohort.evaluation.statistics import accuracy_interval, compute_accuracy
from cohort.examples.encode import EncodedExamples
from cohort.examples.stream import ExampleStream
from cohort.jobs.base import TrainingJob
from cohort.jobs.reference import Notice, compute_reference, digest_reference, provide_reference
from cohort.jobs.task_eval import TaskEvaluator, notice_if_fewer_problems
from cohort.loops import dpo
from cohort.loops.learning import annotate
from cohort.ranks.groups import GroupMover
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program_name
from cohort.run.store.records import Curve, RunDescription
from cohort.run.together import FollowingRun
from cohort.text import Tokenizer
from cohort.text.framing import describe_template
from cohort.types import Group, Provenance
from cohort.world import ONE_PROCESS


@dataclass(kw_only=True)
class DPOJob(TrainingJob):
    """A run of preference optimisation: the model, its learner and the pairs."""

    config: DPO
    stream: ExampleStream
    encoded: EncodedExamples  # the training pairs, and what was left out
    held_out: list[Group]
    loss: PreferenceLoss
    tokenizer: Tokenizer
    evaluator: TaskEvaluator | None = None  # of the config's task
    mover: GroupMover = field(default_factory=lambda: GroupMover(ONE_PROCESS))

    @property
    def evaluate(self) -> Callable[[int], Evaluation | None] | None:
        """A function that measures the accuracy of the run's task or, without one, of the held-out pairs.

        None if there are neither.
        """
        if self.evaluator is not None:
            return self.evaluator.evaluate
        return self._measure if self.held_out else None

    @property
    def measure(self) -> Callable[[], Mapping[str, float]] | None:
        """A function that measures the held-out pairs, where the accuracy of the run is that of a task; else None."""
        return self._measure_pairs if self.held_out and self.evaluator is not None else None

    def _measure_pairs(self) -> dict[str, float]:
        """Returns accuracy, loss and margin of the held-out pairs, as metrics."""
        found = self._measure(0)
        if found is None:
            return {}
        return {"eval/pairs": found.value} | {f"eval/{name}": value for name, value in found.summary.items()}

    def _measure(self, step: int) -> Evaluation | None:
        """Returns how often the implicit reward of the better answer is higher, on the held-out pairs.

        The accuracy counts ties half. `step` is the number of completed steps. Of several ranks each ranks a part of
        the pairs; the first returns the evaluation, the others None.
        """
        own = self.mover.select(self.held_out)
        annotate(self.learner, own, self.loss.needs(own), Provenance.TARGET)
        found = self.learner.annotate(own, {"old"}, Provenance.TARGET).old
        assert found is not None
        own_scores = rank_pairs(self.loss.config, own, found.by_id())
        metrics = self.learner.measure(dpo.make_pair_batch(own), self.loss)
        places = range(len(own)) if self.mover.world.size == 1 else [group.order for group in own]
        parts = self.mover.world.gather_on_first([list(pair) for pair in zip(places, own_scores, strict=True)])
        if not parts:
            return None
        by_place = {place: score for part in parts for place, score in part}
        scores = [by_place[place] for place in range(len(self.held_out))]
        items = [self._make_item(group, score) for group, score in zip(self.held_out, scores, strict=True)]
        correct = [[score] for score in scores]
        low, high = accuracy_interval(correct)
        return Evaluation(
            setting=self._make_setting(step),
            accuracy=compute_accuracy(correct),
            low=low,
            high=high,
            summary={name: metrics[name] for name in ("loss", "nll", "reward/margin") if name in metrics},
            mean_tokens=sum(len(g.samples[0].tokens) for g in self.held_out) / len(self.held_out),
            items=items,
        )

    def _make_item(self, group: Group, score: float) -> EvalItem:
        """Returns a held-out pair as an item of an evaluation. Its answer is the better one."""
        better = group.samples[0]
        answer = EvalAnswer(
            text=self.tokenizer.decode(better.tokens),
            finish=better.finish.value,
            num_tokens=len(better.tokens),
            correct=score,
        )
        return EvalItem(
            id=group.prompt.id,
            messages=group.prompt.messages,
            prompt=self.tokenizer.spell(group.prompt.tokens),
            answers=[answer],
        )

    def _make_setting(self, step: int) -> EvalSetting:
        """Returns what decides an evaluation of this run."""
        c = self.config
        return EvalSetting(
            task="pairs",
            split="held-out",
            num_problems=len(self.held_out),
            num_samples=1,
            model=c.model,
            weights="",
            knobs={"loss": get_variant_name("loss", c.loss), "beta": c.loss.beta},
            rows=self.inputs.held_out_rows,
            grader="implicit-reward",
            template=describe_template(c.template),
            system=c.system,
            date=c.date,
            engine="none",
            place=f"{c.device} {c.learner.dtype}",
            sampling={},
            seed=c.seed,
            step=step,
        )

    def prepare(self, run: Path) -> list[Notice]:
        """Stores log-probabilities of the reference in all pairs, if the config asks for it, in place.

        They are read from a file, or computed and kept in the run directory `run`. So no reference is needed while
        training. Returns what to tell the user. Nothing may be trained or restored before.
        """
        if self.config.reference != "stored":
            return []
        if self.mover.world.size > 1:
            # Every rank computes them for all pairs: no rank but the first has the run's file.
            compute_reference(self.learner, [self.encoded.groups, self.held_out])
            return []
        parts = [self.encoded.groups, self.held_out]
        digests = digest_reference(self.config, self.inputs, self.learner, [*self.encoded.groups, *self.held_out])
        return provide_reference(run, self.learner, parts, digests)

    def run_loop(self, run: Run | FollowingRun) -> None:
        """Trains for every remaining step of `run`. First tells the user about rows that are left out."""
        for line in self.encoded.describe():
            run.show_notice("rows", line)
        num = 0 if self.evaluator is None else self.evaluator.num_rows
        if self.config.task is not None and (notice := notice_if_fewer_problems(self.config, num)):
            run.show_notice("evaluation", notice)
        self.record_changed_grader(run, self.config.task)
        if self.evaluator is not None:
            outcomes = None if run.directory is None else run.directory.outcomes
            self.evaluator.scorer.keep_outcomes(outcomes, self.mover.world)
        minibatches = self.config.learner.minibatches
        dpo.train(run, self.learner, self.loss, self.stream.list_groups, minibatches, self.mover)

    def make_checkpoint(self, step: int) -> Checkpoint:
        """Returns the learner's state after `step` completed steps, but no weights."""
        # The pairs of a step depend on its number only, so the position in the data is the step.
        return self.checkpoint_learner(step, cursor=step)

    def restore(self, state: Checkpoint) -> None:
        """Restores weights and learner from a checkpoint.

        Raises RunError if it was made with other settings, or if model or rows have changed.
        """
        self.restore_learner(state)

    def describe(self) -> RunDescription:
        """Returns what terminal and run card say about this run: data, loss, batch, and which metrics to show."""
        return RunDescription(
            source=get_variant_name("data", self.config.data),
            source_is="data",
            algo=f"dpo ({get_variant_name('loss', self.config.loss)})",
            batch=f"{self.config.batch.pairs} pairs",
            curve=Curve(label="margin", metric="reward/margin", rising=True),
            columns=(
                ("loss", "loss"),
                ("accuracy", "reward/accuracy"),
                ("margin", "reward/margin"),
                ("chosen", "reward/chosen"),
                ("rejected", "reward/rejected"),
                ("gradient norm", "grad_norm"),
            ),
            left_out=tuple(self.encoded.describe()),
        )

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        """Returns commands to try after the run in directory `run` is complete, each as a list of words."""
        return [
            [program_name(), "compare", f"{run}@0", str(run)],
            [program_name(), "export", str(run), f"{run.name}-model"],
            [program_name(), "resume", str(run), "--steps", str(2 * self.config.steps)],
        ]

    def close(self) -> None:
        """Ends the engine and the scoring workers of evaluations, if there are any."""
        if self.evaluator is not None:
            self.evaluator.close()
