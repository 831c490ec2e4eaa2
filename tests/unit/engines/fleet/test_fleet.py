"""A fleet divides requests among replicas, and loses none when replicas are lost. The replicas here are threadless."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.engines.base import Abilities, Request, WorkCounters, sample
from cohort.engines.fleet.base import Forgotten, LoadedWeights, News, NewsQueue, OfferedWeights, Order, ReplicaLost
from cohort.engines.fleet.engine import Fleet, FleetLimits
from cohort.engines.fleet.folder import WeightFolder
from cohort.errors import CohortError, ConfigError, EngineError, ModelError
from cohort.learner.base import LiveWeights
from cohort.types import Finish, Sample
from tests.helpers.decoders_and_groups import make_sample, small_decoder
from tests.helpers.engine_conformance import request

Fault = Callable[["FakeReplica"], object]


def lose(replica: FakeReplica) -> None:
    raise ReplicaLost("was ended by SIGKILL")


class FakeReplica:
    """A replica that answers at once, or when it is told; `faults` are called before the call of that name."""

    def __init__(self, number: int, news: NewsQueue) -> None:
        self.number = number
        self.where = f"replica {number}"
        self.is_ours = True
        self.serial = 0
        self.work = WorkCounters(num_drawn=number + 1)
        self.news = news
        self.held: list[Request] = []
        self.answers = True
        self.seen: list[Order] = []
        self.calls: list[str] = []
        self.faults: dict[str, list[Fault]] = {}
        self.fault = ""
        self.version = -1
        self.weights = WeightFolder()  # whose checksums it repeats
        self.offset = 0.0

    def note(self, call: str) -> None:
        self.calls.append(call)
        if self.faults.get(call):
            self.faults[call].pop(0)(self)

    def start(self) -> None:
        self.serial += 1
        self.fault = ""
        self.note("start")

    def send(self, orders: Sequence[Order]) -> None:
        self.note("send")
        self.seen += orders
        self.held += [o for o in orders if isinstance(o, Request)]
        if self.answers:
            self.answer()

    def answer(self) -> None:
        for r in self.held:
            s = make_sample([self.number] * r.sampling.max_tokens)
            self.news.put(News(replica=self.number, serial=self.serial, id=r.id, sample=s))
        self.held = []

    def abort(self, id: str) -> Sample | None:
        self.note("abort")
        found = [r for r in self.held if r.id == id]
        self.held = [r for r in self.held if r.id != id]
        return make_sample([1], finish=Finish.ABORT) if found else None

    def load(self, folder: Path, version: int) -> LoadedWeights:
        self.note("load")
        self.version = version
        return LoadedWeights(version=version, checksums=dict(self.weights.checksums))

    def load_offered(self, offered: OfferedWeights, version: int) -> LoadedWeights:
        raise AssertionError("the fleet has a folder")

    def compute_logprobs(self, tokens: list[int]) -> list[float]:
        self.note("logprobs")
        return [self.offset + self.version] * (len(tokens) - 1)

    def find_fault(self, is_busy: bool) -> str:
        return self.fault

    def end(self) -> None:
        self.serial += 1
        self.held = []
        self.calls.append("end")


def make(num: int = 2, restarts: int = 3) -> tuple[Fleet, list[FakeReplica]]:
    news = NewsQueue()
    replicas = [FakeReplica(n, news) for n in range(num)]
    folder = WeightFolder()
    for r in replicas:
        r.weights = folder
    limits = FleetLimits(context=128, vocab_size=61, restarts=restarts)
    return Fleet("native", replicas, news, folder, limits, Abilities(streams=False)), replicas


def ids(orders: Sequence[Order]) -> list[str]:
    return [f"-{o.id}" if isinstance(o, Forgotten) else o.id for o in orders]


def test_a_group_goes_to_one_replica_and_groups_are_divided_by_tokens():
    fleet, [a, b] = make()
    requests = [request(0, i, max_tokens=40) for i in range(2)]
    requests += [request(1, i, max_tokens=10) for i in range(3)] + [request(2, i, max_tokens=10) for i in range(3)]
    assert len(sample(fleet, requests)) == 8
    assert ids(a.seen) == ["0/0", "0/1"] and ids(b.seen) == [f"{p}/{i}" for p in (1, 2) for i in range(3)]
    # One message per replica, so that requests of a round share their batches.
    assert a.calls == b.calls == ["start", "send"] and fleet.work.num_drawn == 3


def test_later_members_of_a_group_join_it():
    fleet, [a, b] = make()
    a.answers = b.answers = False
    fleet.submit(request(0, 0))
    fleet.poll()
    for n in (1, 2):
        fleet.submit(request(n, 0, max_tokens=1))
    fleet.submit(request(0, 1))
    fleet.poll()
    assert ids(a.seen) == ["0/0", "0/1"] and ids(b.seen) == ["1/0", "2/0"]


def test_a_conversation_stays_where_its_kv_is_and_orders_keep_their_order():
    fleet, [a, b] = make()
    sample(fleet, [request(0, 0, keep=True, max_tokens=5), request(1, 0, keep=True)])
    fleet.forget("1/0")
    fleet.forget("never seen")
    # Replica 0 would be chosen for both, were it not for the first turns.
    sample(fleet, [request(1, 0, id="1/0"), request(2, 0, id="2/0", continues="0/0", max_tokens=100)])
    assert ids(a.seen) == ["0/0", "1/0", "2/0"] and ids(b.seen) == ["1/0", "-1/0"]


@pytest.mark.parametrize("at", ["send", "silence"])
def test_requests_of_a_lost_replica_go_to_another(at: str, caplog: pytest.LogCaptureFixture):
    fleet, [a, b] = make()
    a.answers = False
    if at == "send":
        a.faults["send"] = [lose]
    for p in range(2):
        for i in range(2):
            fleet.submit(request(p, i, continues="x" if i else ""))
    # Its start takes long: the other replica does the work meanwhile.
    gate: list[str] = []
    a.faults.setdefault("start", []).append(lambda r: wait_for(gate))
    done = {event.id: event.sample for event in fleet.poll() if event.sample is not None}
    if at == "silence":
        a.fault = "has said nothing for 300 s"
    done |= sample(fleet, [])
    assert sorted(done) == ["0/0", "0/1", "1/0", "1/1"] and all(s.tokens[0] == 1 for s in done.values())
    assert sorted(ids(b.seen)) == sorted(done), "none twice"
    again = [o for o in b.seen if o.id == "0/1"]
    assert isinstance(again[0], Request) and again[0].continues == "", "what the lost one kept is gone"
    assert f"replica 0 {'was ended by SIGKILL' if at == 'send' else 'has said nothing for 300 s'}" in caplog.text
    assert "(1 of 3 restarts), and its 2 requests begin again" in caplog.text
    gate.append("open")
    a.answers = True
    fleet.load(LiveWeights(small_decoder()), 1)
    assert fleet.version == 1 and a.calls[-1] == "load"
    # Ready again: it gets requests.
    sample(fleet, [request(0, 0), request(1, 0)])
    assert ids(a.seen)[-1:] == ["0/0"]


def wait_for(gate: list[str]) -> None:
    while not gate:
        time.sleep(0.005)


def test_what_a_replica_reported_before_it_was_lost_counts():
    fleet, [a] = make(1)
    a.answers = False
    fleet.submit(request(0, 0))
    fleet.submit(request(0, 1))
    fleet.poll()
    first, second = a.held
    a.held = [first]
    a.answer()
    a.fault = "was ended by SIGSEGV"
    a.held = [second]
    a.answers = True
    done = sample(fleet, [])
    assert sorted(done) == ["0/0", "0/1"] and ids(a.seen) == ["0/0", "0/1", "0/1"]


def test_news_of_an_earlier_start_are_ignored():
    fleet, [a] = make(1)
    a.answers = False
    fleet.submit(request(0, 0, max_tokens=3))
    fleet.poll()
    late = News(replica=0, serial=a.serial, id="0/0", sample=make_sample([7, 7, 7]))
    a.fault = "hangs"
    a.answers = True
    fleet.poll()
    fleet._wait_for_starters()
    a.news.put(late)
    assert sample(fleet, [])["0/0"].tokens == [0, 0, 0]


def test_a_replica_that_is_back_has_the_current_weights_proved_before_it_works():
    fleet, [a] = make(1)
    fleet.load(LiveWeights(small_decoder()), 4)
    proved: list[float] = []
    fleet.late_proof = lambda engine: proved.append(engine.compute_logprobs([1, 2])[0][0])
    a.faults["send"] = [lose]
    a.calls.clear()
    assert sample(fleet, [request()])["0/0"].tokens
    assert a.calls == ["send", "end", "start", "load", "logprobs", "send"] and proved == [4.0]


def test_a_replica_that_fails_its_late_proof_stops_the_run():
    fleet, [a] = make(1)
    fleet.load(LiveWeights(small_decoder()), 1)

    def refuse(engine: object) -> None:
        raise EngineError("version 1 of the weights did not arrive whole")

    fleet.late_proof = refuse
    a.faults["send"] = [lose]
    with pytest.raises(EngineError, match="did not arrive whole"):
        sample(fleet, [request()])


def test_one_that_is_lost_while_weights_are_loaded_gets_them_after_its_start():
    fleet, [a, b] = make()
    a.faults["load"] = [lose]
    fleet.load(LiveWeights(small_decoder()), 2)
    assert a.version == b.version == fleet.version == 2 and a.calls == ["start", "load", "end", "start", "load"]
    # The next proof covers it: nothing is proved before the learner has computed.
    b.faults["logprobs"] = [lose]
    assert fleet.compute_logprobs([1, 2]) == [[2.0], [2.0]]


def test_restarts_are_limited_and_a_start_that_fails_counts():
    fleet, [a] = make(1, restarts=2)
    a.faults = {"send": [lose], "start": [lose, lose]}
    with pytest.raises(EngineError, match=r"replica 0 was ended by SIGKILL. Engines were started again 2 times") as e:
        sample(fleet, [request()])
    assert "--engine.restarts allows no more" in str(e.value) and "\n" not in str(e.value)
    fleet, [a] = make(1, restarts=0)
    a.fault = "exited with code 1"
    fleet.submit(request())
    with pytest.raises(EngineError, match="replica 0 exited with code 1"):
        fleet.poll()


def test_a_first_start_that_fails_is_one_line_and_ends_all():
    news = NewsQueue()
    replicas = [FakeReplica(n, news) for n in range(2)]
    replicas[1].faults["start"] = [lose]
    limits = FleetLimits(context=128, vocab_size=61, restarts=3)
    with pytest.raises(
        EngineError,
        match=r"replica 1 did not start: it was ended by SIGKILL. Or use --engine native --engine.place here",
    ):
        Fleet("native", replicas, news, WeightFolder(), limits, Abilities())
    assert all(r.calls[-1] == "end" for r in replicas)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: replace(w, version=1), "replica 1: it has version 1"),
        (
            lambda w: replace(w, checksums=w.checksums | {min(w.checksums): 5}),
            "replica 1: 1 tensors have other numbers",
        ),
        (lambda w: replace(w, checksums=dict(list(w.checksums.items())[1:])), "replica 1: it lacks 1 tensors"),
    ],
)
def test_a_wrong_load_of_one_replica_is_named(change: Callable[[LoadedWeights], LoadedWeights], words: str):
    fleet, [_, b] = make()
    good = b.load
    b.load = lambda folder, version: change(good(folder, version))  # type: ignore[method-assign]
    with pytest.raises(EngineError) as error:
        fleet.load(LiveWeights(small_decoder()), 2)
    assert f"version 2 of the weights did not arrive whole in {words}" in str(error.value)


def test_errors_of_the_model_are_raised_as_they_are_and_cause_no_restart():
    fleet, [a] = make(1)
    a.answers = False
    fleet.submit(request())
    fleet.poll()
    error: CohortError = ModelError("the weights are damaged")
    a.news.put(News(replica=0, serial=a.serial, error=error))
    with pytest.raises(ModelError, match="damaged"):
        fleet.poll(1.0)
    assert fleet.num_restarts == 0


def test_aborts():
    fleet, [a] = make(1)
    a.answers = False
    for i in range(4):
        fleet.submit(request(0, i))
    assert fleet.abort("0/3").tokens == [], "not handed over yet"
    fleet.poll()
    assert fleet.abort("0/0").tokens == [1]
    # It ended before the replica was told, and nobody knew.
    a.held, rest = [r for r in a.held if r.id == "0/1"], [r for r in a.held if r.id == "0/2"]
    a.answer()
    ended = fleet.abort("0/1")
    assert len(ended.tokens) == 12 and ended.finish is Finish.ABORT
    a.held = rest
    a.faults["abort"] = [lose]
    assert fleet.abort("0/2") == Sample(tokens=[], provenance=[], sampler_logprobs=[], finish=Finish.ABORT)
    assert fleet.idle
    for id in ("0/0", "0/1", "0/2", "other"):
        with pytest.raises(CohortError, match=id):
            fleet.abort(id)


def test_requests_are_checked_before_they_travel():
    fleet, [a, _] = make()
    fleet.submit(request())
    for changes, words in (({}, "already under way"), ({"id": "x", "tokens": [61]}, "vocabulary of 61")):
        with pytest.raises(ConfigError, match=words):
            fleet.submit(request(**changes))
    assert a.calls == ["start"]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2, 3, 4, 5], r"replica 0 drew 5 tokens where at most 4 were asked for"),
        ([1, 61], r"replica 0 drew the token 61, and the model has 61"),
    ],
)
def test_samples_that_a_request_cannot_have_are_errors(tokens: list[int], words: str):
    fleet, [a] = make(1)
    a.answers = False
    fleet.submit(request(max_tokens=4))
    fleet.poll()
    a.news.put(News(replica=0, serial=a.serial, id="0/0", sample=make_sample(tokens)))
    with pytest.raises(EngineError, match=words):
        fleet.poll()


def test_a_replica_that_cannot_be_started_again_for_any_reason_takes_no_requests():
    fleet, [a, _] = make()

    def fail(replica: FakeReplica) -> None:
        raise OSError("no more processes")

    a.fault = "was ended by SIGKILL"
    a.faults["start"] = [fail]
    fleet.submit(request())
    with pytest.raises(EngineError, match=r"replica 0 could not be started again \(OSError: no more processes\)"):
        for _ in range(100):
            fleet.poll(0.05)
    assert not fleet._posts[0].is_ready and fleet.num_restarts == 1


def test_ctrl_c_does_not_wait_for_a_replica_that_does_not_answer():
    fleet, [a, b] = make()
    answers = threading.Event()

    def interrupt(replica: FakeReplica) -> None:
        raise KeyboardInterrupt

    a.faults["logprobs"] = [interrupt]
    b.faults["logprobs"] = [lambda replica: answers.wait(30)]
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fleet.compute_logprobs([1, 2, 3])
    assert time.monotonic() - begin < 10 and not answers.is_set()
    answers.set()
    fleet.close()


def test_closing_while_a_replica_is_started_again_starts_no_other():
    fleet, [a] = make(1)

    def close_meanwhile(replica: FakeReplica) -> None:
        fleet._closed = True
        lose(replica)

    a.faults["start"] = [close_meanwhile]
    fleet._start_again(fleet._posts[0])
    fleet._start_again(fleet._posts[0])
    assert a.calls == ["start", "end", "start"] and fleet.num_restarts == 0
