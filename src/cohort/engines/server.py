"""An engine that asks a server with OpenAI's interface, for evaluation: messages or text go out, text comes back.

A server cannot give token ids (`tokens` has as many UNKNOWN_TOKEN as the server counts), log-probabilities (they
are 0), new weights, or keyed randomness (the key only makes the seed that is sent). With `template = "chat"` the server
applies its own chat template; a final assistant message is continued if the server can do that (vLLM and SGLang can).
With "text" it gets plain text.

- A thought that comes in a field of its own (`reasoning_content` or `reasoning`) is put back where the model wrote it,
  before the content in <think>...</think>, so that text and graders are the same as for an engine in this process. A
  thought that was cut off stays open.
- An answer that the server's filter cut has finish = abort, and its text counts as far as it came. A call of a tool
  is an ordinary end: no tool was offered.
- vLLM and SGLang take sampling settings that a request leaves out from the model's folder, so they are sent every
  setting. Other servers are sent only the settings of OpenAI's interface, and further ones that are in use.
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

from cohort.engines.base import Abilities, Event, Request, Weights, WorkCounters
from cohort.engines.native.random import derive_random_stream
from cohort.engines.requests import check_request, closed_engine_error, unknown_request_error
from cohort.engines.site import HttpCall, PauseFunction, ServerClient
from cohort.errors import CohortError, ConfigError, EngineError, suggest_name
from cohort.system.http_text import RetryableError
from cohort.text.plain import add_system, join_contents
from cohort.types import Finish, Provenance, Sample

UNKNOWN_TOKEN = -1  # a token's id, where only the number of tokens is known
MAX_REPLY_TOKENS = 1 << 20  # larger counts in a reply are cut to this
SERVERS_WITH_ALL_SETTINGS = ("vllm", "sglang")  # `owned_by` of servers that take every sampling setting
FINISHES = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "function_call": Finish.STOP,
    "length": Finish.LENGTH,
    "content_filter": Finish.ABORT,
    "abort": Finish.ABORT,
}


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PendingRequest:
    """A request that is under way, and the call that carries it to the server."""

    request: Request
    call: HttpCall


CallResult = Sample | CohortError | None
"""What a thread found: a sample, an error to raise, or None after a bug, whose traceback has been printed."""


class ServerEngine:
    """Samples from `model` at `url`, with up to `concurrency` requests at once, each in a thread of its own.

    `key` names the environment variable that holds the API key. Without it, COHORT_API_KEY is used if it is set, and
    OPENAI_API_KEY for OpenAI's own servers only. `system` is a text before the messages of every request. `timeout` is
    in seconds, for a connection or an answer.
    """

    name = "server"
    abilities = Abilities(token_ids=False, logprobs=False, live_weights=False, truncation=False, streams=False)
    version = 0  # the server's weights have no version here

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: Literal["chat", "text"] = "chat",
        system: str = "",
        concurrency: int = 64,
        key: str = "",
        timeout: float = 600.0,
        pause: PauseFunction = threading.Event.wait,
    ) -> None:
        if template not in ("chat", "text"):
            raise ConfigError(f'the server engine has no template = "{template}"; use "chat" or "text".')
        if concurrency < 1:
            raise ConfigError(
                f"the server engine cannot send concurrency = {concurrency} requests at once; set at least 1 (cohort "
                "eval: --slots)."
            )
        if not 0 < timeout < threading.TIMEOUT_MAX:
            raise ConfigError(
                f"ServerEngine(timeout={timeout}): give a number of seconds above 0 and below "
                f"{threading.TIMEOUT_MAX:.0f}."
            )
        self.client = ServerClient(url, key, timeout, pause)
        self.model = model
        self.template = template
        self.system = system
        self.concurrency = concurrency
        self._pending: dict[str, PendingRequest] = {}  # requests under way, by id
        self._results: queue.SimpleQueue[tuple[PendingRequest, CallResult]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next two
        self._waiting: deque[PendingRequest] = deque()  # not yet taken by a thread
        self._num_threads = 0
        self._closed = False
        self.work = WorkCounters()
        list_models = HttpCall(method="GET", path="models")
        served = self.client.send_with_retries(
            self.client.make_connection(), list_models, read_models, retry_unreachable=False
        )
        if not served:
            raise ConfigError(
                f'{self.client.url} does not serve "{model}": its list of models is empty. Load the model into this '
                "server, or give the address of another one with --url."
            )
        if model not in served:
            names = self.client.clean_text(suggest_name(model, served))
            raise ConfigError(
                f'{self.client.url} does not serve "{model}". {names} Give a model that it serves with --model.'
            )
        self._sends_all_settings = served[model] in SERVERS_WITH_ALL_SETTINGS

    def submit(self, request: Request) -> None:
        """Queues a request for the next free thread, and starts another thread if `concurrency` allows it.

        The request's messages are sent, its token ids are not read. Raises ConfigError for a request without messages,
        with stop ids, with impossible sampling settings or with an id that is under way; EngineError after `close`.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        # The server counts and checks the prompt's tokens, so only the sampling settings are checked here.
        alike = replace(request, tokens=[0], shared=-1)
        check_request(alike, max_context=1 << 62, vocab_size=1, under_way=self._pending)
        if not request.messages:
            raise ConfigError(
                f'request "{request.id}" has no messages, and a server takes no token ids; set messages in the request.'
            )
        if request.sampling.stop_ids:
            raise ConfigError(
                f'request "{request.id}" has stop ids, but a server takes only stop strings; leave stop_ids empty.'
            )
        path = "chat/completions" if self.template == "chat" else "completions"
        call = HttpCall(method="POST", path=path, body=json.dumps(self._make_body(request)).encode())
        pending = self._pending[request.id] = PendingRequest(request=request, call=call)
        with self._lock:
            self._waiting.append(pending)
            if self._num_threads == self.concurrency:
                return
            self._num_threads += 1
        # A daemon thread, so that a program which ends does not wait for answers.
        thread = threading.Thread(target=self._run_thread, name="cohort-server", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self._handle_missing_thread(pending, e)

    def _handle_missing_thread(self, pending: PendingRequest, error: RuntimeError) -> None:
        """Counts a thread that could not be started as ended. Other threads then send the request, if there are any.

        If there are none, takes the request back and raises EngineError.
        """
        with self._lock:
            self._num_threads -= 1
            if self._num_threads or pending not in self._waiting:
                return
            self._waiting.remove(pending)
        del self._pending[pending.request.id]
        raise EngineError(
            f"the system lets this process start no more threads ({error}). Send fewer requests at once (--slots), or "
            "raise the limit of processes (ulimit -u)."
        ) from error

    def _make_body(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object that is sent for a request: model, sampling settings, seed, and messages or text.

        The seed is derived from the request's key and `start`. vLLM and SGLang get every setting, other servers those
        of OpenAI's interface and further ones in use. A final message of the assistant is to be continued.
        """
        s, chat = request.sampling, self.template == "chat"
        # OpenAI's newer models refuse the name that all other servers know.
        limit = "max_completion_tokens" if chat and self.client.is_openai else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": s.temperature,
            "top_p": s.top_p,
            limit: s.max_tokens,
            "seed": (derive_random_stream(request.key) + request.start) % 2**31,
        }
        # Values that switch each setting off. The next line replaces those that are in use.
        if self._sends_all_settings:
            body |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {name: value for name, value in (("top_k", s.top_k), ("min_p", s.min_p)) if value}
        if s.stop_strings:
            body["stop"] = list(s.stop_strings)
        messages = add_system(request.messages, self.system)
        if not chat:
            return body | {"prompt": join_contents(messages)}
        if request.messages[-1].get("role") == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body | {"messages": messages}

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._pending

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Waits up to `timeout` seconds until a request ends. Returns one event for each request that has ended.

        Returns [] if none ended in that time or none is under way. An event has the whole answer: there are none for
        parts. If a request failed, or the wait is interrupted, all requests are aborted and the error is raised;
        answers that came together with the failure are lost.
        """
        deadline = time.monotonic() + timeout
        events: list[Event] = []
        try:
            # Results of aborted requests give no event: then the wait goes on.
            while self._pending and not events:
                ended = self._wait_for_results(deadline - time.monotonic())
                if not ended:
                    break
                events = [e for pending, result in ended if (e := self._make_event(pending, result)) is not None]
        except BaseException:
            self._abort_all()
            raise
        return events

    def _wait_for_results(self, seconds: float) -> list[tuple[PendingRequest, CallResult]]:
        """Waits up to `seconds` (below 0 = 0) for a first result. Returns all (request, result) pairs that have come.

        The list may be empty, and may hold results of aborted requests.
        """
        ended: list[tuple[PendingRequest, CallResult]] = []
        with contextlib.suppress(queue.Empty):
            ended.append(self._results.get(timeout=max(0.0, seconds)))
            while True:
                ended.append(self._results.get_nowait())
        return ended

    def _make_event(self, pending: PendingRequest, result: CallResult) -> Event | None:
        """Returns the event for a request that ended with `result`; None if the request was aborted before.

        A request with an event is no longer under way. Raises `result` if it is an error, and EngineError if it is
        None, which means a bug in the thread. Logs a warning, once, about answers whose tokens the server did not count
        and about answers that it cut.
        """
        id = pending.request.id
        # The id may have been used again since: only the same object is the same request.
        if self._pending.get(id) is not pending:
            return None
        if result is None:
            raise EngineError(
                "a thread of the server engine failed. This is a bug in Cohort: report it with the traceback above."
            )
        if isinstance(result, CohortError):
            raise result
        del self._pending[id]
        if result.text and not result.tokens:
            self.client.warn_once("does not say how many tokens it wrote: they are counted as 0")
        if result.finish is Finish.ABORT:
            self.client.warn_once("ended an answer itself, by its filter or going down: these have finish = abort")
        return Event(id=id, tokens=result.tokens, logprobs=result.sampler_logprobs, sample=result)

    def abort(self, id: str) -> Sample:
        """Stops a request and returns an empty sample with finish = abort, since a server sends no partial text.

        Raises CohortError for an unknown id.
        """
        if id not in self._pending:
            raise unknown_request_error(id)
        pending = self._pending.pop(id)
        # A request that no thread has taken yet must never be sent.
        with self._lock:
            if pending in self._waiting:
                self._waiting.remove(pending)
        pending.call.cancel()
        return Sample(tokens=[], provenance=[], sampler_logprobs=[], finish=Finish.ABORT)

    def forget(self, id: str) -> None:
        """Does nothing: the server keeps what it likes."""

    def load(self, weights: Weights, version: int) -> None:
        """Always raises ConfigError: a server takes no new weights."""
        raise ConfigError("the server engine takes no new weights: it can only evaluate. Train with --engine native.")

    def close(self) -> None:
        """Aborts every request. A later `submit` raises EngineError."""
        self._abort_all()
        self._closed = True

    def _abort_all(self) -> None:
        """Aborts every request that is under way. Their samples are dropped."""
        for id in list(self._pending):
            self.abort(id)

    def _run_thread(self) -> None:
        """Sends waiting requests, one after the other on one connection, until none waits. Runs in a thread of its own.

        Puts each result (sample, error, or None after a bug) into the queue that `poll` reads. A bug ends the thread.
        """
        connection = self.client.make_connection()
        try:
            while (pending := self._pop_waiting()) is not None:
                try:
                    result: CallResult = self._send_request(connection, pending)
                except CohortError as error:
                    result = error
                except BaseException:
                    # A bug, whose traceback threading prints. No later request must wait for this thread, and `poll`
                    # not for the result of this one.
                    with self._lock:
                        self._num_threads -= 1
                    self._results.put((pending, None))
                    raise
                self._results.put((pending, result))
        finally:
            connection.close()

    def _pop_waiting(self) -> PendingRequest | None:
        """Removes and returns the next waiting request.

        If there is none, returns None and counts the calling thread as ended, so that `submit` may start a new one.
        """
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._num_threads -= 1
            return None

    def _send_request(self, connection: HTTPConnection, pending: PendingRequest) -> Sample:
        """Sends a request to the server, with retries, and returns the sample in the reply.

        Raises a CohortError if the server refuses the request, all tries failed or the call is cancelled.
        """

        def read(reply: Any) -> Sample:
            """Returns the sample in a reply. Warns, once, of a server that does not say why its answers end."""
            sample = read_sample(reply, pending.request)
            if not reply["choices"][0].get("finish_reason"):
                self.client.warn_once(
                    "does not say why an answer ended: it counts as cut off if it has all the tokens that it may have, "
                    "and as finished otherwise"
                )
            return sample

        return self.client.send_with_retries(connection, pending.call, read)


def read_models(reply: Any) -> dict[str, str]:
    """Returns the served models from the JSON reply: name -> `owned_by`, or "" where the reply does not say it.

    Entries without a name are left out. Raises RetryableError if the reply has no list of models.
    """
    data = reply.get("data") if isinstance(reply, dict) else reply
    if not isinstance(data, list):
        raise RetryableError("no list of models in its reply: is it a server with OpenAI's interface?")
    named = [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]
    return {m["id"]: str(m.get("owned_by") or "") for m in named}


def read_sample(reply: Any, request: Request) -> Sample:
    """Returns the sample in the JSON reply to `request`.

    It has the text of the first choice, and UNKNOWN_TOKEN with log-probability 0 for each token that the server counts,
    none if it does not count. `finish` follows the reply's reason; if that is missing or unknown, it is length for at
    least `max_tokens` tokens, else stop. Raises RetryableError for a reply that is malformed or reports an error.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RetryableError("a reply without choices")
    choice, usage = choices[0], reply.get("usage")
    num = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # Servers may send anything as a count.
    num = min(max(num, 0), MAX_REPLY_TOKENS) if type(num) is int else 0
    reason = choice.get("finish_reason")
    if reason == "error":
        raise RetryableError("an answer that ended with an error")
    # Where the reason is missing or unknown, the number of tokens decides.
    guessed = Finish.LENGTH if num >= request.sampling.max_tokens else Finish.STOP
    finish = FINISHES.get(reason, guessed) if isinstance(reason, str) else guessed
    return Sample(
        tokens=[UNKNOWN_TOKEN] * num,
        provenance=[int(Provenance.SAMPLED)] * num,
        sampler_logprobs=[0.0] * num,
        versions=[(0, 0)],
        finish=finish,
        text=extract_text(choice, request, finish),
    )


def extract_text(choice: dict[str, Any], request: Request, finish: Finish) -> str:
    """Returns the text that the model wrote, from one `choice` of the JSON reply to `request`.

    That is its `text` if it has no message. A thought that the server sends in a field of its own is put before the
    content, in <think>...</think>. <think> is left out if the request's last message, of the assistant, has opened it
    already. </think> is left out if the thought was cut off: no content follows and `finish` is not stop. Raises
    RetryableError for a malformed choice.
    """
    # A choice without a message is that of the text interface.
    if "message" not in choice:
        return read_text(choice.get("text"))
    message = choice["message"]
    if not isinstance(message, dict):
        raise RetryableError("a choice without a message")
    content = read_text(message.get("content"))
    thought = read_text(message.get("reasoning_content") or message.get("reasoning"))
    if not thought:
        return content
    last = request.messages[-1]
    forced = str(last.get("content") or "") if last.get("role") == "assistant" else ""
    # The prompt may have opened the thought already. A thought that was cut off stays open.
    opening = "" if "<think>" in forced.rpartition("</think>")[2] else "<think>"
    closing = "</think>" if content or finish is Finish.STOP else ""
    return f"{opening}{thought}{closing}{content}"


def read_text(content: Any) -> str:
    """Returns the text in a JSON value: a string, a list of parts with texts, or None ("", as after a call of a tool).

    The texts of parts are joined; parts that are no objects are skipped. Half characters (lone surrogates), which JSON
    allows and files do not, become "?". Raises RetryableError for any other value.
    """
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else [content]
    texts = ["" if part is None else part for part in parts]
    for text in texts:
        if not isinstance(text, str):
            raise RetryableError(f"a text that is a {type(text).__name__}")
    return "".join(texts).encode(errors="replace").decode()
