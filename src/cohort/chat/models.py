"""The models of a chat: found by name, checked against the free memory, and loaded, each with an engine of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from cohort.chat.options import DEFAULT_MAX_TOKENS, ChatOptions
from cohort.engines.base import Engine, Request
from cohort.errors import CohortError, ModelError
from cohort.jobs.build import configure_torch
from cohort.jobs.inputs import choose_date
from cohort.jobs.models import NamedModel, find_model
from cohort.jobs.room import SamplingDemand, check_room, compute_demand, format_gigabytes
from cohort.jobs.sampler import load_on_device, make_sampler
from cohort.logs.escape import escape_line
from cohort.models.catalog import find_pulled
from cohort.models.device import DTYPES, choose_device, choose_dtype, measure_free_bytes
from cohort.models.files import LoadedModel
from cohort.system.paths import expand_home
from cohort.text import PromptRenderer, RenderedPrompt, Tokenizer
from cohort.text.framing import read_template
from cohort.text.plain import GAP
from cohort.tools.formats import FormatName
from cohort.types import Key, Message, Sampling

# Decode steps between two looks at the answer. One keeps a processor's answer flowing; a GPU is faster with a few.
CPU_WINDOW = 1
GPU_WINDOW = 4
SLOW_BYTES = 10**9  # weights from this size on take a while to load

Fetch = Callable[[str], object]
"""Called with the path of a .gguf file, which it converts into the cache."""


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """A loaded model with its tokenizer and engine."""

    name: str  # as the user wrote it, with the step of a checkpoint
    label: str  # short, and different from those of the other models
    folder: Path
    tokenizer: Tokenizer
    engine: Engine
    context: int  # most tokens of a conversation
    template: str
    copy_index: int  # how many earlier models of the chat have the same folder
    demand: SamplingDemand
    run: Path | None = None  # the run that the model is a checkpoint of

    @property
    def full_label(self) -> str:
        """The label, with the path where that tells more: a path ends with its own label, and is shown alone."""
        last = escape_line(get_last_part(self.name))
        if self.label == last:
            return self.name
        return self.label if self.name == last else f"{self.label} = {self.name}"

    def render(
        self, messages: Sequence[Message], system: str, tools: Sequence[Any] = (), format: str = "auto"
    ) -> RenderedPrompt:
        """Returns messages, after the system prompt, as the tokens of a prompt, which offers `tools` if there are any.

        `format` is how calls are written; "auto" = as the chat template suggests. Raises ModelError if rendering fails.
        """
        chosen = cast(FormatName | None, None if format == "auto" else format)
        return PromptRenderer(self.tokenizer, self.template, system, chosen).render(messages, tools)

    def encode_follow_up(self, words: str, written: Sequence[int]) -> list[int]:
        """Returns the tokens of a user's message that follows the answer `written`, up to the next answer.

        An end token that the model wrote is not repeated. Raises ModelError if the chat template allows no such
        continuation.
        """
        if self.template == "text":
            return self.tokenizer.encode(GAP + words + GAP)
        tokens = self.tokenizer.encode_follow_up(words)
        return tokens[1:] if list(written[-1:]) == tokens[:1] else tokens


class ChatModels:
    """The models of a chat, in the order of their columns. `swap` exchanges them while the chat goes on."""

    def __init__(self, options: ChatOptions, fetch: Fetch, report: Callable[[str], object] = lambda text: None) -> None:
        self._options = options
        self._fetch = fetch
        self._report = report  # called with a line about what takes long
        self._device = choose_device(options.device)
        self._dtype = choose_dtype(options.dtype, self._device)
        self._loaded: dict[Path, LoadedModel] = {}  # models that are named twice are loaded once
        self._demands: dict[Path, SamplingDemand] = {}
        self.members: list[ChatModel] = []
        configure_torch(options.threads, self._device)

    @property
    def place(self) -> str:
        """Device and number type, such as "cpu, float32"."""
        return f"{self._device.type}, {self._dtype}"

    def swap(self, names: Sequence[str]) -> None:
        """Loads the models with these names in place of the present ones. A model that stays is not loaded again.

        Raises ModelError, RunError or ConfigError if a model cannot be found, does not fit into memory, or is damaged;
        the present models then stay, unless they had to make room for those that turned out to be damaged.
        """
        found = [self._find(name) for name in names]
        folders = [model.folder for model in found]
        width = DTYPES[self._dtype].itemsize
        demands = {f: self._demands[f] if f in self._demands else compute_demand(f, width) for f in folders}
        before, new = self._loaded, [f for f in demands if f not in self._loaded]
        gone = [f for f in before if f not in demands]
        free = measure_free_bytes(self._device)
        freed = sum(self._demands[f].total for f in gone)
        check_room([demands[f] for f in new], None if free is None else free + freed, self._device.type)
        # Tokenizers come first: they are small, and tell most mistakes about --template and --system.
        tokenizers = {f: self._load_tokenizer(f) for f in demands}
        for member in self.members:
            member.engine.close()
        self._loaded = {f: model for f, model in before.items() if f in demands}
        if free is not None and sum(demands[f].total for f in new) > free:
            # The new models have no room beside the old ones, whose decoders the old engines hold too.
            before, self.members = {}, []
            gc.collect()
        try:
            for folder in new:
                if demands[folder].weights >= SLOW_BYTES:
                    self._report(f"loading {folder.name}, {format_gigabytes(demands[folder].weights)} GB ...")
                self._loaded[folder] = load_on_device(folder, self._dtype, self._device)
        except BaseException:
            self._loaded = before
            self.members = [replace(m, engine=self._make_engine(m.folder, m.tokenizer)) for m in self.members]
            raise
        self._demands = demands
        self.members = self._make_members(found, tokenizers)

    def close(self) -> None:
        """Ends the engines."""
        for member in self.members:
            member.engine.close()

    def _find(self, name: str) -> NamedModel:
        """Returns the model that `name` means. A .gguf file that is new is converted first."""
        if Path(name).suffix == ".gguf" and expand_home(name).is_file() and find_pulled(name) is None:
            self._fetch(name)
        return find_model(name)

    def _load_tokenizer(self, folder: Path) -> Tokenizer:
        """Returns the tokenizer of a model folder. Raises ModelError if its template cannot render a conversation."""
        template = self._options.template
        date = choose_date("", template, folder)
        tokenizer = Tokenizer.load(folder, date, read_template(template))
        try:
            PromptRenderer(tokenizer, template, self._options.system).render([{"role": "user", "content": "x"}])
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error
        return tokenizer

    def _make_members(self, found: Sequence[NamedModel], tokenizers: dict[Path, Tokenizer]) -> list[ChatModel]:
        """Returns the models with a new engine each. All of them must be loaded."""
        members: list[ChatModel] = []
        for label, model in zip(make_labels([m.name for m in found]), found, strict=True):
            loaded = self._loaded[model.folder]
            members.append(
                ChatModel(
                    name=model.name,
                    label=label,
                    folder=model.folder,
                    tokenizer=tokenizers[model.folder],
                    engine=self._make_engine(model.folder, tokenizers[model.folder]),
                    context=loaded.config.context,
                    template=self._options.template,
                    copy_index=sum(m.folder == model.folder for m in members),
                    demand=self._demands[model.folder],
                    run=model.checkpoint.run if model.checkpoint else None,
                )
            )
        return members

    def _make_engine(self, folder: Path, tokenizer: Tokenizer) -> Engine:
        """Returns an engine for one answer at a time. On a GPU it leaves the others room for their conversations."""
        others = sum(demand.kv for other, demand in self._demands.items() if other != folder)
        if self._device.type != "cuda":
            return make_sampler(self._loaded[folder], tokenizer, slots=1, window=CPU_WINDOW)
        engine = make_sampler(self._loaded[folder], tokenizer, slots=1, window=GPU_WINDOW, reserve=others)
        warm_up(engine, min(self._options.max_tokens or DEFAULT_MAX_TOKENS, self._loaded[folder].config.context - 1))
        return engine


def warm_up(engine: Engine, max_tokens: int) -> None:
    """Draws the first tokens of an answer and forgets them.

    A GPU compiles its kernels and captures its graphs meanwhile, which would otherwise delay the first answer. The
    memory that is taken is that for answers of up to `max_tokens` tokens.
    """
    key = Key(seed=0, purpose="chat", task="warm-up", prompt_id="", visit=0, sample=0)
    engine.submit(Request(id="warm-up", tokens=[0], sampling=Sampling(max_tokens=max_tokens), key=key))
    engine.poll()
    # The request may have ended by itself.
    with suppress(CohortError):
        engine.abort("warm-up")


def get_last_part(name: str) -> str:
    """Returns the last part of a path, or a name that is none."""
    return name.rstrip("/").rpartition("/")[2] or name


def make_labels(names: Sequence[str]) -> list[str]:
    """Returns a short label per model: the last part of its path, with a number where models have the same one.

    >>> make_labels(["tiny", "runs/2026-11-15-countdown-k3f9@40", "tiny"])
    ['tiny (1)', '2026-11-15-countdown-k3f9@40', 'tiny (2)']
    """
    short = [escape_line(get_last_part(name)) for name in names]
    counts: dict[str, int] = {}
    labels = []
    for label in short:
        counts[label] = counts.get(label, 0) + 1
        labels.append(f"{label} ({counts[label]})" if short.count(label) > 1 else label)
    return labels
