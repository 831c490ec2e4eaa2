"""Evaluate a model outside any run: load it once, then task after task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from cohort import build
from cohort.config.options import EvalOptions
from cohort.device import DTYPES, find_device, find_dtype
from cohort.engines.auto import engine_for
from cohort.engines.base import Engine
from cohort.engines.rollout import Tasks
from cohort.errors import ConfigError
from cohort.evaluate import evaluate, sampling_facts
from cohort.models.catalog import resolve
from cohort.models.config import ModelConfig
from cohort.models.files import load_folder, read_config
from cohort.scoring.pool import ScoringPool, default_workers
from cohort.store.journal import Journal
from cohort.store.records import EvalItem, EvalSetting, Evaluation
from cohort.store.rundir import load_evaluation, slug
from cohort.tasks.base import Task
from cohort.tasks.ref import TaskRef, grader_digest
from cohort.tasks.stream import Renderer, TaskStream
from cohort.text import Rendered, Tokenizer
from cohort.types import Message, Prompt, Sampling

Progress = Callable[[str, int, int], None]
"""progress(task, problems done, problems)"""

USUAL_TOKENS = 256  # of a completion, where a task does not say how many it needs


class Unrendered:
    """Prompts for a server, which renders them itself."""

    def render(self, messages: Sequence[Message], tools: object = None) -> Rendered:
        last = messages[-1]
        forced = str(last.get("content") or "") if last["role"] == "assistant" else ""
        return Rendered(tokens=[], provenance=[], forced_text=forced)


class Examiner:
    """A model ready to answer the problems of any number of tasks."""

    def __init__(self, model: str, options: EvalOptions) -> None:
        self.model, self.options = model, options
        self.tokenizer: Tokenizer | None = None
        self.context = 0  # tokens a sequence may have; 0 = the server knows
        self.engine = self._served() if options.engine == "server" else self._loaded()

    def _served(self) -> Engine:
        from cohort.engines.server import ServerEngine

        o = self.options
        return ServerEngine(o.url, self.model, template=o.template, concurrency=min(o.slots, 64))

    def _loaded(self) -> Engine:
        o = self.options
        device = find_device(o.device)
        build.use_threads(o.threads, device)
        folder = resolve(self.model)
        self.tokenizer = Tokenizer.load(folder)
        dtype = find_dtype(o.dtype, device)
        if o.engine == "vllm":
            from cohort.engines.vllm import VllmEngine

            self.context = ModelConfig.from_hf(read_config(folder)).context
            return VllmEngine(folder, max_context=self.context, slots=o.slots, dtype=dtype, tokenizer=self.tokenizer)
        loaded = load_folder(folder, DTYPES[dtype])
        loaded.decoder.to(device)
        self.context = loaded.config.context
        return engine_for(loaded.decoder, self.tokenizer.decode, slots=o.slots, max_context=self.context)

    def close(self) -> None:
        """End what the engine has under way elsewhere."""
        if hasattr(self.engine, "close"):
            self.engine.close()

    def run(self, task: Task, out: Path, progress: Progress = lambda task, done, of: None) -> tuple[Evaluation, Path]:
        """Evaluate and write; an evaluation with this very setting that is there already is read instead.

        `out` is the file, or an existing folder in which the file is named after the setting.
        """
        o = self.options
        prompts, sampling, stream = self._prompts(task)
        setting = EvalSetting(
            task=task.name,
            split=o.split,
            num_problems=len(prompts),
            num_samples=o.samples,
            model=self.model,
            knobs=TaskRef.of(task).knobs,
            grader=grader_digest(task),
            template=o.template,
            engine=o.engine,
            sampling=sampling_facts(sampling),
            seed=o.seed,
        )
        path = out / file_name(setting) if out.is_dir() or not out.suffix else out
        if path.exists() and (found := load_evaluation(path)).setting == setting:
            return found, path
        with Journal(path, setting) as journal, ScoringPool(task, default_workers(task)) as scorer:
            tasks = Tasks(stream=stream, scorer=scorer, sampling=sampling, weights={}, seed=o.seed, purpose="eval")
            progress(task.name, len(journal.items), len(prompts))

            def done(item: EvalItem) -> None:
                journal.add(item)
                progress(task.name, len(journal.items), len(prompts))

            spell = (lambda ids: "") if self.tokenizer is None else self.tokenizer.spell
            evaluation = evaluate(self.engine, tasks, prompts, setting, spell, journal.items, done)
            journal.finish(evaluation)
        return evaluation, path

    def _prompts(self, task: Task) -> tuple[list[Prompt], Sampling, TaskStream]:
        """The problems as this model sees them, and how their answers are drawn."""
        o = self.options
        wanted = o.max_tokens or int(getattr(task, "max_tokens", USUAL_TOKENS))
        room = 0 if not self.context else self.context - (o.max_tokens or 1)
        if self.context and room < 1:
            raise ConfigError(
                f"--max-tokens {o.max_tokens} leaves no room for a prompt in the context of {self.context}"
            )
        how: Renderer = Unrendered() if self.tokenizer is None else build.renderer(self.tokenizer, o.template)
        stream = TaskStream(task, how, o.seed, o.split, max_prompt_tokens=room)
        prompts = stream.held_out(o.limit, o.split)
        if self.context:
            wanted = min(wanted, self.context - max(len(p.tokens) for p in prompts))
        stops = () if self.tokenizer is None else self.tokenizer.stop_ids
        sampling = Sampling(
            max_tokens=wanted,
            temperature=o.temperature,
            top_p=o.top_p,
            top_k=o.top_k,
            min_p=o.min_p,
            stop_ids=stops,
        )
        return prompts, sampling, stream


def file_name(setting: EvalSetting) -> str:
    """Names the task, the model and, by a digest, the rest.

    >>> import re
    >>> facts = dict(task="gsm8k", split="test", num_problems=5, num_samples=1, knobs={}, grader="g", template="chat")
    >>> name = file_name(EvalSetting(model="a/b c", engine="native", sampling={}, seed=0, **facts))
    >>> re.sub("[0-9a-f]{8}", "...", name)
    'gsm8k-b-c-....json'
    """
    digest = hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:8]
    return f"{setting.task}-{slug(setting.model.rstrip('/'))}-{digest}.json"
