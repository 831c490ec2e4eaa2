"""Servers of vLLM and SGLang as engines: against stand-ins that refuse what the real servers refuse."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch

from cohort.engines.base import POLL_TIMEOUT, Abilities, sample
from cohort.engines.fleet import session
from cohort.engines.fleet.calls import RefusedCall, ServerCalls, read_address
from cohort.engines.fleet.dialect import Part, read_logprobs, warn_untried
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.server import ServerReplica, Starter
from cohort.engines.fleet.servers import divide_addresses, make_server_fleet
from cohort.engines.fleet.sglang_server import SglangDialect
from cohort.engines.fleet.vllm_server import VllmDialect
from cohort.engines.sync import Canary, WeightSync
from cohort.errors import CohortError, ConfigError, EngineError
from cohort.learner.base import LiveWeights
from cohort.models.decoder import Decoder
from cohort.types import Finish, Sample
from tests.helpers.decoders_and_groups import naive_logprobs, small_config
from tests.helpers.engine_conformance import PROMPTS, EngineConformance, request
from tests.helpers.engine_servers.starting import Address, write_python
from tests.helpers.fleets import load_decoder, write_folder
from tests.helpers.served_fleets import FLAGS, KINDS, VARIANTS, describe_model, make_fleet_of, serve, show

DIALECTS: dict[str, Any] = {"vllm": VllmDialect, "sglang": SglangDialect}


@cache
def model_folder() -> Path:
    """Returns a folder with a small model that has square matrices."""
    return write_folder(Path(mkdtemp()) / "model", num_heads=4)


def make_newer(seed: int = 1, size: float = 0.05) -> Decoder:
    """Returns the model as it might be after an update: every number is changed a little."""
    decoder = load_decoder(model_folder())
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in decoder.named_weights():
        tensor += size * torch.randn(tensor.shape, generator=generator) * tensor.std()
    return decoder


def load(fleet: Fleet, decoder: Decoder, version: int) -> None:
    """Loads the weights of a model into all servers."""
    fleet.load(LiveWeights(decoder), version)


def assert_logprobs(decoder: Decoder, prompt: list[int], s: Sample, temperature: float = 1.0) -> None:
    """Asserts that a sample has the log-probabilities that a model gives its tokens."""
    expected = naive_logprobs(decoder, prompt, s.tokens, temperature).tolist()
    assert s.sampler_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder. Paths of sockets have at most 108 bytes, and `tmp_path` may be longer."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BEAT_SECONDS", 0.05)


@contextmanager
def serving(kind: str, *flags: str, num: int = 1, **settings: Any) -> Iterator[tuple[Fleet, list[Address]]]:
    """A fleet of so many stand-ins in this process."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(serve(kind, model_folder(), *flags))[0] for _ in range(num)]
        fleet = make_fleet_of(kind, model_folder(), *addresses, **settings)
        stack.callback(fleet.close)
        yield fleet, addresses


# ---- the protocol


class ServerConformance(EngineConformance):
    abilities = Abilities(truncation=False, streams=False)
    kind = ""

    @pytest.fixture(autouse=True)
    def stack(self) -> Iterator[None]:
        with ExitStack() as self.opened:
            yield

    def make(self, slots: int = 4) -> Fleet:
        address, _ = self.opened.enter_context(serve(self.kind, model_folder()))
        fleet = make_fleet_of(self.kind, model_folder(), address, slots=slots)
        self.opened.callback(fleet.close)
        return fleet

    def weights(self, engine: Any) -> LiveWeights:
        return LiveWeights(load_decoder(model_folder()))

    def dying(self) -> Fleet:
        address, stand_in = self.opened.enter_context(serve(self.kind, model_folder()))
        fleet = make_fleet_of(self.kind, model_folder(), address, restarts=0)
        self.opened.callback(fleet.close)
        stand_in.faults.add({"kind": "error_500", "times": 1000})
        return fleet


class TestVllmConformance(ServerConformance):
    kind = "vllm"


class TestSglangConformance(ServerConformance):
    kind = "sglang"


# ---- samples and weights


def test_samples_have_the_log_probabilities_of_the_current_weights(kind: str):
    first, second = load_decoder(model_folder()), make_newer()
    with serving(kind) as (fleet, _):
        for version, decoder in enumerate((first, second, first)):
            load(fleet, decoder, version)
            for s in sample(fleet, [request(0, i, temperature=0.7, max_tokens=20) for i in range(3)]).values():
                assert s.versions == [(0, version)] and len(s.tokens) == 20
                assert_logprobs(decoder, PROMPTS[0], s, 0.7)
            # Equal prompts: none of their KV may be of other weights.
            found = fleet.compute_logprobs(PROMPTS[2])
            expected = naive_logprobs(decoder, PROMPTS[2][:1], PROMPTS[2][1:]).tolist()
            assert found == [pytest.approx(expected, abs=1e-4)]


def test_a_load_in_flight_is_seen_in_the_sample(kind: str):
    first, second = load_decoder(model_folder()), make_newer()
    with serving(kind) as (fleet, [address]):
        load(fleet, first, 0)
        address.add_fault("slow", seconds=0.01)
        requests = [request(0, i, max_tokens=60) for i in range(2)]
        for r in requests:
            fleet.submit(r)
        fleet.poll()
        time.sleep(0.2)
        load(fleet, second, 1)
        done = sample(fleet, [])
        assert done.keys() == {r.id for r in requests}
        for s in done.values():
            [(zero, old), (turn, new)] = s.versions
            assert (zero, old, new) == (0, 0, 1) and 0 < turn < 60 == len(s.tokens)
            parts = [naive_logprobs(model, PROMPTS[0], s.tokens).tolist() for model in (first, second)]
            expected = [*parts[0][:turn], *parts[1][turn:]]
            assert s.sampler_logprobs == pytest.approx(expected, abs=1e-4)
            assert max(abs(x - y) for x, y in zip(*parts, strict=True)) > 1e-2


def test_an_aborted_request_gives_what_it_has(kind: str):
    with serving(kind, slots=1) as (fleet, [address]):
        address.add_fault("slow", seconds=0.01)
        for index in range(2):
            fleet.submit(request(0, index, max_tokens=100))
        fleet.poll()
        time.sleep(0.2)
        s = fleet.abort("0/0")
        assert s.finish is Finish.ABORT and len(s.tokens) < 100
        if s.tokens:
            assert_logprobs(load_decoder(model_folder()), PROMPTS[0], s)
        # It has a place at the server now.
        begin = time.monotonic()
        assert fleet.abort("0/1").finish is Finish.ABORT and fleet.idle and time.monotonic() - begin < 5


def test_stop_strings_and_stop_ids_end_a_request_at_the_server(kind: str):
    with serving(kind) as (fleet, [address]):
        drawn = sample(fleet, [request(max_tokens=30)])["0/0"].tokens
        for changes in ({"stop_strings": (f"{drawn[9]}.",)}, {"stop_ids": (drawn[9],)}):
            [s] = sample(fleet, [request(max_tokens=30, **changes)]).values()
            end = drawn.index(drawn[9]) + 1
            assert s.tokens == drawn[:end] and s.finish is Finish.STOP
        seen = [body for method, _, body in address.ask("GET", "/stand_in/seen")[1] if isinstance(body, dict)]
        params = [body["sampling_params"] for body in seen if "sampling_params" in body]
        assert any("stop" in p for p in params) and any(p.get("stop_token_ids") for p in params)


def test_several_servers_share_the_requests_and_all_are_proved(kind: str):
    decoder = load_decoder(model_folder())
    with serving(kind, num=2) as (fleet, addresses):
        load(fleet, decoder, 0)
        requests = [request(p, i, max_tokens=8) for p in range(3) for i in range(2)]
        assert sample(fleet, requests).keys() == {r.id for r in requests}
        assert len(fleet.compute_logprobs(PROMPTS[0])) == 2
        path = "/inference/v1/generate" if kind == "vllm" else "/generate"
        counts = [sum(seen[1] == path for seen in a.ask("GET", "/stand_in/seen")[1]) for a in addresses]
        # Four calls are the checks at the start, one is that above.
        assert all(count > 5 for count in counts) and sum(counts) == 6 + 2 * 5


# ---- wrong loads

WRONG_LOADS = ("skip_tensor", "stale_weights", "transpose", "round_to_bf16")


def make_sync(fleet: Fleet, decoder: Decoder) -> WeightSync:
    """Returns the path of a model's weights into a fleet, with a canary."""

    def compute(tokens: list[int]) -> list[float]:
        found: list[float] = naive_logprobs(decoder, tokens[:1], tokens[1:]).tolist()
        return found

    canary = Canary(engine=fleet, compute=compute, vocab_size=small_config().vocab_size, dtype="float32")
    return WeightSync(get_weights=lambda: LiveWeights(decoder), engine=fleet, canary=canary)


@pytest.mark.parametrize("fault", WRONG_LOADS)
def test_a_wrong_load_stops_the_run(kind: str, fault: str):
    decoder = load_decoder(model_folder())
    with serving(kind) as (fleet, [address]):
        sync = make_sync(fleet, decoder)
        sync.start()
        for tensor, (_, newer) in zip(decoder.named_weights(), make_newer().named_weights(), strict=True):
            tensor[1].copy_(newer)
        sync.send(version=1)
        address.add_fault(fault)
        for tensor, (_, newer) in zip(decoder.named_weights(), make_newer(2).named_weights(), strict=True):
            tensor[1].copy_(newer)
        with pytest.raises(EngineError, match=f"version 2 of the weights did not arrive whole in the {kind} engine"):
            sync.send(version=2)


def test_weights_of_another_program_are_noticed(kind: str):
    with serving(kind) as (fleet, [address]):
        load(fleet, load_decoder(model_folder()), 0)
        if kind == "vllm":
            address.ask("POST", "/update_weight_version", {"new_version": "7"})
        else:
            body = {"new_version": "7", "abort_all_requests": False}
            assert address.ask("POST", "/update_weight_version", body)[0] == 200
        with pytest.raises(EngineError, match='the label "7", which this run has not given it'):
            sample(fleet, [request()])


def test_a_folder_that_a_server_cannot_read_is_named(kind: str, tmp_path: Path):
    with serving(kind) as (fleet, _):
        load(fleet, load_decoder(model_folder()), 0)
        with pytest.raises(EngineError, match=r"must be able to read .*nowhere.*--engine\.folder"):
            fleet._posts[0].replica.load(tmp_path / "nowhere", 1)


# ---- lost servers

REPLY_FAULTS = ("drop", "malformed", "error_500", "extra_token", "short_logprobs")


@pytest.mark.parametrize("fault", REPLY_FAULTS)
def test_requests_of_a_server_that_fails_begin_again(kind: str, fault: str, caplog: pytest.LogCaptureFixture):
    decoder = make_newer()
    with serving(kind) as (fleet, [address]):
        load(fleet, decoder, 5)
        requests = [request(0, i, max_tokens=6) for i in range(3)]
        undisturbed = {id: s.tokens for id, s in sample(fleet, requests).items()}
        address.add_fault(fault)
        done = sample(fleet, requests)
        assert {id: s.tokens for id, s in done.items()} == undisturbed
        for s in done.values():
            assert s.versions == [(0, 5)]
            assert_logprobs(decoder, PROMPTS[0], s)
        # A connection that was idle may have been closed by the server: then a request is sent again.
        assert fleet.num_restarts == (fault != "drop")
    if fault == "drop":
        return
    [line] = [r.getMessage() for r in caplog.records if "restarts" in r.getMessage()]
    assert line.startswith(f"the server {show(address)} ")
    assert re.search(r"its (request begins|\d requests begin) again", line)


def test_a_server_that_hangs_is_lost_after_the_patience(kind: str):
    with serving(kind, patience=1.5) as (fleet, [address]):
        address.add_fault("hang")
        begin = time.monotonic()
        # One second per token is allowed besides.
        [s] = sample(fleet, [request(max_tokens=1)]).values()
        assert len(s.tokens) == 1 and fleet.num_restarts == 1 and 2 < time.monotonic() - begin < 10


def test_a_server_without_signs_of_life_is_lost(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("cohort.engines.fleet.session.BEAT_SECONDS", 0.1)
    with serving(kind, patience=1.0) as (fleet, [address]):
        address.add_fault("slow", seconds=0.03)
        fleet.submit(request(max_tokens=100))
        fleet.poll()
        address.add_fault("hang", path="/weight_info" if kind == "vllm" else "/server_info")
        while not fleet.num_restarts:
            fleet.poll(POLL_TIMEOUT)
        assert "needed more than 1 s to give a sign of life" in caplog.text
        assert len(sample(fleet, [])["0/0"].tokens) == 100


def test_the_budget_of_restarts_ends_the_run(kind: str):
    with serving(kind, restarts=1) as (fleet, [address]):
        address.add_fault("error_500", times=1000)
        with pytest.raises(EngineError, match=r"were started again 1 times before, and --engine\.restarts"):
            sample(fleet, [request()])


# One that is stopped is noticed only after the patience, which must be longer than a start.
@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_started_server_is_started_again_with_the_current_weights(
    kind: str, sign: signal.Signals, short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    decoder = make_newer()
    with started(kind, short_path, monkeypatch, patience=6.0) as fleet:
        load(fleet, decoder, 3)
        for index in range(2):
            fleet.submit(request(0, index, max_tokens=60))
        fleet.poll()
        os.kill(find_server(fleet), sign)
        done = sample(fleet, [])
        assert len(done) == 2 and fleet.num_restarts == 1
        for s in done.values():
            assert s.versions == [(0, 3)] and len(s.tokens) == 60
            assert_logprobs(decoder, PROMPTS[0], s)
    words = "was ended by SIGKILL" if sign == signal.SIGKILL else "needed more than 6 s"
    assert f"server 1 of {fleet._posts[0].replica.dialect.title} {words}" in caplog.text  # type: ignore[attr-defined]


# ---- what servers may not reply


@pytest.mark.parametrize("value", [math.inf, 0.5, 1e308, -1e308, -math.inf, math.nan, 10**400, -(10**400)])
def test_log_probabilities_that_none_can_be_are_refused(value: float):
    assert read_logprobs([-1.5, 0, 1e-6]) == [-1.5, 0.0, 1e-6]
    with pytest.raises(EngineError, match="log-probabilities that none can be"):
        read_logprobs([-1.0, value])


@pytest.mark.parametrize(("change", "words"), [(-1.0, "differ by 1 nats"), (None, "draws no token")])
def test_the_log_probabilities_of_drawn_tokens_are_compared_with_those_of_a_prompt(
    kind: str, change: float | None, words: str, monkeypatch: pytest.MonkeyPatch
):
    cls = DIALECTS[kind]
    ask = cls.continue_tokens

    async def shifted(self: Any, *args: Any) -> Part:
        part = await ask(self, *args)
        if change is None:
            return replace(part, tokens=[], logprobs=[], labels=[])
        return replace(part, logprobs=[value + change for value in part.logprobs])

    monkeypatch.setattr(cls, "continue_tokens", shifted)
    with pytest.raises(ConfigError, match=words), serving(kind):
        pass


def test_a_reply_of_vllm_that_json_cannot_have_is_not_a_number(monkeypatch: pytest.MonkeyPatch):
    """So the canary says that the weights did not arrive whole. Other refusals stay what they are."""

    async def refuse(self: ServerCalls, *args: Any) -> Any:
        raise RefusedCall(400, words)

    monkeypatch.setattr(ServerCalls, "post", refuse)
    dialect, calls = VllmDialect(), ServerCalls(read_address("http://localhost:1"))
    words = "400 Out of range float values are not JSON compliant"
    found = asyncio.run(dialect.compute_logprobs(calls, [1, 2, 3], "label", 1.0))
    assert len(found) == 2 and all(map(math.isnan, found))
    words = "400 too long"
    with pytest.raises(RefusedCall, match="too long"):
        asyncio.run(dialect.compute_logprobs(calls, [1, 2, 3], "label", 1.0))


def test_a_server_with_the_weights_of_an_earlier_run_can_be_used_again(kind: str):
    """It is given the weights of this run before it is compared with the learner."""
    decoder = load_decoder(model_folder())
    with serving(kind) as (fleet, _):
        load(fleet, make_newer(), 5)
        canary = Canary(
            engine=fleet,
            compute=lambda tokens: naive_logprobs(decoder, tokens[:1], tokens[1:]).tolist(),
            vocab_size=small_config().vocab_size,
            dtype="float32",
        )
        sync = WeightSync(get_weights=lambda: LiveWeights(decoder), engine=fleet, canary=canary)
        with pytest.raises(EngineError, match=r"do not compute the same model.*--dtype float32"):
            sync.start()
        sync.start(load_first=True)
        assert canary.tolerance == pytest.approx(1e-5, rel=10) and sync.metrics["sync/gap"] < 1e-5


def test_what_is_no_such_server_is_said_at_once(kind: str):
    """A server that is loading its model says 503, or cannot be reached yet."""
    reply = b"HTTP/1.1 %s\r\nContent-Type: text/html\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
    for status in (b"302 Found\r\nLocation: /login", b"200 OK"):
        with socketserver.TCPServer(("127.0.0.1", 0), make_handler(reply % status)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            begin = time.monotonic()
            with pytest.raises(ConfigError, match=r"Is it (vLLM|SGLang)'s server\?"):
                make_fleet_of(kind, model_folder(), Address(place=server.server_address), patience=20.0)
            assert time.monotonic() - begin < 10
            server.shutdown()


def make_handler(reply: bytes) -> type[socketserver.BaseRequestHandler]:
    """Returns what replies the same to everything."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(reply)

    return Handler


# ---- servers that Cohort starts


@contextmanager
def started(kind: str, short_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Fleet]:
    """A fleet of a stand-in that Cohort starts, as if it were vLLM or SGLang."""
    monkeypatch.setattr("cohort.engines.fleet.servers.find_python", lambda given, package: given)
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    python = str(write_python(short_path / "python", kind))
    fleet = make_server_fleet(
        kind, VARIANTS[kind](python=python, **served(kind), **settings), describe_model(model_folder())
    )
    try:
        yield fleet
    finally:
        fleet.close()


def served(kind: str) -> dict[str, Any]:
    """Returns the settings because of which an engine is a server."""
    return {"place": "server"} if kind == "vllm" else {}


def get_starter(fleet: Fleet) -> Starter:
    """Returns what starts the first server."""
    replica = fleet._posts[0].replica
    assert isinstance(replica, ServerReplica) and isinstance(replica.source, Starter)
    return replica.source


def find_server(fleet: Fleet) -> int:
    """Returns the process id of the first server: the child of its guard."""
    program = get_starter(fleet).program
    assert program is not None
    [child] = Path(f"/proc/{program.guard.pid}/task/{program.guard.pid}/children").read_text().split()
    return int(child)


def test_the_start_of_a_server_is_said(
    kind: str, short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(session, "NOTICE_SECONDS", 0.01)
    with caplog.at_level(logging.INFO), started(kind, short_path, monkeypatch) as fleet:
        where = get_starter(fleet) and fleet._posts[0].replica.where
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{where} starts"
    assert said[1].startswith(f"waiting for {where}, which is starting; at most ")


def test_a_started_server_listens_for_this_user_alone_and_leaves_nothing(
    kind: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with started(kind, short_path, monkeypatch) as fleet:
        assert len(sample(fleet, [request()])) == 1
        words = Path(f"/proc/{find_server(fleet)}/cmdline").read_bytes().decode().split("\0")
        if kind == "vllm":
            path = Path(words[words.index("--uds") + 1])
            assert path.is_socket() and path.parent.stat().st_mode & 0o077 == 0
        else:
            assert words[words.index("--host") + 1] == "127.0.0.1"
        pid = find_server(fleet)
    assert not Path(f"/proc/{pid}").exists()
    assert [p.name for p in short_path.iterdir()] == ["python"]


def test_a_server_that_does_not_start_is_named_with_what_it_printed(
    kind: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cohort.engines.fleet.servers.find_python", lambda given, package: given)
    python = short_path / "python"
    python.write_text("#!/bin/sh\necho no such GPU\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    variant = VARIANTS[kind](python=str(python), **served(kind))
    with pytest.raises(EngineError, match=r"did not start: it exited with code 3; .*\.log.*no such GPU") as error:
        make_server_fleet(kind, variant, describe_model(model_folder()))
    [log] = short_path.glob("*.log")
    assert str(log) in str(error.value) and log.read_text() == "no such GPU\n"


# ---- servers that cannot be trained with

Change = Callable[[list[str]], list[str]]
UNFIT: dict[str, tuple[str, tuple[str, ...], dict[str, str], str]] = {
    "raw": ("vllm", ("--logprobs-mode", "raw_logprobs"), {}, "--logprobs-mode processed_logprobs"),
    "short": ("vllm", ("--max-model-len", "64"), {}, "have 128: start it with as many"),
    "short too": ("sglang", ("--context-length", "130"), {}, "or set --learner.token-budget 122"),
    "original": ("sglang", (), {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    "no development": ("vllm", (), {"VLLM_SERVER_DEV_MODE": "0"}, "start it with VLLM_SERVER_DEV_MODE=1"),
    "key": ("sglang", ("--api-key", "secret"), {}, "COHORT_API_KEY"),
    "key too": ("vllm", ("--api-key", "secret"), {}, "COHORT_API_KEY"),
}


@pytest.mark.parametrize(("kind", "flags", "variables", "words"), UNFIT.values(), ids=UNFIT)
def test_a_server_that_cannot_be_trained_with_is_refused(
    kind: str, flags: tuple[str, ...], variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with serve(kind, model_folder(), *flags) as (address, _), pytest.raises(ConfigError) as error:
        make_fleet_of(kind, model_folder(), address)
    assert words in str(error.value) and "secret" not in str(error.value) and "\n" not in str(error.value)


def test_a_server_without_the_call_for_tokens_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FLAGS, "vllm", ("--max-model-len", "128"))
    with serve("vllm", model_folder()) as (address, _), pytest.raises(ConfigError, match="with --enable-scale-out"):
        make_fleet_of("vllm", model_folder(), address)


def test_the_key_is_sent(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHORT_API_KEY", "secret")
    with serve(kind, model_folder(), "--api-key", "secret") as (address, _):
        fleet = make_fleet_of(kind, model_folder(), address)
        assert len(sample(fleet, [request()])) == 1
        fleet.close()


def test_a_server_of_another_kind_is_refused():
    for kind, other in (KINDS, KINDS[::-1]):
        with serve(kind, model_folder()) as (address, _), pytest.raises(CohortError) as error:
            make_fleet_of(other, model_folder(), address, patience=2.0)
        assert "\n" not in str(error.value) and str(address.place[1]) in str(error.value)


def test_a_server_that_is_paused_goes_on(kind: str):
    with serve(kind, model_folder()) as (address, _):
        if kind == "vllm":
            address.ask("POST", "/pause?mode=keep")
        else:
            address.ask("POST", "/pause_generation", {"mode": "in_place"})
        fleet = make_fleet_of(kind, model_folder(), address)
        assert len(sample(fleet, [request()])) == 1
        fleet.close()


def test_what_a_server_refuses_is_said(kind: str):
    with serving(kind) as (fleet, _):
        # Over the limits of both servers, and not of Cohort.
        wrong = request(temperature=3.0) if kind == "vllm" else request()
        if kind == "sglang":
            wrong = replace(wrong, sampling=replace(wrong.sampling, top_p=-1.0))
            with pytest.raises(ConfigError):
                sample(fleet, [wrong])
            return
        with pytest.raises(ConfigError, match=r'refuses request "0/0": 400'):
            sample(fleet, [wrong])


def test_a_server_that_is_not_there_is_waited_for(kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any):
    monkeypatch.setattr(session, "NOTICE_SECONDS", 0.1)
    with caplog.at_level(logging.INFO), pytest.raises(EngineError) as error:
        make_fleet_of(kind, model_folder(), Address(("127.0.0.1", 1)), patience=1.0)
    assert "was not ready after 1 s (--engine.patience): it cannot be reached" in str(error.value)
    assert "nothing listens there" in str(error.value)
    # After 0.1, 0.2, 0.4 and 0.8 s, as far as the machine keeps up.
    waits = [r for r in caplog.records if "waiting for the server http://127.0.0.1:1, which" in r.getMessage()]
    assert 2 <= len(waits) <= 4


def test_a_unix_socket_is_an_address(short_path: Path):
    place = str(short_path / "socket")
    with serve("vllm", model_folder(), place=place) as (address, _):
        fleet = make_fleet_of("vllm", model_folder(), address)
        assert len(sample(fleet, [request()])) == 1 and fleet._posts[0].replica.where == f"the server unix:{place}"
        fleet.close()


# ---- addresses


def test_addresses_are_divided_among_ranks(monkeypatch: pytest.MonkeyPatch):
    urls = tuple(f"http://localhost:{n}" for n in (1, 2, 3, 4))
    assert [str(a) for a in divide_addresses(urls)] == list(urls)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert [str(a) for a in divide_addresses(urls)] == list(urls[2:])
    with pytest.raises(ConfigError, match="names 3 servers, which 2 ranks cannot divide"):
        divide_addresses(urls[:3])


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        *(("http://localhost:1", True), ("http://127.0.0.2", True), ("http://[::1]:3", True), ("unix:/a/b", True)),
        *(("http://10.0.0.1:1", False), ("https://example.org/x/v1", False)),
    ],
)
def test_addresses_beyond_this_machine_are_warned_of(text: str, is_local: bool, caplog: pytest.LogCaptureFixture):
    assert read_address(text).is_local == is_local
    divide_addresses((text,))
    assert ("every program that can reach it" in caplog.text) != is_local


@pytest.mark.parametrize("text", ["localhost:1", "unix:relative", "http://user:key@host", "ftp://x", ""])
def test_other_texts_are_no_addresses(text: str):
    with pytest.raises(ConfigError) as error:
        read_address(text)
    assert "key@" not in str(error.value)


def test_versions_that_were_never_tried_are_warned_of_once(caplog: pytest.LogCaptureFixture):
    for version in ("9.1.0", "9.1.0", "0.32.4"):
        warn_untried("vLLM", version, ("0.32",))
    assert caplog.text.count("was never tried with Cohort") == 1 and "vLLM 9.1.0" in caplog.text
