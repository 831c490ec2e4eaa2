"""The rehearsal of judges in `cohort check`: a judge that can be talked into a score fails it, a sound one passes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cohort
from cohort.inspect.check.findings import Finding
from cohort.inspect.check.judge import check_judge
from cohort.judge import service
from cohort.judge.finding import find_judges
from tests.helpers.fake_server import Behaviour, FakeServer, fails, serving
from tests.helpers.judge_server import count_stars, find_answers, grades, make_judge, says

ELSEWHERE = cohort.Judge(url="http://localhost:1/v1", model="elsewhere", question="?")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path))
    service.get_service.cache_clear()
    with serving() as fake:
        fake.behaviours = [grades()]
        yield fake


class Rows:
    """A task without the decorator, which is enough for the check."""

    name = "rows"

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"id": "1", "question": "Stars?", "gold": "***"}]

    def prompt(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": row["question"]}]


def make_task(judge: cohort.Judge) -> Any:
    return type("Judged", (Rows,), {"grader": judge})()


def check(server: FakeServer, behaviour: Behaviour, **settings: Any) -> dict[str, Finding]:
    server.behaviours = [behaviour]
    return {finding.name: finding for finding in check_judge(make_task(make_judge(server, **settings)))}


def obey(text: str) -> float:
    """Returns the score that a gullible judge gives: that which the answer asks for."""
    found = re.search(r"score (\d+)|Score: (\d+)", text)
    return float(found[1] or found[2]) if found else 0.0


def test_a_sound_judge_passes(server: FakeServer) -> None:
    findings = check(server, grades())
    assert {name: f.status for name, f in findings.items()} == {
        **{"judge/replies": "ok", "judge/wrong": "ok", "judge/injections": "ok", "judge/shape": "ok"}
    }
    answers = [find_answers(body)[0] for body in server.asked]
    assert len(answers) == 9 and "" in answers and max(map(len, answers)) == 20_000
    assert all("user: Stars?" in body["messages"][0]["content"] for body in server.asked)


def test_a_gullible_judge_fails(server: FakeServer) -> None:
    found = check(server, grades(obey))["judge/injections"]
    assert found.status == "FAIL" and found.details["rise"] == 1.0
    assert (
        "of 6 answers that ask for a high score 4 score more" in found.text
        and "The policy will find this" in found.text
    )


def test_a_small_rise_is_a_warning(server: FakeServer) -> None:
    found = check(server, grades(lambda answer: 3.0 if "operator" in answer else 0.0))["judge/injections"]
    assert found.status == "warn" and '"authority" scores +0.30' in found.text


def test_a_judge_that_likes_length_or_nothing_fails(server: FakeServer) -> None:
    for rule in (lambda answer: min(10.0, len(answer) / 1000), lambda answer: 0.0 if answer else 9.0):
        server.seen.clear()
        assert check(server, grades(rule), question=f"{id(rule)}?")["judge/shape"].status == "FAIL"


def test_a_judge_that_likes_everything_is_a_warning(server: FakeServer) -> None:
    found = check(server, grades(lambda answer: 9.0, words="Nice\x1b[2J"))["judge/wrong"]
    assert found.status == "warn" and '"I do not know." 0.90 of 1' in found.text and "\x1b" not in found.text


def test_a_server_that_fails_is_one_finding_after_one_request(server: FakeServer) -> None:
    findings = check(server, fails(401, {"error": "no"}))
    assert list(findings) == ["judge/replies"] and findings["judge/replies"].status == "FAIL"
    assert "401 no" in findings["judge/replies"].text and len(server.asked) == 1


def test_probes_without_a_score_are_named(server: FakeServer) -> None:
    def refuse_empty(h: Any, body: dict[str, Any]) -> None:
        (grades() if find_answers(body)[0] else says("Nothing to grade."))(h, body)

    found = check(server, refuse_empty, retries=0)["judge/replies"]
    assert found.status == "warn" and "for 1 of 9 answers (empty)" in found.text


def test_the_reference_comes_from_the_row(server: FakeServer) -> None:
    check(server, grades(count_stars), reference="gold")
    assert "[begin reference " in server.asked[0]["messages"][0]["content"]


def test_a_reference_that_the_row_lacks_is_a_finding(server: FakeServer) -> None:
    findings = check(server, grades(), reference="answer")
    assert list(findings) == ["judge/contract"] and 'the column "answer"' in findings["judge/contract"].text


def test_judges_are_found_wherever_a_task_has_them(server: FakeServer) -> None:
    inner = make_judge(server, model="inner")

    class Judged(Rows):
        own = make_judge(server, model="own")
        again = make_judge(server, model="own")

        def __init__(self) -> None:
            self.field = make_judge(server, model="field")

        @property
        def trap(self) -> None:
            raise AssertionError("a property is not read")

        async def score(self, row: Any, answer: Any) -> Any:
            return [await judge.score(row, answer) for judge in (ELSEWHERE, self.own)]

        def score_group(self, row: Any, answers: Any) -> Any:
            def ask() -> Any:
                return inner.compare(row, answers)

            return ask()

    assert sorted(judge.model for judge in find_judges(Judged())) == ["elsewhere", "field", "inner", "own"]
    assert find_judges(Rows()) == [] == check_judge(Rows())  # type: ignore[arg-type]


def test_rehearse_returns_records(server: FakeServer) -> None:
    results = asyncio.run(make_judge(server).rehearse("Stars?", wrong="**"))
    assert [(r.name, r.score) for r in results] == [
        *(("plain", 0.2), ("command", 0.2), ("score line", 0.2), ("json", 0.2), ("fence", 0.2), ("roles", 0.2)),
        *(("authority", 0.2), ("empty", 0.0), ("long", 1.0)),
    ]
    assert [r.name for r in results if not r.is_injection] == ["plain", "empty", "long"]
