"""vLLM in this process, for evaluation: it draws the tokens, Cohort reads them.

Prompts go in as token ids and vLLM loads no tokenizer: stop strings are found and text is decoded here, by the same
code as for the native engine. What vLLM cannot promise:

- keyed randomness. A request's seed is made from its key, so that the same key gives the same text in one vLLM, apart
  from near ties that another batch decides otherwise; it is not the native engine's text. Greedy text is, near ties
  apart. Top-k and top-p cut what min-p has left, not the other way round.
- log-probabilities before truncation: where top-p, top-k or min-p cut, `sampler_logprobs` are 0, `kept_mass` is empty.
- new weights: it cannot train.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cohort.engines.base import Abilities, Event, Request, Weights, Work
from cohort.engines.draft import Draft
from cohort.engines.native.random import stream_of
from cohort.engines.requests import check_request, closed, not_under_way
from cohort.errors import ConfigError, EngineError, ModelError, brief, nearest
from cohort.text import TextStream, Tokenizer
from cohort.types import Finish, Sample

COLDEST = 0.01  # vLLM draws at this temperature when it is asked for a lower one above 0
LATE = 8  # tokens by which a stop string may be noticed late: a character has at most four
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # What is drawn must not depend on when requests reach another process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(kw_only=True, slots=True)
class Reader:
    """What vLLM has drawn for a request. With stop strings, tokens whose text is not complete are not told yet."""

    request: Request
    stream: TextStream | None  # where there are stop strings to look for
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_sure: int = 0  # tokens whose text is complete: no stop string ends inside them
    num_told: int = 0
    tail: str = ""  # the last text, as far as a stop string may reach back

    def take(self, tokens: list[int], logprobs: list[float]) -> bool:
        """Take new tokens; whether a stop string seems to be complete."""
        self.tokens += tokens
        self.logprobs += logprobs
        text = "" if self.stream is None else self.stream.push(tokens)
        if self.stream is None or text:
            self.num_sure = len(self.tokens)
        stops = self.request.sampling.stop_strings
        seen = self.tail + text
        reach = max(map(len, stops), default=1) - 1
        self.tail = seen[max(0, len(seen) - reach) :]
        return bool(text) and any(stop in seen for stop in stops)

    def draft(self, tokenizer: Tokenizer) -> Draft:
        """All of it as a draft, which knows how a sample ends and what its text is."""
        draft = Draft(request=self.request)
        draft.begin(version=0)
        sure = max(0, len(self.tokens) - LATE)  # a stop string is looked for token by token only after these
        for part in (slice(sure), slice(sure, None)):
            if draft.finish is None:
                draft.extend(self.tokens[part], self.logprobs[part], [], tokenizer.decode)
        return draft

    def tell(self, num: int) -> Event:
        """The first `num` tokens, less what was told before."""
        new = slice(self.num_told, num)
        self.num_told = num
        return Event(id=self.request.id, tokens=self.tokens[new], logprobs=self.logprobs[new])


class VllmEngine:
    """Samples with a model folder that vLLM can load. `options` are further arguments of vLLM's `EngineArgs`."""

    name = "vllm"
    abilities = Abilities(live_weights=False)
    version = 0  # it takes no other

    def __init__(
        self,
        folder: str | Path,
        *,
        max_context: int,
        slots: int,
        dtype: str = "auto",
        memory: float = 0.8,
        options: Mapping[str, Any] = NO_OPTIONS,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not Path(folder).is_dir():
            raise ModelError(f"{folder} is no folder: vLLM evaluates models in Hugging Face folders.")
        if slots < 1 or max_context < 1 or not 0 < memory <= 1:
            raise ConfigError(
                f"engine.slots = {slots} and max_context = {max_context} must be at least 1, "
                f"engine.memory = {memory} above 0 and at most 1."
            )
        self.tokenizer = Tokenizer.load(folder) if tokenizer is None else tokenizer
        self.max_context = max_context
        self._vllm = import_vllm()
        settings = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_context,
            "max_num_seqs": slots,
            "gpu_memory_utilization": memory,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "generation_config": "vllm",  # no sampling defaults from the folder: a request says all
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        check_options(options, {f.name for f in fields(self._vllm.EngineArgs)}, settings)
        settings |= {"load_format": "safetensors", **options}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # vLLM's own affair
                self._engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**settings))
        except (ValueError, RuntimeError, OSError, ImportError) as e:
            raise ModelError(f"vLLM cannot serve {folder}: {brief(e)}") from e
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        self._readers: dict[str, Reader] = {}
        self._closed = False
        self.work = Work()

    def submit(self, request: Request) -> None:
        if self._closed:
            raise closed(self.name)
        check_request(request, self.max_context, self.vocab_size, self._readers)
        if 0 < request.sampling.temperature < COLDEST:
            raise ConfigError(
                f'request "{request.id}": vLLM draws at no temperature between 0 and {COLDEST}, so not at '
                f"{request.sampling.temperature}; use 0 for greedy."
            )
        prompt = self._vllm.inputs.tokens_input(list(request.tokens))
        try:
            self._engine.add_request(request.id, prompt, self._params(request))
        except ValueError as e:
            raise ConfigError(f'request "{request.id}": vLLM refuses it: {brief(e)}') from e
        stream = TextStream(self.tokenizer) if request.sampling.stop_strings else None
        self._readers[request.id] = Reader(request=request, stream=stream)

    def _params(self, request: Request) -> Any:
        s = request.sampling
        greedy = s.temperature == 0
        return self._vllm.SamplingParams(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            seed=None if greedy else (stream_of(request.key) + request.start) % 2**31,
            stop_token_ids=list(s.stop_ids),
            ignore_eos=True,  # where the model's own end counts, stop_ids name it
            logprobs=0 if greedy or not s.truncates else None,  # 0 = of the sampled token alone
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    @property
    def idle(self) -> bool:
        return not self._readers

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """One step of vLLM's; what it drew may not be ready to be told."""
        if not self._readers:
            return []
        outputs = self._engine.step()
        if not outputs and not self._engine.has_unfinished_requests():
            raise EngineError(f"vLLM has ended without an answer to {len(self._readers)} requests.")
        return [event for output in outputs if (event := self._take(output)) is not None]

    def _take(self, output: Any) -> Event | None:
        """One request's news, if there is any that can be told."""
        reader = self._readers.get(output.request_id)
        if reader is None:
            return None
        [drawn] = output.outputs
        tokens = list(drawn.token_ids)
        rows = drawn.logprobs if tokens and drawn.logprobs else [{}] * len(tokens)
        logprobs = [row[t].logprob if t in row else 0.0 for t, row in zip(tokens, rows, strict=True)]
        stopped = reader.take(tokens, logprobs)
        if output.finished and drawn.finish_reason not in ("stop", "length"):
            raise EngineError(f'vLLM ended request "{reader.request.id}" with "{drawn.finish_reason}".')
        if stopped or output.finished:
            draft = reader.draft(self.tokenizer)
            if draft.finish is not None:
                return self._end(reader, draft, under_way=not output.finished)
        return reader.tell(reader.num_sure) if reader.num_sure > reader.num_told else None

    def _end(self, reader: Reader, draft: Draft, under_way: bool) -> Event:
        if under_way:
            self._engine.abort_request([reader.request.id])
        del self._readers[reader.request.id]
        event = reader.tell(len(draft.tokens))
        event.sample = draft.sample(self.tokenizer.decode)
        return event

    def abort(self, id: str) -> Sample:
        if id not in self._readers:
            raise not_under_way(id)
        self._engine.abort_request([id])
        reader = self._readers.pop(id)
        del reader.tokens[reader.num_told :], reader.logprobs[reader.num_told :]
        draft = reader.draft(self.tokenizer)
        draft.finish = Finish.ABORT
        return draft.sample(self.tokenizer.decode)

    def load(self, weights: Weights, version: int) -> None:
        raise ConfigError("the vllm engine takes no new weights: it evaluates; train with the native engine.")

    def close(self) -> None:
        for id in list(self._readers):
            self.abort(id)
        self._closed = True


def import_vllm() -> Any:
    """The package, told first to be quiet and to report nothing to anybody."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm.inputs  # type: ignore[import-not-found,unused-ignore]
        import vllm.sampling_params  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        if isinstance(e, ModuleNotFoundError) and e.name == "vllm":
            raise ConfigError("the vllm engine needs vLLM: pip install 'cohort[vllm]'") from e
        raise ConfigError(f"vLLM is installed but does not load: {brief(e)}") from e
    return vllm


def check_options(options: Mapping[str, Any], known: set[str], taken: Mapping[str, Any]) -> None:
    """Raise for an option vLLM does not have, and for one the engine decides itself."""
    for name in options:
        if name in taken:
            raise ConfigError(f"engine option {name} is not free: the engine sets it to {taken[name]!r} itself.")
        if name not in known:
            raise ConfigError(f"vLLM has no engine option {name}.{nearest(name, known - taken.keys())}")
