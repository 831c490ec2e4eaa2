"""A stand-in for the server of vLLM 0.32: `python -m tests.helpers.engine_servers.vllm --model FOLDER ...`.

It has the routes that a training client needs, the developer's ones with VLLM_SERVER_DEV_MODE=1 only. What the real
server has and this one has not is answered with status 501.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import threading
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch

from tests.helpers.engine_servers.base import (
    DTYPES,
    Answer,
    Call,
    Refusal,
    StandIn,
    read_context,
    read_dtype,
    serve_forever,
)
from tests.helpers.engine_servers.sampler import Draft, LoadError, Sampler, TokenScore, read_end_ids
from tests.helpers.engine_servers.worker import WORKER_METHODS, StandInWorker

VERSION = "0.32.0"
DEAD = "the engine has met an error"
# Sampling parameters of the real server that this one has not, with the value that changes nothing.
ABSENT_PARAMETERS = {
    **{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0},
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "extra_args")),
    **dict.fromkeys(("prompt_logprob_token_ids", "logprob_token_ids", "trace_decode_token_ids", "stream_interval")),
    **dict.fromkeys(("thinking_token_budget", "repetition_detection", "skip_reading_prefix_cache", "watermarking")),
}
ABSENT_FIELDS = ("stream", "features", "content_parts", "kv_transfer_params", "ec_transfer_params", "stream_options")
ABSENT_ROUTES = ("/tokenize", "/detokenize", "/metrics", "/load", "/weight_checker", "/update_weights")


def refuse(status: int, message: str, kind: str, param: str | None = None) -> Refusal:
    """Returns an error in the form of vLLM."""
    return Refusal(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def refuse_shape(param: str, message: str) -> Refusal:
    """Returns the error for a field that does not fit the schema: 400, where FastAPI alone would say 422."""
    return refuse(400, f"1 validation error: {param}: {message}", "Bad Request", param)


def refuse_value(message: str, param: str | None = None) -> Refusal:
    """Returns the error for a value that fits the schema and is wrong."""
    return refuse(400, message, "BadRequestError", param)


def read_int(value: Any, param: str) -> int:
    """Returns a number as pydantic takes it: "4", 4.0 and true are integers too."""
    try:
        if isinstance(value, int | str) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    except ValueError:
        pass
    raise refuse_shape(param, f"{value!r} is no integer")


def read_float(value: Any, param: str) -> float:
    """Returns a number as pydantic takes it."""
    try:
        if isinstance(value, int | float | str):
            return float(value)
    except ValueError:
        pass
    raise refuse_shape(param, f"{value!r} is no number")


def read_bool(value: Any, param: str) -> bool:
    """Returns a truth value as pydantic takes it."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise refuse_shape(param, f"{value!r} is no truth value")
    return words[str(value).lower()]


def read_ints(value: Any, param: str) -> list[int]:
    """Returns a list of integers."""
    if not isinstance(value, list):
        raise refuse_shape(param, f"{value!r} is no list")
    return [read_int(item, f"{param}.{n}") for n, item in enumerate(value)]


def read_texts(value: Any, param: str) -> list[str]:
    """Returns a text or a list of texts as a list."""
    return [read_text(item, param) for item in (value if isinstance(value, list) else [value])]


def read_text(value: Any, param: str) -> str:
    """Returns a text. Numbers are none."""
    if not isinstance(value, str):
        raise refuse_shape(param, f"{value!r} is no text")
    return value


READERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("seed", "top_k", "max_tokens", "logprobs", "prompt_logprobs"), read_int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), read_float),
    **dict.fromkeys(("ignore_eos", "detokenize"), read_bool),
    "stop_token_ids": read_ints,
    "stop": read_texts,
}
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "stop")  # may be null


def read_sampling(given: Any) -> dict[str, Any]:
    """Returns the values of `sampling_params` that are given. Names that vLLM does not know are ignored, as there."""
    if not isinstance(given, dict):
        raise refuse_shape("body.sampling_params", f"{given!r} is no object")
    for name, default in ABSENT_PARAMETERS.items():
        if given.get(name) not in (None, default, []):
            raise refuse(501, f"the stand-in has no {name}", "NotImplementedError")
    values: dict[str, Any] = {}
    for name, read in READERS.items():
        if name in given and not (given[name] is None and name in OPTIONAL):
            # An error of any of its fields is reported as one of the whole.
            values[name] = read(given[name], "body.sampling_params")
    return values


def check_sampling(values: dict[str, Any], max_logprobs: int, vocab_size: int) -> None:
    """Raises Refusal for values outside their bounds."""
    bounds = {
        "temperature": (0.0, 2.0),
        "top_p": (math.ulp(0.0), 1.0),
        "top_k": (-1, math.inf),
        "min_p": (0.0, 1.0),
        "max_tokens": (1, math.inf),
        "logprobs": (-1, math.inf),
        "prompt_logprobs": (-1, math.inf),
    }
    if values.get("stop") and not values.get("detokenize", True):
        raise refuse_value("stop needs detokenize", "stop")
    for name, (low, high) in bounds.items():
        if name in values and not low <= values[name] <= high:
            param = None if name in ("min_p", "top_k") else name  # these two it does not name
            raise refuse_value(f"{name} = {values[name]} is not between {low} and {high}", param)
    for name in ("logprobs", "prompt_logprobs"):
        num = values.get(name, 0)
        if (vocab_size if num == -1 else num) > max_logprobs:
            raise refuse_value(f"{name} = {num} is more than {max_logprobs}", name)
    if wrong := [id for id in values.get("stop_token_ids", []) if not 0 <= id < vocab_size]:
        raise refuse_value(f"stop_token_ids {wrong} are out of vocabulary", "stop_token_ids")
    if not -(2**63) <= values.get("seed", 0) < 2**64:
        raise refuse_value(f"seed = {values['seed']} has more than 64 bits")


class VllmServer(StandIn):
    """The server."""

    generate_path = "/inference/v1/generate"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.folder = Path(args.model)
        self.context = read_context(self.folder, args.max_model_len)
        self.names = args.served_model_name or [args.model]
        self.unloadable = ""  # why loads fail since one failed amid its tensors
        # The first end token ends a request without a stop reason, the others are stop_token_ids of every request.
        self.end_ids = read_end_ids(self.folder)
        text = self.folder / "tokenizer.json"
        self.tokenizer = tokenizers.Tokenizer.from_file(str(text)) if text.is_file() else None
        self.sampler = Sampler(
            self.folder,
            dtype=read_dtype(args.dtype, self.folder),
            slots=args.max_num_seqs,
            faults=self.faults,
            raw_logprobs=args.logprobs_mode == "raw_logprobs",
            renormalise=True,
            caches=args.enable_prefix_caching is not False,
            on_death=lambda: self.end(1),
            # The real one ends some time after its engine has died, with status 0.
            on_broken=lambda: threading.Timer(1.0, lambda: self.end(0)).start(),
        )
        self.worker = StandInWorker(self.sampler)
        self.routes: dict[str, dict[str, Answer]] = {
            "/health": {"GET": self.answer_health},
            "/ping": {"GET": self.answer_health, "POST": self.answer_health},
            "/version": {"GET": lambda _: {"version": VERSION}},
            "/v1/models": {"GET": self.list_models},
            self.generate_path: {"POST": self.generate},
            "/inference/v1/abort_requests": {"POST": self.abort_in_background},
        }
        if os.environ.get("VLLM_SERVER_DEV_MODE", "0") != "0":
            self.routes |= {
                "/pause": {"POST": self.pause},
                "/resume": {"POST": self.resume},
                "/is_paused": {"GET": lambda _: {"is_paused": bool(self.sampler.pause)}},
                "/abort_requests": {"POST": self.abort},
                "/collective_rpc": {"POST": self.call_workers},
                "/update_weight_version": {"POST": self.set_label},
                "/weight_info": {"GET": lambda _: {"weight_version": self.sampler.label}},
                "/reset_prefix_cache": {"POST": self.reset_prefix_cache},
                "/sleep": {"POST": self.sleep},
                "/wake_up": {"POST": self.wake_up},
                "/is_sleeping": {"GET": lambda _: {"is_sleeping": bool(self.sampler.pause)}},
                "/get_world_size": {"GET": lambda _: {"world_size": args.tensor_parallel_size}},
                "/server_info": {"GET": self.describe_server},
            }

    def answer(self, call: Call) -> Any:
        """Answers a request. The order of the checks is vLLM's: key, route, method, then what stands in the body."""
        # Only these paths are guarded by a key: whoever reaches the port may pause the server and load weights.
        keys = self.args.api_key or []
        scheme, _, key = call.headers.get("authorization", "").partition(" ")
        if (
            call.path.startswith(("/v1", "/v2", "/inference"))
            and keys
            and (scheme.lower(), key) not in {("bearer", k) for k in keys}
        ):
            raise Refusal(401, {"error": "Unauthorized"})
        if call.path in ABSENT_ROUTES or (call.path.startswith("/v1/") and call.path not in self.routes):
            raise refuse(501, f"the stand-in has no {call.path}", "NotImplementedError")
        if call.path not in self.routes:
            raise Refusal(404, {"detail": "Not Found"})
        if call.method not in self.routes[call.path]:
            raise Refusal(405, {"detail": "Method Not Allowed"})
        if call.path.startswith("/inference/") and not self.args.enable_scale_out:
            raise refuse(403, "start the server with --enable-scale-out", "PermissionDeniedError")
        return self.routes[call.path][call.method](call)

    def answer_health(self, call: Call) -> None:
        """Refuses once a token was to be computed with broken weights, not before."""
        if self.sampler.dead:
            raise Refusal(503, None)

    def check_alive(self) -> None:
        """Raises Refusal if the engine behind the server is dead."""
        if self.sampler.dead:
            raise refuse(500, DEAD, "InternalServerError")

    def list_models(self, call: Call) -> Any:
        """Returns the list of models. The root stays the first folder, whatever is loaded later."""
        common = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "root": self.args.model}
        common |= {"parent": None, "max_model_len": self.context, "permission": [{"object": "model_permission"}]}
        return {"object": "list", "data": [{"id": name, **common} for name in self.names]}

    # ---- generation

    def generate(self, call: Call) -> Any:
        """Samples one answer."""
        body = self.read_generate_body(call)
        values = read_sampling(body["sampling_params"])
        salt = body.get("cache_salt")
        if salt is not None and not 0 < len(read_text(salt, "body.cache_salt")) <= 1024:
            raise refuse_value("cache_salt needs 1 to 1024 characters", "cache_salt")
        vocab_size = self.sampler.config.vocab_size
        check_sampling({"logprobs": 0, "prompt_logprobs": 0, **values}, self.args.max_logprobs, vocab_size)
        if body.get("model") and body["model"] not in self.names:
            raise refuse(404, f"the model {body['model']} does not exist", "NotFoundError", "model")
        tokens = body["token_ids"]
        if len(tokens) >= self.context:
            raise refuse_value(f"the prompt has {len(tokens)} tokens, and a sequence at most {self.context}")
        if wrong := [id for id in tokens if id >= vocab_size]:
            raise refuse_value(f"token {wrong[0]} is out of vocabulary")
        self.check_alive()
        draft = self.make_draft(call, body, values)
        self.wait_for(draft, call)
        if not draft.finish:
            raise refuse(500, DEAD, "InternalServerError")
        return self.make_response(draft, body, values)

    def read_generate_body(self, call: Call) -> dict[str, Any]:
        """Returns the body with ids that are integers. Fields that vLLM does not know are ignored, as there."""
        if call.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise refuse(400, "1 validation error: only application/json", "Bad Request")
        body = self.read_object(call)
        for name in ("token_ids", "sampling_params"):
            if name not in body:
                raise refuse_shape(f"body.{name}", "missing")
        tokens = read_ints(body["token_ids"], "body.token_ids")
        if not tokens or min(tokens) < 0:
            raise refuse_shape("body.token_ids", "empty, or with negative ids")
        for name in ("request_id", "model"):
            if body.get(name) is not None:
                read_text(body[name], f"body.{name}")
        for name in ABSENT_FIELDS:
            if body.get(name):
                raise refuse(501, f"the stand-in has no {name}", "NotImplementedError")
        return {**body, "token_ids": tokens}

    def read_object(self, call: Call) -> dict[str, Any]:
        """Returns the JSON object in the body of a request with a schema."""
        try:
            body = call.read_json()
        except ValueError as e:
            raise refuse_shape("body", str(e)) from e
        if not isinstance(body, dict):
            raise refuse_shape("body", "no object")
        return body

    def make_draft(self, call: Call, body: dict[str, Any], values: dict[str, Any]) -> Draft:
        """Returns the request as the sampler gets it."""
        id = call.headers.get("x-request-id") or body.get("request_id") or f"{random.getrandbits(64):016x}"
        tokens = body["token_ids"]
        generator = torch.Generator()
        if values.get("seed", -1) == -1:
            generator.seed()
        else:
            generator.manual_seed(values["seed"])
        # vLLM raises temperatures between 0 and 0.01, without a word in the answer.
        temperature = values.get("temperature", 1.0)
        temperature = 0.0 if temperature == 0 else max(temperature, 0.01)
        room = self.context - len(tokens)
        ends = [] if values.get("ignore_eos") else self.end_ids
        num = values.get("logprobs", 0)
        num_prompt = values.get("prompt_logprobs")
        vocab_size = self.sampler.config.vocab_size
        return Draft(
            # Only under this name can it be aborted.
            id=f"generate-tokens-{id}",
            tokens=list(tokens),
            limit=min(values.get("max_tokens", room), room),
            generator=lambda _: generator,
            temperature=temperature,
            top_p=values.get("top_p", 1.0),
            top_k=max(values.get("top_k", 0), 0),
            min_p=values.get("min_p", 0.0),
            stop_ids=frozenset([*values.get("stop_token_ids", []), *ends[1:]]),
            stop_texts=tuple(values.get("stop", ())),
            end_ids=frozenset(ends[:1]),
            num_best=vocab_size if num == -1 else num,
            prompt_start=-1 if num_prompt is None else 0,
            num_prompt_best=vocab_size if num_prompt == -1 else num_prompt or 0,
            salt=body.get("cache_salt") or "",
        )

    def make_response(self, draft: Draft, body: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request that has ended."""
        drawn = draft.drawn
        ends = [start for _, start in draft.spans[1:]] + [len(drawn)]
        logprobs = {"content": [show_scores(score) for score in draft.scores]} if "logprobs" in values else None
        choice = {
            "index": 0,
            "finish_reason": draft.finish,
            # None for the model's end token.
            "stop_reason": draft.matched if draft.matched not in draft.end_ids else None,
            "token_ids": drawn,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [
                {"version": label, "start": start, "end": end}
                for (label, start), end in zip(draft.spans, ends, strict=False)
            ],
            "logprobs": logprobs,
        }
        usage = {"prompt_tokens": draft.num_prompt, "total_tokens": len(draft.tokens), "completion_tokens": len(drawn)}
        prompt_logprobs = None
        if draft.prompt_start >= 0:
            detokenize = values.get("detokenize", True)
            prompt_logprobs = [None, *(self.show_prompt_scores(score, detokenize) for score in draft.prompt_scores)]
        empty = ("prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params")
        return {
            "request_id": draft.id,
            "model": self.names[0],
            "created": int(time.time()),
            "usage": {**usage, "prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": draft.tokens[: draft.num_prompt] if body.get("return_token_ids") else None,
            **dict.fromkeys(empty),
            "output_mode": "tokens",
            "choices": [choice],
        }

    def show_prompt_scores(self, score: TokenScore, detokenize: bool) -> dict[str, Any]:
        """Returns the scores at a place of the prompt by token id, its own token first."""
        text = self.tokenizer.decode if self.tokenizer is not None and detokenize else lambda _, **__: None
        return {
            str(s.token): {
                "logprob": s.logprob,
                "rank": s.rank,
                "decoded_token": text([s.token], skip_special_tokens=False),
            }
            for s in (score, *score.best)
        }

    def change(self, kind: str, value: Any) -> None:
        """Makes an answer have one token more, or one score less."""
        choice = value["choices"][0]
        if kind == "extra_token":
            choice["token_ids"].append(choice["token_ids"][-1])
        else:
            choice["logprobs"]["content"].pop()

    # ---- the developer's routes

    def pause(self, call: Call) -> Any:
        """Pauses. The mode stands in the query; a body is ignored, so that {"mode": "keep"} aborts."""
        mode = call.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise refuse_shape("query.mode", f"{mode!r} is no mode")
        clears = read_bool(call.query.get("clear_cache", "true"), "query.clear_cache")
        self.check_alive()
        self.sampler.set_pause("all" if mode == "keep" else "new")
        if mode == "abort":
            self.sampler.abort(lambda _: True)
        if mode == "wait":
            self.sampler.wait_until(lambda: not self.sampler.running)
        if clears:
            # In every mode. The documentation of the route says that "keep" ignores it.
            self.sampler.drop_caches(preempt=True)
        return {"status": "paused"}

    def resume(self, call: Call) -> Any:
        """Continues. It is no error if nothing is paused."""
        self.check_alive()
        self.sampler.set_pause("")
        return {"status": "resumed"}

    def abort(self, call: Call) -> Any:
        """Aborts requests by id, or all if no ids are given. The number in the answer is that of the ids given."""
        body = self.read_plain_object(call)
        ids = body.get("request_ids")
        if not ids:
            ids = [draft.id for draft in [*self.sampler.running, *self.sampler.waiting]]
        self.check_alive()
        self.sampler.abort(lambda draft: draft.id in ids)
        return {"status": "aborted", "aborted": len(ids)}

    def abort_in_background(self, call: Call) -> None:
        """Aborts requests by id, without an answer."""
        body = self.read_plain_object(call)
        if body.get("request_ids") is None:
            raise refuse(400, "no request_ids", "Bad Request")
        self.sampler.abort(lambda draft: draft.id in body["request_ids"])

    def read_plain_object(self, call: Call) -> dict[str, Any]:
        """Returns the JSON object in the body of a request without a schema. Its content type does not count."""
        try:
            body = call.read_json()
        except ValueError as e:
            raise refuse(400, f"no JSON: {e}", "Bad Request") from e
        if not isinstance(body, dict):
            raise refuse(400, "no JSON object", "Bad Request")
        return body

    def call_workers(self, call: Call) -> Any:
        """Loads weights.

        An error amid the loading leaves a server that dies when it next computes a token. After a folder without
        weights another load can still save it, after wrong tensors none can. Other errors do no harm.
        """
        body = self.read_plain_object(call)
        if body.get("method") is None:
            raise refuse(400, "no method", "Bad Request")
        self.check_alive()
        given = body.get("kwargs", {})
        if body["method"] == "pack_tied_head" and self.args.worker_extension_cls == "cohort_worker.Extension":
            self.sampler.pack_head()
            return {"results": [None] * self.args.tensor_parallel_size}
        if body["method"] in WORKER_METHODS and self.args.worker_extension_cls == "cohort_worker.Extension":
            try:
                getattr(self.worker, body["method"])(**given)
            except (LoadError, RuntimeError, TypeError) as e:
                raise refuse(500, f"the call of the workers failed: {e}", "InternalServerError") from e
            return {"results": [None] * self.args.tensor_parallel_size}
        if body["method"] != "reload_weights" or not given.keys() <= {"weights_path", "is_checkpoint_format"}:
            raise refuse(500, f"workers have no {body['method']} with {sorted(given)}", "InternalServerError")
        self.folder = Path(given.get("weights_path") or self.folder)
        try:
            if self.unloadable:
                raise LoadError(self.unloadable, begun=True)
            # The real one would take a folder that does not exist for a name on the hub.
            self.sampler.load(self.folder, refuses_unknown=True)
        except LoadError as e:
            self.sampler.broken = True
            if e.begun:
                self.unloadable = str(e)
            raise refuse(500, f"the call of the workers failed: {e}", "InternalServerError") from e
        return {"results": [None] * self.args.tensor_parallel_size}

    def set_label(self, call: Call) -> Any:
        """Sets what the server calls its weights. Nothing connects the name with what was loaded."""
        body = self.read_object(call)
        if "new_version" not in body:
            raise refuse_shape("body.new_version", "missing")
        label = read_text(body["new_version"], "body.new_version")
        self.check_alive()
        self.sampler.label = label
        return {"success": True, "new_version": label}

    def reset_prefix_cache(self, call: Call) -> Any:
        """Forgets the KV of ended requests, unless some run and may not be made to compute theirs again."""
        preempts = read_bool(call.query.get("reset_running_requests", "false"), "query.reset_running_requests")
        self.check_alive()
        done = preempts or not self.sampler.running
        if done:
            self.sampler.drop_caches(preempts)
        return {"success": done}

    def sleep(self, call: Call) -> Any:
        """Pauses. On a CPU no memory is freed."""
        level = read_int(call.query.get("level", "1"), "query.level")
        if not 0 <= level <= 2:
            raise refuse_shape("query.level", f"{level} is no level")
        self.pause(call)
        return {"status": "sleeping", "level": level}

    def wake_up(self, call: Call) -> Any:
        """Continues."""
        self.resume(call)
        return {"status": "awake", "tags": None}

    def describe_server(self, call: Call) -> Any:
        """Returns the part of the configuration that tells what log-probabilities are."""
        model = {"model": str(self.folder), "max_model_len": self.context, "max_logprobs": self.args.max_logprobs}
        model |= {"logprobs_mode": self.args.logprobs_mode, "dtype": str(self.sampler.decoder.embed.dtype)}
        config: Any = {
            "model_config": model,
            "parallel_config": {"tensor_parallel_size": self.args.tensor_parallel_size},
            "scheduler_config": {"max_num_seqs": self.args.max_num_seqs},
        }
        shape = call.query.get("config_format", "text")
        if shape not in ("text", "json"):
            raise refuse_shape("query.config_format", f"{shape!r} is no format")
        return {"vllm_config": config if shape == "json" else str(config), "vllm_env": {}, "system_env": {}}


def show_scores(score: TokenScore) -> dict[str, Any]:
    """Returns the score of a drawn token. The first of `top_logprobs` is the token itself, whatever its rank."""

    def show(s: TokenScore) -> dict[str, Any]:
        return {"token_id": s.token, "logprob": s.logprob, "rank": s.rank}

    others = [s for s in score.best if s.token != score.token]
    top = [score, *others][: max(len(score.best), 1)]
    return {**show(score), "top_logprobs": [show(s) for s in top]}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of those flags of the real server that matter. Others are refused, as by the real one."""
    parser = argparse.ArgumentParser(prog="stand-in for vLLM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--api-key", nargs="+")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--logprobs-mode", default="raw_logprobs", choices=["raw_logprobs", "processed_logprobs"])
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--enable-scale-out", action=BooleanOptionalAction, default=False)
    parser.add_argument("--enable-prefix-caching", action=BooleanOptionalAction)
    # Without an effect here.
    for name in ("--gpu-memory-utilization", "--cpu-offload-gb"):
        parser.add_argument(name, type=float)
    for name in ("--max-num-batched-tokens", "--seed", "--kv-cache-memory-bytes", "--block-size"):
        parser.add_argument(name, type=int)
    for name in ("--load-format", "--tokenizer", "--uvicorn-log-level", "--kv-cache-dtype", "--generation-config"):
        parser.add_argument(name)
    for name in ("--enforce-eager", "--enable-sleep-mode", "--trust-remote-code", "--disable-uvicorn-access-log"):
        parser.add_argument(name, action=BooleanOptionalAction)
    parser.add_argument("--worker-extension-cls")
    for name in ("--disable-log-stats",):
        parser.add_argument(name, action="store_true")
    for name in ("--async-scheduling", "--enable-chunked-prefill", "--enable-log-requests"):
        parser.add_argument(name, action=BooleanOptionalAction)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the server that the words of a command line describe."""
    args = make_parser().parse_args(words)
    serve_forever(VllmServer(args), args.uds or (args.host or "127.0.0.1", args.port))


if __name__ == "__main__":
    main()
