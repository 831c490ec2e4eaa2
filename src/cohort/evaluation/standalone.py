"""Evaluation of a model outside any run (`cohort eval`): the model is loaded once and answers task after task."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cohort.config.engines import ServerEngine, VllmEngine
from cohort.config.options import CONVERSATION_OPTIONS, EvalOptions
from cohort.engines.base import Engine
from cohort.engines.factory import EngineModel, make_engine
from cohort.errors import ConfigError, RunError
from cohort.evaluation.coefficients import list_coefficients, read_coefficients
from cohort.evaluation.evaluate import describe_sampling, digest_rows, evaluate
from cohort.evaluation.journal import Journal, read_journal_setting
from cohort.evaluation.likeness import describe_unlikeness
from cohort.evaluation.records import ADDED_FIELDS, EvalItem, EvalSetting, Evaluation, list_differences
from cohort.jobs import build
from cohort.jobs.inputs import choose_date
from cohort.jobs.models import find_model
from cohort.jobs.sampler import load_on_device, make_sampler
from cohort.models.config import read_context
from cohort.models.device import choose_device, choose_dtype
from cohort.models.files import digest_model, read_config
from cohort.ranks.agree import agree_on_errors
from cohort.rollout.episode import EpisodeSettings
from cohort.rollout.producer import Producer
from cohort.rollout.settings import describe_conversation, make_conversation_rules, make_conversation_turns
from cohort.run.directory import load_evaluation, make_slug
from cohort.run.naming import NamedCheckpoint
from cohort.scoring.start import check_variables, start_scorer
from cohort.tasks.base import Task, has_conversations
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import PromptRenderer, RenderedPrompt, Tokenizer
from cohort.text.framing import describe_template, read_template
from cohort.text.plain import add_system, join_contents
from cohort.types import Message, Prompt, Sampling
from cohort.world import ONE_PROCESS, World

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as progress(name of the task, number of problems that are done, number of all problems)."""


class ServerRenderer:
    """A renderer that leaves prompts as messages, because the server renders them itself."""

    def render(self, messages: Sequence[Message], tools: object = None) -> RenderedPrompt:
        """Returns a prompt without tokens, because the server renders the messages itself. `tools` is ignored.

        If the last message is the assistant's, its text is `forced_text`, which the model continues; "" otherwise.
        """
        last = messages[-1]
        forced = str(last.get("content") or "") if last["role"] == "assistant" else ""
        return RenderedPrompt(tokens=[], provenance=[], forced_text=forced)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTask:
    """A task that is ready to be evaluated: its problems as prompts, and everything that decides the result."""

    task: Task
    stream: TaskStream
    prompts: list[Prompt]
    sampling: Sampling
    setting: EvalSetting
    rules: ConversationRules | None = None  # of conversations; None = the task has none


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """An evaluation and the file that holds it."""

    evaluation: Evaluation
    path: Path
    is_new: bool  # False = it was read from the file, because the same evaluation had been made before


class ModelEvaluator:
    """A loaded model, or a connection to a server, that answers the problems of any number of tasks."""

    def __init__(self, model: str, options: EvalOptions, world: World = ONE_PROCESS) -> None:
        self.world = world  # ranks that answer the problems together
        self.model = model
        self.options = options
        self.checkpoint: NamedCheckpoint | None = None  # None = the model is not named as part of a run
        # These describe a server; `_make_local_engine` sets them for a model that is loaded here.
        self.tokenizer: Tokenizer | None = None  # None = the server has it
        self.context = 0  # tokens that prompt and completion may have together; 0 = the server knows
        self.folder: Path | None = None  # of the model
        self.weights = ""  # digest of the model's files; "" = not known
        self.date = ""  # the day that prompts contain as today; "" = they contain none, or the server decides
        self.place = options.url  # device and dtype, or the server's address
        self.engine = self._make_server_engine() if options.engine == "server" else self._make_local_engine()

    def _make_server_engine(self) -> Engine:
        """Returns an engine that sends requests to the OpenAI-compatible server at `options.url`."""
        o = self.options
        template: Literal["chat", "text"] = "text" if o.template == "text" else "chat"
        subject = EngineModel(name=self.model, template=template, system=o.system, context=0)
        return make_engine(ServerEngine(url=o.url, slots=o.slots), subject)

    def _make_local_engine(self) -> Engine:
        """Loads the model into vLLM (if `options.engine` says so) or the native engine, and returns the engine.

        Sets model and checkpoint, tokenizer, context, digest of the weights and place (device and dtype) of this
        object, and torch's threads.
        """
        o = self.options
        device = choose_device(o.device)
        build.configure_torch(o.threads, device)
        found = find_model(self.model)
        folder = found.folder
        self.folder = folder
        self.model = found.name
        self.date = choose_date(o.date, o.template, folder)
        self.checkpoint = found.checkpoint
        self.tokenizer = Tokenizer.load(folder, self.date, read_template(o.template))
        self.weights = digest_model(folder)
        dtype = choose_dtype(o.dtype, device)
        self.place = f"{device.type} {dtype}"
        if o.engine == "vllm":
            self.context = read_context(read_config(folder))
            subject = EngineModel(folder=folder, context=self.context, dtype=dtype, tokenizer=self.tokenizer)
            return make_engine(VllmEngine(slots=o.slots), subject)
        # The native engine loads the weights here; vLLM loads them itself.
        loaded = load_on_device(folder, dtype, device)
        self.context = loaded.config.context
        return make_sampler(loaded, self.tokenizer, slots=o.slots)

    def close(self) -> None:
        """Ends the engine's processes and connections."""
        self.engine.close()

    def _spell_prompt(self, prompt: Prompt) -> str:
        """Returns the prompt as the text the model sees, special tokens included; "" if a server's template made it."""
        if self.tokenizer is not None:
            return self.tokenizer.spell(prompt.tokens)
        messages = add_system(prompt.messages, self.options.system)
        return join_contents(messages) if self.options.template == "text" else ""

    def prepare(self, task: Task) -> PreparedTask:
        """Reads the rows of a task and renders its prompts. Returns them with the sampling options and the setting.

        So errors show before anything is sampled. The prompts are the first `limit` of the split in the options (0 =
        all). Without --max-tokens, the task's limit of tokens applies. Raises ConfigError if --max-tokens leaves no
        room for a prompt or the split has too few rows, TaskError if a prompt is too long and may not be skipped.
        """
        o = self.options
        check_variables(task, o.scoring)
        # The longest prompt that leaves room for a completion; 0 = not known.
        room = 0 if not self.context else self.context - (o.max_tokens or 1)
        if self.context and room < 1:
            raise ConfigError(
                f"--max-tokens {o.max_tokens} leaves no room for a prompt: the context of the model has "
                f"{self.context} tokens. Use a smaller --max-tokens, or leave it out."
            )
        stream = TaskStream(
            task,
            self._make_renderer(room),
            o.seed,
            o.split,
            max_prompt_tokens=room,
            too_long=o.too_long,
            validation_share=o.validation_share if o.split == "validation" else 0.0,
            max_rows=o.limit,
        )
        prompts = stream.render_held_out(o.limit, o.split)
        sampling = Sampling(
            max_tokens=o.max_tokens or task.max_tokens,
            temperature=o.temperature,
            top_p=o.top_p,
            top_k=o.top_k,
            min_p=o.min_p,
            stop_ids=() if self.tokenizer is None else self.tokenizer.stop_ids,
            stop_strings=o.stop,
        )
        rules = self._make_rules(task)
        setting = EvalSetting(
            task=task.name,
            split=o.split,
            num_problems=len(prompts),
            num_left_out=stream.num_skipped,
            num_samples=o.samples,
            model=self.model,
            weights=self.weights,
            knobs=TaskRef.from_task(task).settings,
            rows=digest_rows(prompts),
            grader=compute_grader_digest(task),
            template=describe_template(o.template),
            system=o.system,
            date=self.date,
            engine=self.engine.name,
            place=self.place,
            sampling=describe_sampling(sampling),
            seed=o.seed,
            turns="first" if rules is None else describe_conversation(rules, o.max_total),
            reward=list_coefficients(task, read_coefficients(task, o.reward)),
            **self._describe_checkpoint(),
        )
        _warn_if_flattered(setting)
        for line in describe_unlikeness(self.checkpoint, task, o) if self.checkpoint else ():
            log.warning("%s", line)
        return PreparedTask(task=task, stream=stream, prompts=prompts, sampling=sampling, setting=setting, rules=rules)

    def _make_renderer(self, room: int) -> Renderer:
        """Returns what turns messages into prompts of at most `room` tokens. Raises if the system text is longer."""
        o = self.options
        if self.tokenizer is None:
            return ServerRenderer()
        renderer = PromptRenderer(
            self.tokenizer, o.template, o.system, None if o.call_format == "auto" else o.call_format
        )
        renderer.check_system(room)
        return renderer

    def _make_rules(self, task: Task) -> ConversationRules | None:
        """Returns the rules of a task's conversations; None if the task has neither tools nor an environment.

        Raises ConfigError if the engine takes no tokens, or if limits are given that have no effect.
        """
        turns = self.options.conversation
        if has_conversations(task):
            if self.tokenizer is None or not self.engine.abilities.token_ids:
                raise ConfigError(
                    f"the task {task.name} has conversations, for which an engine must take and give tokens, and "
                    f"--engine {self.options.engine} does not. Use --engine native or vllm."
                )
            if self.options.stop:
                raise ConfigError(
                    f"--stop {' '.join(self.options.stop)} would cut the ends of calls and messages out of the "
                    f"conversations of {task.name}. Remove --stop: a turn ends with the model's own end token."
                )
            return make_conversation_rules(turns, self.tokenizer)
        given = [name for name in CONVERSATION_OPTIONS if getattr(self.options, name) != getattr(EvalOptions, name)]
        if given:
            raise ConfigError(
                f"the task {task.name} has neither tools nor an environment, so that limits of conversations have no "
                f"effect: remove --{', --'.join(given).replace('_', '-')}."
            )
        return None

    def _make_episode_settings(self, prepared: PreparedTask) -> EpisodeSettings:
        """Returns how the samples of an evaluation are drawn."""
        later_turns = None
        if prepared.rules is not None and self.tokenizer is not None:
            later_turns = make_conversation_turns(self.options.conversation, prepared.sampling, self.tokenizer)
        return EpisodeSettings(
            sampling=prepared.sampling,
            group_size=prepared.setting.num_samples,
            seed=prepared.setting.seed,
            purpose="eval",
            coefficients=prepared.setting.reward,
            later_turns=later_turns,
            context=self.context,
        )

    def _adopt_date(self, prepared: PreparedTask, path: Path) -> PreparedTask:
        """Returns the task, prepared again with the date of the evaluation in `path` if that was begun on another day.

        A date that the user asked for stays.
        """
        date = ""
        if self.world.is_first:
            known = load_evaluation(path).setting if path.exists() else read_journal_setting(path)
            date = "" if known is None else known.date
        # Only the first of several ranks needs the file.
        date = self.world.share(date)
        if self.options.date or not date or date == prepared.setting.date:
            return prepared
        assert self.folder is not None, "only a model that is loaded here has a date"
        self.date = date
        self.tokenizer = Tokenizer.load(self.folder, self.date, read_template(self.options.template))
        return self.prepare(prepared.task)

    def _describe_checkpoint(self) -> dict[str, Any]:
        """Returns the fields of an evaluation's setting about the checkpoint that is evaluated; {} if it is none."""
        found = self.checkpoint
        if found is None:
            return {}
        return {"run": found.run.resolve().name, "step": found.step, "chosen_on": found.chosen_on}

    def run(
        self, prepared: PreparedTask, out: Path, progress: Progress = lambda task, done, total: None
    ) -> EvaluationResult | None:
        """Evaluates a task and writes the evaluation to a file. Reads that instead if it exists with the same setting.

        `out` is a .json file, or a folder in which the file is named after the setting. `progress(task, done, total)`
        is called at the start and as problems are finished. An evaluation that was interrupted, or in which answers
        could not be scored, is completed. Raises RunError if the file holds another evaluation or another process
        writes it, TrainingStopped if many answers cannot be scored. Of several ranks the first one reads and writes the
        file and returns the result; the others answer their part of the problems, and return None.
        """
        world = self.world
        # A date that was not asked for is not part of the name, so that the same command finds the file on another day.
        file_name = make_file_name(replace(prepared.setting, date=self.options.date))
        path = out if out.suffix == ".json" and not out.is_dir() else out / file_name
        prepared = self._adopt_date(prepared, path)
        existing = agree_on_errors(world, lambda: self._find_existing(path, prepared.setting))
        # None on the other ranks: they learn from the first one whether there is anything to do.
        is_done = world.share(existing is not None and not existing.num_failed)
        if is_done:
            return None if existing is None else EvaluationResult(evaluation=existing, path=path, is_new=False)
        # Problems with an answer that could not be scored are answered again.
        known = {} if existing is None else {item.id: item for item in existing.items if not item.has_failures}
        name = prepared.task.name
        num = len(prepared.prompts)
        with ExitStack() as stack:
            journal = agree_on_errors(world, lambda: self._open_journal(stack, path, prepared.setting))
            scorer = stack.enter_context(start_scorer(prepared.task, self.options.scoring, rules=prepared.rules))
            settings = self._make_episode_settings(prepared)
            producer = Producer(self.engine, scorer, prepared.stream, settings, world=world)
            # What an interrupted evaluation has finished.
            known |= {} if journal is None else journal.items
            progress(name, len(known), num)

            def keep_item(item: EvalItem) -> None:
                """Writes a finished problem to the journal, adds it to `known`, and shows the progress."""
                if journal is not None:
                    journal.add(item)
                    known[item.id] = item
                    progress(name, len(known), num)

            # The others need not have the items that are known, only their names.
            names = world.share(list(known))
            items: dict[str, Any] = dict(known) if world.is_first else dict.fromkeys(names)
            evaluation = evaluate(
                producer, prepared.prompts, prepared.setting, self._spell_prompt, items, keep_item, world=world
            )
            if evaluation is None or journal is None:
                return None
            journal.finish(evaluation)
        return EvaluationResult(evaluation=evaluation, path=path, is_new=True)

    def _find_existing(self, path: Path, setting: EvalSetting) -> Evaluation | None:
        """Returns the evaluation that the file at `path` holds; None if there is none, or another rank reads it.

        Raises RunError if it has another setting.
        """
        if not self.world.is_first or not path.exists():
            return None
        existing = load_evaluation(path)
        if existing.setting != setting:
            names = ", ".join(list_differences(existing.setting, setting))
            raise RunError(
                f"{path} holds an evaluation with other settings ({names}); move it away and repeat the command, "
                "or choose another --out."
            )
        return existing

    def _open_journal(self, stack: ExitStack, path: Path, setting: EvalSetting) -> Journal | None:
        """Opens the journal of an evaluation, which `stack` closes; None on ranks but the first."""
        return stack.enter_context(Journal(path, setting)) if self.world.is_first else None


def _warn_if_flattered(setting: EvalSetting) -> None:
    """Warns if a checkpoint is evaluated on the problems on which it was chosen as the best of its run."""
    if setting.chosen_on != f"{setting.task}/{setting.split}":
        return
    log.warning(
        "%s was chosen as the best of its run on the %s problems of %s, so this result flatters it; for one on "
        "other problems, %s",
        setting.model,
        setting.split,
        setting.task,
        "train with --eval.split validation" if setting.split == "test" else "evaluate it with --split test",
    )


def make_file_name(setting: EvalSetting) -> str:
    """Returns the name of the file of an evaluation: task, last part of the model's name, digest of the setting.

    The digest has 8 hexadecimal digits and is over the whole setting.

    >>> import re
    >>> facts = dict(task="gsm8k", split="test", num_problems=5, num_samples=1, knobs={}, grader="g", template="chat")
    >>> rest = dict(weights="w", rows="r", place="cpu", engine="native", sampling={}, seed=0)
    >>> name = make_file_name(EvalSetting(model="a/b c", **facts, **rest))
    >>> re.sub("[0-9a-f]{8}", "...", name)
    'gsm8k-b-c-....json'
    """
    facts = asdict(setting)
    # Evaluations that were made before these fields existed keep their names.
    facts = {name: value for name, value in facts.items() if ADDED_FIELDS.get(name, ...) != value}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{setting.task}-{make_slug(setting.model.rstrip('/'))}-{digest}.json"
