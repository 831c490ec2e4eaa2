"""The journal of outcomes: equal content is scored once, and outcomes are on the disk before they are returned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import RunError, TaskError
from cohort.scoring.base import Pool
from cohort.scoring.journal import JournaledPool, OutcomeJournal
from cohort.tasks.base import make_plain_answer
from cohort.tasks.environment import Past
from cohort.tasks.parts import PartRules
from cohort.types import Answer, Key, Outcome, Row


class FakePool(Pool):
    """A pool that a test drives: `finish` gives an item its outcomes. `asked` has all (id, row, answers), in order."""

    def __init__(self, scores_groups: bool = False) -> None:
        self.scores_groups = scores_groups
        self.asked: list[tuple[str, Row, list[Answer]]] = []
        self.sizes: dict[str, int] = {}
        self.done: list[tuple[str, Outcome]] = []
        self.is_closed = False
        self.error: TaskError | None = None

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        self._take(id, row, [answer], 0)

    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        self._take(id, row, list(answers), len(answers))

    def _take(self, id: str, row: Row, answers: list[Answer], size: int) -> None:
        if self.is_closed:
            raise ValueError("closed")
        assert id not in self.sizes, f"{id} is being scored"
        self.asked.append((id, row, answers))
        self.sizes[id] = size

    def finish(self, id: str, *outcomes: Outcome) -> None:
        size = self.sizes.pop(id)
        assert len(outcomes) == max(1, size)
        self.done += [(f"{id}/{i}" if size else id, outcome) for i, outcome in enumerate(outcomes)]

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        done, self.done = self.done, []
        return done

    def drop(self, id: str) -> None:
        del self.sizes[id]

    @property
    def num_pending(self) -> int:
        return len(self.sizes) + len(self.done)

    def close(self) -> None:
        self.is_closed = True
        self.sizes.clear()


def scored(value: float, reason: str = "") -> Outcome:
    return Outcome(parts={"score": value}, reason=reason)


FAILED = Outcome(failure="the service is down")
ROW: Row = {"id": "r", "question": "?"}


def answer(text: str) -> Answer:
    return make_plain_answer(text)


def make(path: Path | None = None, identity: str = "grader 1", groups: bool = False) -> tuple[JournaledPool, FakePool]:
    """Returns a journaled pool and the pool behind it."""
    inner = FakePool(groups)
    pool = JournaledPool(inner, identity)
    if path is not None:
        pool.keep_outcomes(path)
    return pool, inner


# ---- equal content is scored once


def test_equal_content_is_scored_once_also_while_it_is_under_way(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    for id in ("a", "b", "c"):
        pool.submit(id, ROW, answer("x"))
    pool.submit("d", ROW, answer("y"))
    assert len(inner.asked) == 2 and pool.num_pending == 4
    inner.finish(inner.asked[0][0], scored(0.5, "so"))
    assert sorted(pool.poll()) == [(id, scored(0.5, "so")) for id in "abc"] and pool.num_pending == 1
    pool.submit("e", ROW, answer("x"))
    assert pool.poll() == [("e", scored(0.5, "so"))] and len(inner.asked) == 2


def test_without_a_file_equal_content_is_scored_again_once_it_was_returned() -> None:
    pool, inner = make()
    pool.submit("a", ROW, answer("x"))
    pool.submit("b", ROW, answer("x"))
    inner.finish("0", scored(1.0))
    assert len(pool.poll()) == 2
    pool.submit("a", ROW, answer("x"))
    assert [id for id, _, _ in inner.asked] == ["0", "1"]


PAST = Past(key=Key(seed=0, purpose="train", task="t", prompt_id="r", visit=0, sample=0), answers=())


@pytest.mark.parametrize(
    "other",
    [
        (ROW, answer("y"), None, ""),
        ({**ROW, "question": "other"}, answer("x"), None, ""),
        (ROW, replace(answer("x"), tokens=[1]), None, ""),
        (ROW, replace(answer("x"), full="<think>x"), None, ""),
        (ROW, replace(answer("x"), finish="length"), None, ""),
        (ROW, answer("x"), PAST, ""),
        (ROW, answer("x"), PAST, "turns"),
        (ROW, answer("x"), replace(PAST, answers=(answer("z"),)), ""),
        (ROW, answer("x"), replace(PAST, key=replace(PAST.key, sample=1)), ""),
    ],
)
def test_other_content_is_another(tmp_path: Path, other: tuple[Row, Answer, Past | None, str]) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    pool.submit("b", *other)
    assert len(inner.asked) == 2


def test_the_order_of_columns_is_no_difference_and_another_grader_is_one(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    for identity, num in (("grader 1", 1), ("grader 1", 0), ("grader 2", 1)):
        pool, inner = make(path, identity)
        pool.submit("a", {"question": "?", "id": "r"} if num else ROW, answer("x"))
        assert len(inner.asked) == num
        for id, _, _ in inner.asked:
            inner.finish(id, scored(1.0))
        assert len(pool.poll()) == 1
        pool.close()


def test_half_characters_in_a_row_or_an_answer_are_content_like_any_other(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", {"id": "\ud800"}, answer("\udc80"))
    inner.finish("0", scored(1.0, "\ud800"))
    [(_, outcome)] = pool.poll()
    pool.close()
    again, inner = make(tmp_path / "outcomes.jsonl")
    again.submit("a", {"id": "\ud800"}, answer("\udc80"))
    assert again.poll() == [("a", outcome)] and not inner.asked


# ---- ids, drops and errors


def test_an_id_in_use_is_refused_and_is_free_after_its_outcome(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    for text in ("x", "y"):
        with pytest.raises(ValueError, match='id "a" is being scored already'):
            pool.submit("a", ROW, answer(text))
    inner.finish("0", scored(1.0))
    pool.poll()
    pool.submit("a", ROW, answer("y"))
    inner.finish("1", scored(0.0))
    assert pool.poll() == [("a", scored(0.0))]


@pytest.mark.parametrize("dropped", ["leader", "follower"])
def test_a_drop_keeps_the_work_that_another_one_waits_for(tmp_path: Path, dropped: str) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("leader", ROW, answer("x"))
    pool.submit("follower", ROW, answer("x"))
    pool.drop(dropped)
    assert inner.sizes and pool.num_pending == 1
    # The id is free, and may wait for the same content again.
    pool.submit(dropped, ROW, answer("x"))
    assert len(inner.asked) == 1
    inner.finish("0", scored(1.0))
    assert sorted(id for id, _ in pool.poll()) == ["follower", "leader"]


def test_the_last_drop_ends_the_work(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    pool.submit("b", ROW, answer("x"))
    for id in ("a", "b", "a", "unknown"):
        pool.drop(id)
    assert not inner.sizes and pool.num_pending == 0 and pool.poll() == []
    pool.submit("a", ROW, answer("x"))
    assert [id for id, _, _ in inner.asked] == ["0", "1"]


def test_a_known_outcome_can_be_dropped_before_it_is_polled(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    inner.finish("0", scored(1.0))
    pool.poll()
    pool.submit("b", ROW, answer("x"))
    pool.drop("b")
    assert pool.poll() == [] and pool.num_pending == 0


def test_an_error_of_the_pool_is_raised_and_finished_outcomes_stay(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    inner.finish("0", scored(1.0))
    inner.error = TaskError("no score")
    with pytest.raises(TaskError, match="no score"):
        pool.poll()
    assert pool.poll() == [("a", scored(1.0))]


def test_a_closed_pool_takes_nothing(tmp_path: Path) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    pool.close()
    pool.close()
    assert inner.is_closed and pool.num_pending == 0
    for id in ("a", "b"):
        with pytest.raises(ValueError, match="closed"):
            pool.submit(id, ROW, answer("x"))


# ---- groups


def test_the_outcomes_of_a_group_are_kept_together(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    pool, inner = make(path, groups=True)
    pool.submit_group("5", ROW, [answer("x"), answer("y")])
    pool.submit_group("6", ROW, [answer("x"), answer("y")])
    pool.submit_group("7", ROW, [answer("y"), answer("x")])
    assert len(inner.asked) == 2  # the order of a group is content
    inner.finish("0", scored(0.0), scored(1.0))
    inner.finish("1", scored(0.25), scored(0.75))
    found = dict(pool.poll())
    assert [found[f"{id}/{i}"].parts["score"] for id in (5, 6, 7) for i in (0, 1)] == [0.0, 1.0, 0.0, 1.0, 0.25, 0.75]
    pool.close()
    again, inner = make(path, groups=True)
    again.submit_group("0", ROW, [answer("x"), answer("y")])
    assert again.poll() == [("0/0", scored(0.0)), ("0/1", scored(1.0))] and not inner.asked


def test_a_group_of_one_is_no_single_answer(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    pool, inner = make(path, groups=True)
    pool.submit_group("0", ROW, [answer("x")])
    inner.finish("0", scored(1.0))
    assert pool.poll() == [("0/0", scored(1.0))]
    pool.submit("1", ROW, answer("x"))
    assert len(inner.asked) == 2


def test_a_group_with_a_failure_is_returned_whole_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    pool, inner = make(path, groups=True)
    pool.submit_group("0", ROW, [answer("x"), answer("y")])
    inner.finish("0", scored(0.0), FAILED)
    assert pool.poll() == [("0/0", scored(0.0)), ("0/1", FAILED)] and path.read_bytes() == b""
    assert pool.num_failures == 1


# ---- the file


def test_failures_are_counted_for_each_who_waits_and_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    pool, inner = make(path)
    pool.submit("a", ROW, answer("x"))
    pool.submit("b", ROW, answer("x"))
    inner.finish("0", FAILED)
    assert sorted(pool.poll()) == [("a", FAILED), ("b", FAILED)] and pool.num_failures == 2
    assert path.read_bytes() == b""
    pool.submit("a", ROW, answer("x"))
    assert len(inner.asked) == 2


RICH = Outcome(
    parts={"correct": 1.0, "brief": -0.125, "tiny": 1e-17},
    reason='because "ü"\n\u2028',
    replies=[{"role": "user", "content": "go on"}],
    cost=0.5,
    earned=0.25,
    calls={"ok": 2},
    ending="turns",
    stand_in=make_plain_answer("z"),
)


@pytest.mark.parametrize("outcome", [scored(0.1 + 0.2), RICH, Outcome(replies=RICH.replies)])
def test_an_outcome_is_read_as_it_was_written(tmp_path: Path, outcome: Outcome) -> None:
    journal = OutcomeJournal(tmp_path / "outcomes.jsonl")
    journal.add([("k", [outcome, scored(2.0)])])
    journal.close()
    assert OutcomeJournal(tmp_path / "outcomes.jsonl").find("k") == [outcome, scored(2.0)]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_last_line_that_was_cut_off_is_left_out_and_not_continued(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "outcomes.jsonl"
    journal = OutcomeJournal(path)
    journal.add([("a", [scored(1.0)])])
    journal.add([("b", [scored(2.0)])])
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])
    for num in (1, 2, 2):
        journal = OutcomeJournal(path)
        found = [key for key in "abc" if journal.find(key)]
        # Without its line break alone, the line is whole.
        assert found == (["a", "b"] if cut == 1 else ["a"]) + (["c"] if num > 1 else [])
        if num == 1:
            assert ("1 lines cannot be read; their answers are scored again" in caplog.text) == (cut > 1)
            journal.add([("c", [scored(3.0)])])
        journal.close()


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"null",
        b'["k"]',
        b'["k", 7]',
        b'["k", [7]]',
        b'["k", [null]]',
        b'["k", [{"parts": 7}]]',
        b'["k", [{"parts": {"score": "high"}}]]',
        b'["k", [{"parts": {"score": NaN}}]]',
        b'["k", [{"parts": {"score": Infinity}}]]',
        b'["k", [{"unknown": 1}]]',
        b'["k", [{"parts": {"score": 1.0}, "stand_in": 7}]]',
        b'["k", [{"parts": {"score": 1.0}, "stand_in": {"text": "a"}}]]',
        b'["k", [{"parts": {"score": 1.0}, "reason": 5}]]',
        b'["k", [{"parts": {"score": 1.0}, "failure": "no"}]]',
        b'["k", [{"parts": {"score": 1.0}, "replies": ["a"]}]]',
        b'["k", [{"parts": {"score": 1.0}, "calls": {"ok": "many"}}]]',
        b'["k", [{"parts": {"score": 1.0}, "cost": NaN}]]',
        b'["k", [{}]]',
        b'[["k"], {"a": 1}]',
        b'["k", ' + b"[" * 5000 + b"]",
        b"\x00" * 100,
    ],
)
def test_a_damaged_line_is_left_out_and_said(tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "outcomes.jsonl"
    good = [json.dumps([key, [{"parts": {"score": 1.0}}]]).encode() for key in ("a", "b")]
    path.write_bytes(good[0] + b"\n" + line + b"\n" + good[1] + b"\n")
    journal = OutcomeJournal(path)
    assert journal.find("a") == journal.find("b") == [scored(1.0)] and journal.find("k") is None and len(journal) == 2
    assert "1 lines cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("parts", "is_used"),
    [
        ({"correct": 1.0}, True),
        ({"score": 1.0}, False),
        ({"correct": 1.0, "score": 1.0}, False),
        ({"correct": 0.5}, False),
    ],
)
def test_a_line_with_parts_that_the_task_does_not_have_is_scored_again(
    tmp_path: Path, parts: dict, is_used: bool
) -> None:
    path = tmp_path / "outcomes.jsonl"
    pool, inner = make(path)
    pool.submit("0", ROW, answer("x"))
    inner.finish("0", scored(1.0))
    pool.poll()
    pool.close()
    [key, _] = json.loads(path.read_text())
    path.write_text(json.dumps([key, [{"parts": parts}]]) + "\n")
    inner = FakePool()
    again = JournaledPool(inner, pool.identity, PartRules(parts=("correct",), accuracy="correct", optional=False))
    again.keep_outcomes(path)
    again.submit("0", ROW, answer("x"))
    assert len(inner.asked) == (not is_used)


def test_a_folder_in_place_of_the_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outcomes.jsonl").mkdir()
    with pytest.raises(RunError, match=r"outcomes.jsonl is a folder, .* move it away"):
        OutcomeJournal(tmp_path / "outcomes.jsonl")


@pytest.mark.parametrize("metrics", [None, "", '{"step": 1}\n'])
def test_a_journal_that_is_missing_is_said_if_the_run_has_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: str | None
) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    OutcomeJournal(tmp_path / "outcomes.jsonl").close()
    assert ("outcomes.jsonl is missing, though the run has steps" in caplog.text) == bool(metrics)
    caplog.clear()
    OutcomeJournal(tmp_path / "outcomes.jsonl").close()
    assert not caplog.text


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_line_with_another_number_of_outcomes_is_not_used(tmp_path: Path, num: int) -> None:
    path = tmp_path / "outcomes.jsonl"
    pool, inner = make(path, groups=True)
    pool.submit_group("0", ROW, [answer("x"), answer("y")])
    inner.finish("0", scored(0.0), scored(1.0))
    pool.poll()
    pool.close()
    [key, outcomes] = json.loads(path.read_text())
    path.write_text(json.dumps([key, (outcomes * 2)[:num]]) + "\n")
    again, inner = make(path, groups=True)
    again.submit_group("0", ROW, [answer("x"), answer("y")])
    assert len(inner.asked) == 1


def test_the_file_only_grows_and_the_newest_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    sizes = []
    for value in (1.0, 2.0, 3.0):
        journal = OutcomeJournal(path)
        assert value == 1.0 or journal.find("k") == [scored(value - 1)]
        journal.add([("k", [scored(value)])])
        journal.close()
        sizes.append(path.stat().st_size)
    assert sizes == sorted(set(sizes))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from cohort.scoring.journal import OutcomeJournal
from tests.unit.scoring.test_journal import ROW, answer, make, scored

pool, inner = make(Path(sys.argv[1]))
kept = pool.journal.add
def add(new):
    kept(new)
    os.kill(os.getpid(), signal.SIGKILL)  # written, and not returned yet
pool.journal.add = add
for n in range(3):
    pool.submit(str(n), ROW, answer(str(n)))
    inner.finish(str(n), scored(float(n)))
pool.poll()
print("returned")
"""


def test_outcomes_are_on_the_disk_before_they_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", KILLED, str(path), str(root), str(root / "src")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and "returned" not in done.stdout, done.stderr
    pool, inner = make(path)
    for n in range(4):
        pool.submit(str(n), ROW, answer(str(n)))
    assert pool.poll() == [(str(n), scored(float(n))) for n in range(3)] and len(inner.asked) == 1


def test_nothing_is_returned_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, inner = make(tmp_path / "outcomes.jsonl")
    pool.submit("a", ROW, answer("x"))
    inner.finish("0", scored(1.0))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            pool.poll()
    assert pool.poll() == []
