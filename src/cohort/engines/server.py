"""Any server with OpenAI's interface, for evaluation: messages or text go out, text comes back.

What a server cannot give: token ids (`tokens` are as many UNKNOWN as it counts), log-probabilities (0), new weights,
keyed randomness (the key makes the seed it is sent). With `template = "chat"` the server applies its own chat template;
a final assistant message is continued where the server can (vLLM and SGLang do). With "text" it gets `plain_text`.

- A thought that comes in a field of its own (`reasoning_content` or `reasoning`) is put back where the model wrote it,
  before the content in <think>...</think>, so that text and graders are the same as for an engine in this process. A
  thought that was cut off stays open.
- An answer that the server's filter cut is `abort`: its text counts as far as it came. A call of a tool, which
  nobody offered, is an ordinary end.
- vLLM and SGLang take sampling settings that are not named from the model's folder, so they are sent every setting;
  other servers only those of OpenAI's interface, and others that are in use.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import Any, Literal

from cohort.engines.base import Abilities, Event, Request, Weights, Work
from cohort.engines.native.random import stream_of
from cohort.engines.requests import check_request, closed, not_under_way
from cohort.engines.site import Call, Pause, Site, Trouble
from cohort.errors import CohortError, ConfigError, EngineError, nearest
from cohort.text.plain import plain_text
from cohort.types import Finish, Provenance, Sample

UNKNOWN = -1  # a token's id, where only the number of tokens is known
MOST_TOKENS = 1 << 20  # that a reply may claim
COMPLETE = ("vllm", "sglang")  # servers that take every sampling setting
FINISHES = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "function_call": Finish.STOP,
    "length": Finish.LENGTH,
    "content_filter": Finish.ABORT,
    "abort": Finish.ABORT,
}


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Job:
    """A request and its way to the server."""

    request: Request
    call: Call


Outcome = Sample | CohortError | None
"""None: a bug; its traceback has been printed."""


class ServerEngine:
    """Samples from `model` at `url`, with up to `concurrency` requests at once, each in a thread of its own.

    `key` names the environment variable with the API key; without it COHORT_API_KEY is used if there is one, and
    OPENAI_API_KEY for OpenAI's own servers alone. `timeout` is in seconds, for a connection or an answer.
    """

    name = "server"
    abilities = Abilities(token_ids=False, logprobs=False, live_weights=False)
    version = 0  # what it serves is its own affair

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: Literal["chat", "text"] = "chat",
        concurrency: int = 64,
        key: str = "",
        timeout: float = 600.0,
        pause: Pause = threading.Event.wait,
    ) -> None:
        if template not in ("chat", "text"):
            raise ConfigError(f'template = "{template}" is unknown.{nearest(template, ("chat", "text"))}')
        if concurrency < 1 or not 0 < timeout < threading.TIMEOUT_MAX:
            raise ConfigError(f"concurrency = {concurrency} must be at least 1, timeout = {timeout} a time above 0.")
        self.site = Site(url, key, timeout, pause)
        self.model, self.template, self.concurrency = model, template, concurrency
        self._jobs: dict[str, Job] = {}  # under way, by the request's id
        self._ended: queue.SimpleQueue[tuple[Job, Outcome]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two that follow
        self._waiting: deque[Job] = deque()
        self._num_threads = 0
        self._closed = False
        self.work = Work()
        served = self.site.ask(self.site.connection(), Call(method="GET", path="models"), read_models, patient=False)
        if model not in served:
            names = self.site.clean(nearest(model, served) if served else "It serves none.")
            raise ConfigError(f'{self.site.url} does not serve "{model}". {names}')
        self._complete = served[model] in COMPLETE

    def submit(self, request: Request) -> None:
        if self._closed:
            raise closed(self.name)
        # The server counts and checks the prompt's tokens: what is left to check is how to sample.
        alike = replace(request, tokens=[0], shared=-1)
        check_request(alike, max_context=1 << 62, vocab_size=1, under_way=self._jobs)
        who = f'request "{request.id}"'
        if not request.messages:
            raise ConfigError(f"{who} has no messages, and a server takes no token ids.")
        if request.sampling.stop_ids:
            raise ConfigError(f"{who}: a server takes no stop ids, only stop strings; leave them out.")
        path = "chat/completions" if self.template == "chat" else "completions"
        call = Call(method="POST", path=path, body=json.dumps(self._body(request)).encode())
        job = self._jobs[request.id] = Job(request=request, call=call)
        with self._lock:
            self._waiting.append(job)
            if self._num_threads == self.concurrency:
                return
            self._num_threads += 1
        # A daemon: a program that ends waits for no answer.
        threading.Thread(target=self._work, name="cohort-server", daemon=True).start()

    def _body(self, request: Request) -> dict[str, Any]:
        s, chat = request.sampling, self.template == "chat"
        # OpenAI's newer models refuse the name that all other servers know.
        limit = "max_completion_tokens" if chat and self.site.is_openai else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": s.temperature,
            "top_p": s.top_p,
            limit: s.max_tokens,
            "seed": (stream_of(request.key) + request.start) % 2**31,
        }
        if self._complete:
            body |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {name: value for name, value in (("top_k", s.top_k), ("min_p", s.min_p)) if value}
        if s.stop_strings:
            body["stop"] = list(s.stop_strings)
        if not chat:
            return body | {"prompt": plain_text(request.messages)}
        if request.messages[-1].get("role") == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body | {"messages": request.messages}

    @property
    def idle(self) -> bool:
        return not self._jobs

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Wait until something ended. Interrupted, or at the first error, everything else is given up too."""
        deadline = time.monotonic() + timeout
        events: list[Event] = []
        try:
            while self._jobs and not events:
                ended = self._wait(deadline - time.monotonic())
                if not ended:
                    break
                events = [e for job, outcome in ended if (e := self._take(job, outcome)) is not None]
        except BaseException:
            self._give_up()
            raise
        return events

    def _wait(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """What has ended, the first of it within so many seconds."""
        ended: list[tuple[Job, Outcome]] = []
        with contextlib.suppress(queue.Empty):
            ended.append(self._ended.get(timeout=max(0.0, seconds)))
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def _take(self, job: Job, outcome: Outcome) -> Event | None:
        id = job.request.id
        if self._jobs.get(id) is not job:
            return None  # aborted
        if outcome is None:
            raise EngineError("a thread of the server engine failed: its traceback is above.")
        if isinstance(outcome, CohortError):
            raise outcome
        del self._jobs[id]
        if outcome.text and not outcome.tokens:
            self.site.warn("does not say how many tokens it wrote: they are counted as 0")
        if outcome.finish is Finish.ABORT:
            self.site.warn("ended an answer itself, by its filter or going down: these have finish = abort")
        return Event(id=id, tokens=outcome.tokens, logprobs=outcome.sampler_logprobs, sample=outcome)

    def abort(self, id: str) -> Sample:
        """What an unfinished answer has is not known: the sample is empty."""
        if id not in self._jobs:
            raise not_under_way(id)
        job = self._jobs.pop(id)
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
        job.call.cancel()
        return Sample(tokens=[], provenance=[], sampler_logprobs=[], finish=Finish.ABORT)

    def load(self, weights: Weights, version: int) -> None:
        raise ConfigError("a server takes no new weights: it evaluates; train with the native engine.")

    def close(self) -> None:
        self._give_up()
        self._closed = True

    def _give_up(self) -> None:
        for id in list(self._jobs):
            self.abort(id)

    def _work(self) -> None:
        """A thread's life: request after request on one connection, until none waits."""
        connection = self.site.connection()
        while (job := self._next()) is not None:
            outcome: Outcome = None
            try:
                outcome = self._answer(connection, job)
            except CohortError as error:
                outcome = error
            finally:  # also after a bug, whose traceback threading prints
                self._ended.put((job, outcome))
        connection.close()

    def _next(self) -> Job | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._num_threads -= 1
            return None

    def _answer(self, connection: HTTPConnection, job: Job) -> Sample:
        return self.site.ask(connection, job.call, lambda reply: read_sample(reply, job.request))


def read_models(reply: Any) -> dict[str, str]:
    """The models served, with who serves them."""
    data = reply.get("data") if isinstance(reply, dict) else reply
    if not isinstance(data, list):
        raise Trouble("no list of models in its reply: is it a server with OpenAI's interface?")
    named = [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]
    return {m["id"]: str(m.get("owned_by") or "") for m in named}


def read_sample(reply: Any, request: Request) -> Sample:
    """The sample in a reply to a request. Raises Trouble for a reply that makes no sense."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Trouble("a reply without choices")
    choice, usage = choices[0], reply.get("usage")
    num = usage.get("completion_tokens") if isinstance(usage, dict) else None
    num = min(max(num, 0), MOST_TOKENS) if isinstance(num, int) else 0
    reason = choice.get("finish_reason")
    if reason == "error":
        raise Trouble("an answer that ended with an error")
    unnamed = Finish.LENGTH if num >= request.sampling.max_tokens else Finish.STOP
    finish = FINISHES.get(reason, unnamed) if isinstance(reason, str) else unnamed
    return Sample(
        tokens=[UNKNOWN] * num,
        provenance=[int(Provenance.SAMPLED)] * num,
        sampler_logprobs=[0.0] * num,
        versions=[(0, 0)],
        finish=finish,
        text=said(choice, request, finish),
    )


def said(choice: dict[str, Any], request: Request, finish: Finish) -> str:
    """What the model wrote, its thought included."""
    if "message" not in choice:
        return text_of(choice.get("text"))
    message = choice["message"]
    if not isinstance(message, dict):
        raise Trouble("a choice without a message")
    content = text_of(message.get("content"))
    thought = text_of(message.get("reasoning_content") or message.get("reasoning"))
    if not thought:
        return content
    last = request.messages[-1]
    forced = str(last.get("content") or "") if last.get("role") == "assistant" else ""
    opening = "" if "<think>" in forced.rpartition("</think>")[2] else "<think>"
    closing = "</think>" if content or finish is Finish.STOP else ""
    return f"{opening}{thought}{closing}{content}"


def text_of(content: Any) -> str:
    """Text as a string, as a list of parts, or none at all (after a call of a tool, or a filter)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    raise Trouble(f"a text that is a {type(content).__name__}")
