"""Training with vLLM as a server that Cohort starts: rewards and gap, wrong loads, and loads while requests run."""

from __future__ import annotations

import random
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cohort.config.engines import VllmEngine
from cohort.engines.base import Request
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.server import ServerReplica, Starter
from cohort.types import Sample
from tests.helpers.engine_conformance import iterate_events
from tests.with_vllm.questions import make_requests
from tests.with_vllm.training import (
    STEPS,
    WRONG_LOADS,
    Fault,
    Trained,
    check_logprobs,
    check_rewards_and_gap,
    check_wrong_loads,
    train_with,
)


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    with train_with(VllmEngine(place="server")) as trained:
        yield trained


def get_fleet(trained: Trained) -> Fleet:
    """Returns the fleet of one server."""
    fleet = trained.job.engine
    assert isinstance(fleet, Fleet)
    return fleet


def test_reward_rises_as_with_the_native_engine_and_the_gap_is_reported(trained: Trained):
    check_rewards_and_gap(trained)
    assert get_fleet(trained).num_restarts == 0


def test_the_server_listens_on_a_socket_of_this_user_alone(trained: Trained):
    [post] = get_fleet(trained)._posts
    replica = post.replica
    assert isinstance(replica, ServerReplica) and isinstance(replica.source, Starter)
    folder = replica.source.folder
    assert folder is not None
    for path in (folder.path, get_fleet(trained).transfer.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((folder.path / "socket").stat().st_mode)


# ---- wrong loads


def spoil_files(folder: Path, fault: Fault) -> None:
    """Writes the weights in a folder again, with a fault."""
    for file in folder.glob("*.safetensors"):
        changed = {name: fault(name, tensor) for name, tensor in load_file(file).items()}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)


def send_wrongly(trained: Trained, fault: Fault) -> None:
    """Sends the learner's weights to the server, which has those of ten steps ago, with a fault in the files."""
    trained.load(trained.old, 0)
    write = WeightFolder.write

    def write_wrongly(folder: WeightFolder, weights: object, version: int) -> None:
        write(folder, weights, version)  # type: ignore[arg-type]
        spoil_files(folder.path, fault)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFolder, "write", write_wrongly)
        trained.job.sync.send(STEPS)


@pytest.mark.parametrize("kind", WRONG_LOADS)
def test_a_wrong_load_of_any_single_tensor_is_caught(trained: Trained, kind: str):
    check_wrong_loads(trained, kind, lambda fault: send_wrongly(trained, fault))


def test_a_right_load_after_wrong_ones_is_accepted(trained: Trained):
    send_wrongly(trained, lambda name, tensor: tensor)
    assert get_fleet(trained).version == STEPS


# ---- loads while requests are under way


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_reload_in_flight_shows_two_versions_with_the_logprobs_of_each(trained: Trained, temperature: float):
    # So many that sampling takes longer than a load. Siblings share their first tokens.
    requests = make_requests(64, temperature=temperature, max_tokens=150, stop_ids=())
    for pause in (0.0, 0.1, 0.2, 0.4):
        done = load_in_flight(trained, requests, pause)
        assert len(done) == len(requests) and {len(s.tokens) for s in done.values()} == {150}
        check_logprobs(trained, requests, done)
        spans = [s.versions for s in done.values() if len(s.versions) > 1]
        assert all([v for _, v in versions] == [0, 1] and 0 < versions[1][0] < 150 for versions in spans)
        # It depends on what else the machine does how many requests are in their middle.
        if len(spans) >= 8:
            return
    pytest.fail(f"only {len(spans)} requests were under way during the load")


def load_in_flight(trained: Trained, requests: list[Request], pause: float) -> dict[str, Sample]:
    """Returns the samples of requests during which the new weights are loaded, after so many seconds."""
    fleet = get_fleet(trained)
    trained.load(trained.old, 0)
    for request in requests:
        fleet.submit(request)
    # The first may end before the last is handed over.
    first = fleet.poll()
    time.sleep(pause)
    trained.load(trained.new, 1)
    return {**{e.id: e.sample for e in first if e.sample is not None}, **collect(fleet)}


def collect(fleet: Fleet) -> dict[str, Sample]:
    """Returns the samples of all requests under way when they have ended."""
    return {e.id: e.sample for events in iterate_events(fleet) for e in events if e.sample is not None}


def test_a_prompt_that_is_cached_is_computed_again_with_new_weights(trained: Trained):
    fleet = get_fleet(trained)
    # Longer than vLLM's block of 128 tokens, or nothing would be cached.
    [first] = make_requests(1, temperature=1.0, max_tokens=6, stop_ids=())
    first = replace(first, tokens=random.Random(0).choices(range(3, 500), k=150))
    for version in (2, 3, 4):
        trained.load(trained.new if version % 2 else trained.old, version)
        for _ in range(2):
            fleet.submit(first)
            done = collect(fleet)
            assert done["0"].versions == [(0, version)]
            check_logprobs(trained, [first], done)
