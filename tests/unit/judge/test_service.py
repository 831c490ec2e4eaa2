"""What goes wrong between Cohort and the server of a judge: retries, refusals, keys, limits and the cache."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import multiprocessing
import os
import ssl
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cohort
from cohort.errors import CohortError, ServiceError
from cohort.judge import cache
from cohort.judge.service import MAX_PAUSE_SECONDS, ServiceConfig, get_service
from cohort.scoring.concurrent import ConcurrentServer
from cohort.scoring.wire import Item, Limits, Reply
from cohort.scoring.worker import make_reply
from cohort.system import http_connection
from cohort.tasks.base import make_plain_answer
from tests.helpers.fake_server import Behaviour, FakeServer, breaks_off, chat, fails, hangs_up, raw, resets
from tests.helpers.judge_server import (
    KEY,
    FakeClock,
    grades,
    hangs,
    in_chunks,
    make_judge,
    says,
    speaks,
    wants_key,
)

GOOD = json.dumps(chat("Fine.\nScore: 3")).encode()


def score(judge: cohort.Judge, answer: str = "***") -> float:
    return asyncio.run(judge.score("Write stars.", answer)).parts["score"]


def fail_to_score(judge: cohort.Judge) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        score(judge)
    assert isinstance(caught.value, CohortError) and "\n" not in str(caught.value)
    return caught.value


# ---- replies that are odd and good


@pytest.mark.parametrize(
    "behaviour",
    [
        in_chunks(GOOD),
        raw(GOOD, Content_Type="text/html; charset=utf-16"),
        speaks(b"HTTP/1.0 200 OK\r\n\r\n" + GOOD),
        speaks(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD),
    ],
)
def test_replies_in_all_forms_of_http(server: FakeServer, clock: FakeClock, behaviour: Behaviour) -> None:
    server.behaviours = [behaviour]
    assert score(make_judge(server)) == 0.3 and clock.pauses == []


# ---- failures that may pass


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (fails(429, {"error": {"message": "slow\ndown"}}), "429 slow down"),
        (fails(500, b"<html>oops</html>"), "500 <html>oops</html>"),
        (fails(503), "503"),
        (fails(408), "408"),
        (raw(json.dumps({"error": {"message": "busy", "code": 503}}).encode()), "503 busy"),
        (raw(b"{'score': 3}"), "no JSON"),
        (raw(b""), "a reply of 0 bytes that is no JSON"),
        (raw(b"[" * 100_000), "no JSON"),
        (raw(GOOD[:-5]), "no JSON"),
        (raw(b"[]"), "without choices"),
        (raw(b'{"choices": []}'), "without choices"),
        (raw(b'{"choices": [{"message": null}]}'), "without choices"),
        (raw(b'{"choices": [{"message": {"content": null}}]}'), "without choices"),
        (breaks_off, "the connection ended before the reply did"),
        (hangs_up, "the connection ended before the reply did"),
        (resets, "Connection"),
        (in_chunks(GOOD, sizes=b"zz"), "a chunk without a length"),
        (in_chunks(GOOD, sizes=b"fffffff"), "longer than 16 MiB"),
        (speaks(b"220 mail.example ESMTP\r\n\r\n"), "not HTTP/1"),
        (speaks(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"), "no length"),
        (speaks(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"), "longer than 16 MiB"),
        (speaks(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17) + b"\r\n\r\n"), "longer than 64 KiB"),
        (speaks(b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 200 + b"\r\n"), "more than 100 headers"),
        (says("I like it."), 'no line "Score: ..."'),
        (says("Score: 11"), "from 0 to 10"),
        (says("Score: 1", "length"), "cut off at max_tokens = 512"),
        (says(None, "length"), "cut off at max_tokens = 512"),
        (says("Score: 1", "content_filter"), "filter"),
    ],
)
def test_a_failure_is_tried_again_and_then_raised(
    server: FakeServer, clock: FakeClock, behaviour: Behaviour, words: str
) -> None:
    server.behaviours = [behaviour, behaviour, grades()]
    assert score(make_judge(server)) == 0.3 and len(server.asked) == 3
    server.behaviours = [behaviour]
    server.seen.clear()
    error = fail_to_score(make_judge(server, retries=2, cache=False))
    assert words in str(error) and "failed 3 times" in str(error) and server.url in str(error)
    assert not error.lasting and len(server.asked) == 3


def test_a_server_that_is_not_there(clock: FakeClock) -> None:
    judge = cohort.Judge(url="http://127.0.0.1:9", model="small", question="?", retries=1)
    error = fail_to_score(judge)
    assert "http://127.0.0.1:9/v1 failed 2 times" in str(error) and "Make sure that the server runs" in str(error)


def test_the_next_address_of_a_server_is_tried(server: FakeServer, clock: FakeClock) -> None:
    """The host has an address where nothing listens before the one of the server."""
    judge = make_judge(server, retries=0)

    async def score_with_addresses(*addresses: str) -> float:
        pool = judge._service._get_state().pool
        pool._addresses = list(addresses)
        return (await judge.score("Write stars.", "***")).parts["score"]

    assert asyncio.run(score_with_addresses("127.0.0.2", "127.0.0.1")) == 0.3
    assert asyncio.run(score_with_addresses()) == 0.3


def test_a_server_that_hangs_is_given_up(server: FakeServer) -> None:
    release = threading.Event()
    server.behaviours = [hangs(release), grades()]
    try:
        assert score(make_judge(server, seconds=0.5)) == 0.3
        server.behaviours = [hangs(release)]
        assert "no reply within 0.5 seconds" in str(
            fail_to_score(make_judge(server, seconds=0.5, retries=0, cache=False))
        )
    finally:
        release.set()


def test_a_cancelled_request_ends_at_once_and_leaves_no_trace(server: FakeServer) -> None:
    release = threading.Event()
    server.behaviours = [hangs(release), grades()]
    judge = make_judge(server)

    async def cancel_first() -> float:
        first = asyncio.create_task(judge.score("Write stars.", "***"))
        while not server.asked:
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return (await judge.score("Write stars.", "***")).parts["score"]

    try:
        assert asyncio.run(cancel_first()) == 0.3
    finally:
        release.set()


def test_pauses_double_and_the_content_decides_them(server: FakeServer, clock: FakeClock) -> None:
    server.behaviours = [fails(500)]
    judge = make_judge(server, retries=8, cache=False)
    fail_to_score(judge)
    first, clock.pauses = clock.pauses, []
    fail_to_score(judge)
    assert clock.pauses == first
    for n, pause in enumerate(first):
        usual = min(MAX_PAUSE_SECONDS, 2.0**n)
        assert usual / 2 <= pause < usual
    clock.pauses = []
    with pytest.raises(ServiceError):
        score(judge, "another answer")
    assert clock.pauses != first


def test_a_server_may_ask_for_a_pause(server: FakeServer, clock: FakeClock) -> None:
    server.behaviours = [
        fails(429, Retry_After="7"),
        fails(503, Retry_After="0"),
        fails(429, Retry_After="soon"),
        grades(),
    ]
    assert score(make_judge(server)) == 0.3
    assert 7 <= clock.pauses[0] < 8 and 1 <= clock.pauses[1] < 2 and 2 <= clock.pauses[2] < 4
    server.behaviours = [fails(429, {"error": "quota"}, Retry_After="3600")]
    error = fail_to_score(make_judge(server, cache=False))
    assert "asks for a pause of 3600 seconds: 429 quota" in str(error) and len(clock.pauses) == 3


def test_a_judge_that_forgot_the_form_is_reminded(server: FakeServer, clock: FakeClock) -> None:
    server.behaviours = [says("Seven points."), grades()]
    judge = make_judge(server)
    assert score(judge) == 0.3 and clock.pauses == []
    first, second = (body["messages"][-1]["content"] for body in server.asked)
    assert second.startswith(first) and "did not have the required form" in second
    # The reply is stored for the request as it was made.
    assert score(judge) == 0.3 and len(server.asked) == 2


# ---- failures that last


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (fails(400, {"error": {"message": "context\nlength"}}), ("400 context length", "length of the answers")),
        (fails(401, {"error": {"message": "who?"}}), ("401 who?", 'key="NAME"')),
        (fails(403), ("403", 'key="NAME"')),
        (fails(404, {"detail": "Not Found"}), ("404 Not Found", "a model that it serves")),
        (fails(422), ("422", "max_tokens")),
        (fails(301, Location="https://elsewhere/v1"), ("301 moved to https://elsewhere/v1", "Redirects")),
    ],
)
def test_a_refusal_is_final_and_names_a_remedy(
    server: FakeServer, clock: FakeClock, behaviour: Behaviour, words: tuple[str, ...]
) -> None:
    server.behaviours = [behaviour]
    error = fail_to_score(make_judge(server))
    assert all(word in str(error) for word in (*words, f"{server.url}/v1 refuses"))
    assert error.lasting and len(server.asked) == 1 and clock.pauses == []


def test_a_certificate_must_be_trusted(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshake itself is the standard library's; here it reports what it reports for an unknown issuer."""
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    contexts: list[Any] = []

    async def open_connection(*_: object, **given: Any) -> None:
        contexts.append(given["ssl"])
        raise untrusted

    monkeypatch.setattr(http_connection.asyncio, "open_connection", open_connection)
    error = fail_to_score(make_judge(server, url=server.url.replace("http:", "https:")))
    assert "self-signed certificate" in str(error) and "SSL_CERT_FILE" in str(error) and error.lasting
    [context] = contexts
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


def test_proxies_of_the_environment_are_not_used(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert score(make_judge(server)) == 0.3


def test_an_answer_that_runs_out_of_time_says_what_the_judge_said_last(
    server: FakeServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first pause is longer than the limit.
    monkeypatch.setattr(clock, "sleep", lambda seconds: asyncio.Event().wait())
    server.behaviours = [fails(503, {"error": {"message": "overloaded"}})]
    judge = make_judge(server, cache=False)

    class Judged:
        name, parts, accuracy, optional_parts = "judged", ("score",), None, False

        async def score(self, row: dict, answer: Any) -> Any:
            return await judge.score("Write stars.", answer.text)

    replies: list[Reply] = []
    hello: Any = SimpleNamespace(limits=Limits(seconds=0.4))
    worker = ConcurrentServer(Judged(), hello, replies.append, make_reply)  # type: ignore[arg-type]
    item = Item(number=3, row={"id": "r"}, answer=make_plain_answer("***"))
    asyncio.run(worker._score(item))
    [reply] = replies
    assert reply.failure.startswith("TimeoutError: no score within 0.4 s (--scoring.seconds); ")
    assert "the judge's last error was: 503 overloaded" in reply.failure


# ---- the key


def test_the_key_is_sent_and_appears_nowhere_else(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.behaviours = [wants_key(grades(words=f"I was sent {KEY}."))]
    judge = make_judge(server, key="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    verdict = asyncio.run(judge.score("Write stars.", "***"))
    assert verdict.reason == "I was sent [key]."
    stored = [path.read_text() for path in (tmp_path / "cache").rglob("*.json")]
    assert len(stored) == 1 and KEY not in stored[0] and "JUDGE_KEY" not in stored[0]
    assert KEY not in repr(judge)
    # The server repeats a wrong key, and the message does not.
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong-key-42")
    error = fail_to_score(make_judge(server, key="JUDGE_KEY", cache=False))
    assert "Set the environment variable JUDGE_KEY" in str(error) and "[key]" in str(error)
    for said in (str(error), repr(error), str(error.__cause__), str(error.__context__)):
        assert "sk-wrong-key-42" not in said
    for failure in (fails(500, b"sk-wrong-key-42"), raw(b"not JSON: sk-wrong-key-42")):
        server.behaviours = [failure]
        assert "sk-wrong" not in str(fail_to_score(make_judge(server, key="JUDGE_KEY", retries=0, cache=False)))


@pytest.mark.parametrize(
    "write",
    [
        lambda key: base64.b64encode(f"user:{key}".encode()).decode(),
        lambda key: key.encode().hex().upper(),
        lambda key: json.dumps(key).replace("/", "\\/"),
    ],
)
def test_a_coded_key_in_a_reply_is_not_kept(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write: Callable[[str], str]
) -> None:
    key = "sk-proj/0123456789"
    monkeypatch.setenv("JUDGE_KEY", key)
    judge = make_judge(server, key="JUDGE_KEY", retries=0)
    server.behaviours = [grades(words=f"I was sent {write(key)}.")]
    verdict = asyncio.run(judge.score("Write stars.", "***"))
    assert write(key)[4:-4] not in verdict.reason and "[key]" in verdict.reason
    assert not any(write(key)[4:-4] in path.read_text() for path in (tmp_path / "cache").rglob("*.json"))
    server.behaviours = [raw(b"no JSON: " + b"." * 55 + write(key).encode())]
    error = fail_to_score(make_judge(server, key="JUDGE_KEY", retries=0, cache=False))
    assert "no JSON" in str(error) and write(key)[4:10] not in str(error)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_names_the_flag(server: FakeServer, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    error = fail_to_score(make_judge(server, key="JUDGE_KEY"))
    assert "--scoring.env JUDGE_KEY" in str(error) and error.lasting and not server.asked


def test_a_key_cannot_add_headers(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk\r\nX-Evil: 1")
    error = fail_to_score(make_judge(server, key="JUDGE_KEY"))
    assert "no key has" in str(error) and "Evil" not in str(error) and not server.asked


# ---- limits


def test_requests_are_spaced_to_the_rate(server: FakeServer, clock: FakeClock) -> None:
    judge = make_judge(server, requests_per_minute=120, cache=False)

    async def score_all() -> None:
        await asyncio.gather(*(judge.score("Write stars.", "*" * n) for n in range(6)))

    asyncio.run(score_all())
    # The first begins at once, and the clock moves only by these pauses.
    assert sum(clock.pauses) == pytest.approx(2.5) and max(clock.pauses) <= 0.5


def test_cancelled_requests_take_no_place_in_the_rate(server: FakeServer, clock: FakeClock) -> None:
    judge = make_judge(server, requests_per_minute=60, cache=False)

    async def cancel_most() -> None:
        tasks = [asyncio.create_task(judge.score("Write stars.", "*" * n)) for n in range(50)]
        await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await judge.score("Write stars.", "**")

    asyncio.run(cancel_most())
    assert sum(clock.pauses) <= 2.0


def test_judges_with_equal_settings_share_their_limits(server: FakeServer) -> None:
    first, second = make_judge(server), make_judge(server, question="Other?")
    assert first._service is second._service is not make_judge(server, concurrency=3)._service


def test_a_server_that_closes_idle_connections_costs_no_retry(server: FakeServer, clock: FakeClock) -> None:
    def closes_quietly(h: Any, body: dict[str, Any]) -> None:
        grades()(h, body)
        h.close_connection = True

    server.behaviours = [closes_quietly]
    judge = make_judge(server, concurrency=1, retries=0, cache=False)

    async def score_all() -> list[cohort.Verdict]:
        return await asyncio.gather(*(judge.score("Write stars.", "*" * n) for n in range(8)))

    assert [v.parts["score"] for v in asyncio.run(score_all())] == [n / 10 for n in range(8)]
    assert clock.pauses == [] and len(server.asked) == 8


def test_connections_are_used_again_and_none_outlives_the_loop(server: FakeServer) -> None:
    judge = make_judge(server, concurrency=2, cache=False)

    async def score_all() -> None:
        await asyncio.gather(*(judge.score("Write stars.", "*" * n) for n in range(10)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            asyncio.run(score_all())
            gc.collect()
    assert server.num_connections <= 6 and [str(w.message) for w in caught] == []
    assert len(judge._service._loops) == 1  # those of ended loops are dropped


# ---- the cache


def list_entries(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache" / "judge").rglob("*") if path.is_file()]


def test_a_reply_is_stored_by_the_content_of_the_request(server: FakeServer, tmp_path: Path) -> None:
    judge = make_judge(server)
    assert [score(judge), score(judge)] == [0.3, 0.3] and len(server.asked) == 1
    for changed in (
        {"model": "large"},
        {"question": "?"},
        {"max_tokens": 9},
        {"temperature": 0.5},
        {"url": server.url + "/v2"},
    ):
        assert score(make_judge(server, **changed)) == 0.3
    score(judge, "****")
    assert len(server.asked) == 7 == len(list_entries(tmp_path))
    # Limits of requests are not in them.
    assert score(make_judge(server, retries=0, concurrency=1, seconds=3.0)) == 0.3 and len(server.asked) == 7
    assert score(make_judge(server, cache=False)) == 0.3 and len(server.asked) == 8


@pytest.mark.parametrize("damage", [b"", b"{", b'{"reply": "Score: 9"}\n0', b"\xff\xfe", b'["Score: 9"]\n', b"null\n"])
def test_a_damaged_entry_counts_as_none(server: FakeServer, tmp_path: Path, damage: bytes) -> None:
    judge = make_judge(server)
    score(judge)
    [entry] = list_entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    assert score(judge) == 0.3 and len(server.asked) == 2 and entry.read_bytes() == whole


def test_an_entry_that_no_longer_can_be_read_is_asked_again(server: FakeServer, tmp_path: Path) -> None:
    judge = make_judge(server)
    score(judge)
    [entry] = list_entries(tmp_path)
    cache.remember_reply(entry.stem, "no score here")
    assert score(judge) == 0.3 and len(server.asked) == 2


def test_failures_are_not_stored(server: FakeServer, tmp_path: Path) -> None:
    for behaviour in (fails(500), fails(400), says("no"), raw(b"x")):
        server.behaviours = [behaviour]
        fail_to_score(make_judge(server, retries=1))
    assert list_entries(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_no_failure(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    assert score(make_judge(server)) == 0.3


def write_and_read(folder: str, number: int) -> int:
    """Writes one entry many times and returns how many reads found something else than one of the texts."""
    os.environ["COHORT_CACHE"] = folder
    wrong = 0
    for _ in range(200):
        cache.remember_reply("0" * 32, str(number) * 3000)
        found = cache.recall_reply("0" * 32)
        wrong += found is None or len(set(found)) != 1 or len(found) != 3000
    return wrong


def test_processes_that_write_the_same_entry_never_read_half_of_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(write_and_read, [(str(tmp_path), n) for n in range(3)]) == [0, 0, 0]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0" * 32 + ".json"]


def test_services_are_kept_by_their_settings() -> None:
    config = ServiceConfig(url="http://h/v1", path="/v1/chat/completions")
    assert get_service(config) is get_service(ServiceConfig(url="http://h/v1", path="/v1/chat/completions"))
