"""How SGLang's server is asked. Written from its source (August 2026), and never tried with a real server.

What its source says: pausing with `abort` ends all requests, which report what they have; only then may the cache be
flushed, which is asserted. Requests do not say which weights drew which token. The end tokens of the model always stop
a request, unless all stop ids are switched off. Ids of requests are compared by their beginnings. A context is six to
eight tokens shorter than it is said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

RESERVED_TOKENS = 8  # of a context, which SGLang keeps for itself
FLUSH_SECONDS = 10  # that SGLang may wait until nothing is under way


class SglangDialect:
    """SGLang's server."""

    name = "sglang"
    package = "sglang"
    title = "SGLang"
    tried_versions: tuple[str, ...] = ()
    has_sockets = False

    def make_command(self, settings: ServerSettings, listen: Sequence[str]) -> list[str]:
        """Returns the command that starts a server."""
        flags = [
            *("--model-path", str(settings.folder), "--served-model-name", "cohort", "--dtype", settings.dtype),
            *("--context-length", str(settings.context + RESERVED_TOKENS)),
            *("--max-running-requests", str(settings.slots), "--tp-size", str(settings.tensor)),
            *("--log-level", "warning"),
        ]
        flags += ["--device", "cpu"] if settings.on_cpu else ["--mem-fraction-static", str(settings.memory)]
        return [settings.python, "-m", "sglang.launch_server", *flags, *listen]

    def make_environment(self, settings: ServerSettings) -> dict[str, str]:
        """Returns the environment variables that a server needs."""
        found = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        return {**found, "OMP_NUM_THREADS": str(settings.threads)} if settings.on_cpu else found

    async def is_healthy(self, calls: ServerCalls, seconds: float) -> bool:
        """Returns whether the server has loaded its model. Raises what `ServerCalls.is_up` raises."""
        # Not `/health`, which samples a token, and so waits as long as the server is paused.
        return await calls.is_up("/model_info", seconds, self.title)

    async def inspect(self, calls: ServerCalls, seconds: float) -> ServerFacts:
        """Returns what the server is, and lets it continue if it is paused.

        Raises ConfigError for a server that refuses the key, or is not SGLang's.
        """
        purpose = "to say what it is"
        try:
            info = await calls.get("/server_info", seconds, purpose)
            models = await calls.get("/v1/models", seconds, purpose)
            await calls.order("/continue_generation", {}, seconds, "to go on")
        except RefusedCall as refused:
            raise explain_refusal(calls, refused, "is it SGLang's server?") from refused
        context = read_field(models, "data", 0, "max_model_len")
        known = context - RESERVED_TOKENS if type(context) is int else 0
        return ServerFacts(version=str(read_field(info, "version")), context=known)

    async def beat(self, calls: ServerCalls, seconds: float) -> None:
        """Returns when the process that computes has told its state."""
        await calls.get("/server_info", seconds, "to give a sign of life")

    async def continue_tokens(self, calls: ServerCalls, question: Question, seconds: float) -> Part:
        """Returns what the server draws after the tokens of a question.

        It may end at an end token that is no stop id of the question: the caller then asks for the rest.
        """
        s = question.sampling
        params: dict[str, Any] = {
            "max_new_tokens": question.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "min_p": s.min_p,
            # True would switch off the stop ids too.
            "ignore_eos": not s.stop_ids,
            "stop_token_ids": list(s.stop_ids),
            # Without a seed, servers with `--enable-deterministic-inference` give a whole group the same one.
            "sampling_seed": question.seed,
        }
        if s.stop_strings:
            params["stop"] = list(s.stop_strings)
        body = {"rid": question.id, "input_ids": question.tokens, "sampling_params": params, "return_logprob": True}
        return read_part(await calls.post("/generate", body, seconds, "to sample"))

    async def abort(self, calls: ServerCalls, id: str, seconds: float) -> None:
        """Stops a question. An unknown id is ignored."""
        await calls.order("/abort_request", {"rid": id}, seconds, "to stop a request")

    async def compute_logprobs(self, calls: ServerCalls, tokens: list[int], label: str, seconds: float) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1. The cache is not read."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            # From the first token on, so that none of them comes from the cache.
            "logprob_start_len": 0,
        }
        reply = await calls.post("/generate", body, seconds, "to compute log-probabilities")
        rows = read_field(reply, "meta_info", "input_token_logprobs")
        if not isinstance(rows, list) or len(rows) != len(tokens):
            raise FailedCall("sent log-probabilities of another number of tokens than it was asked for")
        return read_logprobs([read_field(row, 0) for row in rows[1:]])

    async def load(self, calls: ServerCalls, folder: Path, label: str, seconds: float) -> str:
        """Ends all requests with what they have, reloads, and takes new ones. Raises EngineError if it refuses."""
        await calls.order("/pause_generation", {"mode": "abort"}, seconds, "to pause for new weights")
        try:
            # It is asserted that nothing is under way when the cache is flushed with the update.
            await calls.order(f"/flush_cache?timeout={FLUSH_SECONDS}", {}, seconds, "to drop what it has cached")
            order = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
            await calls.order("/update_weights_from_disk", order, seconds, "to load weights")
        except (RefusedCall, FailedCall) as refused:
            raise EngineError(
                f"SGLang's server {calls.address} does not load weights ({refused}). It must be able to read {folder}; "
                "for a server on another machine name a folder that both see: --engine.folder."
            ) from refused
        await calls.order("/continue_generation", {}, seconds, "to go on with new weights")
        return str(read_field(await calls.get("/model_info", seconds, "to name its weights"), "weight_version"))


def read_part(reply: Any) -> Part:
    """Returns what SGLang's server has drawn, from the JSON of its reply."""
    tokens = read_tokens(read_field(reply, "output_ids"))
    info = read_field(reply, "meta_info")
    rows = read_field(info, "output_token_logprobs") if tokens else []
    if not isinstance(rows, list) or [read_field(row, 1) for row in rows] != tokens:
        raise FailedCall(f"sent {len(tokens)} tokens with log-probabilities of others")
    logprobs = read_logprobs([read_field(row, 0) for row in rows])
    finish = read_finish(read_field(info, "finish_reason", "type"))
    # No request lives through a load, so one label is that of all tokens.
    labels = [(0, str(read_field(info, "weight_version")))] if tokens else []
    return Part(tokens=tokens, logprobs=logprobs, finish=finish, labels=labels)
