"""A stand-in for the server of SGLang: `python -m tests.helpers.engine_servers.sglang --model-path FOLDER ...`.

It was written from SGLang's source of August 2026 (about 0.5.18), not compared with a running server. What the real
server has and this one has not is answered with status 501.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import uuid
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers
import torch

from tests.helpers.engine_servers.base import (
    DTYPES,
    POLL_SECONDS,
    Answer,
    Call,
    Gone,
    Refusal,
    StandIn,
    read_context,
    read_dtype,
    serve_forever,
)
from tests.helpers.engine_servers.sampler import Draft, LoadError, Sampler, TokenScore, read_end_ids

VERSION = "0.5.18"
TOP_K_OFF = 1 << 30
REPORT_INTERVAL = 50  # tokens between two reports of a request that does not stream
HEALTH_TIMEOUT = 20.0
SAMPLING: dict[str, Any] = {  # with their defaults
    "max_new_tokens": 128,
    "stop_token_ids": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": TOP_K_OFF,
    "min_p": 0.0,
    "ignore_eos": False,
    "sampling_seed": None,
    "stop": None,
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False},
}
# Sampling parameters of the real server that this one has not, with the value that changes nothing.
ABSENT_PARAMETERS = {
    **{"n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0},
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias")),
    **dict.fromkeys(("stream_interval", "custom_params")),
}
ABSENT_FIELDS = ("text", "input_embeds", "image_data", "stream", "top_logprobs_num", "token_ids_logprob", "lora_path")
ABSENT_ROUTES = ("/encode", "/release_memory_occupation", "/resume_memory_occupation", "/weights_checker", "/metrics")
# With an admin key, these want it and refuse the other key.
ADMIN_ROUTES = ("/flush_cache", "/update_weight", "/abort_request", "/pause_generation", "/continue_generation")


def refuse_body(message: str) -> Refusal:
    """Returns the error for a body that does not fit the schema."""
    value = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return Refusal(400, value)


def refuse_value(message: str) -> Refusal:
    """Returns the error for a value that the server checks itself."""
    return Refusal(400, {"error": {"message": message}})


class SglangServer(StandIn):
    """The server."""

    generate_path = "/generate"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        folder = Path(args.model_path)
        longer = os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0") not in ("", "0", "false")
        self.context = read_context(folder, args.context_length, longer)
        self.model_path = args.model_path
        self.name = args.served_model_name or args.model_path
        # Those of the model's files stop always, those of the tokenizer too: the same ones here.
        self.end_ids = read_end_ids(folder)
        text = folder / "tokenizer.json"
        has_text = not args.skip_tokenizer_init and text.is_file()
        self.tokenizer = tokenizers.Tokenizer.from_file(str(text)) if has_text else None
        self.draws = torch.Generator()
        if args.random_seed is None:
            self.draws.seed()
        else:
            self.draws.manual_seed(args.random_seed)
        # Guards what follows: requests wait here while generation is paused, or weights are loaded without a pause.
        self.door = threading.Condition()
        self.paused = False
        self.loads = False
        self.ids: set[str] = set()  # of requests that wait at the door or are under way
        self.num_inside = 0
        self.sampler = Sampler(
            folder,
            dtype=read_dtype(args.dtype, folder),
            slots=args.max_running_requests,
            faults=self.faults,
            raw_logprobs=os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() in ("1", "true"),
            # Of the distribution before top-k, top-p and min-p, unlike vLLM's.
            renormalise=False,
            caches=not args.disable_radix_cache,
            on_death=lambda: self.end(1),
        )
        self.sampler.label = args.weight_version
        both = ("GET", "POST")
        self.routes: dict[str, dict[str, Answer]] = {
            "/health": {"GET": self.answer_health},
            "/health_generate": {"GET": self.answer_health},
            "/model_info": {"GET": self.describe_model},
            "/get_model_info": {"GET": self.describe_model},
            "/server_info": {"GET": self.describe_server},
            "/get_server_info": {"GET": self.describe_server},
            "/v1/models": {"GET": self.list_models},
            "/generate": dict.fromkeys(("POST", "PUT"), self.generate),
            "/abort_request": {"POST": self.abort},
            "/flush_cache": dict.fromkeys(both, self.flush_cache),
            "/pause_generation": {"POST": self.pause},
            "/continue_generation": {"POST": self.resume},
            "/update_weights_from_disk": {"POST": self.load},
            "/update_weight_version": {"POST": self.set_label},
        }

    def answer(self, call: Call) -> Any:
        """Answers a request."""
        self.check_key(call)
        if call.path in ABSENT_ROUTES or (call.path.startswith("/v1/") and call.path not in self.routes):
            raise Refusal(501, {"error": {"message": f"the stand-in has no {call.path}"}})
        if call.path not in self.routes:
            raise Refusal(404, {"detail": "Not Found"})
        if call.method not in self.routes[call.path]:
            raise Refusal(405, {"detail": "Method Not Allowed"})
        return self.routes[call.path][call.method](call)

    def check_key(self, call: Call) -> None:
        """Raises Refusal for a request without the right key. Only /health and /metrics need none."""
        needed = self.args.api_key
        if self.args.admin_api_key and call.path.startswith(ADMIN_ROUTES):
            needed = self.args.admin_api_key
        scheme, _, key = call.headers.get("authorization", "").partition(" ")
        is_open = call.path.startswith(("/health", "/metrics"))
        if needed and not is_open and (scheme.lower(), key) != ("bearer", needed):
            raise Refusal(401, {"error": "Unauthorized"})

    # ---- what it says of itself

    def answer_health(self, call: Call) -> None:
        """Computes a token, so to speak: it takes a second, and while generation is paused it fails after long."""
        if call.path == "/health" and os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1").lower() in (
            "0",
            "false",
        ):
            return
        if self.paused:
            time.sleep(HEALTH_TIMEOUT)
            raise Refusal(503, None)
        time.sleep(1.0)

    def describe_model(self, call: Call) -> Any:
        """Returns what model it has now."""
        config = json.loads((Path(self.args.model_path) / "config.json").read_text())
        return {
            "model_path": self.model_path,
            "served_model_name": self.name,
            "tokenizer_path": self.args.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.sampler.label,
            "load_format": self.args.load_format,
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
        }

    def describe_server(self, call: Call) -> Any:
        """Returns the flags that it was started with."""
        return {**vars(self.args), "max_req_input_len": self.context - 6, "internal_states": [{}], "version": VERSION}

    def list_models(self, call: Call) -> Any:
        """Returns the list of models. The name is the folder that was loaded last."""
        card = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
        return {"object": "list", "data": [{**card, "root": self.name, "parent": None, "max_model_len": self.context}]}

    # ---- generation

    def generate(self, call: Call) -> Any:
        """Samples one answer. Most values are looked at only when generation is not paused."""
        body = self.read_body(call)
        tokens = self.read_tokens(body)
        id = body.get("rid") or uuid.uuid4().hex
        with self.door:
            if id in self.ids:
                raise refuse_value(f"a request with the rid {id} is under way")
            self.ids.add(id)
        try:
            with self.door:
                while self.paused or self.loads:
                    self.door.wait(POLL_SECONDS)
                    if not call.is_open():
                        raise Gone
                self.num_inside += 1
            try:
                draft = self.make_draft(id, tokens, body)
                self.wait_for(draft, call)
            finally:
                with self.door:
                    self.num_inside -= 1
                    self.door.notify_all()
        finally:
            self.ids.discard(id)
        return self.make_response(draft, body)

    def read_body(self, call: Call) -> dict[str, Any]:
        """Returns the JSON object in a body. Fields that SGLang does not know are ignored, as there."""
        try:
            body = call.read_json()
        except ValueError as e:
            raise refuse_body(str(e)) from e
        if not isinstance(body, dict):
            raise refuse_body("no object")
        return body

    def read_tokens(self, body: dict[str, Any]) -> list[int]:
        """Returns the ids of the prompt."""
        for name in ABSENT_FIELDS:
            if body.get(name):
                raise Refusal(501, {"error": {"message": f"the stand-in has no {name}"}})
        tokens = body.get("input_ids")
        if tokens is not None and (not isinstance(tokens, list) or not all(isinstance(id, int) for id in tokens)):
            raise refuse_body("input_ids is no list of integers; the stand-in has no batches")
        if not tokens:
            raise refuse_value("input_ids is needed, and may not be empty")
        return tokens

    def make_draft(self, id: str, tokens: list[int], body: dict[str, Any]) -> Draft:
        """Returns the request as the sampler gets it."""
        given = body.get("sampling_params") or {}
        if unknown := given.keys() - SAMPLING.keys() - ABSENT_PARAMETERS.keys():
            # A TypeError that nobody catches: the answer does not name the parameter.
            raise Refusal(500, "Internal Server Error") from TypeError(unknown)
        for name, default in ABSENT_PARAMETERS.items():
            if given.get(name) not in (None, default):
                raise Refusal(501, {"error": {"message": f"the stand-in has no {name}"}})
        values: dict[str, Any] = {
            name: default if given.get(name) is None else given[name] for name, default in SAMPLING.items()
        }
        self.check_lengths(tokens, given)
        self.check_sampling(values)
        start = body.get("logprob_start_len")
        start = -1 if start is None or not body.get("return_logprob") else start
        if start > len(tokens):
            raise refuse_value(f"logprob_start_len = {start} is more than the {len(tokens)} tokens of the prompt")
        if max(tokens) >= self.sampler.config.vocab_size:
            # Nothing checks ids. On a GPU this ends in an error of the device.
            raise self.die()
        # Less than what fits: two places are never used.
        limit = min(TOP_K_OFF if given.get("max_new_tokens", 0) is None else values["max_new_tokens"], self.context)
        # With ignore_eos, no token stops a request, not even those of stop_token_ids.
        stops = [] if values["ignore_eos"] else [*(values["stop_token_ids"] or []), *self.end_ids]
        greedy = values["temperature"] < 1e-6
        return Draft(
            id=id,
            tokens=list(tokens),
            limit=max(1, min(limit, self.context - 2 - len(tokens))),
            generator=lambda num: self.get_generator(values["sampling_seed"], len(tokens) + num),
            temperature=0.0 if greedy else float(values["temperature"]),
            top_p=values["top_p"],
            top_k=values["top_k"] if 0 < values["top_k"] < TOP_K_OFF else 0,
            min_p=values["min_p"],
            stop_ids=frozenset(stops),
            stop_texts=(texts,) if isinstance(texts := values["stop"] or (), str) else tuple(texts),
            prompt_start=start if start < len(tokens) else -1,
            salt=f"{body.get('cache_salt') or ''} {body.get('extra_key') or ''}",
        )

    def check_lengths(self, tokens: list[int], given: dict[str, Any]) -> None:
        """Raises Refusal for a request that does not fit."""
        most = given.get("max_new_tokens") or 0
        if len(tokens) + most > self.context or len(tokens) >= self.context - 6:
            raise refuse_value(f"{len(tokens)} + {most} tokens do not fit in {self.context}")

    def check_sampling(self, values: dict[str, Any]) -> None:
        """Raises Refusal for values outside their bounds."""
        try:
            wrong = {
                "temperature": not 0 <= values["temperature"] < float("inf"),
                "top_p": not 0 < values["top_p"] <= 1,
                "min_p": not 0 <= values["min_p"] <= 1,
                "top_k": values["top_k"] != -1 and values["top_k"] < 1,
                "max_new_tokens": values["max_new_tokens"] < 0,
            }
        except TypeError as e:
            raise Refusal(500, "Internal Server Error") from e
        for name in wrong:
            if wrong[name]:
                raise refuse_value(f"{name} = {values[name]} is out of bounds")

    def get_generator(self, seed: int | None, position: int) -> torch.Generator:
        """Returns the random numbers for the token at a position.

        Seeds count with --enable-deterministic-inference only. Then requests without one have the seed 42, so that
        those with the same prompt get the same answer.
        """
        if not self.args.enable_deterministic_inference:
            return self.draws
        digest = sha256(f"{42 if seed is None else seed} {position}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def make_response(self, draft: Draft, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request that has ended."""
        drawn, scores = draft.drawn, draft.scores
        label = draft.spans[-1][0] if draft.spans else self.sampler.label
        finish: dict[str, Any] = {"type": draft.finish}
        if draft.finish == "stop":
            finish["matched"] = draft.matched
        elif draft.finish == "length":
            finish["length"] = len(drawn)
        elif draft.was_waiting:
            # Only what had been reported is known of a request that waited, or was put back.
            num = len(drawn) // REPORT_INTERVAL * REPORT_INTERVAL
            drawn, scores, label = drawn[:num], scores[:num], self.sampler.label
            finish["message"] = "aborted in the queue"
        else:
            finish |= {"message": "aborted", "status_code": None, "err_type": None}
        if (body.get("sampling_params") or {}).get("max_new_tokens") == 0:
            drawn, scores, finish = [], [], {"type": "length", "length": 0}
        meta: dict[str, Any] = {"id": draft.id, "finish_reason": finish}
        if not draft.was_waiting:
            meta |= {"prompt_tokens": draft.num_prompt, "num_retractions": 0, "reasoning_tokens": 0}
            meta["cached_tokens"] = draft.num_reused
        # One label per answer: that of its end, even if older weights drew most of it.
        meta |= {"weight_version": label, "completion_tokens": len(drawn), "e2e_latency": 0.0}
        if body.get("return_logprob"):
            has_text = bool(body.get("return_text_in_logprobs"))
            start = draft.prompt_start
            first = [] if start < 0 else [self.show(None, draft.tokens[start], has_text)]
            meta["input_token_logprobs"] = [*first, *(self.show_score(s, has_text) for s in draft.prompt_scores)]
            meta["output_token_logprobs"] = [self.show_score(s, has_text) for s in scores]
            meta["output_token_logprobs_length"] = len(scores)
        text = {} if self.tokenizer is None else {"text": self.tokenizer.decode(drawn)}
        return {**text, "output_ids": drawn, "meta_info": meta}

    def show_score(self, score: TokenScore, has_text: bool) -> list[Any]:
        """Returns a log-probability with its token."""
        return self.show(score.logprob, score.token, has_text)

    def show(self, logprob: float | None, token: int, has_text: bool) -> list[Any]:
        """Returns [log-probability, token id, text or None]."""
        return [logprob, token, self.tokenizer.decode([token]) if has_text and self.tokenizer else None]

    def change(self, kind: str, value: Any) -> None:
        """Makes an answer have one token more, or one score less."""
        if kind == "extra_token":
            value["output_ids"].append(value["output_ids"][-1])
        else:
            value["meta_info"]["output_token_logprobs"].pop()

    # ---- control

    def die(self) -> Gone:
        """Ends the process, as an error in the real server's scheduler does. Returns the error to raise."""
        self.end(1)
        return Gone()

    def abort(self, call: Call) -> None:
        """Aborts all requests, or those whose rid begins with the given one. Unknown ones are no error."""
        body = self.read_body(call)
        id = body.get("rid") or ""
        if body.get("abort_all"):
            self.sampler.abort(lambda _: True, soon=True)
        elif id in self.ids:
            self.sampler.abort(lambda draft: draft.id.startswith(id), soon=True)

    def pause(self, call: Call) -> Any:
        """Pauses. With "abort" only new requests wait, and what is under way is aborted until nothing is."""
        mode = self.read_body(call).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise refuse_body(f"{mode!r} is no mode")
        with self.door:
            self.paused = True
            if mode == "abort":
                while self.num_inside:
                    self.sampler.abort(lambda _: True, soon=True)
                    # The real one looks once per second.
                    self.door.wait(POLL_SECONDS)
            else:
                self.sampler.set_pause("all")
                if mode == "retract":
                    self.sampler.retract()
        return {"message": "paused", "status": "ok"}

    def resume(self, call: Call) -> Any:
        """Continues."""
        self.read_body(call)
        with self.door:
            self.paused = False
            self.sampler.set_pause("")
            self.door.notify_all()
        return {"message": "continued", "status": "ok"}

    def flush_cache(self, call: Call) -> str:
        """Forgets the KV of ended requests, if none is under way within the time given."""
        end = time.monotonic() + float(call.query.get("timeout", "0"))
        while not self.sampler.idle:
            if time.monotonic() >= end:
                raise Refusal(400, "busy")
            time.sleep(POLL_SECONDS)
        self.sampler.drop_caches(preempt=False)
        return "flushed"

    def load(self, call: Call) -> Any:
        """Loads weights: at once while generation is paused, else when nothing is under way."""
        body = self.read_body(call)
        if not isinstance(body.get("model_path"), str):
            raise refuse_body("model_path is no text")
        if body.get("abort_all_requests"):
            self.sampler.abort(lambda _: True, soon=True)
        with self.door:
            waits = not self.paused
            if waits:
                self.loads = True
                self.door.wait_for(lambda: not self.num_inside)
        try:
            return self.load_now(body)
        finally:
            with self.door:
                self.loads = False
                self.door.notify_all()

    def load_now(self, body: dict[str, Any]) -> Any:
        """Loads weights, and returns the answer."""
        path = body["model_path"]
        try:
            self.sampler.load(Path(path), refuses_unknown=False)
        except LoadError as e:
            if e.begun:
                # The way back reads the new folder again, and its second error ends the scheduler.
                raise self.die() from e
            raise Refusal(400, {"success": False, "message": str(e), "num_paused_requests": 0}) from e
        if body.get("flush_cache", True):
            if not self.sampler.idle:
                # Also after "retract", which the documentation recommends for this: an assertion of the scheduler.
                raise self.die()
            self.sampler.drop_caches(preempt=False)
        self.model_path = self.name = path
        message = "loaded"
        if body.get("weight_version") is not None:
            self.sampler.label = body["weight_version"]
            message += f" as {body['weight_version']}"
        return {"success": True, "message": message, "num_paused_requests": 0}

    def set_label(self, call: Call) -> Any:
        """Sets what the server calls its weights, and aborts all requests unless told not to."""
        body = self.read_body(call)
        if not isinstance(body.get("new_version"), str):
            raise refuse_body("new_version is no text")
        if body.get("abort_all_requests", True):
            self.sampler.abort(lambda _: True, soon=True)
        self.sampler.label = body["new_version"]
        return {"success": True, "message": "set", "new_version": body["new_version"]}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of those flags of the real server that matter. Others are refused, as by the real one."""
    parser = argparse.ArgumentParser(prog="stand-in for SGLang")
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--random-seed", type=int)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--load-format", default="auto")
    for name in ("--served-model-name", "--api-key", "--admin-api-key"):
        parser.add_argument(name)
    for name in ("--skip-tokenizer-init", "--disable-radix-cache", "--enable-deterministic-inference"):
        parser.add_argument(name, action="store_true")
    # Without an effect here.
    for name in ("--trust-remote-code", "--disable-cuda-graph", "--disable-overlap-schedule", "--enable-memory-saver"):
        parser.add_argument(name, action="store_true")
    for name in ("--log-requests", "--skip-server-warmup", "--incremental-streaming-output"):
        parser.add_argument(name, action="store_true")
    for name in ("--mem-fraction-static", "--watchdog-timeout"):
        parser.add_argument(name, type=float)
    for name in ("--chunked-prefill-size", "--max-prefill-tokens", "--stream-interval", "--base-gpu-id"):
        parser.add_argument(name, type=int)
    for name in ("--tokenizer-path", "--device", "--log-level", "--log-level-http", "--kv-cache-dtype"):
        parser.add_argument(name)
    for name in ("--attention-backend", "--sampling-backend"):
        parser.add_argument(name)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the server that the words of a command line describe."""
    args = make_parser().parse_args(words)
    serve_forever(SglangServer(args), (args.host, args.port))


if __name__ == "__main__":
    main()
