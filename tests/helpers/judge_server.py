"""A stand-in for the server of a judge: it grades by a rule that tests can work out, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import cohort
from cohort.judge import service
from tests.helpers.fake_server import Behaviour, FakeServer, Handler, chat

KEY = "sk-secret-0123456789"


class FakeClock(service.Clock):
    """A clock that only moves when something waits. `pauses` has every wait in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def get_seconds(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        # Other requests go on while this one waits.
        await asyncio.sleep(0)
        self.now += seconds


def find_answers(body: dict[str, Any]) -> list[str]:
    """Returns the answers between the fence lines of a request, in the order shown."""
    text = body["messages"][-1]["content"]
    return [found[2] for found in re.finditer(r"\[begin (answer[ \d]* \w{16})\]\n(.*?)\n\[end \1\]", text, re.DOTALL)]


def count_stars(answer: str) -> int:
    """Returns the score that an honest judge of this stand-in gives: the number of stars in an answer, at most 10."""
    return min(10, answer.count("*"))


def grades(rule: Callable[[str], float] = count_stars, words: str = "I counted.") -> Behaviour:
    """Replies with the score of the answer, in the form that is asked for."""

    def behave(h: Handler, body: dict[str, Any]) -> None:
        scores = [rule(answer) for answer in find_answers(body)]
        content = body["messages"][-1]["content"]
        if "response_format" in body:
            value: dict[str, Any] = {"reason": words}
            if '"better"' in content:
                value["better"] = "tie" if scores[0] == scores[1] else 1 if scores[0] > scores[1] else 2
            elif '"scores"' in content:
                value["scores"] = scores
            else:
                value["score"] = scores[0]
            h.reply(chat(json.dumps(value)))
            return
        if "\nBetter: 1" in content:
            line = "Better: " + ("tie" if scores[0] == scores[1] else "1" if scores[0] > scores[1] else "2")
        elif "\nScores: " in content:
            line = "Scores: " + ", ".join(f"{n}={score:g}" for n, score in enumerate(scores, 1))
        else:
            line = f"Score: {scores[0]:g}"
        h.reply(chat(f"{words}\n{line}"))

    return behave


def says(content: Any, reason: str = "stop") -> Behaviour:
    """Replies with a text, whatever is asked."""
    return lambda h, _: h.reply(chat(content, reason))


def hangs(release: threading.Event) -> Behaviour:
    """Gives no reply until `release` is set, and then closes the connection."""

    def behave(h: Handler, _: dict[str, Any]) -> None:
        release.wait(30)
        h.close_connection = True

    return behave


def waits_for(num: int, then: Behaviour) -> Behaviour:
    """Replies as `then` once `num` requests are under way, so that fewer never get a reply (until 20 s have passed)."""
    barrier = threading.Barrier(num, timeout=20)

    def behave(h: Handler, body: dict[str, Any]) -> None:
        barrier.wait()
        then(h, body)

    return behave


def in_chunks(data: bytes, sizes: bytes | None = None) -> Behaviour:
    """Replies with chunked transfer encoding, seven bytes per chunk. `sizes` replaces the lengths, to be wrong."""

    def behave(h: Handler, _: dict[str, Any]) -> None:
        h.send_response(200)
        h.send_header("Transfer-Encoding", "chunked")
        h.end_headers()
        for n in range(0, len(data), 7):
            piece = data[n : n + 7]
            h.wfile.write((sizes or b"%x" % len(piece)) + b";name=value\r\n" + piece + b"\r\n")
        h.wfile.write(b"0\r\nTrailer: x\r\n\r\n")

    return behave


def speaks(data: bytes) -> Behaviour:
    """Sends exactly these bytes, status line and headers included, and closes the connection."""

    def behave(h: Handler, _: dict[str, Any]) -> None:
        h.wfile.write(data)
        h.close_connection = True

    return behave


def wants_key(then: Behaviour) -> Behaviour:
    """Replies as `then` to requests with KEY. Others are refused, and the refusal repeats what they sent."""

    def behave(h: Handler, body: dict[str, Any]) -> None:
        sent = h.headers.get("Authorization", "")
        if sent == f"Bearer {KEY}":
            then(h, body)
        else:
            h.reply({"error": {"message": f"Incorrect API key provided: {sent}"}}, 401)

    return behave


def list_paths(server: FakeServer) -> list[str]:
    """Returns the paths of all requests."""
    return [path for path, _, _ in server.seen]


def make_judge(server: FakeServer, **settings: Any) -> cohort.Judge:
    """Returns a judge of the server that counts stars."""
    given: dict[str, Any] = {"url": f"{server.url}/v1", "model": "small", "question": "How many stars?"}
    return cohort.Judge(**{**given, "seconds": 20.0, **settings})
