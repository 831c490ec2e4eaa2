"""The pool for graders that ask an outside service: many answers at once, faults tried again, and deaths explained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.scoring import service
from cohort.scoring.service import ServicePool, choose_pause
from cohort.scoring.wire import Limits
from cohort.system.clock import read_and_reset
from cohort.system.kernel import list_children
from cohort.tasks.base import make_plain_answer
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Outcome, Row

# Nothing here waits for time to pass: graders wait for each other, or for files that tests write.
GRADER = '''
import asyncio, os, signal, threading, time
from pathlib import Path
from cohort.tasks.base import Verdict, task

numbers = {"started": 0, "tries": {}}
met = asyncio.Event()
barrier = threading.Barrier(16)
never = threading.Event()

async def wait_for_file(file):
    while not file.exists():
        await asyncio.sleep(0.001)

class Base:
    def rows(self, split): yield {"x": 1}
    def prompt(self, row): return "?"

@task("judged")
class Judged(Base):
    async def score(self, row, answer):
        words = answer.text.split()
        return await getattr(self, words[0])(row, *words[1:])

    async def fine(self, row, reason=""): return Verdict({"correct": 1}, reason or str(os.getpid()))

    async def meet(self, row):
        numbers["started"] += 1
        if numbers["started"] == row["num"]:
            met.set()
        await met.wait()
        return {"correct": 1}

    async def first(self, row):
        await met.wait()
        return {"correct": 1}

    async def second(self, row):
        met.set()
        return {"correct": 0}

    async def fails(self, row, times):
        tries = numbers["tries"][row["id"]] = numbers["tries"].get(row["id"], 0) + 1
        if tries <= int(times):
            raise ConnectionError(f"busy, try {tries}")
        return {"correct": 1}

    async def hangs(self, row): await asyncio.Event().wait()
    async def own_timeout(self, row): raise TimeoutError("the service says 504")
    async def cancels(self, row): raise asyncio.CancelledError()
    async def leaves(self, row): raise SystemExit("bye")
    async def stops(self, row): raise KeyboardInterrupt()
    async def blocks(self, row): never.wait()
    async def prints(self, row):
        print("hello from the judge")
        return {"correct": 1}
    async def eats(self, row):
        hoard = []
        while True:
            hoard.append(bytearray(1 << 24))
    async def nan(self, row): return {"correct": float("nan")}
    async def missing(self, row): return {"brief": 1.0}
    async def nothing(self, row): return None
    async def keeps(self, row):
        return Verdict({"correct": 1}, "".join(os.environ.get(name, "none") for name in ("JUDGE_KEY", "OTHER_KEY")))

    async def dies(self, row, how):
        """Ends the process once `num` answers are under way, and whenever it is tried again."""
        folder = Path(row["folder"])
        while not (folder / "died").exists() and numbers["started"] < row["num"]:
            await asyncio.sleep(0.001)
        (folder / "died").touch()
        if how == "exit": os._exit(5)
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()

    async def innocent(self, row):
        """Is under way until the process dies; then it is scored at once."""
        numbers["started"] += 1
        if not (Path(row["folder"]) / "died").exists():
            await asyncio.Event().wait()
        return {"correct": 1}

    async def dies_when_told(self, row):
        (Path(row["folder"]) / "guilty").touch()
        await wait_for_file(Path(row["folder"]) / "go")
        os._exit(5)

    async def waits_or_not(self, row):
        folder = Path(row["folder"])
        if not (folder / "go").exists():
            (folder / "waiting").touch()
            await asyncio.Event().wait()
        return {"correct": 1}

@task("plain")
class Plain(Base):
    service = True
    def score(self, row, answer):
        if answer.text == "meet":
            barrier.wait()
        elif answer.text == "hangs":
            never.wait()
        elif answer.text == "StopIteration":
            next(iter(()))
        elif answer.text == "exit":
            raise SystemExit("bye")
        return Verdict({"correct": 1}, f"{os.getpid()} {threading.get_ident()}")

@task("relative")
class Relative(Base):
    parts, accuracy = ("rank",), None
    async def score_group(self, row, answers):
        if row.get("do") == "short": return [1.0]
        if row.get("do") == "raise": raise ConnectionError("down")
        if row.get("do") == "hang": await asyncio.Event().wait()
        order = sorted(a.text for a in answers)
        return [Verdict(float(order.index(a.text)), a.text) for a in answers]

@task("ill")
class Ill(Base):
    service = True
    def __post_init__(self): raise OSError("no such judge")
    def score(self, row, answer): return {"correct": 1}
'''
Make = Callable[..., ServicePool]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Returns a function that makes pools, which are closed afterwards. They try again without a pause."""
    monkeypatch.setattr(service, "choose_pause", lambda number, key: 0.0)
    file = tmp_path / "graders.py"
    file.write_text(GRADER)
    made: list[ServicePool] = []

    def make_pool(task: str = "judged", seconds: float = 30.0, **options: Any) -> ServicePool:
        made.append(ServicePool(TaskRef(name=task, path=str(file)), limits=Limits(seconds=seconds), **options))
        # A TaskRef does not know the class, which tells whether groups are scored together.
        made[-1].scores_groups = task == "relative"
        return made[-1]

    yield make_pool
    for pool in made:
        pool.close()


def row(id: object = 0, **columns: Any) -> Row:
    return {"id": str(id), **columns}


def answer(text: str) -> Answer:
    return make_plain_answer(text)


def collect(pool: ServicePool, num: int, patience: float = 60.0) -> dict[str, Outcome]:
    """Returns `num` outcomes by id."""
    found: dict[str, Outcome] = {}
    deadline = time.monotonic() + patience
    while len(found) < num:
        assert time.monotonic() < deadline, f"only {sorted(found)} of {num}"
        for id, outcome in pool.poll(0.05):
            assert id not in found
            found[id] = outcome
    assert pool.poll(0.0) == [] and pool.num_pending == 0
    return found


def wait_for(condition: Callable[[], bool], pool: ServicePool, patience: float = 60.0) -> None:
    """Runs the pool until a condition holds. The pool must finish nothing before."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        assert pool.poll(0.01) == []


# ---- many at once


def test_sixteen_coroutines_are_under_way_at_once(make: Make) -> None:
    outcomes = make(concurrency=16).score([(row(i, num=16), answer("meet")) for i in range(16)])
    assert [o.parts for o in outcomes] == [{"correct": 1.0}] * 16


def test_no_more_are_under_way_than_the_setting_says(make: Make) -> None:
    pool = make(concurrency=15, seconds=1.0, retries=0)
    outcomes = pool.score([(row(i, num=16), answer("meet")) for i in range(15)])
    assert all("no score within 1 s (--scoring.seconds)" in o.failure for o in outcomes) and pool.num_failures == 15


def test_sixteen_plain_functions_run_in_threads(make: Make) -> None:
    outcomes = make("plain", concurrency=16).score([(row(i), answer("meet")) for i in range(16)])
    assert [o.parts for o in outcomes] == [{"correct": 1.0}] * 16
    assert len({o.reason.split()[0] for o in outcomes}) == 1 and len({o.reason for o in outcomes}) == 16


def test_the_share_of_each_worker_fills_all_of_them(make: Make) -> None:
    pool = make("plain", workers=2, concurrency=4)
    assert pool._share == 2
    assert len({o.reason.split()[0] for o in pool.score([(row(i), answer("fine")) for i in range(40)])}) == 2


def test_replies_come_in_any_order_and_outcomes_have_their_ids(make: Make) -> None:
    pool = make()
    pool.submit("a", row(), answer("first"))
    pool.submit("b", row(), answer("second"))
    found = collect(pool, 2)
    assert found["a"].parts == {"correct": 1.0} and found["b"].parts == {"correct": 0.0}


def test_a_thousand_answers_are_scored_in_the_order_of_the_caller(make: Make) -> None:
    outcomes = make(concurrency=50).score([(row(i), answer(f"fine {i}")) for i in range(1000)])
    assert [o.reason for o in outcomes] == [str(i) for i in range(1000)]


# ---- faults of the service


@pytest.mark.parametrize("times", [1, 3])
def test_an_exception_is_tried_again(make: Make, times: int) -> None:
    pool = make(retries=3)
    read_and_reset()
    [outcome] = pool.score([(row(), answer(f"fails {times}"))])
    assert outcome.parts == {"correct": 1.0} and not outcome.failure
    assert pool.num_retries == times and pool.num_failures == pool.num_restarts == 0
    # The step that this belongs to says so, and after a success there is no failure to be told of.
    assert read_and_reset() == {"scoring/retries": times} and pool.last_failure == ""


@pytest.mark.parametrize(("retries", "tried"), [(0, ""), (2, " (tried 3 times)")])
def test_after_the_last_try_it_is_a_failure_and_never_a_zero(make: Make, retries: int, tried: str) -> None:
    pool = make(retries=retries)
    [outcome] = pool.score([(row(), answer("fails 99"))])
    assert outcome.parts == {} and outcome.failure.endswith(tried)
    assert outcome.failure.startswith(f"scoring failed: ConnectionError: busy, try {retries + 1}")
    assert (pool.num_failures, pool.num_retries) == (1, retries)
    assert "ConnectionError: busy" in pool.last_failure


def test_pauses_grow_and_differ_between_answers() -> None:
    for key in ("a", "b"):
        pauses = [choose_pause(number, key) for number in range(2, 12)]
        assert all(0.75 * 0.5 * 2**n <= pause <= 1.25 * 0.5 * 2**n for n, pause in enumerate(pauses[:6]))
        assert max(pauses) <= 1.25 * 30 and choose_pause(1000, key) <= 1.25 * 30
    assert choose_pause(2, "a") != choose_pause(2, "b") and choose_pause(2, "a") == choose_pause(2, "a")


def test_a_try_waits_for_its_pause(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def choose(number: int, key: str) -> float:
        asked.append((number, key))
        return 3600.0

    pool = make(retries=3)
    monkeypatch.setattr(service, "choose_pause", choose)
    pool.submit("a", row(7), answer("fails 1"))
    wait_for(lambda: bool(asked), pool)
    pool.submit("b", row(), answer("fine"))
    while not (found := pool.poll(0.05)):
        pass
    assert [id for id, _ in found] == ["b"] and asked == [(2, "7/a")] and pool.num_pending == 1


def test_a_hang_is_a_failure_with_the_limit(make: Make) -> None:
    pool = make(seconds=0.2, retries=1)
    slow, fine = pool.score([(row(), answer("hangs")), (row(), answer("fine"))])
    assert "TimeoutError: no score within 0.2 s (--scoring.seconds)" in slow.failure and "tried 2 times" in slow.failure
    assert fine.parts == {"correct": 1.0} and pool.num_restarts == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("own_timeout", "TimeoutError: the service says 504"),
        ("cancels", "CancelledError"),
        ("leaves", "SystemExit: bye"),
        ("stops", "KeyboardInterrupt"),
    ],
)
def test_whatever_a_coroutine_raises_is_its_own_failure(make: Make, word: str, said: str) -> None:
    pool = make(retries=0)
    odd, fine = pool.score([(row(), answer(word)), (row(), answer("fine"))])
    assert said in odd.failure and not odd.parts and fine.parts == {"correct": 1.0} and pool.num_restarts == 0


@pytest.mark.parametrize("word", ["StopIteration", "exit"])
def test_whatever_a_thread_raises_is_its_own_failure(make: Make, word: str) -> None:
    odd, fine = make("plain", retries=0).score([(row(), answer(word)), (row(), answer("fine"))])
    assert odd.failure and not odd.parts and fine.parts == {"correct": 1.0}


def test_memory_that_is_used_up_is_a_failure_with_advice(make: Make) -> None:
    [outcome] = make(retries=0).score([(row(), answer("eats"))])
    assert "MemoryError" in outcome.failure and "1024 MB" in outcome.failure


def test_a_coroutine_that_blocks_is_replaced_and_told_what_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GRACE_SECONDS", 0.1)
    pool = make(seconds=0.2, retries=0)
    blocking, fine = pool.score([(row(), answer("blocks")), (row(), answer("fine"))])
    assert "a coroutine must not block, as time.sleep and requests do; await instead, or write a plain function" in (
        blocking.failure
    )
    assert fine.parts == {"correct": 1.0} and pool.num_restarts == 2  # together, and alone


def test_threads_that_cannot_be_stopped_lead_to_another_worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_STUCK", 3)
    pool = make("plain", seconds=0.2, retries=0)
    [before] = pool.score([(row(), answer("fine"))])
    stuck = pool.score([(row(i), answer("hangs")) for i in range(3)])
    [same] = pool.score([(row(), answer("fine"))])
    stuck += pool.score([(row(), answer("hangs"))])
    [after] = pool.score([(row(), answer("fine"))])
    assert all("no score within 0.2 s" in o.failure for o in stuck) and pool.num_restarts == 1
    assert same.reason.split()[0] == before.reason.split()[0] != after.reason.split()[0]


# ---- deaths


@pytest.mark.parametrize(("how", "said"), [("exit", "exited with code 5"), ("kill", "was ended by SIGKILL")])
def test_only_the_guilty_answer_fails_when_a_process_dies(make: Make, tmp_path: Path, how: str, said: str) -> None:
    pool = make(retries=1)
    texts = ["innocent"] * 3 + [f"dies {how}"] + ["innocent"] * 4
    outcomes = pool.score([(row(i, num=7, folder=str(tmp_path)), answer(text)) for i, text in enumerate(texts)])
    guilty = outcomes.pop(3)
    assert [o.parts for o in outcomes] == [{"correct": 1.0}] * 7
    assert f"the grader's process {said}" in guilty.failure and "(tried 2 times)" in guilty.failure
    assert pool.num_restarts == 3 and pool.num_failures == 1  # together, then twice alone


def test_an_answer_that_is_tried_alone_waits_for_its_pause_too(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []
    pool = make(retries=2)
    monkeypatch.setattr(service, "choose_pause", lambda number, key: asked.append((number, key)) or 0.0)
    texts = ["dies exit", "innocent"]
    pool.score([(row(i, num=1, folder=str(tmp_path)), answer(text)) for i, text in enumerate(texts)])
    assert asked == [(2, "0/0"), (3, "0/0")]


def test_with_two_workers_only_the_guilty_answer_fails(make: Make, tmp_path: Path) -> None:
    pool = make(workers=2, concurrency=8, retries=0)
    texts = ["dies exit"] + ["innocent"] * 3 + ["fine"] * 30
    outcomes = pool.score([(row(i, num=3, folder=str(tmp_path)), answer(text)) for i, text in enumerate(texts)])
    assert "exited with code 5" in outcomes[0].failure and all(o.parts == {"correct": 1.0} for o in outcomes[1:])


def test_an_answer_beside_a_dropped_one_is_not_blamed_for_its_death(make: Make, tmp_path: Path) -> None:
    pool = make(retries=0)
    pool.submit("guilty", row(folder=str(tmp_path)), answer("dies_when_told"))
    pool.submit("other", row(folder=str(tmp_path)), answer("waits_or_not"))
    wait_for(lambda: (tmp_path / "guilty").exists() and (tmp_path / "waiting").exists(), pool)
    pool.drop("guilty")
    (tmp_path / "go").touch()
    assert collect(pool, 1)["other"].parts == {"correct": 1.0}


def test_suspects_stay_alone_if_their_worker_does_not_start(make: Make, tmp_path: Path) -> None:
    pool = make(retries=1)
    texts = ["dies exit", "innocent", "innocent"]
    for i, text in enumerate(texts):
        pool.submit(str(i), row(i, num=2, folder=str(tmp_path)), answer(text))
    wait_for(lambda: pool.num_restarts == 1, pool)
    # The new worker is ended before it has said that it is ready, with a suspect in its queue.
    pool.poll(0.0)
    [worker] = pool._workers
    assert worker.ready is None and len(worker.items) == 1
    os.kill(worker.guard_pid, signal.SIGKILL)
    found = collect(pool, 3)
    assert found["1"].parts == found["2"].parts == {"correct": 1.0} and "exited with code 5" in found["0"].failure


def test_a_worker_that_is_killed_from_outside_costs_no_answer(make: Make) -> None:
    pool = make(retries=1)
    pool.score([(row(), answer("fine"))])
    for pid in list_children(pool._workers[0].guard_pid):
        os.kill(pid, signal.SIGKILL)
    assert pool.score([(row(), answer("fine"))])[0].parts == {"correct": 1.0}


def test_no_worker_survives_its_parent(make: Make, tmp_path: Path) -> None:
    make()  # writes the file
    owner = (
        "import sys\nfrom cohort.scoring.service import ServicePool\nfrom cohort.system.kernel import list_children\n"
        "from cohort.tasks.base import make_plain_answer\nfrom cohort.tasks.ref import TaskRef\n"
        "pool = ServicePool(TaskRef(name='judged', path=sys.argv[1]))\n"
        "pool.score([({'id': '0'}, make_plain_answer('fine'))])\n"
        "pool.submit('0', {'id': '0'}, make_plain_answer('hangs'))\npool.poll(0.01)\n"
        "print(pool._workers[0].guard_pid, *list_children(pool._workers[0].guard_pid), flush=True)\npool.poll(60)\n"
    )
    command = [sys.executable, "-c", owner, str(tmp_path / "graders.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- the interface


def test_dropped_answers_are_never_returned_and_their_ids_are_free(make: Make) -> None:
    pool = make(concurrency=1)
    pool.submit("under way", row(), answer("hangs"))
    pool.submit("waiting", row(), answer("fine"))
    pool.submit("kept", row(), answer("fine kept"))
    pool.poll(0.01)
    with pytest.raises(ValueError, match='id "kept" is being scored'):
        pool.submit("kept", row(), answer("fine"))
    for id in ("under way", "waiting", "unknown"):
        pool.drop(id)
    assert pool.num_pending == 1
    pool.drop("kept")
    pool.submit("kept", row(), answer("fine again"))
    assert pool.num_pending == 1
    pool.close()
    assert pool.num_pending == 0


def test_a_finished_outcome_can_be_dropped_and_a_dropped_answer_is_not_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(retries=5)
    monkeypatch.setattr(service, "choose_pause", lambda number, key: 3600.0)
    pool.submit("a", row(), answer("fails 99"))
    wait_for(lambda: pool.num_retries == 1, pool)
    pool.drop("a")
    assert pool.num_pending == 0 and pool.poll(0.01) == []
    pool.submit("b", row(), answer("fine"))
    while not pool._done:
        pool._advance(0.05)
    pool.drop("b")
    assert pool.poll(0.0) == [] and pool.num_pending == 0 and (pool.num_retries, pool.num_failures) == (1, 0)


def test_a_closed_pool_takes_nothing_and_has_no_processes(make: Make) -> None:
    pool = make()
    pool.score([(row(), answer("fine"))])
    guard = pool._workers[0].guard_pid
    pool.submit("0", row(), answer("hangs"))
    pool.poll(0.01)
    pool.close()
    pool.close()
    assert not Path(f"/proc/{guard}").exists() and pool.num_pending == 0 and pool.poll(0.1) == []
    for submit in (
        lambda: pool.submit("0", row(), answer("fine")),
        lambda: pool.submit_group("0", row(), [answer("")]),
    ):
        with pytest.raises(ValueError, match="closed"):
            submit()


@pytest.mark.parametrize(
    ("word", "said"), [("nan", "gave nan"), ("missing", "no part 'correct'"), ("nothing", "returned None|NoneType")]
)
def test_what_is_no_score_is_an_error_and_not_tried_again(make: Make, word: str, said: str) -> None:
    pool = make()
    pool.submit("bad", row("r1"), answer(word))
    pool.submit("good", row(), answer("fine"))
    found: list[tuple[str, Outcome]] = []
    with pytest.raises(TaskError, match=said):
        while True:
            found += pool.poll(0.05)
            assert pool.num_pending
    while pool.num_pending:
        found += pool.poll(0.05)
    assert [id for id, _ in found] == ["good"] and pool.num_retries == 0


def test_a_task_that_cannot_be_loaded_is_an_error(make: Make) -> None:
    with pytest.raises(TaskError, match=r"cannot be loaded for scoring: .*no such judge"):
        make("ill").score([(row(), answer("fine"))])


def test_groups_are_scored_together(make: Make) -> None:
    pool = make("relative")
    pool.submit_group("g", row(), [answer(text) for text in "cab"])
    pool.submit_group("h", row(), [answer("only")])
    found = collect(pool, 4)
    assert {id: (o.parts["rank"], o.reason) for id, o in found.items()} == {
        "g/0": (2.0, "c"),
        "g/1": (0.0, "a"),
        "g/2": (1.0, "b"),
        "h/0": (0.0, "only"),
    }


def test_a_group_that_fails_fails_whole_and_one_that_is_dropped_is_gone(make: Make) -> None:
    pool = make("relative", retries=1)
    pool.submit_group("g", row(do="raise"), [answer(text) for text in "ab"])
    pool.submit_group("gone", row(), [answer(text) for text in "ab"])
    pool.drop("gone")
    found = collect(pool, 2)
    assert {id: "ConnectionError: down" in o.failure for id, o in found.items()} == {"g/0": True, "g/1": True}
    assert pool.num_failures == 2 and pool.num_retries == 1
    pool.submit_group("short", row(do="short"), [answer(text) for text in "ab"])
    with pytest.raises(TaskError, match="1 results for 2 answers"):
        collect(pool, 2)


def test_the_answers_of_a_group_have_the_time_of_all(make: Make) -> None:
    pool = make("relative", seconds=0.1, retries=0)
    pool.submit_group("g", row(do="hang"), [answer(text) for text in "abcde"])
    assert all("no score within 0.5 s" in outcome.failure for outcome in collect(pool, 5).values())


def test_graders_get_only_the_variables_that_are_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "eu1")  # too short for a secret
    monkeypatch.setenv("OTHER_KEY", "hidden")
    assert make(env=("JUDGE_KEY",)).score([(row(), answer("keeps"))])[0].reason == "eu1none"
    assert make().score([(row(), answer("keeps"))])[0].reason == "nonenone"


def test_what_graders_print_is_shown(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pool = make()
    pool.score([(row(), answer("prints"))])
    pool.close()
    assert "hello from the judge" in caplog.text
