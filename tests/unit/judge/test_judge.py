"""A judge's scores and comparisons, from a real server on this machine that follows a rule."""

from __future__ import annotations

import asyncio
import doctest
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

import cohort
from cohort.errors import ConfigError, ServiceError, TaskError
from cohort.judge import parse, prompt
from tests.helpers.fake_server import FakeServer
from tests.helpers.judge_server import (
    find_answers,
    grades,
    list_paths,
    make_judge,
    says,
    waits_for,
)

ANSWERS = ["****", "*", "", "**********", "*", "**"]


def score(judge: cohort.Judge, answer: str, **more: Any) -> cohort.Verdict:
    return asyncio.run(judge.score("Write stars.", answer, **more))


def test_the_examples() -> None:
    for module in (prompt, parse):
        assert doctest.testmod(module).attempted > 0 == doctest.testmod(module).failed


@pytest.mark.parametrize("as_json", [False, True])
def test_a_score_is_normalised_and_has_the_judges_words(server: FakeServer, as_json: bool) -> None:
    verdict = score(make_judge(server, json=as_json), "*******")
    assert verdict == cohort.Verdict(parts={"score": 0.7}, reason="I counted.")
    assert ("response_format" in server.asked[0]) == as_json


def test_the_ends_of_another_scale_are_0_and_1(server: FakeServer) -> None:
    judge = make_judge(server, scale=(-2, 2), part="stars")
    server.behaviours = [grades(lambda answer: answer.count("*") - 2.0)]
    assert [score(judge, "*" * n).parts["stars"] for n in (0, 1, 4)] == [0.0, 0.25, 1.0]


def test_the_request_has_the_settings(server: FakeServer) -> None:
    score(make_judge(server, max_tokens=77, extra={"reasoning_effort": "low"}), "*")
    score(make_judge(server, temperature=None), "**")
    first, second = server.asked
    assert {k: v for k, v in first.items() if k != "messages"} == {
        **{"model": "small", "max_tokens": 77, "temperature": 0.0, "reasoning_effort": "low"}
    }
    assert "temperature" not in second
    assert list_paths(server) == ["/v1/chat/completions"] * 2
    assert "Authorization" not in server.seen[0][1]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/proxy/v1", "/proxy/v1/chat/completions"),
        ("/v1beta/openai/", "/v1beta/openai/chat/completions"),
    ],
)
def test_addresses_with_and_without_a_path(server: FakeServer, path: str, asked: str) -> None:
    score(make_judge(server, url=server.url + path), "*")
    assert list_paths(server) == [asked]


def test_a_prompt_may_be_messages_and_a_reference_comes_from_the_row(server: FakeServer) -> None:
    judge = make_judge(server, reference="gold")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write."}]
    asyncio.run(judge.score(messages, "*", {"id": "1", "gold": "***"}))
    text = server.asked[0]["messages"][0]["content"]
    assert "system: Be brief.\n\nuser: Write." in text and "compare with:\n[begin reference " in text and "***" in text
    for row in (None, {"id": "1"}):
        with pytest.raises(TaskError, match='the column "gold"'):
            score(judge, "*", row=row)


# ---- many at once


def test_requests_are_under_way_at_the_same_time_and_no_more_than_allowed(server: FakeServer) -> None:
    # No reply comes before eight requests are there, so fewer at once would never end.
    server.behaviours = [waits_for(8, grades())]
    judge = make_judge(server, concurrency=8, cache=False)

    async def score_all() -> list[cohort.Verdict]:
        return await asyncio.gather(*(judge.score("Write stars.", "*" * (n % 11)) for n in range(32)))

    assert [v.parts["score"] for v in asyncio.run(score_all())] == [n % 11 / 10 for n in range(32)]
    assert len(server.asked) == 32 and server.num_connections == 8


def test_equal_answers_at_the_same_time_are_asked_once(server: FakeServer) -> None:
    judge = make_judge(server)

    async def score_all() -> list[cohort.Verdict]:
        return await asyncio.gather(*(judge.score("Write stars.", "***") for _ in range(16)))

    assert {v.parts["score"] for v in asyncio.run(score_all())} == {0.3}
    assert len(server.asked) == 1


# ---- comparisons


@pytest.mark.parametrize("as_json", [False, True])
def test_one_request_scores_all_siblings(server: FakeServer, as_json: bool) -> None:
    judge = make_judge(server, json=as_json)
    assert asyncio.run(judge.compare("Write.", ANSWERS)) == [0.4, 0.1, 0.0, 1.0, 0.1, 0.2]
    # Equal answers are shown once.
    assert [sorted(find_answers(body)) for body in server.asked] == [sorted(set(ANSWERS))]


@pytest.mark.parametrize("as_json", [False, True])
def test_pairs_give_the_share_of_wins(server: FakeServer, as_json: bool) -> None:
    judge = make_judge(server, json=as_json)
    # By stars: 4, 1, 0, 10 and, a tie with the second, 1.
    answers = ["****", "*", "", "**********", "one *"]
    assert asyncio.run(judge.compare("Write.", answers, by="pairs")) == [0.75, 0.375, 0.0, 1.0, 0.375]
    assert len(server.asked) == 10


def test_the_order_shown_is_random_but_the_content_decides_it(server: FakeServer) -> None:
    judge = make_judge(server, cache=False)
    for order in itertools.islice(itertools.permutations(ANSWERS), 4):
        asyncio.run(judge.compare("Write.", order))
    assert len({tuple(find_answers(body)) for body in server.asked}) == 1
    server.seen.clear()
    for n in range(24):
        asyncio.run(judge.compare(f"Write {n}.", ["a", "b", "c"]))
    assert len({tuple(find_answers(body)) for body in server.asked}) == 6
    server.seen.clear()
    asyncio.run(judge.compare("Write.", [str(n) for n in range(8)], by="pairs"))
    firsts = [find_answers(body)[0] for body in server.asked]
    assert max(map(firsts.count, firsts)) < 7


def test_a_judge_that_prefers_the_first_answer_does_not_prefer_a_place_in_the_group(server: FakeServer) -> None:
    server.behaviours = [says("Better: 1")]
    judge = make_judge(server)
    wins = [asyncio.run(judge.compare(f"Write {n}.", ["a", "b"], by="pairs"))[0] for n in range(40)]
    assert 8 < sum(wins) < 32


def test_a_group_of_equal_answers_is_not_asked_about(server: FakeServer) -> None:
    judge = make_judge(server)
    assert asyncio.run(judge.compare("Write.", ["*", "*"])) == [0.5, 0.5]
    assert asyncio.run(judge.compare("Write.", [])) == []
    assert not server.asked
    with pytest.raises(ConfigError, match='use "scores" or "pairs"'):
        asyncio.run(judge.compare("Write.", ["a", "b"], by="ranks"))  # type: ignore[arg-type]


def test_one_failed_comparison_is_the_failure_of_the_group(server: FakeServer) -> None:
    server.behaviours = [says("Better: 1"), says("I cannot tell.")]
    with pytest.raises(ServiceError, match="failed 2 times"):
        asyncio.run(make_judge(server, retries=1).compare("Write.", ["a", "b", "c"], by="pairs"))


# ---- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key": "sk-abc-123"}, "never the key itself"),
        ({"model": ""}, "model must be a name"),
        ({"question": " "}, "question is empty"),
        ({"scale": (3, 3)}, "give (low, high)"),
        ({"scale": (0, float("nan"))}, "give (low, high)"),
        ({"template": "{question} {prompt}"}, "no {answer}"),
        ({"template": "{question} {prompt} {answer}", "reference": "gold"}, "no {reference}"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"seconds": 0}, "seconds is 0"),
        ({"requests_per_minute": -1.0}, "requests_per_minute is -1.0"),
        ({"concurrency": 1.5}, "concurrency is 1.5"),
        ({"extra": {"model": "x"}}, "extra has model"),
        ({"url": "localhost:8000"}, "no address of a server"),
        ({"url": "http://me:word@host:port/v1"}, "must not hold a user or a password"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(server: FakeServer, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_judge(server, **settings)
    message = str(caught.value)
    assert words in message and "\n" not in message
    assert "sk-abc" not in message and "word@" not in message


def test_a_judge_is_imported_without_torch_and_numpy() -> None:
    program = "import cohort, sys, json; cohort.Judge; print(json.dumps(sorted({'torch', 'numpy'} & {*sys.modules})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []
