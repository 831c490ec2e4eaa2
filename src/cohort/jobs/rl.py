"""Reinforcement learning as a job: its parts, its evaluations and checkpoints, what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.algos.algorithm import Algorithm
from cohort.config.document import variant_name
from cohort.config.flags import leaves, show
from cohort.config.kinds import RL
from cohort.engines.base import Engine
from cohort.engines.sync import WeightSync
from cohort.evaluation.evaluate import evaluate as run_evaluation
from cohort.evaluation.evaluate import rows_digest, sampling_facts
from cohort.evaluation.records import EvalSetting, Evaluation
from cohort.jobs.state import Trained
from cohort.loops.reuse import Replay
from cohort.loops.rl import train
from cohort.rollout.producer import Producer
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program
from cohort.run.store.records import About
from cohort.scoring.pool import ScoringPool
from cohort.tasks.ref import TaskRef, grader_digest
from cohort.text import Tokenizer
from cohort.types import Prompt

COLUMNS = (
    ("reward", "reward/mean"),
    ("length", "length/mean"),
    ("entropy", "entropy"),
    ("gradient norm", "grad_norm"),
    ("dead groups", "groups/dead"),
)
TOTALS = (
    ("samples that could not be scored", "samples/failed"),
    ("samples left out of the loss", "samples/masked"),
)


@dataclass(kw_only=True)
class Parts(Trained):
    """Everything a run of reinforcement learning is made of; the job that it does."""

    config: RL
    engine: Engine
    sync: WeightSync  # from the learner to the engine
    scorer: ScoringPool
    producer: Producer  # of what is trained
    eval_producer: Producer  # of what is evaluated
    problems: list[Prompt]  # held out
    algo: Algorithm

    tokenizer: Tokenizer

    def evaluate(self, step: int) -> Evaluation:
        c = self.config
        setting = EvalSetting(
            task=c.task.name,
            split="test",
            num_problems=len(self.problems),
            num_samples=c.eval.samples,
            model=c.model,
            weights="",
            knobs=TaskRef.of(c.task).knobs,
            rows=rows_digest(self.problems),
            grader=grader_digest(c.task),
            template=c.template,
            engine=self.engine.name,
            place=f"{c.device} {c.learner.dtype}",
            sampling=sampling_facts(self.eval_producer.drawing.sampling),
            seed=c.seed,
            step=step,
            turns="first" if self.eval_producer.drawing.further is None else "all",
        )
        return run_evaluation(
            self.eval_producer, self.problems, setting, lambda p: self.tokenizer.spell(p.tokens), then="resume the run"
        )

    def checkpoint(self, step: int) -> Checkpoint:
        rollouts = self.producer.state()
        state = self.learner_checkpoint(step, rollouts["cursor"])
        state.numbers["algo"] = self.algo.state()
        if rollouts["open"]:  # prompts begun ahead that were not needed; none in rounds
            state.numbers["open"] = rollouts["open"]
        return state

    def restore(self, state: Checkpoint) -> None:
        self.restore_learner(state)
        self.algo.load_state(state.numbers["algo"])
        self.producer.load_state({"cursor": state.cursor, "open": state.numbers.get("open", [])})
        self.sync.send(state.step)

    def about(self) -> About:
        return about(self.config)

    def next_commands(self, run: Path, step: int) -> list[list[str]]:
        return next_commands(self.config, run, step)

    def work(self, run: Run) -> None:
        if self.producer.drawing.sampling.truncates and run.step == 0:  # told once: a resumed run has it on record
            run.event("sampling", "top-p, top-k or min-p: the policy that acts is not the one that is trained")
        if (note := idle_ratio(self.config)) and run.step < self.config.steps:
            run.notice("algo", note)
        replay = Replay(self.config.replay, self.config.seed, run.directory.rollouts)
        train(run, self.config, self.producer, self.learner, self.sync, self.algo, replay)

    def close(self) -> None:
        self.scorer.close()
        self.engine.close()


def about(config: RL) -> About:
    """What the header and the card say."""
    return About(
        source=variant_name("task", config.task),
        algo=variant_name("algo", config.algo),
        batch=f"{config.batch.prompts} prompts x {config.batch.samples} samples",
        columns=COLUMNS,
        totals=TOTALS,
        reads_back=config.replay.steps if config.replay.on else 0,
    )


def next_commands(config: RL, run: Path, step: int) -> list[list[str]]:
    """What is worth trying with a complete run: evaluate its model as the run did, export it, go on."""
    task, model = variant_name("task", config.task), run / "checkpoints" / checkpoint.name(step) / "model"
    longer = [program(), "resume", str(run), "--steps", str(2 * config.steps)]
    return [
        [program(), "eval", task, "--model", str(model), *_eval_flags(config)],
        [program(), "export", str(run), f"{run.name}-model"],
        [program(), "train", "tiny_countdown"] if config.recipe == "quickstart" else longer,
    ]


def _eval_flags(config: RL) -> list[str]:
    """What makes an evaluation outside the run like those in it, as far as it is not the default."""
    flags = []
    if config.template != "chat":
        flags += ["--template", config.template]
    if config.eval.temperature != 1.0:
        flags += ["--temperature", f"{config.eval.temperature:g}"]
    if config.sampling.max_tokens != config.task.max_tokens:
        flags += ["--max-tokens", str(config.sampling.max_tokens)]
    for name, leaf in leaves(config.task, "task.").items():
        default = getattr(type(config.task), name.removeprefix("task."), None)
        if leaf.value != default and not isinstance(leaf.value, tuple):
            flags.append(f"{show(name)}={leaf.value}")
    return flags


def idle_ratio(config: RL) -> str:
    """Said where an algorithm is chosen for what it does to ratios, and these are all 1."""
    name = variant_name("algo", config.algo)
    if config.learner.updates > 1 or name not in ("gspo", "gspo_token", "cispo", "sapo", "gmpo"):
        return ""
    return f"with one update a batch every ratio is 1, and {name} is the plain policy gradient: see learner.minibatches"
