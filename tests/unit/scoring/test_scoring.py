"""The parts of scoring and its CPU limit; `test_scoring_pool.py` tests the whole pool."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.scoring.pool import ScoringPool
from cohort.scoring.process import Worker, make_worker_environment
from cohort.scoring.wire import MAX_FAILURE, Hello, Item, Limits, Ready, Reply, check_environment_reply
from cohort.scoring.worker import CapturedOutput, describe_error, score_item, shorten_reply
from cohort.system.secrets import Secrets
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import make_plain_answer, task
from cohort.tasks.environment import Episodes, SingleTurn
from cohort.tasks.parts import check_parts
from cohort.tasks.ref import TaskRef
from cohort.types import Answer


def test_records_survive_the_wire() -> None:
    task = TaskRef(name="t", settings={"a": [1]}, path="/x.py")
    hello = Hello(task=task, limits=Limits(seconds=2.5), import_path=["/y"])
    assert Hello.decode(hello.encode()) == hello
    answer = Answer(
        text="a\nb\ud800\u2028\x00", full="p", finish="length", num_tokens=3, conversation=[{"role": "user"}]
    )
    item = Item(number=7, row={"id": "1", "x": [1.5, None]}, answer=answer)
    assert Item.decode(item.encode()) == item
    assert item.encode().count(b"\n") == 1
    for reply in (
        Reply(ready=Ready(("correct", "format"), "correct")),
        Reply(ready=Ready(("correct",), "correct", 2.5)),
        Reply(broken="why"),
        Reply(number=0, parts={"correct": 1.0}, reason="r"),
        Reply(number=3, failure="f"),
        Reply(number=3, memory="m"),
        Reply(number=3, contract="c"),
    ):
        assert Reply.decode(reply.encode()) == reply


def test_replies_before_a_line_that_is_none_are_kept() -> None:
    """They may arrive together: then a worker has started, although its first grader wrote into the pipe."""
    hello = Hello(task=TaskRef.from_task(Arithmetic()), limits=Limits(), import_path=[])
    worker = Worker(hello, 0)
    replies, writer = os.pipe()
    os.dup2(replies, worker._replies)
    os.set_blocking(worker._replies, False)
    good = [Reply(ready=Ready(("correct",), "correct")), Reply(number=0, parts={"correct": 1.0})]
    os.write(writer, b"".join(reply.encode() for reply in good) + b"hello\n" + good[1].encode())
    try:
        assert worker.read_replies() == good and "wrote into the pipe" in worker.garbled
    finally:
        worker.kill()
        os.close(replies)
        os.close(writer)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[]",
        b"1",
        b'{"verdict": 1}',
        b'{"number": "0"}',
        b'{"number": true}',
        b'{"number": 0, "parts": [1]}',
        b'{"ready": [["a"]]}',
        b'{"ready": [["a"], "a", "soon"]}',
        b"\xff\xfe",
        b'{"ready": [["a"], "a", 1%s]}' % (b"0" * 400),
        b'{"ready": [["a"], "a", 1e400]}',
        b'{"ready": [["a"], "a", -1.0]}',
        b'{"ready": [["a"], "a", NaN]}',
        b'{"ready": [[[]], "a", 1.0]}',
        b'{"ready": ["ab", "a", 1.0]}',
        b'{"ready": 1}',
        b'{"number": 1%s}' % (b"0" * 5000),
        b'{"seconds": 1%s}' % (b"0" * 400),
        b'{"parts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"replies": ' + b'[{"a":' * 100_000,
        b'{"reason": null}',
        b"null",
    ],
)
def test_a_line_that_is_no_reply_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        Reply.decode(line)


def test_any_line_is_a_reply_or_refused() -> None:
    """Lines that a hostile grader may write: right ones with other values in the places of a few fields."""
    values: list[Any] = [None, True, -1, 0, 10**400, 1.5, float("nan"), float("inf"), "x", "\ud800", [], [None], {}]
    values += [{"correct": 10**400}, [["a"], "a", 1.0], [["a"], 1, 1.0], [{"role": "user", "content": None}]]
    names = [f.name for f in dataclasses.fields(Reply)]
    draw = random.Random(0)
    num_replies = 0
    for _ in range(3000):
        chosen = {name: draw.choice(values) for name in draw.sample(names, draw.randint(1, 3))}
        line = json.dumps(chosen).encode()
        cut = draw.randrange(len(line)) if draw.random() < 0.2 else len(line)
        try:
            Reply.decode(line[:cut])
        except ValueError:
            continue
        num_replies += 1
    assert num_replies > 100


@pytest.mark.parametrize("depth", [10, 900, 960, 980, 990, 1000, 1100])
def test_deep_replies_are_described(depth: int) -> None:
    line = b'{"number": 0, "replies": [%s], "parts": {"correct": %s}}' % ((b"[" * depth + b"]" * depth,) * 2)
    with pytest.raises((ValueError, TaskError)):
        reply = Reply.decode(line)
        with pytest.raises(TaskError):
            check_parts("t", "0", ("correct",), "correct", reply.parts)
        check_environment_reply("t", "0", reply)


def test_prints_are_kept_up_to_the_limit() -> None:
    printed = CapturedOutput(10, Secrets())
    for _ in range(5):
        assert printed.write("abcd") == 4
    assert printed.text == "abcdabcdab"
    print("more", file=printed)
    assert printed.text == "abcdabcdab"
    printed.clear()
    assert printed.text == ""


def test_failures_say_what_and_where_in_a_bounded_line() -> None:
    try:
        raise KeyError("x" * 5000)
    except KeyError as error:
        text = shorten_reply(Reply(number=0, failure=describe_error(error, "printed before")), Secrets()).failure
    assert text.startswith("KeyError: 'xxx")
    assert len(text) == MAX_FAILURE + 3
    try:
        _ = [][0]
    except IndexError as error:
        text = describe_error(error, "printed before", "; columns: id, n")
    assert "test_scoring.py, line" in text
    assert "; columns: id, n; it had printed 'printed before'" in text


def score_here(task: Any, item: Item) -> Reply:
    """Scores an item as a worker does, in this process."""
    return score_item(
        task, Episodes(lambda: SingleTurn(task)), item, lambda answer: None, CapturedOutput(10, Secrets())
    )


def test_a_row_the_grader_cannot_read_is_a_failure_not_a_zero() -> None:
    item = Item(number=4, row={"id": "1"}, answer=make_plain_answer("<answer>1</answer>"))
    reply = score_here(Arithmetic(), item)
    assert (reply.number, reply.parts) == (4, None)
    assert reply.failure.startswith("KeyError: 'answer' (arithmetic.py, line")


def test_a_variable_that_graders_are_not_given_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT_KEY", raising=False)

    class Reads:
        name, parts, accuracy = "reads", ("correct",), "correct"

        def score(self, row: dict, answer: Answer) -> float:
            return float(os.environ[row["name"]] if "name" in row else row["ABSENT_KEY"])

    rows: list[dict] = [{"name": "ABSENT_KEY"}, {"id": "1"}]
    texts = [score_here(Reads(), Item(number=1, row=row, answer=make_plain_answer(""))).failure for row in rows]
    assert texts[0].startswith("KeyError: 'ABSENT_KEY'") and "--scoring.env ABSENT_KEY" in texts[0]
    assert "columns" not in texts[0] and "the row's columns: id" in texts[1] and "--scoring.env" not in texts[1]


def test_running_out_of_memory_is_told_from_other_exceptions() -> None:
    class Eats:
        name, parts, accuracy = "eats", ("correct",), "correct"

        def score(self, row: dict, answer: Answer) -> dict:
            raise MemoryError("no more") if row["eats"] else ValueError("a bug")

    replies = [
        score_here(Eats(), Item(number=1, row={"eats": eats}, answer=make_plain_answer(""))) for eats in (True, False)
    ]
    assert [bool(reply.memory) for reply in replies] == [True, False]
    assert replies[0].memory.startswith("MemoryError: no more (test_scoring.py, line")
    assert replies[1].failure.startswith("ValueError: a bug")


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5", None])
def test_a_work_limit_is_a_number_of_seconds(seconds: object) -> None:
    class Limited(Arithmetic):
        work_seconds = seconds

    with pytest.raises(TaskError, match='task "limited": work_seconds is'):
        task("limited")(Limited)


def test_a_task_has_no_work_limit_unless_it_says_so() -> None:
    assert (Arithmetic().work_seconds, dict(Arithmetic().packages)) == (0.0, {})


BURNS = """
import os, signal
from cohort.tasks.base import Verdict, task

@task("burns")
class Burns:
    work_seconds = 0.2
    def rows(self, split): yield {"id": "0"}
    def prompt(self, row): return [{"role": "user", "content": "?"}]
    def score(self, row, answer):
        if answer.text:
            with open(row["tries"], "a") as f: f.write("x")
        if answer.text == "burn":
            while True: pass
        if answer.text == "abort": os.abort()
        if answer.text in ("SIGPROF", "SIGXCPU"): os.kill(os.getpid(), getattr(signal, answer.text))
        return Verdict({"correct": 0}, "")
"""


@pytest.mark.parametrize(
    ("text", "num_tries"), [("burn", 1), ("SIGPROF", 1), ("SIGXCPU", 1), ("abort", 2), ("else", 1)]
)
def test_an_answer_that_uses_up_its_cpu_time_is_not_tried_again(tmp_path: Path, text: str, num_tries: int) -> None:
    """Any other end of a worker may be the machine's fault, so that the answer has a second try."""
    (tmp_path / "burns.py").write_text(BURNS)
    row = {"id": "0", "tries": str(tmp_path / "tries")}
    with ScoringPool(TaskRef(name="burns", path=str(tmp_path / "burns.py"))) as pool:
        (outcome,) = pool.score([(row, make_plain_answer(text))])
        restarts = 0 if text == "else" else num_tries
        assert (pool.num_over_limit, pool.num_failures, pool.num_restarts) == (int(text != "else"), 0, restarts)
    assert outcome.parts == {"correct": 0.0}
    assert outcome.reason == ("" if text == "else" else "over the grader's work limit of 0.2 s")
    assert (tmp_path / "tries").read_text() == "x" * num_tries


def test_workers_get_only_allowed_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "LD_PRELOAD"):
        monkeypatch.setenv(name, "secret")
    environment = make_worker_environment()
    assert "secret" not in environment.values()
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PYTHONHASHSEED"] == "0"
