"""Evaluations of a task in a run: its problems, and the engine and scoring workers that answer and grade them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config.document import get_variant_name
from cohort.config.engines import NativeEngine
from cohort.config.flags import collect_settings, format_setting
from cohort.config.imitation import DPO, SFT
from cohort.config.kinds import RL
from cohort.config.options import CONVERSATION_OPTIONS
from cohort.config.schema import Conversation, EvalConfig
from cohort.engines.factory import EngineModel, make_engine
from cohort.engines.sync import WeightSync
from cohort.errors import CohortError, ConfigError
from cohort.evaluation.coefficients import format_coefficients, list_coefficients
from cohort.evaluation.evaluate import describe_sampling, digest_rows
from cohort.evaluation.evaluate import evaluate as run_evaluation
from cohort.evaluation.records import EvalSetting, Evaluation
from cohort.learner.local import LocalLearner
from cohort.models.files import LoadedModel
from cohort.rollout.episode import EpisodeSettings
from cohort.rollout.producer import Producer
from cohort.rollout.settings import describe_conversation, make_conversation_rules, make_conversation_turns
from cohort.run.machine import program_name
from cohort.scoring.base import Pool
from cohort.scoring.start import start_scorer
from cohort.tasks.base import check_packages, has_conversations, has_rows
from cohort.tasks.places import lacks_test_file
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.tasks.stream import TaskStream
from cohort.text import PromptRenderer, Tokenizer
from cohort.text.framing import describe_template
from cohort.types import Prompt, Sampling
from cohort.world import ONE_PROCESS, World

# Answers that are decoded at the same time.
SLOTS = NativeEngine().slots
_ALL_MEMORY = 1 << 62  # bytes: more than any GPU has


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblems:
    """The problems of a task that a run is evaluated on, as prompts, and how answers to them are sampled."""

    stream: TaskStream
    prompts: list[Prompt]
    sampling: Sampling
    context: int  # most tokens of a prompt with its answer

    @property
    def num_kv_tokens(self) -> int:
        """The most tokens of answers and prompts for which memory is needed at once, at one answer per problem."""
        return min(len(self.prompts), SLOTS) * self.context


def read_problems(config: SFT | DPO, model: LoadedModel, tokenizer: Tokenizer) -> TaskProblems | None:
    """Returns the problems of the config's task, of the split in `eval.split`; None if it has no task, or no test rows.

    Raises ConfigError if no prompt has room in the model's context, and TaskError if one has none and may not be left
    out (`data.too_long`).
    """
    task = config.task
    if task is None:
        return None
    check_packages(task)
    if config.eval.split == "test" and not has_rows(task, "test"):
        return None
    wanted = config.sampling.max_tokens
    room = model.config.context - (wanted or 1)
    if room < 1:
        raise ConfigError(
            f"sampling.max_tokens is {wanted}, which leaves no room for a prompt in the model's context of "
            f"{model.config.context} tokens. Lower --sampling.max-tokens."
        )
    renderer = PromptRenderer(tokenizer, config.template, config.system)
    renderer.check_system(room)
    stream = TaskStream(
        task,
        renderer,
        config.seed,
        config.eval.split,
        max_prompt_tokens=room,
        too_long="error" if getattr(config.data, "too_long", "error") == "error" else "skip",
        validation_share=config.eval.validation_share if config.eval.split == "validation" else 0.0,
    )
    prompts = stream.render_held_out(config.eval.problems, config.eval.split, or_fewer=True)
    longest = wanted or task.max_tokens
    sampling = Sampling(
        max_tokens=longest,
        temperature=config.eval.temperature,
        stop_ids=tokenizer.stop_ids,
        stop_strings=config.sampling.stop,
    )
    context = min(model.config.context, longest + max(len(prompt.tokens) for prompt in prompts))
    if has_conversations(task):
        # A conversation goes on as long as there is room.
        context = model.config.context
    return TaskProblems(stream=stream, prompts=prompts, sampling=sampling, context=context)


@dataclass(kw_only=True)
class TaskEvaluator:
    """Measures the accuracy of a task with the learner's current weights. `close` ends its engine and workers."""

    config: SFT | DPO
    problems: TaskProblems
    producer: Producer
    sync: WeightSync
    scorer: Pool
    grader: str  # digest of the code that scores, as it was at the start
    tokenizer: Tokenizer

    def evaluate(self, step: int) -> Evaluation | None:
        """Returns the evaluation of the current weights, after `step` completed steps; None on ranks but the first.

        Raises TrainingStopped if many samples cannot be scored.
        """
        self.sync.send(step)
        left_out = self.problems.stream.num_skipped
        return evaluate_problems(
            self.config, self.producer, self.problems.prompts, left_out, self.grader, self.tokenizer, step
        )

    @property
    def num_rows(self) -> int:
        """The number of held-out rows, those with too long prompts included."""
        return len(self.problems.prompts) + self.problems.stream.num_skipped

    def close(self) -> None:
        """Ends the scoring workers and the engine."""
        self.scorer.close()
        self.producer.engine.close()


def make_evaluator(
    config: SFT | DPO,
    problems: TaskProblems,
    model: LoadedModel,
    learner: LocalLearner,
    tokenizer: Tokenizer,
    world: World = ONE_PROCESS,
) -> TaskEvaluator:
    """Returns what answers the problems with the weights of `learner`, which the engine shares, and grades them."""
    subject = EngineModel(
        decoder=model.decoder,
        decode=tokenizer.decode,
        context=problems.context,
        # Without a plan the GPU memory of keys and values is given back after each evaluation.
        reserve=_ALL_MEMORY if learner.plan is None else learner.plan.update,
    )
    engine = make_engine(NativeEngine(), subject)
    # The limits of conversations are the default ones: such a run has no settings of turns.
    turns = Conversation() if has_conversations(config.task) else None
    rules = None if turns is None else make_conversation_rules(turns, tokenizer)
    scorer = start_scorer(config.task, config.scoring, rules=rules)
    settings = EpisodeSettings(
        sampling=problems.sampling,
        group_size=config.eval.samples,
        seed=config.seed,
        purpose="eval",
        coefficients={},
        later_turns=None if turns is None else make_conversation_turns(turns, problems.sampling, tokenizer),
        context=problems.context,
    )
    # In rounds, the bits of an evaluation on a CPU do not depend on how quick graders are.
    return TaskEvaluator(
        config=config,
        problems=problems,
        producer=Producer(engine, scorer, problems.stream, settings, "rounds", world),
        sync=WeightSync(get_weights=learner.weights, engine=engine),
        scorer=scorer,
        grader=compute_grader_digest(config.task),
        tokenizer=tokenizer,
    )


def evaluate_problems(
    config: RL | SFT | DPO,
    producer: Producer,
    problems: Sequence[Prompt],
    num_left_out: int,
    grader: str,
    tokenizer: Tokenizer,
    step: int,
) -> Evaluation | None:
    """Samples and scores answers to problems of the run's task with the engine of `producer`; returns the evaluation.

    The ranks of the producer divide the problems among them. The first returns the evaluation, the others None.

    `num_left_out` problems have prompts that are too long, `grader` is the digest of the code that scores, and `step`
    the number of completed steps. Raises TrainingStopped if many samples cannot be scored.
    """
    c = config
    setting = EvalSetting(
        task=c.task.name,
        split=c.eval.split,
        num_problems=len(problems),
        num_left_out=num_left_out,
        num_samples=c.eval.samples,
        model=c.model,
        # The run and the step name these weights.
        weights="",
        knobs=TaskRef.from_task(c.task).settings,
        rows=digest_rows(problems),
        grader=grader,
        template=describe_template(c.template),
        system=c.system,
        date=c.date,
        engine=producer.engine.name,
        place=f"{c.device} {c.learner.dtype}",
        sampling=describe_sampling(producer.settings.sampling),
        seed=c.seed,
        step=step,
        turns=_describe_turns(producer),
        reward=list_coefficients(c.task, producer.settings.coefficients),
    )
    return run_evaluation(
        producer,
        problems,
        setting,
        lambda p: tokenizer.spell(p.tokens),
        then="resume the run",
        world=producer.world,
    )


def _describe_turns(producer: Producer) -> str:
    """Returns which turns the episodes of a producer have, as the setting of an evaluation records it."""
    later_turns = producer.settings.later_turns
    rules = getattr(producer.scorer, "conversation", None)
    if later_turns is not None and rules is not None:
        return describe_conversation(rules, later_turns.max_total)
    return "first" if later_turns is None else "all"


def notice_if_fewer_problems(config: RL | SFT | DPO, num: int) -> str:
    """Returns a notice for the user if the task has fewer held-out rows, `num`, than eval.problems; else "".

    Without any it says that nothing is evaluated, and which settings therefore have no effect.
    """
    if not num:
        return f"{describe_no_rows(config)}; --eval.split validation cuts some from the training rows"
    if num >= config.eval.problems:
        return ""
    return (
        f"evaluations use all {num} {config.eval.split} rows of the task {config.task.name}, because there are no "
        f"more; eval.problems is {config.eval.problems}"
    )


def describe_no_rows(config: RL | SFT | DPO) -> str:
    """Returns that a run without test rows is not evaluated, with the settings that therefore have no effect."""
    names = ("every", "problems", "samples", "temperature", "turns")
    idle = [name for name in names if getattr(config.eval, name) != getattr(EvalConfig(), name)]
    settings = ", ".join(f"eval.{name} = {getattr(config.eval, name)}" for name in idle)
    verb = "has" if len(idle) == 1 else "have"
    return "no test rows: nothing is evaluated" + (f", so {settings} {verb} no effect" if idle else "")


def suggest_evaluation(config: RL | SFT | DPO, run: Path, step: int, too_long: str) -> list[str]:
    """Returns the command that evaluates the model after `step` steps of the run in `run`, which was evaluated.

    It is on the test rows or, if the task has none, on the validation split of the run.
    """
    flags = make_eval_flags(config, too_long)
    if config.eval.split == "validation" and not _may_have_test_rows(config.task):
        flags += ["--split", "validation"]
        if config.eval.validation_share != EvalConfig().validation_share:
            flags += ["--validation-share", str(config.eval.validation_share)]
    task = get_variant_name("task", config.task)
    return [program_name(), "eval", task, "--model", f"{run}@{step}", *flags]


def _may_have_test_rows(task: Any) -> bool:
    """Returns whether a task has test rows, or they cannot be read now, as those of a hub without a network."""
    # Known without a warning that would come at the end of the run.
    if lacks_test_file(str(getattr(task, "data", ""))):
        return False
    try:
        return has_rows(task, "test")
    except CohortError:
        return True


def make_eval_flags(config: RL | SFT | DPO, too_long: str) -> list[str]:
    """Returns flags, as words, that make `cohort eval` use the run's prompts and sampling in evaluations.

    They are template, system prompt, temperature, limit of tokens, stop texts, limits of conversations, coefficients of
    a reward without an accuracy, names of variables with keys, and settings of the task, each only if it differs from
    the default. `too_long` says what becomes of prompts that are too long. The numbers of problems and samples are left
    out.
    """
    flags = []
    if config.template != "chat":
        flags += ["--template", config.template]
    if too_long != "error":
        flags += ["--too-long", "skip"]
    if config.system:
        flags += format_setting("system", config.system)
    if config.eval.temperature != 1.0:
        flags += ["--temperature", str(config.eval.temperature)]
    if config.sampling.max_tokens not in (0, config.task.max_tokens):
        flags += ["--max-tokens", str(config.sampling.max_tokens)]
    if config.sampling.stop:
        flags += format_setting("stop", config.sampling.stop)
    coefficients = list_coefficients(config.task, getattr(config, "reward", {}))
    if any(value != 1.0 for value in coefficients.values()):
        flags += ["--reward", *format_coefficients(coefficients).split()]
    if isinstance(turns := getattr(config, "turns", None), Conversation):
        for option, name in CONVERSATION_OPTIONS.items():
            value = getattr(turns, name)
            flags += [] if value == getattr(Conversation(), name) else format_setting(option, value)
    # Without its keys a judge gives no score. Other settings of scoring change no result.
    if config.scoring.env:
        flags += format_setting("scoring.env", config.scoring.env)
    # A task of which a setting has no default cannot be made without settings.
    defaults = {f.name: f.default for f in dataclasses.fields(config.task)}
    for name, setting in collect_settings(config.task, "task.").items():
        if setting.value != defaults.get(name.removeprefix("task."), dataclasses.MISSING):
            flags += format_setting(name, setting.value)
    return flags
