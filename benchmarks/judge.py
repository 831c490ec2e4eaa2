"""Times a judge: many answers, graded at the same time by a local server that takes a second for each.

python benchmarks/judge.py [--answers 256] [--concurrency 64] [--delay 1.0]

The server stands in for a language model: it sleeps, then scores an answer by its length. The figure is what Cohort
adds to the time of the server, which is answers / concurrency * delay at best. It prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import cohort


class SlowServer(ThreadingHTTPServer):
    """A server that replies after `delay` seconds, and counts requests under way."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, delay: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.delay = delay
        self.lock = threading.Lock()
        self.num_now = self.num_most = self.num_requests = 0


class Handler(BaseHTTPRequestHandler):
    """Grades the answer of a request by its length: a tenth of a point per character."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SlowServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.num_requests += 1
            self.server.num_now += 1
            self.server.num_most = max(self.server.num_most, self.server.num_now)
        time.sleep(self.server.delay)
        text = body["messages"][-1]["content"]
        answer = re.search(r"\[begin answer (\w+)\]\n(.*)\n\[end answer \1\]", text, re.DOTALL)
        assert answer is not None
        reply = {"message": {"content": f"Long.\nScore: {min(10.0, len(answer[2]) / 10):g}"}, "finish_reason": "stop"}
        data = json.dumps({"choices": [reply]}).encode()
        with self.server.lock:
            self.server.num_now -= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def grade(judge: cohort.Judge, num: int) -> list[float]:
    """Returns the scores of `num` different answers, graded at the same time."""
    verdicts = await asyncio.gather(*(judge.score("Write.", f"{n:04d}" + "x" * (n % 97)) for n in range(num)))
    return [verdict.parts["score"] for verdict in verdicts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--delay", type=float, default=1.0)
    options = parser.parse_args()
    server = SlowServer(options.delay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COHORT_CACHE"] = folder
        judge = cohort.Judge(
            url=f"http://127.0.0.1:{server.server_port}/v1",
            model="length",
            question="How long is the answer?",
            concurrency=options.concurrency,
        )
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            scores = asyncio.run(grade(judge, options.answers))
            seconds.append(time.perf_counter() - begin)
            assert [round(100 * score) for score in scores] == [min(100, 4 + n % 97) for n in range(options.answers)]
    result = {
        "answers": options.answers,
        "concurrency": options.concurrency,
        "delay": options.delay,
        "seconds": round(seconds[0], 2),
        "seconds_cached": round(seconds[1], 3),
        "requests": server.num_requests,
        "most_at_once": server.num_most,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "python": platform.python_version(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
