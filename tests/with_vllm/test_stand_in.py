"""The stand-in for vLLM's server answers as the real one does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.engine_servers.starting import Address, find_free_port, serve_here
from tests.with_vllm.questions import CONTEXT, TINY, make_requests

START_SECONDS = 180.0
GENERATE = "/inference/v1/generate"
FLAGS = ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
FLAGS += ["--max-num-seqs", "8", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]


class Both:
    """The real server and the stand-in. Each request is sent to both."""

    def __init__(self, real: Address, stand_in: Address, process: subprocess.Popen[bytes]) -> None:
        self.addresses = (real, stand_in)
        self.process = process

    def ask(self, *args: Any) -> list[tuple[int, Any]]:
        """Returns both answers, the real one first."""
        return [address.ask(*args) for address in self.addresses]

    def ask_alike(self, *args: Any) -> Any:
        """Returns the real answer. Fails unless both have the same status and JSON of the same form."""
        (status, real), (other, pretended) = self.ask(*args)
        assert (status, find_form(real)) == (other, find_form(pretended)), (args, real, pretended)
        return real

    def generate(self, tokens: list[int], **sampling: Any) -> list[Any]:
        """Returns both answers to a request that succeeds, of the same form."""
        answers = self.ask("POST", GENERATE, {"token_ids": tokens, "sampling_params": sampling})
        assert [status for status, _ in answers] == [200, 200], answers
        real, pretended = (value for _, value in answers)
        assert find_form(real) == find_form(pretended)
        return [real, pretended]


def find_form(value: Any) -> Any:
    """Returns the names in a JSON value, with those of the first item of each list. Keys that are token ids are "id".

    Of errors, only what they concern is kept: their words are the stand-in's own.
    """
    if isinstance(value, dict) and "error" in value and isinstance(value["error"], dict):
        return {**value["error"], "message": "", "param": str(value["error"]["param"]).partition(".1")[0]}
    if isinstance(value, dict):
        return {"id" if name.isdecimal() else name: find_form(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return [find_form(item) for item in value[-1:]]
    return type(value).__name__ if not isinstance(value, int | float) else "number"


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """Starts both with the bundled model."""
    real = Address(("127.0.0.1", find_free_port()))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY), *FLAGS]
    command += ["--host", "127.0.0.1", "--port", str(real.place[1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with subprocess.Popen(command, env=env) as process, serve_here("vllm", TINY, *FLAGS) as (stand_in, _):
            try:
                wait_until_healthy(real, process)
                # The bundled model's head is its embedding.
                stand_in.add_fault("stale_head")
                yield Both(real, stand_in, process)
            finally:
                process.terminate()


def wait_until_healthy(address: Address, process: subprocess.Popen[bytes]) -> None:
    """Waits until the real server is ready."""
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < end, "vLLM does not start"
        try:
            if address.ask("GET", "/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.2)


def read_choice(answer: Any) -> tuple[list[int], list[float], str, int | None]:
    """Returns tokens, log-probabilities, and how the answer ended."""
    [choice] = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, choice["finish_reason"], choice["stop_reason"]


def assert_equal(answers: list[Any]) -> None:
    """Checks that both answers have the same tokens, log-probabilities, prompt's scores and version spans."""
    (tokens, logprobs, *end), (others, other_logprobs, *other_end) = (read_choice(answer) for answer in answers)
    assert (tokens, end) == (others, other_end)
    assert logprobs == pytest.approx(other_logprobs, abs=1e-4)
    real, pretended = answers
    assert real["choices"][0]["weight_versions"] == pretended["choices"][0]["weight_versions"]
    assert real["usage"] == pretended["usage"]
    for one, other in zip(real["prompt_logprobs"] or [], pretended["prompt_logprobs"] or [], strict=True):
        assert (one is None) == (other is None)
        for id in one or {}:
            assert one[id]["logprob"] == pytest.approx(other[id]["logprob"], abs=1e-4)
            assert one[id]["decoded_token"] == other[id]["decoded_token"]


def test_greedy_answers(both: Both):
    requests = make_requests(8)

    def ask(n: int) -> list[Any]:
        return both.generate(requests[n].tokens, max_tokens=20, temperature=0, logprobs=0, prompt_logprobs=n % 2)

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(ask, range(len(requests))):
            assert_equal(answers)


def test_ends(both: Both):
    tokens = make_requests(1)[0].tokens
    [free, _] = both.generate(tokens, max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    drawn = read_choice(free)[0]
    assert_equal(both.generate(tokens, max_tokens=8, temperature=0, logprobs=0, stop_token_ids=[drawn[1]]))
    assert_equal(both.generate(tokens, max_tokens=500, temperature=0, logprobs=0, ignore_eos=True))
    # Only the best token is left, whatever the random numbers are.
    assert_equal(both.generate(tokens, max_tokens=8, temperature=0.7, top_k=1, logprobs=0, detokenize=False))


def test_refusals(both: Both):
    def sampling(**values: Any) -> dict[str, Any]:
        return {"token_ids": [1, 5, 9], "sampling_params": {"max_tokens": 1, **values}}

    wrong = ({"temperature": 3}, {"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"max_tokens": "x"})
    wrong += ({"logprobs": 21}, {"prompt_logprobs": 21}, {"stop_token_ids": [10**6]}, {"seed": 2**64}, {"min_p": 2})
    accepted = ({"max_tokens": "1"}, {"unknown": 1}, {"seed": -1}, {"top_k": -1}, {"seed": 2**63})
    for values in (*wrong, *accepted):
        both.ask_alike("POST", GENERATE, sampling(**values))
    for body in (
        {**sampling(), "token_ids": [-1]},
        {**sampling(), "token_ids": []},
        {**sampling(), "token_ids": [10**6]},
        {**sampling(), "token_ids": [1] * CONTEXT},
        {**sampling(), "model": "other"},
        {**sampling(), "cache_salt": ""},
        {**sampling(), "unknown": 1},
        {"sampling_params": {}},
        {"token_ids": [1]},
        b"[]",
        b"{bad",
    ):
        both.ask_alike("POST", GENERATE, body)
    both.ask_alike("GET", GENERATE)
    both.ask_alike("GET", "/nothing")
    for path in ("/pause?mode=other", "/pause?clear_cache=perhaps", "/sleep?level=5"):
        both.ask_alike("POST", path)
    for body in ({}, {"new_version": 7}):
        both.ask_alike("POST", "/update_weight_version", body)
    for body in (b"", [], {}, {"method": "other"}, {"method": "reload_weights", "kwargs": {"other": 1}}):
        both.ask_alike("POST", "/collective_rpc", body)
    for body in (b"", [], {"request_ids": ["unknown"]}, {}):
        both.ask_alike("POST", "/abort_requests", body)
    both.ask_alike("POST", "/inference/v1/abort_requests", {})


def test_what_it_says_of_itself(both: Both):
    for path in ("/health", "/version", "/is_paused", "/weight_info", "/is_sleeping", "/get_world_size"):
        both.ask_alike("GET", path)
    [real, pretended] = (value for _, value in both.ask("GET", "/v1/models"))
    assert pretended["data"][0].keys() == real["data"][0].keys()
    [real, pretended] = (value["vllm_config"] for _, value in both.ask("GET", "/server_info?config_format=json"))
    for part in ("model_config", "parallel_config", "scheduler_config"):
        assert pretended[part] == {name: real[part][name] for name in pretended[part]}


def test_weights(both: Both, tmp_path: Path):
    tensors = load_file(TINY / "model.safetensors")
    shutil.copy(TINY / "config.json", tmp_path)
    save_file({name: (t * 1.02 if t.ndim == 2 else t) for name, t in tensors.items()}, tmp_path / "model.safetensors")

    def load(folder: Path) -> None:
        both.ask_alike("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    tokens = make_requests(1)[0].tokens
    both.ask_alike("POST", "/pause?mode=keep")
    both.ask_alike("GET", "/is_paused")
    found: list[Any] = []

    def ask() -> None:
        found.extend(both.generate(tokens, max_tokens=8, temperature=0, logprobs=0, prompt_logprobs=0))

    # It waits until generation goes on.
    waiting = threading.Thread(target=ask)
    waiting.start()
    load(tmp_path)
    both.ask_alike("POST", "/update_weight_version", {"new_version": "7"})
    both.ask_alike("POST", "/resume")
    waiting.join()
    assert_equal(found)
    assert found[0]["choices"][0]["weight_versions"][0]["version"] == "7"
    # What fused matrices lack is garbage in the real server, so a matrix that stands alone is left out.
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    both.ask_alike("POST", "/reset_prefix_cache")
    assert_equal(both.generate(tokens, max_tokens=8, temperature=0, logprobs=0, prompt_logprobs=0))
    load(tmp_path / "missing")
    load(TINY)
    assert_equal(both.generate(tokens, max_tokens=8, temperature=0, logprobs=0, prompt_logprobs=0))


def test_wrong_weights_end_both(both: Both, tmp_path: Path):
    """The last test: no server is left."""
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, tmp_path / "model.safetensors")
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    both.ask_alike("POST", "/collective_rpc", load)
    both.ask_alike("GET", "/health")
    both.ask_alike("POST", GENERATE, {"token_ids": [1], "sampling_params": {}})
    assert both.process.wait(30) == 0
    with pytest.raises(OSError):
        for _ in range(100):
            both.addresses[1].ask("GET", "/health")
            time.sleep(0.1)
