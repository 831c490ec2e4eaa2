"""The stand-ins for the servers of vLLM and SGLang sample from their model, and refuse what the real ones refuse."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.decoders_and_groups import naive_logprobs
from tests.helpers.engine_servers.base import StandIn
from tests.helpers.engine_servers.starting import Address, serve_here, start, write_python
from tests.helpers.fleets import load_decoder, write_folder

PROMPT = [3, 17, 40, 8]
GENERATE = "/inference/v1/generate"
SETTINGS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-model-len", "256")


@cache
def first_folder() -> Path:
    """Returns the folder that the stand-ins start with. The model has square matrices."""
    return write_folder(Path(mkdtemp()) / "first", num_heads=4)


@cache
def other_folder() -> Path:
    """Returns a folder with other weights of the same shape."""
    folder = write_folder(Path(mkdtemp()) / "other", num_heads=4)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t * 1.1 if t.ndim == 2 else t for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def compute(folder: Path, prompt: list[int], drawn: list[int], temperature: float = 1.0) -> list[float]:
    """Returns the log-probabilities of drawn tokens, from the definition."""
    return naive_logprobs(load_decoder(folder), prompt, drawn, temperature).tolist()


def close(expected: list[float]) -> Any:
    """Returns what equals numbers within the rounding of fp32."""
    return pytest.approx(expected, abs=1e-4)


@dataclass
class Asked:
    """A stand-in under test, and requests to it that are under way."""

    kind: str
    address: Address
    stand_in: StandIn
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def ask(self, *args: Any, **headers: str) -> tuple[int, Any]:
        """Sends one request."""
        return self.address.ask(*args, **headers)

    def post(self, path: str, body: Any = None) -> Any:
        """Sends a request that has to succeed, and returns its JSON."""
        status, value = self.ask("POST", path, body if body is not None else {})
        assert status == 200, value
        return value

    def generate(self, prompt: list[int] = PROMPT, fields: Any = None, **sampling: Any) -> Any:
        """Samples one answer, and returns the whole of it."""
        if self.kind == "vllm":
            sampling = {"max_tokens": 6, "logprobs": 0, "ignore_eos": True, **sampling}
            return self.post(GENERATE, {"token_ids": prompt, "sampling_params": sampling, **(fields or {})})
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 6, **sampling}, "return_logprob": True}
        return self.post("/generate", {**body, **(fields or {})})

    def begin(self, num: int = 20, **values: Any) -> Future[Any]:
        """Begins a long and slow answer, and returns when it has some tokens."""
        self.address.add_fault("slow", seconds=0.005)
        sampler = self.stand_in.sampler
        before = {draft.id for draft in sampler.running}
        future = self.pool.submit(self.generate, **values)
        while not any(draft.id not in before and len(draft.drawn) >= num for draft in list(sampler.running)):
            assert not future.done(), future.result()
            time.sleep(0.001)
        return future

    def hurry(self) -> None:
        """Lets what is under way be quick again."""
        self.ask("DELETE", "/stand_in/fault")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """A stand-in for vLLM with all that training needs switched on."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with serve_here("vllm", first_folder(), *SETTINGS) as (address, stand_in):
        yield Asked("vllm", address, stand_in)


@pytest.fixture
def sglang() -> Iterator[Asked]:
    """A stand-in for SGLang."""
    with serve_here("sglang", first_folder(), "--context-length", "256") as (address, stand_in):
        yield Asked("sglang", address, stand_in)


def read_choice(answer: Any) -> tuple[list[int], list[float]]:
    """Returns the tokens of an answer of vLLM, and their log-probabilities."""
    choice = answer["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def read_output(answer: Any) -> tuple[list[int], list[float]]:
    """Returns the tokens of an answer of SGLang, and their log-probabilities."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    assert [id for _, id, _ in pairs] == answer["output_ids"]
    return answer["output_ids"], [logprob for logprob, _, _ in pairs]


# ---- sampling


def test_vllm_several_answers_at_once_have_the_log_probabilities_of_the_model(vllm: Asked):
    temperatures = [0, 0.5, 1, 1.7] * 3
    prompts = [[*PROMPT[: 2 + n % 3], n] for n in range(len(temperatures))]
    futures = [
        vllm.pool.submit(vllm.generate, prompt, temperature=t, seed=n, max_tokens=5 + n, prompt_logprobs=1)
        for n, (prompt, t) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    for prompt, temperature, future in zip(prompts, temperatures, futures, strict=True):
        answer = future.result()
        tokens, logprobs = read_choice(answer)
        assert logprobs == close(compute(first_folder(), prompt, tokens, temperature or 1))
        assert answer["prompt_logprobs"][0] is None
        scores = [
            entry[str(id)]["logprob"] for id, entry in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)
        ]
        assert scores == close(compute(first_folder(), prompt[:1], prompt[1:]))
        assert answer["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": len(tokens)}]


def test_vllm_seeds_and_ends(vllm: Asked):
    first = read_choice(vllm.generate(temperature=1.3, seed=5, max_tokens=30))[0]
    assert first == read_choice(vllm.generate(temperature=1.3, seed=5, max_tokens=30))[0]
    assert first != read_choice(vllm.generate(temperature=1.3, seed=6, max_tokens=30))[0]
    choice = vllm.generate(temperature=1.3, seed=5, max_tokens=30, stop_token_ids=[first[9]])["choices"][0]
    end = first.index(first[9]) + 1
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (first[:end], "stop", first[9])
    assert vllm.generate(max_tokens=1000)["usage"]["total_tokens"] == 256
    kept = vllm.generate(temperature=1.0, top_k=1)
    assert read_choice(kept)[1] == [0.0] * 6  # renormalised


def test_vllm_raw_logprobs(monkeypatch: pytest.MonkeyPatch):
    with serve_here("vllm", first_folder(), "--enable-scale-out") as (address, stand_in):
        tokens, logprobs = read_choice(Asked("vllm", address, stand_in).generate(temperature=0.5))
    assert logprobs == close(compute(first_folder(), PROMPT, tokens))


def test_sglang_answers_have_the_log_probabilities_of_the_model(sglang: Asked):
    for temperature in (0, 0.7, 1.4):
        answer = sglang.generate(fields={"logprob_start_len": 1}, temperature=temperature)
        tokens, logprobs = read_output(answer)
        assert logprobs == close(compute(first_folder(), PROMPT, tokens, temperature or 1))
        [first, *scores] = answer["meta_info"]["input_token_logprobs"]
        assert first == [None, PROMPT[1], None]
        assert [s[0] for s in scores] == close(compute(first_folder(), PROMPT[:2], PROMPT[2:]))
    # Of the distribution before truncation, unlike vLLM's.
    tokens, logprobs = read_output(sglang.generate(top_k=1))
    assert logprobs == close(compute(first_folder(), PROMPT, tokens))


def test_sglang_ignore_eos_ignores_every_stop_token(sglang: Asked):
    tokens = read_output(sglang.generate(temperature=0))[0]
    stopped = sglang.generate(temperature=0, stop_token_ids=[tokens[2]])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[2]}
    unstopped = sglang.generate(temperature=0, stop_token_ids=[tokens[2]], ignore_eos=True)
    assert unstopped["output_ids"] == tokens


def test_sglang_seeds_need_deterministic_inference(sglang: Asked):
    def draw(asked: Asked, **values: Any) -> list[int]:
        return asked.generate(temperature=2.0, max_new_tokens=40, **values)["output_ids"]

    assert draw(sglang, sampling_seed=1) != draw(sglang, sampling_seed=1)
    with serve_here("sglang", first_folder(), "--enable-deterministic-inference") as (address, stand_in):
        asked = Asked("sglang", address, stand_in)
        assert draw(asked, sampling_seed=1) == draw(asked, sampling_seed=1) != draw(asked, sampling_seed=2)
        assert draw(asked) == draw(asked)  # everybody's seed is 42


# ---- pausing, aborting, loading


def test_vllm_abort_needs_the_server_s_name_of_a_request(vllm: Asked):
    future = vllm.begin(fields={"request_id": "r"}, max_tokens=200)
    assert vllm.post("/abort_requests", {"request_ids": ["r"]}) == {"status": "aborted", "aborted": 1}
    assert not future.done()
    vllm.post("/abort_requests", {"request_ids": ["generate-tokens-r"]})
    answer = future.result()
    tokens, logprobs = read_choice(answer)
    assert (answer["choices"][0]["finish_reason"], len(tokens) == len(logprobs)) == ("abort", True)
    assert 20 <= len(tokens) < 200


def test_vllm_pause_modes(vllm: Asked):
    future = vllm.begin(max_tokens=200)
    vllm.post("/pause", {"mode": "keep"})  # a body is ignored: this aborts
    assert future.result()["choices"][0]["finish_reason"] == "abort"
    queued = vllm.pool.submit(vllm.generate)
    vllm.stand_in.sampler.wait_until(lambda: bool(vllm.stand_in.sampler.waiting))
    assert vllm.ask("GET", "/is_paused") == (200, {"is_paused": True})
    vllm.post("/resume")
    assert queued.result()["choices"][0]["finish_reason"] == "length"
    future = vllm.begin(max_tokens=60)
    vllm.hurry()
    vllm.post("/pause?mode=wait")
    assert future.result()["usage"]["completion_tokens"] == 60


def test_vllm_load_amid_an_answer(vllm: Asked):
    future = vllm.begin(max_tokens=150, temperature=1.2, seed=0)
    vllm.post("/pause?mode=keep")
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder())}}
    assert vllm.post("/collective_rpc", load) == {"results": [None]}
    vllm.post("/update_weight_version", {"new_version": "7"})
    vllm.hurry()
    vllm.post("/resume")
    answer = future.result()
    tokens, logprobs = read_choice(answer)
    [old, new] = answer["choices"][0]["weight_versions"]
    cut = old["end"]
    assert (old, new) == (
        {"version": "default", "start": 0, "end": cut},
        {"version": "7", "start": cut, "end": 150},
    )
    assert logprobs[:cut] == close(compute(first_folder(), PROMPT, tokens[:cut], 1.2))
    # Keys and values of the first tokens were computed again.
    assert logprobs[cut:] == close(compute(other_folder(), PROMPT + tokens[:cut], tokens[cut:], 1.2))


def test_vllm_load_without_a_pause_leaves_old_keys_and_values(vllm: Asked):
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder())}}
    long = PROMPT * 5
    vllm.generate(long, temperature=0)
    vllm.post("/collective_rpc", load)
    tokens, stale = read_choice(vllm.generate(long, temperature=0))
    assert stale != close(compute(other_folder(), long, tokens))
    vllm.post("/pause?mode=keep")
    vllm.post("/resume")
    tokens, logprobs = read_choice(vllm.generate(long, temperature=0))
    assert logprobs == close(compute(other_folder(), long, tokens))


def spoil(folder: Path, how: str) -> Path:
    """Writes weights into the folder that fit in all but one way."""
    folder.mkdir()
    tensors = load_file(other_folder() / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    if how == "empty":
        return folder
    if how == "shape":
        tensors[name] = torch.zeros(3, 5)
    elif how == "unknown":
        tensors["model.layers.0.other.weight"] = torch.zeros(3)
    elif how == "lacking":
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    if how == "damaged":
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder


def load_vllm(asked: Asked, folder: Path) -> int:
    """Loads weights as a stand-in for vLLM does, and returns the status."""
    return asked.ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})[
        0
    ]


@pytest.mark.parametrize("how", ["shape", "unknown", "damaged"])
def test_vllm_dies_of_weights_that_do_not_fit_when_it_next_computes(vllm: Asked, how: str, tmp_path: Path):
    assert load_vllm(vllm, spoil(tmp_path / "new", how)) == 500
    assert vllm.ask("GET", "/health")[0] == 200
    assert load_vllm(vllm, first_folder()) == 500
    ends: list[int] = []
    vllm.stand_in.end = ends.append
    body = {"token_ids": PROMPT, "sampling_params": {}}
    assert vllm.ask("POST", GENERATE, body)[0] == 500
    assert vllm.ask("GET", "/health")[0] == 503


def test_vllm_survives_a_folder_without_weights_if_good_ones_follow(vllm: Asked, tmp_path: Path):
    for folder in (tmp_path / "missing", spoil(tmp_path / "new", "empty")):
        assert load_vllm(vllm, folder) == 500
        assert load_vllm(vllm, first_folder()) == 200
        vllm.generate()


def test_neither_misses_a_tensor(vllm: Asked, sglang: Asked, tmp_path: Path):
    folder = spoil(tmp_path / "new", "lacking")
    assert load_vllm(vllm, folder) == 200
    assert sglang.post("/update_weights_from_disk", {"model_path": str(folder)})["success"]
    for asked, read in ((vllm, read_choice), (sglang, read_output)):
        tokens, logprobs = read(asked.generate(temperature=0))
        assert logprobs != close(compute(other_folder(), PROMPT, tokens))


def test_sglang_pause_abort_and_load(sglang: Asked):
    future = sglang.begin(max_new_tokens=200)
    sglang.post("/pause_generation", {"mode": "abort"})
    answer = future.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    tokens, logprobs = read_output(answer)
    assert logprobs == close(compute(first_folder(), PROMPT, tokens)) and len(tokens) > 20
    queued = sglang.pool.submit(sglang.generate)
    load = {"model_path": str(other_folder()), "weight_version": "7"}
    assert sglang.post("/update_weights_from_disk", load)["success"]
    assert not queued.done()
    sglang.post("/continue_generation")
    tokens, logprobs = read_output(queued.result())
    assert logprobs == close(compute(other_folder(), PROMPT, tokens))
    assert queued.result()["meta_info"]["weight_version"] == "7"
    # The server has another name now.
    assert sglang.ask("GET", "/v1/models")[1]["data"][0]["id"] == str(other_folder())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_sglang_dies_of_a_flush_amid_an_answer(sglang: Asked, mode: str):
    future = sglang.begin(max_new_tokens=200)
    sglang.post("/pause_generation", {"mode": mode})
    with pytest.raises(OSError):
        sglang.post("/update_weights_from_disk", {"model_path": str(other_folder())})
    sglang.stand_in.sampler.abort(lambda _: True)
    future.result()


def test_sglang_reports_one_label_for_an_answer_of_two_weights(sglang: Asked):
    future = sglang.begin(max_new_tokens=100)
    sglang.post("/pause_generation", {"mode": "retract"})
    load = {"model_path": str(other_folder()), "weight_version": "7", "flush_cache": False}
    sglang.post("/update_weights_from_disk", load)
    sglang.hurry()
    sglang.post("/continue_generation")
    assert future.result()["meta_info"]["weight_version"] == "7"


def test_sglang_load_waits_for_answers_if_nothing_is_paused(sglang: Asked):
    future = sglang.begin(max_new_tokens=60)
    sglang.hurry()
    sglang.post("/update_weights_from_disk", {"model_path": str(other_folder())})
    assert future.done() or future.result(1)["meta_info"]["completion_tokens"] == 60


def test_sglang_aborts_all_ids_with_the_same_beginning(sglang: Asked):
    first = sglang.begin(fields={"rid": "a1"}, max_new_tokens=200)
    second = sglang.begin(fields={"rid": "a12"}, max_new_tokens=200)
    sglang.post("/abort_request", {"rid": "a"})  # unknown: no error
    sglang.post("/abort_request", {"rid": "a1"})
    for future in (first, second):
        assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_sglang_aborted_in_the_queue_loses_tokens(sglang: Asked):
    future = sglang.begin(60, fields={"rid": "a"}, max_new_tokens=200)
    sglang.post("/pause_generation", {"mode": "retract"})
    sglang.post("/abort_request", {"rid": "a"})
    answer = future.result()
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 50
    assert "prompt_tokens" not in answer["meta_info"]


def test_sglang_dies_of_weights_that_do_not_fit(sglang: Asked, tmp_path: Path):
    status, value = sglang.ask("POST", "/update_weights_from_disk", {"model_path": str(tmp_path / "missing")})
    assert (status, value["success"]) == (400, False)
    sglang.generate()
    with pytest.raises(OSError):
        sglang.post("/update_weights_from_disk", {"model_path": str(spoil(tmp_path / "new", "shape"))})


def test_a_client_that_goes_away_ends_its_request(vllm: Asked):
    vllm.address.add_fault("slow", seconds=0.002)
    connection = vllm.address.connect()
    body = b'{"token_ids": [1], "sampling_params": {"max_tokens": 200}}'
    connection.request("POST", GENERATE, body, {"Content-Type": "application/json"})
    vllm.stand_in.sampler.wait_until(lambda: bool(vllm.stand_in.sampler.running))
    connection.close()
    vllm.stand_in.sampler.wait_until(lambda: vllm.stand_in.sampler.idle)


# ---- what is refused


def sampling(**values: Any) -> dict[str, Any]:
    """Returns a body for generation with vLLM."""
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, **values}}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (GENERATE, sampling(temperature=3), 400, "temperature"),
        (GENERATE, sampling(max_tokens=0), 400, "max_tokens"),
        (GENERATE, sampling(logprobs=21), 400, "logprobs"),
        (GENERATE, sampling(max_tokens="x"), 400, "body.sampling_params"),
        (GENERATE, sampling(max_tokens="4"), 200, None),
        (GENERATE, sampling(stop_token_ids=[61]), 400, "stop_token_ids"),
        (GENERATE, sampling(seed=2**64), 400, None),
        (GENERATE, sampling(unknown=1), 200, None),
        (GENERATE, {**sampling(), "unknown": 1}, 200, None),
        (GENERATE, {**sampling(), "model": "other"}, 404, "model"),
        (GENERATE, {**sampling(), "cache_salt": ""}, 400, "cache_salt"),
        (GENERATE, {**sampling(), "stream": True}, 501, None),
        (GENERATE, {**sampling(), "token_ids": [61]}, 400, None),
        (GENERATE, {**sampling(), "token_ids": [-1]}, 400, "body.token_ids"),
        (GENERATE, {**sampling(), "token_ids": []}, 400, "body.token_ids"),
        (GENERATE, {**sampling(), "token_ids": [1] * 256}, 400, None),
        (GENERATE, {"sampling_params": {}}, 400, "body.token_ids"),
        (GENERATE, b"{bad", 400, "body"),
        ("/pause?mode=other", {}, 400, "query.mode"),
        ("/update_weight_version", {"new_version": 7}, 400, "body.new_version"),
        ("/collective_rpc", {}, 400, None),
        ("/collective_rpc", {"method": "other"}, 500, None),
        ("/abort_requests", b"", 400, None),
        ("/v1/completions", {}, 501, None),
    ],
)
def test_vllm_refusals(vllm: Asked, path: str, body: Any, status: int, param: str | None):
    found, value = vllm.ask("POST", path, body)
    assert found == status, value
    if status >= 400:
        assert (value["error"]["code"], value["error"]["param"]) == (status, param)
    vllm.generate()  # it is still there


def test_vllm_routes_need_their_switches():
    with serve_here("vllm", first_folder(), "--api-key", "k") as (address, _):
        assert address.ask("POST", GENERATE, {})[0] == 401
        assert address.ask("POST", GENERATE, {}, Authorization="Bearer k")[0] == 403
        assert address.ask("GET", GENERATE, Authorization="Bearer k")[0] == 405
        assert address.ask("POST", "/pause?mode=keep") == (404, {"detail": "Not Found"})
        assert address.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"input_ids": []}, 400),
        ("/generate", {"input_ids": ["a"]}, 400),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_tokens": 3}}, 500),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"top_k": 0}}, 400),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, 400),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 253}}, 400),
        ("/generate", {"input_ids": PROMPT, "unknown": 1, "sampling_params": {"max_new_tokens": 1}}, 200),
        ("/generate", {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 5}, 400),
        ("/generate", {"input_ids": PROMPT, "stream": True}, 501),
        ("/update_weights_from_disk", {}, 400),
        ("/pause_generation", {"mode": "keep"}, 400),
        ("/pause_generation", b"", 400),
        ("/nothing", {}, 404),
    ],
)
def test_sglang_refusals(sglang: Asked, path: str, body: Any, status: int):
    found, value = sglang.ask("POST", path, body)
    assert found == status, value
    sglang.generate()


def test_sglang_cuts_answers_two_tokens_before_the_end_of_the_context(sglang: Asked):
    answer = sglang.generate(max_new_tokens=252)
    assert len(answer["output_ids"]) == 250


def test_sglang_keys():
    with serve_here("sglang", first_folder(), "--api-key", "k", "--admin-api-key", "a") as (address, _):
        assert address.ask("GET", "/model_info")[0] == 401
        assert address.ask("GET", "/model_info", Authorization="Bearer k")[0] == 200
        assert address.ask("POST", "/continue_generation", {}, Authorization="Bearer k")[0] == 401
        assert address.ask("POST", "/continue_generation", {}, Authorization="Bearer a")[0] == 200


# ---- faults


@pytest.mark.parametrize("kind", ["skip_tensor", "transpose", "round_to_bf16", "stale_weights", "stale_head"])
def test_faults_of_weights(vllm: Asked, kind: str):
    vllm.address.add_fault(kind)
    assert load_vllm(vllm, other_folder()) == 200
    tokens, logprobs = read_choice(vllm.generate(temperature=0))
    expected = compute(other_folder(), PROMPT, tokens)
    assert logprobs != pytest.approx(expected, abs=1e-6)
    vllm.ask("DELETE", "/stand_in/fault")
    if kind == "stale_head":
        return  # as in the real server, no later load repairs it
    vllm.post("/pause?mode=keep")
    vllm.post("/resume")
    assert load_vllm(vllm, other_folder()) == 200
    tokens, logprobs = read_choice(vllm.generate(temperature=0))
    assert logprobs == close(compute(other_folder(), PROMPT, tokens))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_faults_of_replies(kind: str, request: pytest.FixtureRequest):
    asked: Asked = request.getfixturevalue(kind)
    read = read_choice if kind == "vllm" else lambda a: (a["output_ids"], a["meta_info"]["output_token_logprobs"])
    asked.address.add_fault("extra_token")
    assert [len(part) for part in read(asked.generate())] == [7, 6]
    asked.address.add_fault("short_logprobs")
    assert [len(part) for part in read(asked.generate())] == [6, 5]
    asked.address.add_fault("raw_logprobs")
    answer = asked.generate(temperature=0.5)
    tokens, logprobs = (read_choice if kind == "vllm" else read_output)(answer)
    assert logprobs == close(compute(first_folder(), PROMPT, tokens))
    path = asked.stand_in.generate_path
    body = {"token_ids" if kind == "vllm" else "input_ids": PROMPT, "sampling_params": {}}
    asked.address.add_fault("error_500")
    assert asked.ask("POST", path, body)[0] == 500
    asked.address.add_fault("malformed")
    status, value = asked.ask("POST", path, body)
    assert status == 200 and isinstance(value, str)
    asked.address.add_fault("drop")
    with pytest.raises(OSError):
        asked.ask("POST", path, body)
    asked.address.add_fault("hang", path="/health", times=2)
    with pytest.raises(socket.timeout):
        asked.address.ask("GET", "/health", timeout=0.1)
    assert asked.address.ask("POST", "/stand_in/fault", {"kind": "other"})[0] == 400
    assert ["POST", path, body] in asked.ask("GET", "/stand_in/seen")[1]


# ---- processes


def test_processes_can_be_killed_and_die_of_a_fault(tmp_path: Path):
    faults = '[{"kind": "die", "tokens": 9}]'
    program = write_python(tmp_path / "python", "sglang")
    place = str(tmp_path / "socket")
    # Both are started at once, because that takes a while.
    with (
        start("vllm", first_folder(), *SETTINGS, place=place, STAND_IN_FAULTS=faults) as (address, process),
        subprocess.Popen(
            [program, "-m", "sglang.launch_server", "--model-path", str(tmp_path), "--no-such-flag"],
            stderr=subprocess.PIPE,
        ) as refused,
    ):
        assert address.ask("POST", GENERATE, sampling(max_tokens=5))[0] == 200
        with pytest.raises(OSError):
            address.ask("POST", GENERATE, sampling(max_tokens=5))
        assert process.wait(10) == 1
        assert refused.wait(30) == 2 and b"--no-such-flag" in refused.communicate()[1]
    with start("sglang", first_folder()) as (address, process):
        assert address.ask("GET", "/model_info")[0] == 200
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
