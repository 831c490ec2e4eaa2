"""The scoring pool with graders that misbehave: they raise, hang, die, print, fork, flood pipes and forge replies."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.scoring import pool as pool_module
from cohort.scoring.pool import MAX_QUEUE, ScoringPool, choose_queue_length
from cohort.scoring.process import Worker
from cohort.scoring.start import choose_num_workers
from cohort.scoring.wire import Item, Limits, Reply, check_environment_reply
from cohort.system.kernel import list_children
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import load_rows, make_plain_answer
from cohort.tasks.draws import Draws
from cohort.tasks.environment import AgainRules, Past
from cohort.tasks.grading import grade
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Key, Outcome

GRADER = '''
import os, random, re, signal, subprocess, sys, time
from cohort.tasks.base import Verdict, task

seen = []
heard = []

def write_everywhere(data):
    """Writes to every file descriptor but the standard ones. The pipe of the protocol is among them."""
    for fd in range(3, 512):
        try:
            os.write(fd, data)
        except OSError:
            pass

@task("wild")
class Wild:
    note: str = "-"

    def rows(self, split): yield {"x": 1}
    def prompt(self, row): return [{"role": "user", "content": "?"}]

    def score(self, row, answer):
        seen.append(row["id"])
        heard.append(answer.text)
        if answer.text == "die": os._exit(5)
        if answer.text == "raise": raise ValueError("my own bug")
        reason = getattr(self, row.get("do", "nothing"))(row) or answer.text
        return Verdict({"correct": 1}, reason)

    def nothing(self, row): return None
    def hears(self, row): return " ".join(heard)
    def naps(self, row): time.sleep(0.05)
    def raises(self, row): raise ValueError("my own bug")
    def leaves(self, row): sys.exit("bye")
    def exits(self, row): os._exit(3)
    def segfaults(self, row): os.kill(os.getpid(), signal.SIGSEGV)
    def recurses(self, row): return self.recurses(row)
    def hangs_in_c(self, row): re.match(r"(a+)+$", "a" * 60 + "b")
    def sleeps(self, row): signal.pause()
    def eats(self, row):
        hoard = []
        while True:
            hoard.append(bytearray(1 << 24))
    def prints(self, row):
        for _ in range(20):
            print("x" * 1_000_000)
            print("y" * 1_000_000, file=sys.stderr)
        os.write(1, b"z" * 3_000_000)
    def reads(self, row): return repr(sys.stdin.read())
    def returns_twice(self, row):
        child = os.fork()
        if child == 0:
            return "the child"
        os.waitpid(child, 0)
        return "the parent"
    def leaves_a_child(self, row):
        child = os.fork()
        if child == 0:
            signal.pause()
        return str(child)
    def leaves_a_program(self, row):
        return str(subprocess.Popen(["sleep", "600"]).pid)
    def leaves_a_child_and_exits(self, row):
        child = os.fork()
        if child == 0:
            signal.pause()
        with open(row["file"], "w") as f: f.write(str(child))
        os._exit(1)
    def writes_a_file(self, row):
        with open(row["file"], "wb") as f: f.write(b"x" * 5_000_000)
    def garbles(self, row): write_everywhere(b"hello\\n")
    def floods(self, row):
        while True: write_everywhere(b"x" * 65536)
    def forges(self, row): write_everywhere(b'{"number":0,"parts":{"correct":NaN}}\\n')
    def once(self, row):
        if len(seen) > 1 and seen[0] != row["id"]: raise RuntimeError("this process is spoilt")
    def shows(self, row):
        return " ".join(sorted(os.environ)) + f" note={self.note} sid={os.getsid(0) == os.getpid()}"
    def draws(self, row): return repr(random.random())
    def long_reason(self, row): return "r" * 10_000

@task("bounded")
class Bounded(Wild):
    """A grader with a work limit: the row says what an answer makes it do; an empty answer is scored at once."""

    parts = ("correct", "format")
    work_seconds = 0.2

    def score(self, row, answer):
        if answer.text == "burn": self.runs(row)
        if answer.text == "die": os._exit(5)
        if not answer.text:
            if row.get("fragile"): raise ValueError("even empty answers")
            return Verdict({"correct": 0, "format": 0.25}, "empty")
        seen.append(row["id"])
        getattr(self, row.get("do", "nothing"))(row)
        return Verdict({"correct": 1, "format": 1}, answer.text)

    def overflows(self, row):
        import faulthandler
        faulthandler._stack_overflow()
    def aborts(self, row): os.abort()
    def runs(self, row):
        while True: pass
    def burns_then_raises(self, row):
        if len(seen) > 1: self.runs(row)
        raise ValueError("my own bug")
    def aborts_once(self, row):
        if len(seen) > 1: os.abort()
    def aborts_then_raises(self, row):
        if len(seen) > 1: os.abort()
        raise ValueError("my own bug")
    def killed(self, row): os.kill(os.getpid(), signal.SIGKILL)

@task("needs-more")
class NeedsMore(Wild):
    packages = {"no_such_module_here": "somewhere[extra]"}

@task("heavy")
class Heavy(Wild):
    packages = {"wave": "in the standard library"}
    def score(self, row, answer): return Verdict({"correct": 1}, str("wave" in sys.modules))

@task("wrong-shape")
class WrongShape(Wild):
    def score(self, row, answer): return {"correct": float("nan")} if row.get("bad") else {"correct": 0}
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("grader") / "wild.py"
    path.write_text(GRADER)
    return str(path)


@pytest.fixture
def pool(file: str) -> Iterator[ScoringPool]:
    with ScoringPool(TaskRef(name="wild", path=file), limits=Limits(seconds=1.0, memory_mb=256)) as made:
        yield made


def make_items(*deeds: str, **more: Any) -> list:
    """Returns a row and an answer per deed, a method of the grader above; `more` goes into the rows."""
    return [({"id": str(i), "do": deed, **more}, make_plain_answer(f"t{i}")) for i, deed in enumerate(deeds)]


def list_processes(pool: ScoringPool) -> list[int]:
    """Returns the process ids of the guards and workers of a pool."""
    guards = [worker.guard_pid for worker in pool._workers]
    return guards + [pid for guard in guards for pid in list_children(guard)]


def has_ended(pid: int, within: float = 10.0) -> bool:
    """Waits up to `within` seconds and returns whether a process has ended; a zombie has, though it is not reaped."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


GOOD = {"correct": 1.0}


@pytest.mark.parametrize(
    ("deed", "failure"),
    [
        ("raises", "the grader raised ValueError: my own bug (wild.py, line"),
        ("leaves", "the grader raised SystemExit: bye"),
        ("recurses", "RecursionError"),
        ("exits", "process exited with code 3"),
        ("segfaults", "process was ended by SIGSEGV"),
        ("hangs_in_c", "took longer than 1 s"),
        ("sleeps", "took longer than 1 s"),
        ("eats", "MemoryError"),
        ("garbles", "wrote into the pipe of the scoring protocol"),
        ("floods", "the reply of the grader's process is longer than"),
    ],
)
def test_a_failure_is_reported_and_harms_no_neighbour(pool: ScoringPool, deed: str, failure: str) -> None:
    outcomes = pool.score(make_items("nothing", deed, "nothing", "nothing"))
    assert [o.parts for o in outcomes] == [GOOD, {}, GOOD, GOOD]
    assert [o.reason for o in outcomes] == ["t0", "", "t2", "t3"]
    assert failure in outcomes[1].failure
    assert [bool(o.failure) for o in outcomes] == [False, True, False, False]
    assert pool.num_failures == 1
    assert pool.num_restarts >= 1
    assert pool.score(make_items("nothing"))[0].parts == GOOD


def make_bounded_pool(file: str, workers: int = 1, seconds: float = 1.0) -> ScoringPool:
    """Returns a pool for the task with a work limit."""
    limits = Limits(seconds=seconds, memory_mb=256)
    return ScoringPool(TaskRef(name="bounded", path=file), workers=workers, limits=limits)


OVER = Outcome(parts={"correct": 0.0, "format": 0.25}, reason="over the grader's work limit of 0.2 s")


@pytest.mark.parametrize("deed", ["runs", "hangs_in_c", "sleeps", "eats", "overflows", "aborts", "burns_then_raises"])
def test_too_much_work_is_the_answers_doing(file: str, deed: str) -> None:
    """With a work limit, it gets the score of an empty answer and is counted apart; its neighbours are unharmed."""
    with make_bounded_pool(file) as pool:
        outcomes = pool.score(make_items("nothing", deed, "nothing"))
        assert outcomes[1] == OVER
        assert [outcomes[i].reason for i in (0, 2)] == ["t0", "t2"]
        assert (pool.num_over_limit, pool.num_failures) == (1, 0)
        assert pool.score(make_items("nothing"))[0].reason == "t0"


@pytest.mark.parametrize(
    ("deed", "failure"),
    [
        ("raises", "the grader raised ValueError: my own bug"),
        ("recurses", "RecursionError"),
        ("exits", "process exited with code 3"),
        ("killed", "process was ended by SIGKILL"),  # it may have come from a machine that is out of memory
        ("garbles", "wrote into the pipe of the scoring protocol"),
        ("aborts_then_raises", "my own bug"),  # too much memory once is not enough
    ],
)
def test_a_work_limit_excuses_no_other_failure(file: str, deed: str, failure: str) -> None:
    with make_bounded_pool(file) as pool:
        outcomes = pool.score(make_items("nothing", deed, "nothing"))
        assert failure in outcomes[1].failure
        assert (pool.num_over_limit, pool.num_failures) == (0, 1)
        assert [outcomes[i].reason for i in (0, 2)] == ["t0", "t2"]


def test_an_answer_that_is_out_of_memory_once_is_scored_by_the_second_try(file: str) -> None:
    with make_bounded_pool(file) as pool:
        outcomes = pool.score(make_items("nothing", "aborts_once"))
        assert [o.reason for o in outcomes] == ["t0", "t1"]
        assert (pool.num_over_limit, pool.num_failures, pool.num_restarts) == (0, 0, 1)


def test_a_grader_that_cannot_score_an_empty_answer_either_has_failed(file: str) -> None:
    with make_bounded_pool(file) as pool:
        (outcome,) = pool.score(make_items("runs", fragile=True))
        assert "even empty answers" in outcome.failure
        assert (pool.num_over_limit, pool.num_failures) == (0, 1)


def test_over_the_limit_or_not_does_not_depend_on_order_or_workers(file: str) -> None:
    asked = make_items("nothing", "runs", "raises", "eats", "nothing", "overflows", "runs", "raises")
    good = {"correct": 1.0, "format": 1.0}
    for workers, step in ((1, 1), (3, 1), (2, -1)):
        with make_bounded_pool(file, workers) as pool:
            outcomes = pool.score(asked[::step])[::step]
            assert [outcomes[i] for i in (1, 3, 5, 6)] == [OVER] * 4
            assert [outcomes[i] for i in (0, 4)] == [Outcome(parts=good, reason=f"t{i}") for i in (0, 4)]
            assert all("my own bug" in outcomes[i].failure for i in (2, 7))
            assert (pool.num_over_limit, pool.num_failures) == (4, 2)


def test_an_answer_that_was_dropped_is_not_counted_as_over_the_limit(file: str) -> None:
    """It is dropped while a worker scores the empty answer in its place."""
    with make_bounded_pool(file) as pool:
        pool.submit("one", *make_items("runs")[0])
        # The empty answer goes to a worker that is just being started, so no reply to it can be there yet.
        while not any(item.number in pool._emptied for worker in pool._workers for item in worker.items):
            pool._advance(0.01)
        pool.drop("one")
        pool.submit("two", *make_items("nothing")[0])
        assert [id for id, _ in poll_until_done(pool).items()] == ["two"]
        assert (pool.num_over_limit, pool.num_failures) == (0, 0)


SLOW = """
import time
from cohort.tasks.base import task

@task("slow")
class Slow:
    work_seconds = {seconds}
    def rows(self, split): yield {{"x": 1}}
    def prompt(self, row): return [{{"role": "user", "content": "?"}}]
    def score(self, row, answer):
        time.sleep(0.8)  # twice the limit of the pool
        return {{"correct": 1}}
"""


def test_the_advice_for_a_slow_grader_works(tmp_path: Path) -> None:
    limits = Limits(seconds=0.4)
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=0.0))
    with ScoringPool(TaskRef(name="slow", path=str(tmp_path / "slow.py")), limits=limits) as pool:
        (outcome,) = pool.score(make_items("nothing"))
    assert outcome.failure == (
        "the grader took longer than 0.4 s; make it quicker, raise --scoring.seconds, or, if its work depends on the "
        "answer, set `work_seconds = 0.4` in the task's class: an answer that needs more is then wrong"
    )
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=0.4))
    with ScoringPool(TaskRef(name="slow", path=str(tmp_path / "slow.py")), limits=limits) as pool:
        assert pool.score(make_items("nothing")) == [Outcome(parts=GOOD)]


def test_a_grader_without_memory_is_told_how_much_it_may_use(pool: ScoringPool) -> None:
    (outcome,) = pool.score(make_items("eats"))
    assert outcome.failure.endswith(
        "; scoring one answer may use 256 MB more than the loaded task: use less, or load large data when the module "
        "is imported"
    )


def test_a_busy_machine_is_not_the_answers_fault(file: str) -> None:
    """CPU time counts: the pool waits longer than the limit for a worker that got none."""
    with make_bounded_pool(file, seconds=0.1) as pool:
        pool.score(make_items("nothing"))
        (worker,) = pool._workers
        (worker_pid,) = list_children(worker.guard_pid)
        os.kill(worker_pid, signal.SIGSTOP)
        pool.submit("slow", {"id": "0"}, make_plain_answer("t"))
        assert pool.poll() == []
        worker.last_active -= 1.0  # five times the work limit, ten times the pool's own
        assert pool.poll(timeout=0.1) == []
        os.kill(worker_pid, signal.SIGCONT)
        assert pool.poll(timeout=10) == [("slow", Outcome(parts={"correct": 1.0, "format": 1.0}, reason="t"))]
        assert pool.num_restarts == 0


@pytest.mark.parametrize("deed", ["nothing", "raises", "exits"])
def test_a_dropped_answer_is_not_heard_of_and_its_id_is_free_again(pool: ScoringPool, deed: str) -> None:
    """Dropped before a worker has it, while one works on it (and perhaps dies of it), and when it is done."""
    ((row, answer),) = make_items(deed)
    ((_, good),) = make_items("nothing")
    for moment in ("waiting", "working", "done"):
        pool.submit("one", row, answer)
        pool.submit("two", {"id": "2"}, good)
        if moment == "working":
            pool._advance(0.0)  # hands them out
        if moment == "done":
            while pool.num_pending > len(pool._done):
                pool._advance(0.05)
        pool.drop("one")
        pool.submit("one", {"id": "1"}, good)
        outcomes: dict[str, Outcome] = {}
        while pool.num_pending:
            for id, outcome in pool.poll(timeout=5.0):
                assert id not in outcomes
                outcomes[id] = outcome
        assert set(outcomes) == {"one", "two"} and not any(outcome.failure for outcome in outcomes.values())
    pool.drop("never submitted")


def make_patient_pool(file: str, workers: int = 1) -> ScoringPool:
    """Returns a pool that waits for a grader that sleeps longer than any test may take."""
    return ScoringPool(TaskRef(name="wild", path=file), workers=workers, limits=Limits(seconds=120.0, memory_mb=256))


def poll_until_done(pool: ScoringPool) -> dict[str, Outcome]:
    """Polls until nothing is pending and returns all outcomes by id."""
    outcomes: dict[str, Outcome] = {}
    while pool.num_pending:
        outcomes.update(pool.poll(timeout=5.0))
    return outcomes


def submit_and_hand_out(pool: ScoringPool, **deeds: str) -> None:
    """Submits an answer per deed, under the id of its name, and hands them to the workers."""
    for id, deed in deeds.items():
        pool.submit(id, {"id": id, "do": deed}, make_plain_answer(id))
    pool._advance(0.0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that is filled with the row ids of the items that workers are given, in order."""
    rows: list[str] = []
    send = Worker.send

    def listen(worker: Worker, item: Item) -> None:
        rows.append(item.row["id"])
        send(worker, item)

    monkeypatch.setattr(Worker, "send", listen)
    return rows


@pytest.mark.parametrize("quick_before", [0, 20])
def test_a_quick_answer_does_not_wait_for_dropped_slow_ones(file: str, quick_before: int) -> None:
    """A new worker has two of the slow answers queued; one whose answers were quick so far has all of them."""
    with make_patient_pool(file) as pool:
        pool.score(make_items(*["nothing"] * quick_before))
        slow = [f"slow{i}" for i in range(10)]
        submit_and_hand_out(pool, **dict.fromkeys(slow, "sleeps"))
        for id in slow:
            pool.drop(id)
        assert pool.num_pending == 0
        begin = time.monotonic()
        submit_and_hand_out(pool, quick="nothing")
        assert poll_until_done(pool) == {"quick": Outcome(parts=GOOD, reason="quick")}
        assert time.monotonic() - begin < 60  # of the 120 s that a single slow one has
        assert pool.num_restarts == 1 and pool.num_failures == 0  # one for all ten
        assert not pool._waiting and not pool._retries and not pool._was_too_much


def test_what_waits_behind_a_dropped_answer_is_scored_elsewhere_with_a_clean_record(file: str) -> None:
    with make_patient_pool(file) as pool:
        pool.score(make_items(*["nothing"] * 20))
        pool._typical_seconds = 0.0
        submit_and_hand_out(pool, slow="sleeps", a="nothing", b="once")
        assert [item.row["id"] for item in pool._workers[0].items] == ["slow", "a", "b"]
        pool.drop("slow")
        # b fails because it is not the first in its process; it still has its second try.
        assert poll_until_done(pool) == {id: Outcome(parts=GOOD, reason=id) for id in "ab"}
        assert pool.num_failures == 0 and pool.num_restarts == 2


def test_a_worker_with_a_dropped_answer_stays_while_nothing_waits_for_it(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "WASTED_SECONDS", 0.0)
    with make_patient_pool(file, workers=2) as pool:
        while not all(worker.ready for worker in pool._workers):
            pool._advance(0.0)
        submit_and_hand_out(pool, slow="sleeps")
        pool.drop("slow")
        for _ in range(3):
            assert pool.poll() == []
        submit_and_hand_out(pool, quick="nothing")  # the other worker takes it
        assert poll_until_done(pool) == {"quick": Outcome(parts=GOOD, reason="quick")}
        assert pool.num_restarts == 0


def test_a_dropped_answer_is_not_begun_again_when_its_worker_dies(file: str, sent: list[str]) -> None:
    with make_patient_pool(file) as pool:
        pool._typical_seconds = 0.0
        submit_and_hand_out(pool, bad="exits", dropped="sleeps", kept="nothing")
        pool.submit("waits", {"id": "waits"}, make_plain_answer("waits"))
        pool.submit("gone", {"id": "gone", "do": "sleeps"}, make_plain_answer("gone"))
        for id in ("dropped", "gone"):
            pool.drop(id)
        outcomes = poll_until_done(pool)
    assert outcomes.keys() == {"bad", "kept", "waits"} and "exited with code 3" in outcomes["bad"].failure
    assert sent[:3] == ["bad", "dropped", "kept"] and not {"dropped", "gone"} & set(sent[3:])


def test_a_dropped_second_try_is_not_made_and_starts_no_worker(file: str, sent: list[str]) -> None:
    with make_patient_pool(file) as pool:
        submit_and_hand_out(pool, bad="raises")
        while not pool._retries:
            pool._advance(0.01)
        pool.drop("bad")
        submit_and_hand_out(pool, good="nothing")
        assert poll_until_done(pool) == {"good": Outcome(parts=GOOD, reason="good")}
        assert sent == ["bad", "good"] and pool.num_restarts == 0 and not pool._was_too_much


def test_the_window_shrinks_as_answers_take_longer() -> None:
    assert [choose_queue_length(s) for s in (0.0, 0.001, 0.0015)] == [MAX_QUEUE] * 3
    assert [choose_queue_length(s) for s in (None, 0.05, 0.1, 1e9)] == [2] * 4
    between = [choose_queue_length(s / 1000) for s in range(1, 60)]
    assert between == sorted(between, reverse=True) and len(set(between)) > 10


def test_slow_answers_are_handed_out_as_workers_get_free(file: str) -> None:
    with make_patient_pool(file, workers=2) as pool:
        pool.score(make_items(*["naps"] * 6))
        for id in map(str, range(10)):
            pool.submit(id, {"id": id, "do": "naps"}, make_plain_answer(id))
        most = [0, 0]
        while pool.num_pending:
            for index, worker in enumerate(pool._workers):
                pool._hand_out_items(index, worker)
                most[index] = max(most[index], len(worker.items))
            pool.poll(timeout=0.05)
        assert most == [2, 2]


def test_quick_answers_are_as_quick_as_with_a_full_window(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is generous: with one answer per poll they would take many times as long where polls are rare."""
    asked = make_items(*["nothing"] * 2000)
    took: dict[str, int] = {}
    for name, seconds in (("fixed", math.inf), ("measured", pool_module.QUEUE_SECONDS)):
        monkeypatch.setattr(pool_module, "QUEUE_SECONDS", seconds)
        with make_patient_pool(file) as pool:
            pool.score(make_items("nothing"))
            for i, (row, answer) in enumerate(asked):
                pool.submit(str(i), row, answer)
            polls = 0
            while pool.num_pending:
                time.sleep(0.005)  # the owner of the pool is busy with something else
                pool.poll()
                polls += 1
            took[name] = polls
    assert took["measured"] < 3 * took["fixed"] + 50 < 1000


@pytest.mark.parametrize("seconds", ["NaN", "-1.0", "Infinity"])
def test_an_impossible_time_in_a_reply_is_ignored(pool: ScoringPool, seconds: str) -> None:
    pool.score(make_items("nothing"))
    (worker,), typical = pool._workers, pool._typical_seconds
    pool.submit("a", {"id": "a"}, make_plain_answer(""))
    worker.items.append(Item(number=0, row={"id": "a"}, answer=make_plain_answer("")))
    reply = Reply.decode(f'{{"number":0,"parts":{{"correct":1}},"seconds":{seconds}}}'.encode())
    pool._handle_reply(worker, reply)
    assert typical is not None and pool._typical_seconds == typical > 0


# ---- episodes

AGAIN = AgainRules(attempts=3, below=1.0, cost=0.5, words=tuple("abcdefgh"), coefficients={"format": 0.0})


def play_episodes(
    pool: ScoringPool, num: int, says: Callable[[int, int], str], turns: int = 4
) -> dict[int, list[Outcome]]:
    """Plays `num` episodes side by side and returns the outcomes per episode, turn by turn.

    `says(episode, turn)` is the policy's answer.
    """
    told: dict[int, list[Answer]] = {n: [] for n in range(num)}
    found: dict[int, list[Outcome]] = {n: [] for n in range(num)}
    going = set(range(num))
    for turn in range(turns):
        for n in sorted(going):
            answer = make_plain_answer(says(n, turn))
            key = Key(seed=1, purpose="train", task="wild", prompt_id=str(n), visit=0, sample=0)
            pool.submit(str(n), {"id": str(n)}, answer, Past(key=key, answers=tuple(told[n])))
            told[n].append(answer)
        waiting = set(going)
        while waiting:
            for id, outcome in pool.poll(timeout=1.0):
                waiting.discard(int(id))
                found[int(id)].append(outcome)
                if outcome.stand_in is not None:
                    told[int(id)][-1] = outcome.stand_in
        going = {n for n in going if found[n][-1].replies}
    assert not pool.num_pending
    return found


def make_episode_pool(file: str, workers: int = 1, name: str = "wild") -> ScoringPool:
    limits = Limits(seconds=1.0, memory_mb=256)
    return ScoringPool(TaskRef(name=name, path=file), workers=workers, limits=limits, again=AGAIN)


def answer_calmly(episode: int, turn: int) -> str:
    return f"{episode}.{turn}"


def test_an_episode_asks_for_another_attempt_by_its_key_in_any_worker(file: str) -> None:
    with make_episode_pool(file) as pool:
        expected = play_episodes(pool, 20, answer_calmly)
    for n, outcomes in expected.items():
        words = [Draws("again", 1, "train", "wild", str(n), 0, 0, turn).choice(AGAIN.words) for turn in (1, 2, 3)]
        assert [o.replies for o in outcomes] == [[{"role": "user", "content": w}] for w in words] + [[]]
        assert [o.cost for o in outcomes] == [0.0, 0.5, 1.0, 1.5]
        assert [(o.parts, o.reason) for o in outcomes] == [(GOOD, answer_calmly(n, turn)) for turn in range(4)]
    with make_episode_pool(file, workers=3) as pool:
        assert play_episodes(pool, 20, answer_calmly) == expected


def test_an_episode_with_a_key_that_was_used_is_told_its_own_answers(file: str) -> None:
    """The grader returns all answers that its process has scored. Its environment knows X; the episode began with Y."""
    key = Key(seed=1, purpose="eval", task="wild", prompt_id="0", visit=0, sample=0)
    with make_episode_pool(file) as pool:
        said = []
        for earlier, newest in (((), "X"), (("X",), "Z"), ((), "X"), (("Y",), "Z")):
            answers = tuple(map(make_plain_answer, earlier))
            pool.submit("0", {"id": "0", "do": "hears"}, make_plain_answer(newest), Past(key=key, answers=answers))
            said.append(poll_until_done(pool)["0"].reason)
    assert said == ["X", "X Z", "X Z X", "X Z X Y Z"]


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("deed", ["die", "raise"])
def test_a_worker_that_dies_with_many_episodes_in_it_fails_exactly_one(file: str, turn: int, deed: str) -> None:
    with make_episode_pool(file) as pool:
        expected = play_episodes(pool, 50, answer_calmly)
        found = play_episodes(pool, 50, lambda n, at: deed if (n, at) == (17, turn) else answer_calmly(n, at))
        assert pool.num_failures == 1 and pool.num_restarts >= 1
    assert len(found[17]) == turn + 1 and found[17][-1].failure and not found[17][-1].replies
    del found[17], expected[17]
    assert found == expected


def test_what_is_too_much_work_is_an_empty_answer_and_the_episode_goes_on(file: str) -> None:
    """Also when another worker has to replay the episode: it is not given the same work again."""

    def says(n: int, turn: int) -> str:
        return {(1, 1): "burn", (0, 2): "die"}.get((n, turn), answer_calmly(n, turn))

    with make_episode_pool(file, name="bounded") as pool:
        found = play_episodes(pool, 3, says)
        assert (pool.num_over_limit, pool.num_failures) == (1, 1)
    over = found[1][1]
    assert (over.parts, over.reason) == (OVER.parts, OVER.reason) and over.replies and over.cost == 0.5
    assert over.stand_in == make_plain_answer("")
    assert [len(outcomes) for outcomes in found.values()] == [3, 4, 4]
    assert [o.reason for o in found[1][2:]] == ["1.2", "1.3"]


def test_an_answer_outside_an_episode_is_scored_alone(file: str) -> None:
    """The same pool serves evaluation, which reads the first answer only."""
    with make_episode_pool(file) as pool:
        assert pool.score(make_items("nothing")) == [Outcome(parts=GOOD, reason="t0")]


def test_a_reply_that_is_no_message_is_refused() -> None:
    for reply in (Reply(replies=["hello"]), Reply(replies=[{"role": "user"}]), Reply(cost=math.nan)):
        with pytest.raises(TaskError, match='task "t", row "r": the environment'):
            check_environment_reply("t", "r", reply)


def test_a_missing_package_is_named_before_anything_starts(file: str) -> None:
    task = TaskRef(name="needs-more", path=file).load()
    with pytest.raises(
        TaskError, match=r"scoring needs-more needs the module no_such_module_here.*pip install 'somewhere\[extra\]'"
    ):
        ScoringPool(task)
    with (
        ScoringPool(TaskRef(name="needs-more", path=file)) as pool,  # the task is never loaded in this process
        pytest.raises(TaskError, match=r"cannot be loaded for scoring: ModuleNotFoundError.*; correct its file$"),
    ):
        pool.score(make_items("nothing"))


def test_packages_are_imported_by_workers_before_the_first_answer_and_not_by_their_owner(file: str) -> None:
    task = TaskRef(name="heavy", path=file).load()
    assert "wave" not in sys.modules
    with ScoringPool(task) as pool:
        (outcome,) = pool.score(make_items("nothing"))
    assert outcome.reason == "True"
    assert "wave" not in sys.modules


def test_the_number_of_workers_follows_the_processors(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    one, many = TaskRef(name="wild", path=file).load(), TaskRef(name="bounded", path=file).load()
    for processors, workers in ((1, 1), (2, 1), (4, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processors: set(range(n)))
        assert (choose_num_workers(one), choose_num_workers(many)) == (1, workers)


def test_every_answer_of_many_may_fail(pool: ScoringPool) -> None:
    outcomes = pool.score(make_items(*["raises"] * 150))
    assert all("my own bug" in o.failure for o in outcomes)
    assert pool.num_restarts < 20  # they share the fresh workers


def test_a_second_try_runs_in_a_fresh_process(pool: ScoringPool) -> None:
    """`once` works only as the first item of a process, so it succeeds only if the retry is in a fresh one."""
    outcomes = pool.score(make_items("nothing", "once"))
    assert [o.parts for o in outcomes] == [GOOD, GOOD]
    assert pool.num_failures == 0
    assert pool.num_restarts == 1


def test_prints_reads_and_long_reasons_do_not_matter(pool: ScoringPool) -> None:
    outcomes = pool.score(make_items("prints", "reads", "long_reason", "nothing"))
    assert [o.parts for o in outcomes] == [GOOD] * 4
    assert outcomes[1].reason == "''"
    assert len(outcomes[2].reason) == 500
    assert pool.num_restarts == 0


def test_a_fork_gives_one_reply(pool: ScoringPool) -> None:
    outcomes = pool.score(make_items("returns_twice", "nothing", "returns_twice"))
    assert [o.reason for o in outcomes] == ["the parent", "t1", "the parent"]
    assert pool.num_restarts == 0


def test_what_a_grader_leaves_behind_ends_with_its_worker(pool: ScoringPool, tmp_path: Path) -> None:
    outcomes = pool.score(make_items("leaves_a_child", "leaves_a_program"))
    children = [int(o.reason) for o in outcomes]
    assert all(Path(f"/proc/{pid}").exists() for pid in children)
    pool.close()
    assert all(has_ended(pid) for pid in children)


def test_a_worker_that_dies_leaving_a_child_is_noticed(pool: ScoringPool, tmp_path: Path) -> None:
    """The child holds the pipe open, so the pipe does not show the death."""
    (outcome,) = pool.score(make_items("leaves_a_child_and_exits", file=str(tmp_path / "pid")))
    assert "exited with code 1" in outcome.failure
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_files_are_bounded(pool: ScoringPool, tmp_path: Path) -> None:
    (outcome,) = pool.score(make_items("writes_a_file", file=str(tmp_path / "big")))
    assert "File too large" in outcome.failure
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_workers_know_no_keys_and_have_their_own_session(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    with ScoringPool(TaskRef(name="wild", path=file, settings={"note": "hi"})) as pool:
        (outcome,) = pool.score(make_items("shows"))
    assert "KEY" not in outcome.reason
    assert "PATH" in outcome.reason
    assert outcome.reason.endswith("note=hi sid=True")


def test_results_depend_neither_on_order_nor_on_workers(file: str) -> None:
    rows = load_rows(Arithmetic(train_size=300, test_size=10), "train")
    task = Arithmetic(train_size=300, test_size=10)
    asked = [
        (r, make_plain_answer(f"<answer>{r['answer'] + i % 3}</answer>" * (i % 2 + 1))) for i, r in enumerate(rows)
    ]
    expected = [grade(task, row, answer) for row, answer in asked]
    assert len({json.dumps(o.parts) for o in expected}) == 4
    shuffled = list(range(300))
    random.Random(0).shuffle(shuffled)
    for workers in (1, 3):
        with ScoringPool(task, workers=workers) as pool:
            assert pool.score(asked) == expected
            assert pool.score(asked[i] for i in shuffled) == [expected[i] for i in shuffled]


def test_a_grader_that_draws_random_numbers_draws_the_same_for_the_same_answer(file: str) -> None:
    seen: list[list[Outcome]] = []
    for order in ([0, 1, 2], [2, 0, 1]):
        with ScoringPool(TaskRef(name="wild", path=file)) as pool:
            asked = make_items("draws", "draws", "draws")
            found = pool.score(asked[i] for i in order)
            seen.append([found[order.index(i)] for i in range(3)])
    assert seen[0] == seen[1]
    assert len({o.reason for o in seen[0]}) == 3


def test_a_result_that_is_no_score_is_an_error_with_task_and_row(file: str) -> None:
    with ScoringPool(TaskRef(name="wrong-shape", path=file)) as pool:
        pool.submit("a", {"id": "r1"}, make_plain_answer(""))
        pool.submit("b", {"id": "r2", "bad": True}, make_plain_answer(""))
        pool.submit("c", {"id": "r3"}, make_plain_answer(""))
        outcomes: dict[str, Outcome] = {}
        with pytest.raises(TaskError, match='task "wrong-shape", row "r2": method `score` gave nan'):
            while pool.num_pending:
                outcomes.update(pool.poll(timeout=5))
        while pool.num_pending:
            outcomes.update(pool.poll(timeout=5))
        assert outcomes.keys() == {"a", "c"}


def test_the_pool_checks_scores_itself(pool: ScoringPool) -> None:
    """A forged reply is not checked by the worker; the pool refuses it."""
    with pytest.raises(TaskError, match='task "wild", row "0": method `score` gave nan'):
        pool.score(make_items("forges"))


def test_a_task_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with (
        ScoringPool(TaskRef(name="x", path=str(tmp_path / "broken.py"))) as pool,
        pytest.raises(TaskError, match=r"for scoring: the file .* raised ModuleNotFoundError.* import no_such_module$"),
    ):
        pool.score(make_items("nothing"))
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with (
        ScoringPool(TaskRef(name="x", path=str(tmp_path / "dies.py"))) as pool,
        pytest.raises(TaskError, match=r"does not start \(the grader's process exited with code 7"),
    ):
        pool.score(make_items("nothing"))


def test_answers_larger_than_any_pipe_pass_both_ways(pool: ScoringPool) -> None:
    asked = [({"id": str(i), "pad": "p" * 300_000}, make_plain_answer("a" * 300_000)) for i in range(40)]
    outcomes = pool.score(asked)
    assert [o.reason for o in outcomes] == ["a" * 500] * 40
    assert pool.num_restarts == 0


def test_a_worker_is_not_killed_while_its_owner_is_busy(pool: ScoringPool) -> None:
    """A worker waits for the rest of an answer that is longer than the pipe; the grader is not charged for that."""
    pool.score(make_items("nothing"))
    (worker,) = pool._workers
    (worker_pid,) = list_children(worker.guard_pid)
    os.kill(worker_pid, signal.SIGSTOP)
    pool.submit("long", {"id": "0", "pad": "p" * 3_000_000}, make_plain_answer("t"))
    assert pool.poll() == []  # writes what the pipe takes
    os.kill(worker_pid, signal.SIGCONT)
    select.select([], [worker._requests], [])  # the worker has read that much and wants more
    worker.last_active -= 1000  # meanwhile the owner was busy elsewhere
    outcomes: list[tuple[str, Outcome]] = []
    while pool.num_pending:
        outcomes += pool.poll(timeout=5)
    assert outcomes == [("long", Outcome(parts=GOOD, reason="t"))]
    assert pool.num_restarts == 0


def test_poll_does_not_wait_when_nothing_is_under_way(pool: ScoringPool) -> None:
    begin = time.monotonic()
    assert pool.poll(timeout=60) == []
    assert time.monotonic() - begin < 30


def test_misuse_is_refused(pool: ScoringPool) -> None:
    pool.submit("a", {"id": "1"}, make_plain_answer(""))
    with pytest.raises(ValueError, match='"a" is being scored already'):
        pool.submit("a", {"id": "1"}, make_plain_answer(""))
    with pytest.raises(ValueError, match="pending"):
        pool.score([])
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.submit("b", {"id": "1"}, make_plain_answer(""))
    with pytest.raises(ValueError, match="at least 1"):
        ScoringPool(Arithmetic(), workers=0)


def test_a_fork_of_the_owner_does_not_end_the_workers(pool: ScoringPool) -> None:
    pool.score(make_items("nothing"))
    child = os.fork()
    if child == 0:
        try:
            pool._finalizer()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert pool.score(make_items("nothing"))[0].parts == GOOD
    assert pool.num_restarts == 0


def test_a_forgotten_pool_ends_its_workers(file: str) -> None:
    pool = ScoringPool(TaskRef(name="wild", path=file), workers=2)
    pool.score(make_items("nothing"))
    pids = list_processes(pool)
    del pool
    gc.collect()
    assert all(has_ended(pid) for pid in pids)


OWNER = """
import sys
from cohort.scoring.pool import ScoringPool
from cohort.system.kernel import list_children
from cohort.tasks.base import make_plain_answer
from cohort.tasks.ref import TaskRef

pool = ScoringPool(TaskRef(name="wild", path=sys.argv[1]), workers=2)
child = pool.score([({"id": "0", "do": "leaves_a_child"}, make_plain_answer(""))])[0].reason
for i in range(4):
    pool.submit(str(i), {"id": str(i), "do": sys.argv[2]}, make_plain_answer(""))
pool.poll(timeout=0.2)
guards = [worker.guard_pid for worker in pool._workers]
print(*guards, *(pid for guard in guards for pid in list_children(guard)), child, flush=True)
pool.poll(timeout=600)
"""


@pytest.mark.parametrize("deed", ["hangs_in_c", "sleeps"])
def test_no_worker_survives_its_parent(file: str, deed: str) -> None:
    """An owner that is killed with SIGKILL cannot clean up; the kernel kills its workers."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, file, deed], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 5
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert all(has_ended(pid) for pid in pids)


def test_no_worker_takes_more_than_its_share() -> None:
    """An episode stays with its worker: one that took all of them at once would run all slow calls alone."""
    with ScoringPool(Arithmetic(), workers=4) as pool:
        pool._typical_seconds = 0.0  # answers were quick so far
        for number, (row, answer) in enumerate(make_items(*["nothing"] * 16)):
            pool.submit(str(number), row, answer)
        # None has started yet, so that nothing is answered meanwhile.
        for index, worker in enumerate(pool._workers):
            pool._hand_out_items(index, worker)
        assert [len(worker.items) for worker in pool._workers] == [4, 3, 3, 2]
        assert len(pool._waiting) == 4
