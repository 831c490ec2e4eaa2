"""An engine that runs vLLM in this process, for evaluation and training.

Prompts go in as token ids and vLLM loads no tokenizer: stop strings are found and text is decoded here, by the same
code as for the native engine. What vLLM cannot promise:

- Keyed randomness. A request's seed is made from its key, so the same key gives the same text in one vLLM, except for
  near ties, which another batch may decide otherwise. It is not the native engine's text. Greedy text is, except for
  near ties. vLLM applies min-p first and then top-k and top-p; the native engine does the opposite.
- Log-probabilities before truncation. If top-p, top-k or min-p truncate, `sampler_logprobs` are 0 and `kept_mass` is
  empty. So training refuses truncation.

New weights are handed over in memory, tensor by tensor. Requests under way are computed again from their tokens, with
the new weights, and go on: their samples record from which token on which version was used.

On a GPU that a learner shares, vLLM sleeps from the end of a rollout to the next load of weights (`sleep`). It sleeps
at level 2: its weights and KV are discarded. Level 1 would copy the weights to the host and back, although new ones
follow. What a load does not bring, such as tables of rotary positions, are buffers: vLLM saves and restores these.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cohort.engines.base import Abilities, Event, Request, Weights, WorkCounters
from cohort.engines.draft import Draft
from cohort.engines.fleet.in_vllm.cohort_worker import pack_tied_head
from cohort.engines.native.random import derive_random_stream
from cohort.engines.pending import PendingOutput
from cohort.engines.requests import check_request, closed_engine_error, unknown_request_error
from cohort.engines.sums import SummedWeights, sum_parameters
from cohort.errors import ConfigError, EngineError, ModelError, shorten_error, suggest_name
from cohort.text import TextStream, Tokenizer
from cohort.types import Finish, Sample

log = logging.getLogger(__name__)

# Versions of vLLM with which the tests have passed. Of 0.26 only the source was read.
TRIED_VERSIONS = ("0.32",)
MIN_TEMPERATURE = 0.01  # vLLM draws at this temperature if a request asks for a lower one above 0
VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # The drawn tokens must not depend on when requests reach another process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# vLLM on a CPU would take a share of the whole memory for KV. Requests that do not fit into this wait.
CPU_KV_BYTES = 1 << 30
REPEAT = (
    "Continue: cohort resume RUN for training; cohort eval, repeated with the same words, keeps the answers that are "
    "finished."
)
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class VllmEngine:
    """Samples from the model in a folder that vLLM can load.

    `memory` is the share of the GPU's memory that vLLM may use. `options` are further arguments of vLLM's `EngineArgs`.
    `max_context` bounds prompt plus completion, in tokens; `slots` is the most requests that run at once. `tokenizer`
    None = that of the folder. `shares_gpu` says that a learner needs the GPU's memory between rollouts: then `sleep`
    frees it. Raises ModelError if vLLM cannot serve the model.
    """

    name = "vllm"
    abilities = Abilities(truncation=False)

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
        shares_gpu: bool = False,
    ) -> None:
        if not Path(folder).is_dir():
            raise ModelError(f"{folder} is no folder: give vLLM the folder of a model in Hugging Face format.")
        if slots < 1 or max_context < 1:
            raise ConfigError(
                f"the vllm engine got slots = {slots} and max_context = {max_context}; set both to at least 1."
            )
        if not 0 < memory <= 1:
            raise ConfigError(
                f"the vllm engine got memory = {memory}, its share of the GPU's memory; set it above 0 and at most 1."
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
            # No sampling defaults from the folder: a request has all settings.
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        check_options(options, {f.name for f in fields(self._vllm.EngineArgs)}, settings)
        self._can_sleep = shares_gpu and self._vllm.platforms.current_platform.is_sleep_mode_available()
        settings |= {**self._choose_device_settings(), "load_format": "safetensors", **options}
        try:
            with warnings.catch_warnings(), keep_process_settings():
                # These warnings are for vLLM's developers.
                warnings.simplefilter("ignore", FutureWarning)
                self._engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**settings))
        except (ValueError, RuntimeError, OSError, ImportError) as e:
            raise ModelError(f"vLLM cannot serve {folder}: {describe(e)}. Use --engine native.") from e
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        self.version = 0
        self._pending: dict[str, PendingOutput] = {}
        self._events: list[Event] = []  # of requests, found while something else was computed
        self._num_probes = 0
        self._sleeps = False
        # Whether vLLM stores the numbers that it is given, which can then be compared; None = no load has shown it.
        # On a CPU it stores packed copies instead.
        self._stores_numbers: bool | None = None
        self._closed = False
        self.work = WorkCounters()

    def _choose_device_settings(self) -> dict[str, Any]:
        """Returns those of vLLM's settings that depend on the device."""
        if not self._vllm.platforms.current_platform.is_cpu():
            return {"enable_sleep_mode": True} if self._can_sleep else {}
        # A prompt in parts makes vLLM turn back a request's random numbers, which it cannot do on a CPU. Compiling
        # takes 40 seconds, needs a C++ compiler, and makes `tiny` no faster.
        settings: dict[str, Any] = {"enable_chunked_prefill": False, "enforce_eager": True}
        # Where the variable is set, vLLM follows it.
        return (
            settings
            if os.environ.get("VLLM_CPU_KVCACHE_SPACE")
            else {**settings, "kv_cache_memory_bytes": CPU_KV_BYTES}
        )

    def submit(self, request: Request) -> None:
        """Hands a request to vLLM. Raises ConfigError for a request that can never be served, or that vLLM refuses.

        A temperature between 0 and MIN_TEMPERATURE is refused too. Raises EngineError after `close`, and after `sleep`
        until weights are loaded.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        if self._sleeps:
            raise EngineError("vLLM sleeps and has no weights: load some before a request (WeightSync.send).")
        check_request(request, self.max_context, self.vocab_size, self._pending)
        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f'request "{request.id}": temperature = {request.sampling.temperature}, but vLLM has no temperature '
                f"between 0 and {MIN_TEMPERATURE}; use 0 for greedy decoding, or at least {MIN_TEMPERATURE}."
            )
        prompt = self._vllm.inputs.tokens_input(list(request.tokens))
        try:
            self._engine.add_request(request.id, prompt, self._make_params(request))
        except ValueError as e:
            raise ConfigError(f'vLLM refuses request "{request.id}": {describe(e)}. Change what it names.') from e
        stream = TextStream(self.tokenizer) if request.sampling.stop_strings else None
        self._pending[request.id] = PendingOutput(request=request, text_stream=stream, versions=[(0, self.version)])

    def _make_params(self, request: Request) -> Any:
        """Returns vLLM's SamplingParams object for a request. Its seed is derived from the request's key and `start`.

        Greedy requests get no seed. Sampled tokens come with log-probabilities unless the request truncates; greedy
        ones always do. Stop strings are not passed on.
        """
        s = request.sampling
        greedy = s.temperature == 0
        return self._vllm.SamplingParams(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            seed=None if greedy else (derive_random_stream(request.key) + request.start) % 2**31,
            stop_token_ids=list(s.stop_ids),
            # Where the model's own end token counts, stop_ids has it.
            ignore_eos=True,
            # 0 = the log-probability of the sampled token alone, None = none.
            logprobs=0 if greedy or not s.truncates else None,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no event waits to be reported."""
        return not self._pending and not self._events

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Runs one step of vLLM and returns the events: new tokens whose text is complete, and samples that ended.

        Returns [] without a step if no request is under way. `timeout` is ignored, because vLLM runs in this process.
        Raises EngineError if vLLM loses a request or ends one for a reason of its own.
        """
        events, self._events = self._events, []
        return events + self._step() if self._pending else events

    def _step(self) -> list[Event]:
        """Runs one step of vLLM, which has requests under way, and returns its events."""
        outputs = self._engine.step()
        if not outputs and not self._engine.has_unfinished_requests():
            raise EngineError(
                f"vLLM has lost {len(self._pending)} requests: it has nothing left to do, but gave no answer to them. "
                f"{REPEAT}"
            )
        return [event for output in outputs if (event := self._read_output(output)) is not None]

    def _read_output(self, output: Any) -> Event | None:
        """Adds one output of vLLM's step to its request. Returns the event to report, or None if there is none yet.

        Outputs of aborted requests are ignored. Raises EngineError if vLLM ended the request for a reason of its own.
        """
        pending = self._pending.get(output.request_id)
        if pending is None:
            return None
        [drawn] = output.outputs
        tokens = list(drawn.token_ids)
        # Log-probabilities come as one mapping per token, from token ids.
        rows = drawn.logprobs if tokens and drawn.logprobs else [{}] * len(tokens)
        logprobs = [row[t].logprob if t in row else 0.0 for t, row in zip(tokens, rows, strict=True)]
        stopped = pending.add_tokens(tokens, logprobs)
        if output.finished and drawn.finish_reason not in ("stop", "length"):
            raise EngineError(
                f'vLLM broke request "{pending.request.id}" off, with the reason "{drawn.finish_reason}". {REPEAT}'
            )
        if stopped or output.finished:
            draft = pending.make_draft(self.tokenizer)
            if draft.finish is not None:
                return self._finish_request(pending, draft, still_running=not output.finished)
        return pending.make_event(pending.num_complete) if pending.num_complete > pending.num_reported else None

    def _finish_request(self, pending: PendingOutput, draft: Draft, still_running: bool) -> Event:
        """Forgets a request that has ended and returns its last event, with the sample of `draft`.

        `still_running` says that vLLM still works on the request (a stop string ended it); vLLM then aborts it.
        """
        if still_running:
            self._engine.abort_request([pending.request.id])
        del self._pending[pending.request.id]
        event = pending.make_event(len(draft.tokens))
        event.sample = draft.to_sample(self.tokenizer.decode)
        return event

    def abort(self, id: str) -> Sample:
        """Stops a request and returns its sample with the tokens reported so far and finish = abort.

        Raises CohortError for an unknown id.
        """
        waiting, self._events = self._events, [event for event in self._events if event.id != id]
        # It may have ended in `compute_logprobs`, and the caller not know it yet.
        if ended := [event.sample for event in waiting if event.id == id and event.sample is not None]:
            return replace(ended[0], finish=Finish.ABORT)
        if id not in self._pending:
            raise unknown_request_error(id)
        self._engine.abort_request([id])
        pending = self._pending.pop(id)
        # Tokens that were never reported are not part of the sample.
        del pending.tokens[pending.num_reported :], pending.logprobs[pending.num_reported :]
        draft = pending.make_draft(self.tokenizer)
        draft.finish = Finish.ABORT
        return draft.to_sample(self.tokenizer.decode)

    def forget(self, id: str) -> None:
        """Does nothing: vLLM finds equal first tokens in its own cache, and drops them when it needs the memory."""

    def sleep(self) -> None:
        """Frees the GPU memory of vLLM's weights and KV, until `load` brings new weights.

        Does nothing while requests are under way, after `close`, and where no learner shares a GPU with vLLM.
        """
        if not self._can_sleep or self._sleeps or self._closed or not self.idle:
            return
        self._engine.sleep(level=2)
        self._sleeps = True

    def load(self, weights: Weights, version: int) -> None:
        """Replaces vLLM's weights by `weights`, one tensor after the other. All cached KV is dropped.

        Requests under way are computed again, with the new weights, from the tokens that they have. vLLM itself only
        logs a warning about a tensor that it lacks: `engines.sync` proves the load, and the sum over all numbers is
        compared here. Raises EngineError after `close`, and if vLLM refuses the weights, stores others, has no memory
        to wake up, or cannot drop its cache.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        try:
            # The weights first: vLLM restores its buffers with the first call, and loading needs room of its own.
            self._wake("weights")
            sent = weights if self._stores_numbers is False else SummedWeights(weights)
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(sent)})
            self._engine.collective_rpc(pack_tied_head)
            if isinstance(sent, SummedWeights):
                self._compare_sums(sent.total, version)
            # With the last part vLLM takes up its work again.
            self._wake("kv_cache")
        except (ValueError, RuntimeError, KeyError, AssertionError) as e:
            raise EngineError(
                f"vLLM does not take version {version} of the weights: {describe(e)}. Train with --engine native."
            ) from e
        self._sleeps = False
        # Running requests are computed again too. Their KV is of the old weights.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(f"vLLM still has KV of version {self.version} of the weights in its cache. {REPEAT}")
        self.version = version
        for pending in self._pending.values():
            pending.set_version(version)

    def _compare_sums(self, sent: int, version: int) -> None:
        """Raises EngineError if vLLM stores other numbers than those that were sent, given their sum.

        The first load shows whether it stores them as they are.
        """
        equal = self._engine.collective_rpc(sum_parameters) == [sent]
        if self._stores_numbers is None:
            self._stores_numbers = equal
        elif not equal:
            raise EngineError(
                f"version {version} of the weights did not arrive whole in the vllm engine: it stores other numbers "
                f"than those that were sent. {REPEAT}"
            )

    def _wake(self, part: str) -> None:
        """Gives a part of vLLM, if it sleeps, its GPU memory back: "weights" or "kv_cache", with undefined content.

        Raises EngineError, with the setting to change, if the learner has left too little memory.
        """
        if not self._sleeps:
            return
        # What torch keeps of the learner's freed memory is of no use to vLLM, which has an allocator of its own.
        torch.cuda.empty_cache()
        try:
            self._engine.wake_up(tags=[part])
        except RuntimeError as e:
            raise EngineError(
                f"vLLM got no GPU memory for its {part} after the update: {describe(e)}. Lower --engine.memory. "
                f"{REPEAT}"
            ) from e

    def compute_logprobs(self, tokens: list[int]) -> list[list[float]]:
        """Returns one list: the log-probability of every token after the first, at temperature 1, with these weights.

        vLLM does not read its cache for this. Requests under way go on meanwhile; the next `poll` returns their events.
        """
        # vLLM gives the log-probabilities of a prompt before any processing, so at temperature 1.
        params = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._num_probes += 1
        id = f"cohort-probe-{self._num_probes}"
        self._engine.add_request(id, self._vllm.inputs.tokens_input(list(tokens)), params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.request_id != id:
                    event = self._read_output(output)
                    self._events += [] if event is None else [event]
                elif output.finished:
                    # The first token has none.
                    rows = output.prompt_logprobs[1:]
                    return [[float(row[token].logprob) for token, row in zip(tokens[1:], rows, strict=True)]]
        raise EngineError(f"vLLM gave no log-probabilities of a prompt. {REPEAT}")

    def close(self) -> None:
        """Aborts every request. vLLM itself stays loaded. A later `submit` raises EngineError."""
        for id in list(self._pending):
            self.abort(id)
        self._closed = True


def import_vllm() -> Any:
    """Imports and returns the vllm package. Raises ConfigError if it is not installed or does not load.

    First sets the variables of VLLM_ENVIRONMENT in this process, except those that are set already: no usage
    statistics, only errors in the log, no process of its own. Warns once of a version that was never tried.
    """
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Parts of vLLM write warnings before it has read the variable.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    try:
        import vllm.inputs  # type: ignore[import-not-found,unused-ignore]
        import vllm.platforms  # type: ignore[import-not-found,unused-ignore]
        import vllm.sampling_params  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        if isinstance(e, ModuleNotFoundError) and e.name == "vllm":
            raise ConfigError(
                "the vllm engine needs vLLM. Install it: pip install 'cohort[vllm]'. To train, you can also name the "
                "Python of another environment that has it: --engine.place server --engine.python PATH."
            ) from e
        raise ConfigError(
            f"vLLM is installed but does not load: {describe(e)}. Install it again (pip install --force-reinstall "
            "vllm), or use --engine native."
        ) from e
    warn_once(vllm.__version__, vllm.platforms.current_platform.is_cpu())
    return vllm


@cache
def warn_once(version: str, on_cpu: bool) -> None:
    """Logs what was never tried: this version of vLLM, or this hardware."""
    if not version.startswith(tuple(f"{tried}." for tried in TRIED_VERSIONS)):
        log.warning("vLLM %s was never tried with Cohort, only %s", version, ", ".join(TRIED_VERSIONS))
    if not on_cpu:
        log.warning("vLLM as a part of training was never tried on this hardware, only on a CPU")


@contextmanager
def keep_process_settings() -> Iterator[None]:
    """Context in which vLLM starts on a CPU, without two changes that it makes to this whole process.

    It binds all memory to one node of a machine that has several, with a warning. And it replaces
    `torch.set_num_threads` by a function that does nothing, so that a resumed run could not have its threads back.
    """
    operations, set_num_threads = torch.ops._C, torch.set_num_threads
    operations.__dict__["init_cpu_memory_env"] = lambda nodes: None
    try:
        yield
    finally:
        del operations.__dict__["init_cpu_memory_env"]
        torch.set_num_threads = set_num_threads


def describe(error: BaseException) -> str:
    """Returns an error's text in one line, without a full stop at its end."""
    return shorten_error(error).rstrip(".")


def check_options(options: Mapping[str, Any], known: set[str], fixed: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that vLLM does not know or that the engine sets itself.

    `options` are the user's settings by name, `known` the names that vLLM knows, `fixed` the engine's own settings.
    """
    for name in options:
        if name in fixed:
            raise ConfigError(f"engine option {name} cannot be set: the engine sets it to {fixed[name]!r}; remove it.")
        if name not in known:
            raise ConfigError(
                f"vLLM has no engine option {name}; correct or remove it.{suggest_name(name, known - fixed.keys())}"
            )
