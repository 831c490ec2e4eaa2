"""Evaluate a model outside any run: load it once, then task after task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cohort.config.engines import NativeEngine, ServerEngine, VllmEngine
from cohort.config.options import EvalOptions
from cohort.engines.base import Engine
from cohort.engines.factory import Subject, make_engine
from cohort.errors import ConfigError, RunError
from cohort.evaluation.evaluate import evaluate, rows_digest, sampling_facts
from cohort.evaluation.journal import Journal
from cohort.evaluation.records import EvalItem, EvalSetting, Evaluation
from cohort.jobs import build
from cohort.models.catalog import resolve
from cohort.models.config import context_of
from cohort.models.device import DTYPES, find_device, find_dtype
from cohort.models.files import load_folder, read_config
from cohort.rollout.episode import Drawing
from cohort.rollout.producer import Producer
from cohort.run.directory import load_evaluation, slug
from cohort.scoring.pool import ScoringPool, default_workers
from cohort.tasks.base import Task
from cohort.tasks.ref import TaskRef, grader_digest
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import Rendered, Tokenizer
from cohort.text.plain import plain_text
from cohort.types import Message, Prompt, Sampling

Progress = Callable[[str, int, int], None]
"""progress(task, problems done, problems)"""

BLOCK = 1 << 20


class Unrendered:
    """Prompts for a server, which renders them itself."""

    def render(self, messages: Sequence[Message], tools: object = None) -> Rendered:
        last = messages[-1]
        forced = str(last.get("content") or "") if last["role"] == "assistant" else ""
        return Rendered(tokens=[], provenance=[], forced_text=forced)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """One task's problems as the model sees them, and everything that decides the result."""

    task: Task
    stream: TaskStream
    prompts: list[Prompt]
    sampling: Sampling
    setting: EvalSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What came of it, and where it is; `fresh` if it was made now."""

    evaluation: Evaluation
    path: Path
    fresh: bool


class Examiner:
    """A model ready to answer the problems of any number of tasks."""

    def __init__(self, model: str, options: EvalOptions) -> None:
        self.model, self.options = model, options
        self.tokenizer: Tokenizer | None = None
        self.context = 0  # tokens a sequence may have; 0 = the server knows
        self.weights, self.place = "", options.url
        self.engine = self._served() if options.engine == "server" else self._loaded()

    def _served(self) -> Engine:
        o = self.options
        subject = Subject(name=self.model, template=o.template, context=0)
        return make_engine(ServerEngine(url=o.url, slots=o.slots), subject)

    def _loaded(self) -> Engine:
        o = self.options
        device = find_device(o.device)
        build.use_threads(o.threads, device)
        folder = resolve(self.model)
        self.tokenizer, self.weights = Tokenizer.load(folder), folder_digest(folder)
        dtype = find_dtype(o.dtype, device)
        self.place = f"{device.type} {dtype}"
        if o.engine == "vllm":
            self.context = context_of(read_config(folder))
            subject = Subject(folder=folder, context=self.context, dtype=dtype, tokenizer=self.tokenizer)
            return make_engine(VllmEngine(slots=o.slots), subject)
        loaded = load_folder(folder, DTYPES[dtype])
        loaded.decoder.to(device)
        self.context = loaded.config.context
        subject = Subject(decoder=loaded.decoder, decode=self.tokenizer.decode, context=self.context)
        return make_engine(NativeEngine(slots=o.slots), subject)

    def close(self) -> None:
        """End what the engine has under way elsewhere."""
        self.engine.close()

    def _spell(self, prompt: Prompt) -> str:
        """The exact text that the model is given; what a server makes of messages is not known."""
        if self.tokenizer is not None:
            return self.tokenizer.spell(prompt.tokens)
        return plain_text(prompt.messages) if self.options.template == "text" else ""

    def prepare(self, task: Task) -> Exam:
        """Read the rows and render the prompts: what is wrong with them shows before anything is sampled."""
        o = self.options
        room = 0 if not self.context else self.context - (o.max_tokens or 1)
        if self.context and room < 1:
            raise ConfigError(
                f"--max-tokens {o.max_tokens} leaves no room for a prompt in the context of {self.context}"
            )
        how: Renderer = Unrendered() if self.tokenizer is None else build.renderer(self.tokenizer, o.template)
        stream = TaskStream(task, how, o.seed, o.split, max_prompt_tokens=room, too_long=o.too_long)
        prompts = stream.held_out(o.limit, o.split)
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
            knobs=TaskRef.of(task).knobs,
            rows=rows_digest(prompts),
            grader=grader_digest(task),
            template=o.template,
            engine=self.engine.name,
            place=self.place,
            sampling=sampling_facts(sampling),
            seed=o.seed,
        )
        return Exam(task=task, stream=stream, prompts=prompts, sampling=sampling, setting=setting)

    def run(self, exam: Exam, out: Path, progress: Progress = lambda task, done, of: None) -> Examined:
        """Evaluate and write; an evaluation with this very setting that is there already is read instead.

        `out` is a .json file, or a folder in which the file is named after the setting.
        """
        name, setting, num = exam.task.name, exam.setting, len(exam.prompts)
        path = out if out.suffix == ".json" and not out.is_dir() else out / file_name(setting)
        known: dict[str, EvalItem] = {}
        if path.exists():
            found = load_evaluation(path)
            if found.setting != setting:
                raise RunError(f"{path} holds an evaluation with other settings; delete it or choose another --out.")
            if not found.num_failed:
                return Examined(evaluation=found, path=path, fresh=False)
            known = {item.id: item for item in found.items if not item.failed}
        with Journal(path, setting) as journal, ScoringPool(exam.task, default_workers(exam.task)) as scorer:
            drawing = Drawing(
                sampling=exam.sampling,
                group_size=setting.num_samples,
                seed=setting.seed,
                purpose="eval",
                coefficients={},
                context=self.context,
            )
            producer = Producer(self.engine, scorer, exam.stream, drawing)
            known |= journal.items
            progress(name, len(known), num)

            def done(item: EvalItem) -> None:
                journal.add(item)
                known[item.id] = item
                progress(name, len(known), num)

            evaluation = evaluate(producer, exam.prompts, setting, self._spell, dict(known), done)
            journal.finish(evaluation)
        return Examined(evaluation=evaluation, path=path, fresh=True)


def folder_digest(folder: Path) -> str:
    """Names a model's files: their sizes, beginnings, middles and ends, which no training leaves as they were."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".jinja")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for place in (0, size // 2, max(0, size - BLOCK)):
                content.seek(place)
                digest.update(content.read(BLOCK))
    return digest.hexdigest()[:16]


def file_name(setting: EvalSetting) -> str:
    """Names the task, the model and, by a digest, the rest.

    >>> import re
    >>> facts = dict(task="gsm8k", split="test", num_problems=5, num_samples=1, knobs={}, grader="g", template="chat")
    >>> rest = dict(weights="w", rows="r", place="cpu", engine="native", sampling={}, seed=0)
    >>> name = file_name(EvalSetting(model="a/b c", **facts, **rest))
    >>> re.sub("[0-9a-f]{8}", "...", name)
    'gsm8k-b-c-....json'
    """
    facts = asdict(setting)
    if facts["turns"] == "first":  # as every evaluation was before there was a choice: their names stay
        del facts["turns"]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{setting.task}-{slug(setting.model.rstrip('/'))}-{digest}.json"
