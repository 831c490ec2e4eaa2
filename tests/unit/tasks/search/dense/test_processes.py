"""Processes that embed: the same vectors as in one process, their threads, their ends, and what is said of them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cohort.errors import TaskError
from cohort.system.process import THREAD_VARIABLES
from cohort.tasks.search.dense import processes
from cohort.tasks.search.dense.model import SentenceModel
from cohort.tasks.search.dense.processes import EmbeddingProcess, OwnEmbedder, embed_passages, open_embedder, serve
from tests.helpers.processes import list_family, wait_until_gone
from tests.helpers.sentence_models import WORDS, write_model

SOURCE = Path(__file__).resolve().parents[5] / "src"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    open_embedder.cache_clear()
    yield
    open_embedder.cache_clear()


def make_texts(number: int) -> list[str]:
    return [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(n % 7 + 1)) for n in range(number)]


def test_requests_are_answered_one_after_the_other(tmp_path: Path) -> None:
    model = SentenceModel(write_model(tmp_path))
    requests = [{"kind": "query", "texts": ["tea", "ink \ud800"]}, {"kind": "passage", "texts": ["the river"]}]
    replies = io.BytesIO()
    serve(tmp_path, io.BytesIO(b"".join(json.dumps(r).encode() + b"\n" for r in requests)), replies)
    hello, _, content = replies.getvalue().partition(b"\n")
    assert json.loads(hello) == {"width": 8}
    vectors = np.frombuffer(content, np.float32).reshape(3, 8)
    assert (vectors == [model.embed(text, "query") for text in ("tea", "ink \ud800", "the river")]).all()


def test_passages_have_the_vectors_that_each_has_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SentenceModel(write_model(tmp_path))
    texts = make_texts(150)
    wanted = np.stack([model.embed(text, "passage") for text in texts])
    monkeypatch.setattr(processes, "count_cores", lambda: 2)
    assert (embed_passages(tmp_path, 8, texts) == wanted).all()
    monkeypatch.setattr(processes, "CHUNK", 7)
    monkeypatch.setattr(processes, "count_cores", lambda: 1)
    assert (embed_passages(tmp_path, 8, texts) == wanted).all()


def test_a_process_with_one_thread_embeds_queries_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "1")
    own = open_embedder(tmp_path)
    assert isinstance(own, OwnEmbedder) and open_embedder(tmp_path) is own
    monkeypatch.delenv(THREAD_VARIABLES[0])
    open_embedder.cache_clear()
    other = open_embedder(tmp_path)
    assert isinstance(other, EmbeddingProcess)
    for text in ("who named the river", "", "tea " * 50):
        assert (own.embed_query(text) == other.embed_query(text)).all()
    other.close()


def test_the_process_has_one_thread_and_ends_when_it_is_closed(tmp_path: Path) -> None:
    process = EmbeddingProcess(write_model(tmp_path))
    process.wait_until_ready()
    pid = process._process.pid
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {f"{name}=1".encode() for name in THREAD_VARIABLES} <= set(variables)
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    process.close()
    wait_until_gone([pid])
    with pytest.raises(TaskError, match="a process that computes vectors"):
        process.embed(["tea"], "query")


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    process = EmbeddingProcess(write_model(tmp_path))
    process.wait_until_ready()
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(TaskError, match=r"computes vectors of texts was ended by SIGKILL; each needs as much memory"):
        process.embed(["tea"], "query")


def test_one_killed_process_ends_the_work_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    started: list[EmbeddingProcess] = []
    begin = EmbeddingProcess.__init__

    def begin_and_kill_the_second(self: EmbeddingProcess, folder: Path) -> None:
        begin(self, folder)
        started.append(self)
        if len(started) == 2:
            os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(EmbeddingProcess, "__init__", begin_and_kill_the_second)
    monkeypatch.setattr(processes, "count_cores", lambda: 2)
    with pytest.raises(TaskError, match="was ended by SIGKILL"):
        embed_passages(tmp_path, 8, make_texts(150))
    wait_until_gone([process._process.pid for process in started])


def test_what_is_wrong_with_the_model_is_said_by_the_process_that_asked(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"has model_type 'mpnet'"):
        EmbeddingProcess(write_model(tmp_path, {"model_type": "mpnet"})).wait_until_ready()
    with pytest.raises(TaskError, match=r"has model_type 'mpnet'"):
        embed_passages(tmp_path, 8, ["tea"])


PROGRAM = """
import sys
from pathlib import Path
from cohort.tasks.search.dense.processes import EmbeddingProcess
process = EmbeddingProcess(Path(sys.argv[1]))
process.wait_until_ready()
print(process._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path, number: signal.Signals | None) -> None:
    """`number` is the signal that ends the latter; None = it ends by itself."""
    write_model(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        text=True,
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert list_family(program.pid) == [pid]
        if number is not None:
            program.send_signal(number)
        _, error = program.communicate(timeout=60)
        assert error == "" and (number is not None or program.returncode == 0)
        wait_until_gone([pid])


def test_long_work_tells_how_it_gets_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    caplog.set_level("INFO", logger="cohort.tasks.progress")
    progress = processes.EmbeddingProgress(7402, 2)
    for _ in range(10):
        now[0] += 3.0
        progress.add(500)
    progress.add(2402)
    progress.end()
    assert caplog.messages == [
        "vectors of passages: 2,000 of 7,402; about 32 s more",
        "vectors of passages: 4,000 of 7,402; about 20 s more",
        "the vectors of 7,402 passages took 30 s in 2 processes",
    ]
    caplog.clear()
    quick = processes.EmbeddingProgress(24, 1)
    quick.add(24)
    quick.end()
    assert caplog.messages == []
