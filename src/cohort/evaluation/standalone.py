"""Evaluation of a model outside any run (`cohort eval`): the model is loaded once and answers task after task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cohort.config.engines import NativeEngine, ServerEngine, VllmEngine
from cohort.config.options import EvalOptions
from cohort.engines.base import Engine
from cohort.engines.factory import EngineModel, make_engine
from cohort.errors import ConfigError, RunError
from cohort.evaluation.evaluate import describe_sampling, digest_rows, evaluate
from cohort.evaluation.journal import Journal
from cohort.evaluation.records import EvalItem, EvalSetting, Evaluation
from cohort.jobs import build
from cohort.models.catalog import resolve_model
from cohort.models.config import read_context
from cohort.models.device import DTYPES, choose_device, choose_dtype
from cohort.models.files import load_folder, read_config
from cohort.rollout.episode import EpisodeSettings
from cohort.rollout.producer import Producer
from cohort.run.directory import load_evaluation, make_slug
from cohort.scoring.pool import ScoringPool, choose_num_workers
from cohort.tasks.base import Task
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import RenderedPrompt, Tokenizer
from cohort.text.plain import join_contents
from cohort.types import Message, Prompt, Sampling

Progress = Callable[[str, int, int], None]
"""Called as progress(name of the task, number of problems that are done, number of all problems)."""

# How much of each file is read at its beginning, middle and end to make the digest of a model.
DIGEST_BLOCK_BYTES = 1 << 20


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """An evaluation and the file that holds it."""

    evaluation: Evaluation
    path: Path
    is_new: bool  # False = it was read from the file, because the same evaluation had been made before


class ModelEvaluator:
    """A loaded model, or a connection to a server, that answers the problems of any number of tasks."""

    def __init__(self, model: str, options: EvalOptions) -> None:
        self.model = model
        self.options = options
        # These describe a server; `_make_local_engine` sets them for a model that is loaded here.
        self.tokenizer: Tokenizer | None = None  # None = the server has it
        self.context = 0  # tokens that prompt and completion may have together; 0 = the server knows
        self.weights = ""  # digest of the model's files; "" = not known
        self.place = options.url  # device and dtype, or the server's address
        self.engine = self._make_server_engine() if options.engine == "server" else self._make_local_engine()

    def _make_server_engine(self) -> Engine:
        """Returns an engine that sends requests to the OpenAI-compatible server at `options.url`."""
        o = self.options
        subject = EngineModel(name=self.model, template=o.template, context=0)
        return make_engine(ServerEngine(url=o.url, slots=o.slots), subject)

    def _make_local_engine(self) -> Engine:
        """Loads the model into vLLM (if `options.engine` says so) or the native engine, and returns the engine.

        Sets tokenizer, context, digest of the weights and place (device and dtype) of this object, and torch's threads.
        """
        o = self.options
        device = choose_device(o.device)
        build.configure_torch(o.threads, device)
        folder = resolve_model(self.model)
        self.tokenizer = Tokenizer.load(folder)
        self.weights = digest_folder(folder)
        dtype = choose_dtype(o.dtype, device)
        self.place = f"{device.type} {dtype}"
        if o.engine == "vllm":
            self.context = read_context(read_config(folder))
            subject = EngineModel(folder=folder, context=self.context, dtype=dtype, tokenizer=self.tokenizer)
            return make_engine(VllmEngine(slots=o.slots), subject)
        # The native engine loads the weights here; vLLM loads them itself.
        loaded = load_folder(folder, DTYPES[dtype])
        loaded.decoder.to(device)
        self.context = loaded.config.context
        subject = EngineModel(decoder=loaded.decoder, decode=self.tokenizer.decode, context=self.context)
        return make_engine(NativeEngine(slots=o.slots), subject)

    def close(self) -> None:
        """Ends the engine's processes and connections."""
        self.engine.close()

    def _spell_prompt(self, prompt: Prompt) -> str:
        """Returns the prompt as the text the model sees, special tokens included; "" if a server's template made it."""
        if self.tokenizer is not None:
            return self.tokenizer.spell(prompt.tokens)
        return join_contents(prompt.messages) if self.options.template == "text" else ""

    def prepare(self, task: Task) -> PreparedTask:
        """Reads the rows of a task and renders its prompts. Returns them with the sampling options and the setting.

        So errors show before anything is sampled. The prompts are the first `limit` of the split in the options (0 =
        all). Without --max-tokens, the task's limit of tokens applies. Raises ConfigError if --max-tokens leaves no
        room for a prompt or the split has too few rows, TaskError if a prompt is too long and may not be skipped.
        """
        o = self.options
        # The longest prompt that leaves room for a completion; 0 = not known.
        room = 0 if not self.context else self.context - (o.max_tokens or 1)
        if self.context and room < 1:
            raise ConfigError(
                f"--max-tokens {o.max_tokens} leaves no room for a prompt: the context of the model has "
                f"{self.context} tokens. Use a smaller --max-tokens, or leave it out."
            )
        renderer: Renderer = (
            ServerRenderer() if self.tokenizer is None else build.make_renderer(self.tokenizer, o.template)
        )
        stream = TaskStream(task, renderer, o.seed, o.split, max_prompt_tokens=room, too_long=o.too_long)
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
            template=o.template,
            engine=self.engine.name,
            place=self.place,
            sampling=describe_sampling(sampling),
            seed=o.seed,
        )
        return PreparedTask(task=task, stream=stream, prompts=prompts, sampling=sampling, setting=setting)

    def run(
        self, prepared: PreparedTask, out: Path, progress: Progress = lambda task, done, total: None
    ) -> EvaluationResult:
        """Evaluates a task and writes the evaluation to a file. Reads that instead if it exists with the same setting.

        `out` is a .json file, or a folder in which the file is named after the setting. `progress(task, done, total)`
        is called at the start and as problems are finished. An evaluation that was interrupted, or in which answers
        could not be scored, is completed. Raises RunError if the file holds another evaluation or another process
        writes it, TrainingStopped if many answers cannot be scored.
        """
        name = prepared.task.name
        setting = prepared.setting
        num = len(prepared.prompts)
        path = out if out.suffix == ".json" and not out.is_dir() else out / make_file_name(setting)
        known: dict[str, EvalItem] = {}
        if path.exists():
            existing = load_evaluation(path)
            if existing.setting != setting:
                raise RunError(
                    f"{path} holds an evaluation with other settings; move it away and repeat the command, or choose "
                    "another --out."
                )
            if not existing.num_failed:
                return EvaluationResult(evaluation=existing, path=path, is_new=False)
            # Problems with an answer that could not be scored are answered again.
            known = {item.id: item for item in existing.items if not item.has_failures}
        with Journal(path, setting) as journal, ScoringPool(prepared.task, choose_num_workers(prepared.task)) as scorer:
            settings = EpisodeSettings(
                sampling=prepared.sampling,
                group_size=setting.num_samples,
                seed=setting.seed,
                purpose="eval",
                coefficients={},
                context=self.context,
            )
            producer = Producer(self.engine, scorer, prepared.stream, settings)
            # What an interrupted evaluation has finished.
            known |= journal.items
            progress(name, len(known), num)

            def keep_item(item: EvalItem) -> None:
                """Writes a finished problem to the journal, adds it to `known`, and shows the progress."""
                journal.add(item)
                known[item.id] = item
                progress(name, len(known), num)

            evaluation = evaluate(producer, prepared.prompts, setting, self._spell_prompt, dict(known), keep_item)
            journal.finish(evaluation)
        return EvaluationResult(evaluation=evaluation, path=path, is_new=True)


def digest_folder(folder: Path) -> str:
    """Returns 16 hexadecimal digits that identify a model: a hash of its files' names, sizes and parts of the content.

    Only .safetensors, .json and .jinja files directly in `folder` count. Beginning, middle and end of each are read.
    Training changes weights everywhere, so these parts are enough.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".jinja")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for place in (0, size // 2, max(0, size - DIGEST_BLOCK_BYTES)):
                content.seek(place)
                digest.update(content.read(DIGEST_BLOCK_BYTES))
    return digest.hexdigest()[:16]


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
    # Evaluations that were made before this field existed keep their names.
    if facts["turns"] == "first":
        del facts["turns"]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{setting.task}-{make_slug(setting.model.rstrip('/'))}-{digest}.json"
