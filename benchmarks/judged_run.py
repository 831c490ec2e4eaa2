"""A run whose reward is a slow and faulty judge: how long scoring takes, and whether a killed run ends the same.

python benchmarks/judged_run.py [--kills 3] [--steps 12]

1. 32 x 8 answers go to a judge that takes one second per answer, 64 at once. The figure is the time until all have a
   score, the start of the worker included.
2. A run is trained with a judge that fails 5% of the requests and never answers 2% of them, and is killed and resumed.
   Kills come from the judge, between a score and its reply, so that the resumed run must ask about that answer again.
   The score of an answer changes every time it is asked. Then a run is trained without a kill, by a judge that gives
   every answer the score that it got last in the first run. Both can only end alike if a resumed run reads the scores
   that it had used from its journal. Compared are the metrics of every step, weights and optimizer state. No answer
   may be scored 0 for a fault, and none may be left out. Faults, hangs, kills and repeated questions must occur.

It prints a line per part and exits with 1 if a part does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TASK = """
import cohort

judge = cohort.Judge(url="{url}", model="judge", question="How good is it?", cache=False, retries=0, seconds=2.0)


@cohort.task("judged")
class Judged:
    accuracy = None

    def rows(self, split):
        if split == "train":
            yield from ({{"id": str(n), "n": n}} for n in range(64))

    def prompt(self, row):
        return f"{{row['n']}}+{{row['n'] + 1}}=?"

    async def score(self, row, answer):
        return await judge.score(self.prompt(row), answer.text)
"""


PROMPTS, SAMPLES = 8, 4  # of a step


class FaultyServer(ThreadingHTTPServer):
    """A judge that takes `delay` seconds, and sometimes fails or never answers."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, delay: float, faults: float = 0.0, hangs: float = 0.0, fixed: dict[str, int] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fixed = fixed or {}  # scores by content, in place of new ones
        self.given: dict[str, int] = {}  # the last score by content
        self.delay, self.faults, self.hangs = delay, faults, hangs
        self.random = random.Random(0)
        self.lock = threading.Lock()
        self.num_asked: Counter[str] = Counter()  # how often each content got a score
        self.num_faults = self.num_hangs = 0
        self.victim: tuple[int, int] | None = None  # a process to kill, and the number of scores at which to kill it

    def kill_victim_if_due(self) -> None:
        """Kills the victim if enough scores were given. The lock must be held."""
        if self.victim is not None and self.num_asked.total() >= self.victim[1]:
            os.kill(self.victim[0], signal.SIGKILL)
            self.victim = None

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints a traceback, unless the client has left: it was killed, or does not wait any longer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    """Gives a score by the answer's content, and by how often the answer was asked about."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        text = json.loads(body)["messages"][-1]["content"]
        with self.server.lock:
            luck = self.server.random.random()
        if luck < self.server.hangs:
            self.server.num_hangs += 1
            time.sleep(30.0)
            self.close_connection = True
            return
        time.sleep(self.server.delay)
        if luck < self.server.hangs + self.server.faults:
            self.server.num_faults += 1
            self._reply(500, {"error": {"message": "out of luck"}})
            return
        answer = re.search(r"\[begin answer (\w+)\]\n(.*)\n\[end answer \1\]", text, re.DOTALL)
        assert answer is not None
        key = hashlib.sha256(text.encode()).hexdigest()
        with self.server.lock:
            self.server.num_asked[key] += 1
            number = self.server.num_asked[key]
            self.server.kill_victim_if_due()
        # Never 0, so that a score of 0 could only come from a fault.
        score = self.server.fixed.get(key, 1 + (int(key[:6], 16) + 3 * number + len(answer[2])) % 9)
        self.server.given[key] = score
        self._reply(200, {"choices": [{"message": {"content": f"Score: {score}"}, "finish_reason": "stop"}]})

    def _reply(self, status: int, body: object) -> None:
        """Sends a JSON reply."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def serve(server: FaultyServer) -> FaultyServer:
    """Starts a server in a thread and returns it."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def measure_wait(folder: Path) -> float:
    """Returns the seconds until 256 answers are scored by a judge of one second, 64 at once."""
    from cohort.config.scoring import ScoringConfig
    from cohort.scoring.start import start_scorer
    from cohort.tasks.base import TASKS, make_plain_answer

    server = serve(FaultyServer(1.0))
    file = folder / "waiting.py"
    file.write_text(TASK.format(url=server.url).replace('"judged"', '"waiting"'))
    task = TASKS.find(f"{file}:waiting")()
    rows = list(task.rows("train"))[:32]
    began = time.perf_counter()
    with start_scorer(task, ScoringConfig(concurrency=64)) as pool:
        outcomes = pool.score([(row, make_plain_answer(f"answer {n}")) for row in rows for n in range(8)])
    seconds = time.perf_counter() - began
    server.shutdown()
    assert len(outcomes) == 256 and not any(outcome.failure for outcome in outcomes)
    return seconds


def train(folder: Path, name: str, steps: int, server: FaultyServer, kills: int) -> Path:
    """Trains a run, killed `kills` times by the server at even distances, and returns its directory.

    Exits with a message if a process fails, or ends before it is killed.
    """
    task = folder / "judged.py"
    task.write_text(TASK.format(url=server.url))
    command = [sys.executable, "-m", "cohort"]
    settings = [f"--batch.prompts={PROMPTS}", f"--batch.samples={SAMPLES}", f"--steps={steps}", "--save.every=1"]
    settings += ["--eval.problems=4", "--scoring.concurrency=64", "--scoring.seconds=4", "--threads=1", "--log=plain"]
    run = folder / name
    words = ["train", "quickstart", f"--task={task}:judged", f"--out={folder}", f"--name={name}", *settings]
    for number in range(kills + 1):
        process = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if number < kills:
            # The samples of a step may be equal, and are asked once then, so that there are fewer scores than samples.
            server.victim = process.pid, (number + 1) * steps * PROMPTS // (kills + 1)
        _, errors = process.communicate(timeout=600)
        words = ["resume", str(run), "--log=plain"]
        wanted = -signal.SIGKILL if number < kills else 0
        if process.returncode != wanted:
            raise SystemExit(f"{name} ended with {process.returncode}, not {wanted}: {errors[-2000:]}")
    return run


def read_run(run: Path) -> dict[str, object]:
    """Returns what two equal runs have in common: metrics without times, weights and optimizer state."""
    connection = sqlite3.connect(run / "run.db")
    rows = connection.execute("select step, name, value from metrics order by step, name").fetchall()
    metrics = {f"{step} {name}": value for step, name, value in rows if not name.startswith("time/")}
    last = sorted((run / "checkpoints").iterdir())[-1]
    files = {
        str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(last.rglob("*.safetensors"))
    }
    return {"metrics": metrics, "files": files}


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="judged-"))
    os.environ["COHORT_CACHE"] = str(folder / "cache")
    try:
        seconds = measure_wait(folder)
        print(f"waiting: {seconds:.2f} s for 256 answers, 64 at once, judge of 1 s (must be below 8)")
        broken = serve(FaultyServer(0.2, faults=0.05, hangs=0.02))
        killed = read_run(train(folder, "killed", options.steps, broken, options.kills))
        whole = serve(FaultyServer(0.2, faults=0.05, hangs=0.02, fixed=broken.given))
        straight = read_run(train(folder, "straight", options.steps, whole, 0))
        same = straight == killed
        metrics = killed["metrics"]
        assert isinstance(metrics, dict)
        failed = sum(value for name, value in metrics.items() if name.endswith("samples/failed"))
        print(f"faults: {broken.num_faults} + {broken.num_hangs} hangs, then {whole.num_faults} + {whole.num_hangs}")
        again = sum(count - 1 for count in broken.num_asked.values())
        print(f"after {options.kills} kills: equal = {same}, samples without a score {failed:g}, asked again {again}")
        if not same or failed or seconds >= 8:
            raise SystemExit(1)
        if not (broken.num_faults and broken.num_hangs and again >= options.kills):
            raise SystemExit("too few faults, hangs or repeated questions occurred to prove anything: raise --steps")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
