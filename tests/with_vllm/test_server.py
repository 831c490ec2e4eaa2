"""The server engine against vLLM's own server of the bundled model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cohort.engines.base import Request, sample
from cohort.engines.server import UNKNOWN_TOKEN, ServerEngine
from cohort.errors import ConfigError
from cohort.text import Tokenizer
from cohort.types import Finish
from tests.with_vllm.questions import CONTEXT, TINY, make_native, make_requests

START_SECONDS = 180


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Starts the server and gives its address once its log says that it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["--model", str(TINY), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    settings += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *settings]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watch = threading.Timer(START_SECONDS, process.kill)
        watch.start()
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Application startup complete" in line:
                break
        watch.cancel()
        assert "Application startup complete" in lines[-1], "".join(lines[-40:])
        reader = threading.Thread(target=process.stdout.read, daemon=True)  # keeps the pipe from filling up
        reader.start()
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        reader.join()


def strip_for_server(requests: list[Request]) -> list[Request]:
    """Returns the requests without token ids and stop ids, which a server cannot take: its own end token stops it."""
    return [replace(r, tokens=[], sampling=replace(r.sampling, stop_ids=())) for r in requests]


def test_greedy_text_is_the_native_engines(url: str):
    requests = make_requests()
    expected = sample(make_native(), requests)
    done = sample(ServerEngine(url, "tiny", template="chat", concurrency=8), strip_for_server(requests))
    assert {id: (s.text, s.finish) for id, s in done.items()} == {id: (s.text, s.finish) for id, s in expected.items()}
    assert {id: s.tokens for id, s in done.items()} == {
        id: [UNKNOWN_TOKEN] * len(s.tokens) for id, s in expected.items()
    }


def test_greedy_continuation_of_raw_text_is_the_native_engines(url: str):
    tokenizer = Tokenizer.load(TINY)
    requests = [replace(r, tokens=tokenizer.render_text(r.messages).tokens) for r in make_requests(8)]
    expected = sample(make_native(), requests)
    done = sample(ServerEngine(url, "tiny", template="text"), strip_for_server(requests))
    assert {id: (s.text, s.finish) for id, s in done.items()} == {id: (s.text, s.finish) for id, s in expected.items()}


def test_stop_strings_and_limits(url: str):
    requests = make_requests(8, stop_strings=("</think>", "</answer>"), max_tokens=9)
    expected = sample(make_native(), requests)
    done = sample(ServerEngine(url, "tiny"), strip_for_server(requests))
    assert {id: (s.text, s.finish) for id, s in done.items()} == {id: (s.text, s.finish) for id, s in expected.items()}
    assert {s.finish for s in done.values()} == {Finish.STOP, Finish.LENGTH}


def test_same_key_same_text(url: str):
    engine = ServerEngine(url, "tiny", concurrency=8)
    requests = strip_for_server(make_requests(16, temperature=1.5, max_tokens=30))
    first, second = sample(engine, requests), sample(engine, requests[::-1])
    assert {id: s.text for id, s in first.items()} == {id: s.text for id, s in second.items()}
    other = [replace(r, key=replace(r.key, seed=6)) for r in requests]
    assert sum(s.text != first[id].text for id, s in sample(engine, other).items()) > 8


def test_what_the_server_refuses(url: str):
    with pytest.raises(ConfigError, match=re.escape(f'{url} does not serve "tini". Did you mean "tiny"?')):
        ServerEngine(url, "tini")
    engine = ServerEngine(url, "tiny")
    engine.submit(strip_for_server(make_requests(1, max_tokens=5000))[0])
    with pytest.raises(ConfigError, match=r"chat/completions refuses: 400 .*5000"):
        engine.poll(60)
    engine.submit(strip_for_server(make_requests(1))[0])
    [event] = engine.poll(60)
    assert event.sample is not None and event.sample.finish == Finish.STOP
