"""How vLLM's server is asked: tokens in and out by `/inference/v1/generate`, weights by its calls for development.

What was found out by trying (0.32): `keep` holds requests back and computes their KV again afterwards. A folder that
the server does not see is taken for the name of a model on a hub. A `max_tokens` beyond the context is cut silently.
`/health` replies even if the process that computes hangs, but `/weight_info` asks that process. Log-probabilities of a
prompt are those at temperature 1, whatever was asked for; those of drawn tokens are only with `processed_logprobs`
those at the request's temperature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cohort.engines.fleet import in_vllm
from cohort.engines.fleet.base import OfferedWeights
from cohort.engines.fleet.calls import FailedCall, RefusedCall, ServerCalls
from cohort.engines.fleet.dialect import (
    Part,
    Question,
    ServerFacts,
    ServerSettings,
    explain_refusal,
    read_field,
    read_finish,
    read_logprobs,
    read_tokens,
)
from cohort.errors import EngineError

DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
# vLLM puts this before the id of a request.
ID_PREFIX = "generate-tokens-"
# How vLLM refuses a request whose reply would have a number that JSON has not.
NO_NUMBERS = "not JSON compliant"
# The class of `in_vllm`, as servers that Cohort starts import it.
EXTENSION = "cohort_worker.Extension"
# A CPU takes a share of the whole memory for KV otherwise, in GiB.
CPU_KV_GIB = "1"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCall:
    """A call of a method that vLLM's workers have."""

    method: str
    kwargs: dict[str, Any] = field(default_factory=dict)


class VllmDialect:
    """vLLM's server, 0.27 or newer: older ones do not say which weights drew a token.

    `has_extension` says that its workers have the methods of `in_vllm`. A server on a CPU needs them, and one that gets
    weights through memory of its GPU.
    """

    name = "vllm"
    package = "vllm"
    title = "vLLM"
    tried_versions: tuple[str, ...] = ("0.32",)
    has_sockets = True

    def __init__(self, has_extension: bool = False) -> None:
        self.has_extension = has_extension

    def make_command(self, settings: ServerSettings, listen: Sequence[str]) -> list[str]:
        """Returns the command that starts a server."""
        # `vllm serve` would need a package of exactly that name.
        flags = [
            *("--model", str(settings.folder), "--served-model-name", "cohort", "--load-format", "safetensors"),
            *("--dtype", settings.dtype, "--max-model-len", str(settings.context)),
            *("--max-num-seqs", str(settings.slots), "--tensor-parallel-size", str(settings.tensor)),
            # No sampling defaults from the folder: a request has all settings.
            *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
            *("--disable-log-stats", "--disable-uvicorn-access-log"),
        ]
        if self.has_extension:
            flags += ["--worker-extension-cls", EXTENSION]
        if settings.on_cpu:
            # As for vLLM in the process: see `engines.vllm`.
            flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        else:
            flags += ["--gpu-memory-utilization", str(settings.memory)]
        return [settings.python, "-m", "vllm.entrypoints.openai.api_server", *flags, *listen]

    def make_environment(self, settings: ServerSettings) -> dict[str, str]:
        """Returns the environment variables that a server needs.

        It contacts no other machine then, and has the calls that load weights.
        """
        found = {DEVELOPMENT: "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if settings.on_cpu:
            threads = str(settings.threads)
            found |= {"VLLM_CPU_KVCACHE_SPACE": CPU_KV_GIB, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            found |= {"OMP_NUM_THREADS": threads, "TORCH_COMPILE_DISABLE": "1"}
        return {**found, "PYTHONPATH": str(Path(in_vllm.__file__).parent)} if self.has_extension else found

    async def is_healthy(self, calls: ServerCalls, seconds: float) -> bool:
        """Returns whether the server has loaded its model. Raises what `ServerCalls.is_up` raises."""
        return await calls.is_up("/health", seconds, self.title)

    async def inspect(self, calls: ServerCalls, seconds: float) -> ServerFacts:
        """Returns what the server is, and resumes it if it is paused.

        Raises ConfigError for a server without the calls that training needs, or that refuses the key.
        """
        purpose = "to say what it is"
        try:
            version = read_field(await calls.get("/version", seconds, purpose), "version")
            models = await calls.get("/v1/models", seconds, purpose)
            context = read_field(models, "data", 0, "max_model_len")
        except RefusedCall as refused:
            raise explain_refusal(calls, refused, "is it vLLM's server?") from refused
        try:
            paused = read_field(await calls.get("/is_paused", seconds, purpose), "is_paused")
            if paused:
                await calls.order("/resume", {}, seconds, "to go on")
        except RefusedCall as refused:
            raise explain_refusal(calls, refused, f"start it with {DEVELOPMENT}=1 in its environment.") from refused
        try:
            await calls.order("/inference/v1/abort_requests", {"request_ids": []}, seconds, purpose)
        except RefusedCall as refused:
            raise explain_refusal(calls, refused, "start it with --enable-scale-out.") from refused
        return ServerFacts(version=str(version), context=context if type(context) is int else 0)

    async def beat(self, calls: ServerCalls, seconds: float) -> None:
        """Returns when the process that computes has replied: it does so between two steps."""
        await calls.get("/weight_info", seconds, "to give a sign of life")

    async def continue_tokens(self, calls: ServerCalls, question: Question, seconds: float) -> Part:
        """Returns what the server draws after the tokens of a question."""
        s = question.sampling
        params: dict[str, Any] = {
            "max_tokens": question.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "stop_token_ids": list(s.stop_ids),
            # Where the model's own end token counts, `stop_ids` has it.
            "ignore_eos": True,
            # 0 = the log-probability of the drawn token alone.
            "logprobs": 0,
            # Stop strings need text.
            "detokenize": bool(s.stop_strings),
        }
        if s.temperature > 0:
            params["seed"] = question.seed
        if s.stop_strings:
            params |= {"stop": list(s.stop_strings)}
        body = {
            "request_id": question.id,
            "token_ids": question.tokens,
            "sampling_params": params,
            "cache_salt": question.label,
        }
        return read_part(await calls.post("/inference/v1/generate", body, seconds, "to sample"))

    async def abort(self, calls: ServerCalls, id: str, seconds: float) -> None:
        """Stops a question. An unknown id is ignored."""
        await calls.order("/abort_requests", {"request_ids": [f"{ID_PREFIX}{id}"]}, seconds, "to stop a request")

    async def compute_logprobs(self, calls: ServerCalls, tokens: list[int], label: str, seconds: float) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1. The cache is not read.

        They are NaN if the server computes some that are no numbers, as it may with weights that are not whole.
        """
        body = {
            "token_ids": tokens,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
            "cache_salt": label,
        }
        try:
            reply = await calls.post("/inference/v1/generate", body, seconds, "to compute log-probabilities")
        except RefusedCall as refused:
            if NO_NUMBERS not in str(refused):
                raise
            return [math.nan] * (len(tokens) - 1)
        # The first token has none. JSON has texts as keys.
        return read_logprobs(
            [read_field(reply, "prompt_logprobs", n, str(tokens[n]), "logprob") for n in range(1, len(tokens))]
        )

    async def load(self, calls: ServerCalls, folder: Path, label: str, seconds: float) -> str:
        """Holds all requests back, reloads, and lets them go on: they are computed again from their tokens."""
        worker_calls = [WorkerCall(method="reload_weights", kwargs={"weights_path": str(folder)})]
        if self.has_extension:
            worker_calls.append(WorkerCall(method="pack_tied_head"))
        advice = (
            f"It must be able to read {folder}; for a server on another machine name a folder that both see: "
            "--engine.folder."
        )
        return await self._change_weights(calls, iter(worker_calls), label, seconds, advice)

    async def load_offered(self, calls: ServerCalls, offered: OfferedWeights, label: str, seconds: float) -> str:
        """Loads weights from memory of the GPU, as `load` does from a folder."""
        advice = "Let weights pass as files: --engine.transfer files."
        return await self._change_weights(calls, list_worker_calls(offered), label, seconds, advice)

    async def _change_weights(
        self, calls: ServerCalls, worker_calls: Iterator[WorkerCall], label: str, seconds: float, advice: str
    ) -> str:
        """Calls the workers while all requests are held back, and returns the label that the server reports.

        A call is asked for when the one before is done. Raises EngineError, with advice, if one fails.
        """
        await calls.order("/pause?mode=keep", {}, seconds, "to pause for new weights")
        try:
            for call in worker_calls:
                body = {"method": call.method, "kwargs": call.kwargs}
                await calls.order("/collective_rpc", body, seconds, "to load weights")
        except FailedCall as failed:
            # Requests stay held back: tokens of half-loaded weights would not be noticed.
            raise EngineError(f"vLLM's server {calls.address} {failed}. {advice}") from failed
        await calls.order("/update_weight_version", {"new_version": label}, seconds, "to label its weights")
        await calls.order("/resume", {}, seconds, "to go on with new weights")
        return str(read_field(await calls.get("/weight_info", seconds, "to name its weights"), "weight_version"))


def list_worker_calls(offered: OfferedWeights) -> Iterator[WorkerCall]:
    """Yields the calls that make vLLM's workers load offered weights: see `in_vllm`."""
    yield WorkerCall(method="begin_weights", kwargs=asdict(offered.handle))
    for portion in offered.portions:
        yield WorkerCall(method="take_weights", kwargs={"tensors": [list(asdict(place).values()) for place in portion]})
    yield WorkerCall(method="end_weights")


def read_part(reply: Any) -> Part:
    """Returns what vLLM's server has drawn, from the JSON of its reply."""
    choice = read_field(reply, "choices", 0)
    tokens = read_tokens(read_field(choice, "token_ids"))
    content = read_field(choice, "logprobs", "content") if tokens else []
    spans = read_field(choice, "weight_versions") or []
    if not isinstance(content, list) or not isinstance(spans, list):
        raise FailedCall("sent a reply whose lists are none")
    logprobs = read_logprobs([read_field(row, "logprob") for row in content])
    drawn = [read_field(row, "token_id") for row in content]
    if drawn != tokens:
        raise FailedCall(
            f"sent {len(tokens)} tokens and {len(content)} log-probabilities, which are not of these tokens"
        )
    labels = [(read_field(span, "start"), str(read_field(span, "version"))) for span in spans]
    ends = [0, *(read_field(span, "end") for span in spans)]
    if [start for start, _ in labels] != ends[:-1] or ends[-1] != len(tokens):
        raise FailedCall("does not say which weights drew which token: is it older than vLLM 0.27?")
    return Part(
        tokens=tokens, logprobs=logprobs, finish=read_finish(read_field(choice, "finish_reason")), labels=labels
    )
