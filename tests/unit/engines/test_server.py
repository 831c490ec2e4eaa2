"""The server engine against a real HTTP server that can be told to misbehave. No test sleeps."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.engines import server as server_module
from cohort.engines import site
from cohort.engines.base import Abilities, sample
from cohort.engines.server import UNKNOWN_TOKEN, ServerEngine
from cohort.engines.site import (
    MAX_PAUSE_SECONDS,
    MAX_TRIES,
    ServerClient,
    normalise_url,
    parse_retry_after,
    read_api_key,
)
from cohort.errors import CohortError, ConfigError, EngineError, ModelError
from cohort.types import Finish, Provenance
from tests.helpers.engine_conformance import EngineConformance, iterate_events, request
from tests.helpers.fake_server import (
    Behaviour,
    FakeServer,
    Handler,
    answers,
    babble,
    breaks_off,
    chat,
    fails,
    hangs_up,
    models,
    raw,
    resets,
    serving,
)

SOURCE = Path(__file__).resolve().parents[3] / "src"
SECRET = "sk-never-to-be-seen"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COHORT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


class Pauses(list[float]):
    """A pause function that does not wait but records the seconds."""

    def __call__(self, stop: threading.Event, seconds: float) -> None:
        self.append(seconds)


def make(server: FakeServer, **values: Any) -> ServerEngine:
    """Returns an engine for the server's model "small", which does not wait between retries."""
    return ServerEngine(server.url, values.pop("model", "small"), **{"pause": Pauses(), "timeout": 30.0, **values})


def sample_one(engine: ServerEngine, **changes: Any) -> Any:
    """Returns the sample of one request with these changes."""
    return sample(engine, [request(**changes)])["0/0"]


class TestConformance(EngineConformance):
    abilities = Abilities(token_ids=False, logprobs=False, live_weights=False, truncation=False, streams=False)

    @pytest.fixture(autouse=True)
    def served(self, server: FakeServer) -> None:
        self.server = server

    def make(self, slots: int = 4) -> ServerEngine:
        return make(self.server, concurrency=slots)

    def dying(self) -> ServerEngine:
        engine = make(self.server)
        self.server.behaviours = [hangs_up]
        return engine


def test_a_poll_without_time_to_wait_reports_nothing_yet(server: FakeServer):
    release = threading.Event()

    def slow(h: Handler, body: dict[str, Any]) -> None:
        assert release.wait(30)
        babble(h, body)

    server.behaviours = [slow]
    engine = make(server)
    engine.submit(request())
    assert engine.poll() == [] and engine.poll(0.01) == [] and not engine.idle
    release.set()
    assert [e.id for e in engine.poll(30)] == ["0/0"] and engine.idle


def test_what_is_sent(server: FakeServer):
    engine = make(server)
    server.behaviours = [answers()]
    sample_one(engine, max_tokens=9, temperature=0.7, top_p=0.9)
    plain = server.asked[-1]
    seed = plain.pop("seed")
    assert 0 <= seed < 2**31
    assert plain == {
        "model": "small",
        "messages": [{"role": "user", "content": "prompt 0"}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 9,
    }
    assert server.seen[-1][0] == "/v1/chat/completions" and "Authorization" not in server.seen[-1][1]
    sample_one(engine, max_tokens=9, top_k=5, min_p=0.1, stop_strings=("a", "b"))
    extra = {k: server.asked[-1][k] for k in ("top_k", "min_p", "stop", "seed")}
    assert extra == {"top_k": 5, "min_p": 0.1, "stop": ["a", "b"], "seed": seed}


def test_the_key_decides_the_seed(server: FakeServer):
    engine = make(server)
    sample(engine, [request(0, 0), request(0, 1), request(1, 0)])
    sample_one(engine)
    sample_one(engine, start=3)
    seeds = [body["seed"] for body in server.asked]
    assert len(set(seeds[:3])) == 3 and seeds[3] in seeds[:3] and seeds[4] not in seeds[:3]


def test_vllm_is_sent_every_setting_so_that_the_folder_decides_none(server: FakeServer):
    server.listing, server.behaviours = models("small", owner="vllm"), [answers()]
    engine = make(server)
    sample_one(engine)
    assert {k: server.asked[-1][k] for k in ("top_k", "min_p", "repetition_penalty", "top_p")} == {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "top_p": 1.0,
    }
    sample_one(engine, top_k=7)
    assert server.asked[-1]["top_k"] == 7


def test_final_assistant_message_is_continued(server: FakeServer):
    server.behaviours = [answers()]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}]
    sample_one(make(server), messages=messages)
    body = server.asked[-1]
    assert body["messages"] == messages
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_text_template_sends_the_plain_text(server: FakeServer):
    server.behaviours = [lambda h, _: h.reply({"choices": [{"text": " 4", "finish_reason": "stop"}]})]
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "Sum:"}]
    s = sample_one(make(server, template="text"), messages=messages)
    path, _, body = server.seen[-1]
    assert path == "/v1/completions" and body["prompt"] == "2+2\n\nSum:"
    assert not {"messages", "continue_final_message"} & body.keys()
    assert s.text == " 4" and s.finish == Finish.STOP


def test_sample_has_as_many_unknown_tokens_as_the_server_counts(server: FakeServer):
    server.behaviours = [answers("four", "length", 3)]
    s = sample_one(make(server))
    assert s.tokens == [UNKNOWN_TOKEN] * 3 and s.provenance == [Provenance.SAMPLED] * 3
    assert s.sampler_logprobs == [0.0] * 3 and s.kept_mass == [] and s.versions == [(0, 0)]
    assert (s.text, s.finish) == ("four", Finish.LENGTH)


@pytest.mark.parametrize(
    ("reply", "text", "finish", "num"),
    [
        (chat("a", "stop"), "a", Finish.STOP, 2),
        (chat("a", "length"), "a", Finish.LENGTH, 2),
        (chat(None, "stop"), "", Finish.STOP, 2),
        (chat("par", "content_filter"), "par", Finish.ABORT, 2),
        (chat(None, "content_filter", 0), "", Finish.ABORT, 0),
        (chat(None, "tool_calls", tool_calls=[{"id": "1"}]), "", Finish.STOP, 2),
        (chat("a", None), "a", Finish.STOP, 2),
        (chat("a", None, 12), "a", Finish.LENGTH, 12),
        (chat("a", "eos_token"), "a", Finish.STOP, 2),
        (chat("a", ["stop"]), "a", Finish.STOP, 2),
        (chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, 3]), "ab", Finish.STOP, 2),
        ({"choices": chat()["choices"]}, "4", Finish.STOP, 0),
        ({"choices": chat()["choices"], "usage": None}, "4", Finish.STOP, 0),
        ({"choices": chat()["choices"], "usage": {"completion_tokens": "9"}}, "4", Finish.STOP, 0),
        ({"choices": chat()["choices"], "usage": {"completion_tokens": -5}}, "4", Finish.STOP, 0),
        ({"choices": chat()["choices"], "usage": {"completion_tokens": 10**15}}, "4", Finish.STOP, 1 << 20),
        ({"choices": chat()["choices"], "usage": {"completion_tokens": True}}, "4", Finish.STOP, 0),
        ({"choices": [{**chat()["choices"][0], "logprobs": None}]}, "4", Finish.STOP, 0),
        (chat("half \ud83d"), "half ?", Finish.STOP, 2),
    ],
)
def test_replies_of_every_kind(server: FakeServer, reply: Any, text: str, finish: Finish, num: int):
    server.behaviours = [lambda h, _: h.reply(reply)]
    s = sample_one(make(server))
    assert (s.text, s.finish, len(s.tokens)) == (text, finish, num)
    assert len(server.asked) == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("content", "thought", "reason", "forced", "text"),
    [
        ("4", "2 and 2", "stop", None, "<think>2 and 2</think>4"),
        ("4", "", "stop", None, "4"),
        ("4", None, "stop", None, "4"),
        (None, "2 and", "length", None, "<think>2 and"),
        ("It", "2 and 2", "length", None, "<think>2 and 2</think>It"),
        (None, "hm", "stop", None, "<think>hm</think>"),
        ("4", "2 and 2", "stop", "<think>", "2 and 2</think>4"),
        ("4", "again", "stop", "<think>a</think>b", "<think>again</think>4"),
    ],
)
def test_a_thought_is_put_back(
    server: FakeServer, name: str, content: Any, thought: Any, reason: str, forced: str | None, text: str
):
    server.behaviours = [answers(content, reason, **{name: thought})]
    messages = [{"role": "user", "content": "?"}]
    messages += [] if forced is None else [{"role": "assistant", "content": forced}]
    assert sample_one(make(server), messages=messages).text == text


def nest_parts(depth: int) -> Any:
    """Returns a text in a part of a text in a part, and so on: JSON that can be parsed, but not read by recursion."""
    text: Any = "x"
    for _ in range(depth):
        text = [{"type": "text", "text": text}]
    return text


TROUBLE = {
    "busy": fails(429, {"error": {"message": "slow down"}}),
    "broken": fails(500, b"<html>oops</html>"),
    "loading": fails(503, {"error": "loading"}),
    "timeout at a gateway": fails(504),
    "reset": resets,
    "hung up": hangs_up,
    "cut off": breaks_off,
    "no JSON": raw(b"<html>hello</html>"),
    "half JSON": raw(b'{"choices": [{"mess'),
    "nothing": raw(b""),
    "null": raw(b"null"),
    "a list": raw(b"[1]"),
    "deep": raw(b"[" * 100_000),
    "not UTF-8": raw(b'{"choices": "\xff\xfe"}'),
    "no choices": raw(b'{"choices": []}'),
    "choices of nothing": raw(b'{"choices": [null]}'),
    "no message": raw(b'{"choices": [{"message": 3, "finish_reason": "stop"}]}'),
    "number for text": answers(17),
    "number in a part": answers([{"type": "text", "text": 17}]),
    "deep parts": raw(json.dumps(chat(nest_parts(450))).encode()),
    "ended with an error": answers("half", "error"),
    "error with status 200": raw(b'{"error": {"message": "overloaded", "code": 529}}'),
    "error without code": raw(b'{"error": "overloaded", "choices": []}'),
    "no HTTP": lambda h, _: h.wfile.write(b"what?\r\n\r\n") and hangs_up(h, {}),
}


@pytest.mark.parametrize("kind", TROUBLE)
def test_passing_errors_are_retried(server: FakeServer, kind: str):
    server.behaviours = [TROUBLE[kind], TROUBLE[kind], answers("fine")]
    pauses = Pauses()
    assert sample_one(make(server, pause=pauses)).text == "fine"
    assert len(server.asked) == 3
    assert len({json.dumps(body) for body in server.asked}) == 1  # the same question, seed included
    assert 0.5 <= pauses[0] <= 1.0 <= pauses[1] <= 2.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("broken", "500 <html>oops</html>"),
        ("busy", "429 slow down"),
        ("no JSON", 'a reply of 18 bytes that is no JSON: "<html>hello</html>"'),
        ("no choices", "a reply without choices"),
        ("cut off", "breaks off after 20 bytes"),
        ("hung up", "RemoteDisconnected"),
    ],
)
def test_lasting_errors_end_after_max_tries(server: FakeServer, kind: str, words: str):
    server.behaviours = [TROUBLE[kind]]
    pauses = Pauses()
    engine = make(server, pause=pauses)
    with pytest.raises(EngineError, match=f"failed {MAX_TRIES} times") as error:
        sample_one(engine)
    assert words in str(error.value) and server.url in str(error.value) and "\n" not in str(error.value)
    assert len(server.asked) == MAX_TRIES and len(pauses) == MAX_TRIES - 1
    assert all(2 ** (n - 1) <= seconds <= 2**n for n, seconds in enumerate(pauses))
    assert engine.poll() == []


def test_a_server_that_does_not_answer_in_time_is_tried_again(server: FakeServer):
    release = threading.Event()
    server.behaviours = [lambda h, _: release.wait() and None, answers("late")]
    try:
        assert sample_one(make(server, timeout=0.1)).text == "late"
    finally:
        release.set()
    assert len(server.asked) == 2


def test_a_pause_that_the_server_asks_for_is_obeyed(server: FakeServer):
    pauses = Pauses()
    server.behaviours = [fails(429, Retry_After="7"), fails(503, Retry_After="0.25"), answers()]
    sample_one(make(server, pause=pauses))
    assert pauses == [7.0, 0.25]


def test_a_pause_too_long_is_an_error_at_once(server: FakeServer):
    server.behaviours = [fails(429, {"error": {"message": "quota"}}, Retry_After="86400")]
    with pytest.raises(EngineError, match="a pause of 86400 seconds: 429 quota"):
        sample_one(make(server))
    assert len(server.asked) == 1 and MAX_PAUSE_SECONDS < 86400


def test_retry_after_as_a_date(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cohort.system.http_text.time.time", lambda: 784111777.0 - 30)
    assert parse_retry_after("Sun, 06 Nov 1994 08:49:37 GMT") == 30.0
    assert parse_retry_after("Sat, 05 Nov 1994 08:49:37 GMT") == 0.0
    for odd in ("inf", "nan", "Sun, 99 Nov 1994", "7 seconds", "Sun, 06 Nov 99999999 08:49:37 GMT"):
        assert parse_retry_after(odd) is None


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (fails(400, {"error": {"message": "prompt is\ntoo long"}}), "400 prompt is too long"),
        (fails(400, {"object": "error", "message": "top_k"}), "400 top_k"),
        (fails(422, {"detail": [{"msg": "bad"}]}), '422 [{"msg": "bad"}]'),
        (fails(400, {"error": {"code": 3}}), '400 {"code": 3}'),
        (
            fails(404, {"error": {"message": "no model"}}),
            "404 no model. Give as --url the part of the server's address before /v1",
        ),
        (fails(401, {"error": {"message": "who?"}}), "401 who?. Set the environment variable COHORT_API_KEY"),
        (fails(403, b""), "403. Set the environment variable COHORT_API_KEY"),
        (fails(413, b"\x1b[31mred\x00" + b"x" * 10_000), "413 [31mred xxx"),
        (fails(302, b"", Location="http://elsewhere/v1"), "302 moved to http://elsewhere/v1"),
        (raw(b'{"error": {"message": "no such model", "code": 400}}'), "400 no such model"),
    ],
)
def test_what_the_server_refuses_is_an_error_of_one_line(server: FakeServer, behaviour: Behaviour, words: str):
    server.behaviours = [behaviour]
    with pytest.raises(ConfigError) as error:
        sample_one(make(server))
    text = str(error.value)
    assert f"{server.url}/v1/chat/completions refuses: {words}" in text
    assert text.isprintable() and len(text) < 500
    assert len(server.asked) == 1


def test_an_error_gives_up_everything_else(server: FakeServer):
    waiting, gone = threading.Event(), threading.Event()

    def holds(h: Handler, _: dict[str, Any]) -> None:
        waiting.set()
        assert h.rfile.read(1) == b""  # until the other side has gone
        gone.set()

    def refuses(h: Handler, _: dict[str, Any]) -> None:
        assert waiting.wait(30)
        h.reply(b"", 400)

    server.behaviours = [holds, refuses]
    engine = make(server)
    engine.submit(request(0, 0))
    assert waiting.wait(30)
    engine.submit(request(0, 1))
    with pytest.raises(ConfigError, match="400"):
        engine.poll(30)
    assert gone.wait(30)
    assert engine.idle and engine.poll() == []
    server.behaviours = [babble]
    assert sample_one(engine).finish == Finish.LENGTH  # the engine still works


def test_samples_are_reported_as_they_end(server: FakeServer):
    waiting, release = threading.Event(), threading.Event()

    def slow(h: Handler, body: dict[str, Any]) -> None:
        waiting.set()
        assert release.wait(30)
        babble(h, body)

    server.behaviours = [slow, babble]
    engine = make(server)
    engine.submit(request(0, 0))
    assert waiting.wait(30)
    engine.submit(request(0, 1))
    [first] = engine.poll(30)
    release.set()
    [second] = engine.poll(30)
    assert (first.id, second.id) == ("0/1", "0/0")
    assert engine.poll() == []


def test_no_more_requests_at_once_than_allowed(server: FakeServer):
    together, now, most = threading.Barrier(3), [0], [0]

    def counted(h: Handler, body: dict[str, Any]) -> None:
        with server.lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(30)
        with server.lock:
            now[0] -= 1
        babble(h, body)

    server.behaviours = [counted]
    done = sample(make(server, concurrency=3), [request(0, i) for i in range(12)])
    assert len(done) == 12 and most[0] == 3


def test_one_thread_keeps_its_connection(server: FakeServer):
    submitted = threading.Event()

    def wait(h: Handler, body: dict[str, Any]) -> None:
        assert submitted.wait(30)  # a thread ends when nothing waits for it
        babble(h, body)

    server.behaviours = [wait]
    engine = make(server, concurrency=1)
    for i in range(20):
        engine.submit(request(0, i))
    submitted.set()
    assert sum(map(len, iterate_events(engine))) == 20
    assert server.num_connections == 2  # one for the list of models


def test_many_requests(server: FakeServer):
    done = sample(make(server), [request(i % 3, i, max_tokens=3) for i in range(500)])
    assert len(done) == 500 and len(server.asked) == 500
    assert len({s.text for s in done.values()}) > 400


def test_abort_tells_the_server_and_frees_the_place(server: FakeServer):
    waiting, gone = threading.Event(), threading.Event()

    def holds(h: Handler, _: dict[str, Any]) -> None:
        waiting.set()
        assert h.rfile.read(1) == b""
        gone.set()

    server.behaviours = [holds, babble]
    engine = make(server, concurrency=1)
    engine.submit(request(0, 0))
    engine.submit(request(0, 1))
    assert waiting.wait(30)
    s = engine.abort("0/0")
    assert (s.tokens, s.text, s.finish) == ([], "", Finish.ABORT)
    assert gone.wait(30)
    engine.submit(request(0, 0))  # the id is free again
    ids = {e.id for events in iterate_events(engine) for e in events}
    assert ids == {"0/0", "0/1"} and len(server.asked) == 3


def test_a_waiting_request_that_is_aborted_is_never_sent(server: FakeServer):
    waiting, release = threading.Event(), threading.Event()

    def slow(h: Handler, body: dict[str, Any]) -> None:
        waiting.set()
        assert release.wait(30)
        babble(h, body)

    server.behaviours = [slow]
    engine = make(server, concurrency=1)
    for i in range(3):
        engine.submit(request(0, i))
    assert waiting.wait(30)
    engine.abort("0/1")
    release.set()
    assert {e.id for events in iterate_events(engine) for e in events} == {"0/0", "0/2"}
    assert len(server.asked) == 2


def test_abort_ends_a_pause(server: FakeServer):
    pausing = threading.Event()

    def pause(stop: threading.Event, seconds: float) -> None:
        pausing.set()
        assert stop.wait(30)

    server.behaviours = [fails(503), babble]
    engine = make(server, concurrency=1, pause=pause)
    engine.submit(request(0, 0))
    assert pausing.wait(30)
    engine.abort("0/0")
    assert sample_one(engine).finish == Finish.LENGTH
    assert len(server.asked) == 2


def test_the_key_is_sent_and_appears_in_no_message(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("MY_KEY", SECRET)
    echo = {"error": {"message": f"Bearer {SECRET} is wrong"}}
    server.behaviours = [fails(500, echo), raw(SECRET.encode()), fails(401, echo)]
    engine = make(server, key="MY_KEY")
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError) as error:
        sample_one(engine)
    assert [headers["Authorization"] for _, headers, _ in server.seen] == [f"Bearer {SECRET}"] * 4
    assert "Bearer [key] is wrong" in str(error.value) and "[key]" in caplog.text
    told = [str(error.value), repr(error.value.__cause__), caplog.text, repr(engine), repr(engine.client)]
    assert not any(SECRET in text for text in told)
    assert SECRET not in json.dumps([body for _, _, body in server.seen])


def test_where_the_key_is_read_from(monkeypatch: pytest.MonkeyPatch):
    here, openai = "http://localhost:8000", "https://api.openai.com"
    assert read_api_key(here, "") == read_api_key(openai, "") == ""
    monkeypatch.setenv("OPENAI_API_KEY", "for-openai")
    assert (read_api_key(here, ""), read_api_key(openai, "")) == ("", "for-openai")
    assert read_api_key("https://openai.com.evil.example", "") == read_api_key("https://notopenai.com", "") == ""
    assert read_api_key(here, "OPENAI_API_KEY") == "for-openai"  # the user named it
    monkeypatch.setenv("COHORT_API_KEY", " mine\n")
    assert read_api_key(here, "") == read_api_key(openai, "") == "mine"


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_key_in_the_place_of_its_name_is_not_repeated(value: str | None, monkeypatch: pytest.MonkeyPatch):
    if value is not None:
        monkeypatch.setenv(SECRET, value)
    with pytest.raises(ConfigError, match="give its name, not the key itself") as error:
        ServerClient("http://localhost:8000", SECRET, 1.0)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("value", [f"{SECRET}\nX: y", f"{SECRET} b", f"{SECRET}\u00e9"])
def test_a_malformed_key_is_refused_without_being_shown(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHORT_API_KEY", value)
    with pytest.raises(ConfigError, match="character that no key has") as error:
        ServerClient("http://localhost:8000", "", 1.0)
    assert SECRET not in str(error.value)


def test_redirects_are_not_followed(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHORT_API_KEY", SECRET)
    with FakeServer() as other:
        server.listing = fails(307, b"", Location=f"{other.url}/v1/models")
        with pytest.raises(ConfigError, match=f"307 moved to {other.url}"):
            make(server)
        assert other.num_connections == 0 and other.seen == []


def test_a_missing_server_is_noticed_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # a port without a server
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        pauses = Pauses()
        with pytest.raises(ModelError, match=f"no server answers at {url} .ConnectionRefusedError.*: start it"):
            ServerEngine(url, "small", template="chat", pause=pauses)
        assert pauses == []


def test_an_unknown_host_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch):
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ModelError, match=r"no server answers at http://nowhere.invalid \(gaierror"):
        ServerEngine("http://nowhere.invalid", "small")


def test_a_server_that_is_still_loading_is_waited_for(server: FakeServer):
    listings = [fails(503), raw(b"{}"), models("small")]
    server.listing = lambda h, body: listings.pop(0)(h, body)
    pauses = Pauses()
    make(server, pause=pauses)
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        (models("smart", "large"), 'does not serve "small". Did you mean "smart"?'),
        (models("x", "y"), 'does not serve "small". Valid: x, y.'),
        (models(), 'does not serve "small": its list of models is empty.'),
        (models(*(f"m{i}-{'z' * 40}" for i in range(500))), "Valid: m0-zzz"),
        (raw(b'{"data": [{"id": 3}, null, {"id": "smalll"}]}'), 'Did you mean "smalll"?'),
        (raw(b'[{"id": "smal"}]'), 'Did you mean "smal"?'),
        (raw(b'{"data": {"id": "small"}}'), "no list of models in its reply"),
        (fails(404), "404. Give as --url the part of the server's address before /v1"),
        (fails(401, b"no"), "401 no. Set the environment variable COHORT_API_KEY"),
    ],
)
def test_a_model_that_is_not_served(server: FakeServer, listing: Behaviour, words: str):
    server.listing = listing
    with pytest.raises(CohortError) as error:
        make(server)
    assert words in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["{}", "{}/", "{}/v1", "{}/v1/", "  {}/v1 "])
def test_ways_to_write_an_address(server: FakeServer, url: str):
    server.behaviours = [answers()]
    engine = ServerEngine(url.format(server.url), "small")
    sample_one(engine)
    assert [path for path, _, _ in server.seen] == ["/v1/models", "/v1/chat/completions"]


def test_an_address_with_a_path(server: FakeServer):
    server.behaviours = [answers()]
    sample_one(ServerEngine(f"{server.url}/team/llm/v1", "small"))
    assert [path for path, _, _ in server.seen] == ["/team/llm/v1/models", "/team/llm/v1/chat/completions"]


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://[::1", "http://a?x=1"),
        *("http://a#b", "http://a b", "http://a\r\nX: y", "http://\u00e9", "http:/a"),
    ],
)
def test_impossible_addresses_are_refused(url: str):
    with pytest.raises(ConfigError, match="is no address of a server; write it like http://localhost:8000"):
        normalise_url(url)


def test_an_address_with_a_password_is_refused_without_being_shown():
    with pytest.raises(ConfigError, match="must not hold a user or a password") as error:
        normalise_url(f"http://me:{SECRET}@localhost:8000")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"template": "chatml"}, 'no template = "chatml"; use "chat" or "text"'),
        ({"concurrency": 0}, "concurrency = 0"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
    ],
)
def test_impossible_settings_are_refused(server: FakeServer, values: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as error:
        make(server, **values)
    assert words in str(error.value) and server.seen == []


def test_requests_that_a_server_cannot_answer(server: FakeServer):
    engine = make(server)
    with pytest.raises(ConfigError, match='"0/0" has no messages'):
        engine.submit(request(messages=[]))
    with pytest.raises(ConfigError, match='"0/0" has stop ids, but a server takes only stop strings'):
        engine.submit(request(stop_ids=(1,)))
    engine.submit(request(tokens=[]))  # it needs none
    assert [e.id for e in engine.poll(30)] == ["0/0"]


def test_a_server_that_counts_no_tokens_gives_one_warning(server: FakeServer, caplog: pytest.LogCaptureFixture):
    server.behaviours = [lambda h, _: h.reply({"choices": chat()["choices"]})]
    engine = make(server)
    sample(engine, [request(0, i) for i in range(5)])
    assert caplog.text.count("does not say how many tokens") == 1


def test_a_server_that_does_not_say_why_answers_end_gives_one_warning(
    server: FakeServer, caplog: pytest.LogCaptureFixture
):
    server.behaviours = [answers("4", None)]
    sample(make(server), [request(0, i) for i in range(5)])
    assert caplog.text.count("does not say why an answer ended") == 1
    server.behaviours = [answers("4", "stop")]
    caplog.clear()
    sample(make(server), [request(0, i) for i in range(5)])
    assert "why an answer ended" not in caplog.text


def test_a_reply_without_end_is_an_error_in_plain_words(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(site, "MAX_REPLY_BYTES", 1 << 20)
    server.behaviours = [answers("a" * (1 << 21))]
    with pytest.raises(EngineError, match="the reply is longer than 1 MiB"):
        sample_one(make(server, pause=Pauses()))


def test_a_bug_in_every_thread_leaves_room_for_others(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    """A thread that a bug ended is not counted any more: else no thread would be left to send a later request."""
    engine = make(server, concurrency=2)
    bugs = iter([True] * 3)
    real = server_module.read_sample

    def read(*args: Any) -> Any:
        if next(bugs, False):
            raise KeyError("bug")
        return real(*args)

    monkeypatch.setattr(server_module, "read_sample", read)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for _ in range(3):
        engine.submit(request())
        with pytest.raises(EngineError, match="a thread of the server engine failed"):
            engine.poll(30)
    engine.submit(request())
    assert [e.id for e in engine.poll(30)] == ["0/0"]


@pytest.mark.parametrize("started_before", [0, 1])
def test_a_thread_that_cannot_be_started_is_told_or_not_needed(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, started_before: int
):
    holding, go_on = threading.Event(), threading.Event()

    def holds(h: Handler, body: dict[str, Any]) -> None:
        holding.set()
        assert go_on.wait(30)
        h.reply(chat())

    server.behaviours = [holds]
    engine = make(server)
    if started_before:
        engine.submit(request(0, 0))
        assert holding.wait(30)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        # The server's own threads are started already, or not needed.
        patch.setattr(server_module.threading.Thread, "start", refuse)
        if started_before:
            engine.submit(request(0, 1))
        else:
            with pytest.raises(EngineError, match=r"no more threads \(can't start new thread\).*--slots"):
                engine.submit(request(0, 1))
    go_on.set()
    if not started_before:
        assert engine.idle
        engine.submit(request(0, 1))
    ended = []
    while not engine.idle:
        ended += [e.id for e in engine.poll(30)]
    assert sorted(ended) == (["0/0", "0/1"] if started_before else ["0/1"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_thread_raises_instead_of_waiting_for_ever(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    def bug(*args: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(server_module, "read_sample", bug)
    engine = make(server)
    engine.submit(request())
    with pytest.raises(EngineError, match="a thread of the server engine failed"):
        engine.poll(30)
    # The thread must end before the test does, so that pytest counts its traceback to this test.
    for thread in threading.enumerate():
        if thread.name == "cohort-server":
            thread.join(30)


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored if the tests run in the background
from cohort.engines.server import ServerEngine
from tests.helpers.engine_conformance import request
engine = ServerEngine("{url}", "small")
for i in range(3):
    engine.submit(request(0, i))
try:
    print("polling", flush=True)
    engine.poll(60)
finally:
    print("under way:", len(engine._pending))
"""


def test_an_interrupt_ends_the_engine_at_once_and_closes_its_connections(server: FakeServer):
    waiting, gone = threading.Barrier(4), threading.Barrier(4)

    def holds(h: Handler, _: dict[str, Any]) -> None:
        waiting.wait(30)
        assert h.rfile.read(1) == b""
        gone.wait(30)

    server.behaviours = [holds]
    root = SOURCE.parent
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{root}"}
    program = [sys.executable, "-c", INTERRUPTED.format(url=server.url)]
    with subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        waiting.wait(60)
        # All requests may have arrived before the program has come so far.
        assert process.stdout is not None and process.stdout.readline() == "polling\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)  # far less than the time-out of a request
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    assert out == "under way: 0\n"
    gone.wait(30)
