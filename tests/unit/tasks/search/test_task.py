"""The task search_qa: its rows, prompts, search, scores and messages, with small files and with the real data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cohort.config.kinds import RL
from cohort.errors import TaskError
from cohort.jobs.inputs import settle_inputs
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import get_task, load_rows, make_plain_answer
from cohort.tasks.calls import compute_summary
from cohort.tasks.grading import grade
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.tasks.search.index import open_index
from cohort.tasks.search.task import NOTHING_FOUND, SearchQA
from cohort.tasks.self_check import run_self_check
from cohort.user_code import load_file
from tests.helpers.data_rows import write_rows

QUESTIONS = [
    {"question": "Who made tea?", "answers": ["Ann", "Ann Lee"], "passage_id": "p1", "split": "train"},
    {"question": "Is ink blue?", "answers": ["yes"], "passage_id": "p2", "split": "test"},
    {"question": "Who drew {maps}?", "answers": ["Bo"], "passage_id": "p3", "split": "train"},
]
PASSAGES = [
    {"id": "p1", "title": "Tea", "text": "Ann Lee made tea, with mint."},
    {"id": "p2", "title": "Ink", "text": "Ink is blue. " * 30},
    {"id": "p3", "title": "Maps", "text": "Bo drew maps for Ann."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    open_index.cache_clear()
    yield
    open_index.cache_clear()


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def task(tmp_path: Path) -> SearchQA:
    """A task with questions and passages of its own."""
    data = write(tmp_path / "questions.jsonl", QUESTIONS)
    return SearchQA(data=data, passages=(write(tmp_path / "passages.jsonl", PASSAGES),))


# ---- rows


def test_the_column_split_divides_one_file(task: SearchQA) -> None:
    train, test = load_rows(task, "train"), load_rows(task, "test")
    assert [row["question"] for row in train] == ["Who made tea?", "Who drew {maps}?"]
    assert [row["question"] for row in test] == ["Is ink blue?"]
    assert train[0]["answers"] == ["Ann", "Ann Lee"] and train[0]["passage_id"] == "p1"
    with pytest.raises(TaskError, match='no split "dev"'):
        list(task.rows("dev"))


def test_a_file_per_split_needs_no_column(tmp_path: Path) -> None:
    write(tmp_path / "q_train.jsonl", [{"question": "A?", "answer": "a1"}, {"question": "B?", "answer": "b1"}])
    write(tmp_path / "q_test.jsonl", [{"question": "b?", "answer": "b1"}])
    task = SearchQA(data=str(tmp_path / "q_{split}.jsonl"))
    # The question of test is left out of train.
    assert [row["question"] for row in load_rows(task, "train")] == ["A?"]
    assert [row["answers"] for row in load_rows(task, "test")] == [["b1"]]


def test_a_file_without_the_column_is_for_testing(tmp_path: Path) -> None:
    task = SearchQA(data=write(tmp_path / "q.jsonl", [{"question": "A?", "answer": "x"}]))
    assert len(load_rows(task, "test")) == 1
    with pytest.raises(TaskError, match=r'line 1 has no column "split".*NAME_\{split\}'):
        load_rows(task, "train")


def test_columns_with_other_names(tmp_path: Path) -> None:
    data = write(tmp_path / "q.jsonl", [{"q": "A?", "gold": ["x"], "part": "train"}])
    passages = write(tmp_path / "p.jsonl", [{"key": 1, "body": "x is here"}])
    columns = ("question=q", "answers=gold", "split=part", "id=key", "text=body")
    task = SearchQA(data=data, passages=(passages,), columns=columns)
    assert load_rows(task, "train")[0]["answers"] == ["x"]
    assert task.search("x") == "[1]\nx is here"
    with pytest.raises(TaskError, match=r'"questoin=".*Did you mean'):
        SearchQA(columns=("questoin=q",))


@pytest.mark.parametrize(
    ("raw", "answers"),
    [
        ({"answers": ["a1", " a1 ", "b1"]}, ["a1", "b1"]),
        ({"answers": "a1"}, ["a1"]),
        ({"answer": "a1"}, ["a1"]),
        ({"answer": ["a1", "b1"]}, ["a1", "b1"]),
        ({"answers": {"text": ["a1"], "answer_start": [3]}}, ["a1"]),
        ({"answers": ["?", "The"]}, ["The"]),
    ],
)
def test_accepted_answers_in_several_forms(tmp_path: Path, raw: dict[str, object], answers: list[str]) -> None:
    task = SearchQA(data=write(tmp_path / "q.jsonl", [{"question": "A?", **raw}]))
    row = load_rows(task, "test")[0]
    assert row["answers"] == answers
    assert grade(task, row, make_plain_answer(task.gold(row))).parts["correct"] == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"question": " ", "answer": "x"}, 'line 1: column "question"'),
        ({"question": "A?"}, 'no column "answer"'),
        ({"question": "A?", "answers": []}, "no letter and no digit"),
        ({"question": "A?", "answers": ["?"]}, "no letter and no digit"),
        ({"question": "A?", "answers": [1]}, 'column "answers" has .*1'),
        ({"question": "A?", "answers": {"start": 1}}, "neither a text nor a list"),
    ],
)
def test_bad_questions_are_named(tmp_path: Path, raw: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_rows(SearchQA(data=write(tmp_path / "q.jsonl", [raw])), "test")


def test_without_the_data_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COHORT_DATA", raising=False)
    for ask in (lambda: list(SearchQA().rows("train")), lambda: SearchQA(corpus="wiki2").search("x")):
        with pytest.raises(TaskError, match=r"COHORT_DATA \(now: not set\).*--task.corpus small"):
            ask()
    monkeypatch.setenv("COHORT_DATA", str(tmp_path))
    with pytest.raises(TaskError, match=r"wiki2_passages\.jsonl"):
        SearchQA(corpus="wiki2").open_index()


def test_the_corpora_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_DATA", str(write_rows(tmp_path)))
    for corpus in ("squad", "wiki2", "both"):
        task = SearchQA(corpus=corpus)
        assert run_self_check(task).num_gold > 0
        rows = load_rows(task, "train")
        assert len(rows) >= 64 and rows[-1]["answers"][0] in task.search(rows[-1]["question"])
    squad, wiki2, both = (SearchQA(corpus=corpus) for corpus in ("squad", "wiki2", "both"))
    assert len(both.open_index()) == len(squad.open_index()) + len(wiki2.open_index())
    assert len(load_rows(both, "test")) == len(load_rows(squad, "test")) + len(load_rows(wiki2, "test"))


def test_the_small_corpus_needs_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COHORT_DATA", raising=False)
    task = SearchQA(corpus="small")
    assert run_self_check(task, 100).num_gold == 72
    train, test = load_rows(task, "train"), load_rows(task, "test")
    assert (len(train), len(test), len(task.open_index())) == (48, 24, 24)
    assert not {row["passage_id"] for row in train} & {row["passage_id"] for row in test}
    for row in [*train, *test]:
        found = task.open_index().search(row["question"], 3)
        assert row["passage_id"] in [passage.id for passage in found], row["question"]
        right = next(passage for passage in found if passage.id == row["passage_id"])
        assert row["answers"][0] in ("yes", "no") or row["answers"][0] in right.text


# ---- prompts and searches


def test_prompts(task: SearchQA) -> None:
    row = load_rows(task, "train")[1]
    (message,) = task.prompt(row)
    assert message["role"] == "user" and message["content"].startswith("Who drew {maps}?\nWrite the answer")
    assert "<answer>" in message["content"] and "[1]" not in message["content"]
    thinking = SearchQA(corpus="small", style="think").prompt(row)[0]["content"]
    assert "between <think> and </think>, then write the answer" in thinking
    assert SearchQA(style="none").prompt(row)[0]["content"] == row["question"]


def test_a_prompt_with_passages(task: SearchQA) -> None:
    with_context = SearchQA(data=task.data, passages=task.passages, context="search", top_k=1)
    content = with_context.prompt(load_rows(task, "train")[1])[0]["content"]
    assert content.startswith("[1] Maps\nBo drew maps for Ann.\n\nQuestion: Who drew {maps}?\nWrite")


def test_search_numbers_and_cuts_passages(task: SearchQA) -> None:
    assert task.search("Ann") == "[1] Maps\nBo drew maps for Ann.\n\n[2] Tea\nAnn Lee made tea, with mint."
    short = SearchQA(data=task.data, passages=task.passages, top_k=1, max_chars=10)
    assert short.search("Ann") == "[1] Maps\nBo drew ..."
    assert short.search("ink") == "[1] Ink\nInk is ..."
    assert task.search("zebra") == NOTHING_FOUND
    # A call without words has failed: its author is told, and the reward knows.
    for query in ("", '"*', "?"):
        with pytest.raises(ValueError, match="the query has no words"):
            task.search(query)


def test_a_question_without_words_has_a_prompt(task: SearchQA) -> None:
    with_context = SearchQA(data=task.data, passages=task.passages, context="search")
    assert with_context.prompt({"question": "?!"})[0]["content"].startswith(f"{NOTHING_FOUND}\n\nQuestion: ?!")


def test_tools_name_typed_methods_where_the_policy_searches(task: SearchQA, tmp_path: Path) -> None:
    assert task.tools == () == SearchQA(context="search").tools
    searching = SearchQA(data=task.data, passages=task.passages, context="tool")
    (name,) = searching.tools
    method = getattr(searching, name)
    assert "Args:\n" in method.__doc__ and method.__annotations__ == {"query": "str", "return": "str"}
    assert "Search for what you need before you answer. Write" in searching.prompt({"question": "Who?"})[0]["content"]
    assert not (tmp_path / "cache" / "search").exists()
    searching.rows("train")
    assert len(list((tmp_path / "cache" / "search").glob("*.db"))) == 1, "made before workers need it"


# ---- scores


@dataclass(frozen=True, kw_only=True)
class AnswerWithCalls:
    """An answer of a conversation, as far as the grader sees it."""

    text: str
    calls: tuple[str, ...]


@pytest.mark.parametrize(
    ("calls", "total"), [((), -0.5), (("ok",), 2.0), (("ok", "ok"), 2.0), (("ok", "error"), -0.8), (("unknown",), -0.8)]
)
def test_the_outcomes_of_calls_decide_the_reward_of_the_seed(calls: tuple[str, ...], total: float) -> None:
    task = SearchQA(reward="seed", context="tool")
    answer = AnswerWithCalls(text="<answer>Ann</answer>", calls=calls)
    verdict = task.score({"answers": ["Ann"]}, answer)  # type: ignore[arg-type]
    assert sum(verdict.parts.values()) == pytest.approx(total, abs=1e-12)


def test_parts(task: SearchQA) -> None:
    row = load_rows(task, "train")[0]
    outcome = grade(task, row, make_plain_answer("So <answer>the Ann Lee!</answer>"))
    assert outcome.parts == {"correct": 1, "f1": 1, "format": 1, "call": 0, "result": 0, "penalty": 0}
    outcome = grade(task, row, make_plain_answer("<answer>Ann Bo</answer>"))
    assert outcome.parts["correct"] == 0 and outcome.parts["f1"] == pytest.approx(2 / 3) and "F1" in outcome.reason
    seed = SearchQA(reward="seed", context="tool")
    right = make_plain_answer("<answer>Ann</answer>")
    assert sum(grade(seed, row, right).parts.values()) == pytest.approx(-0.5), "no call was made"
    assert grade(seed, row, right).parts["correct"] == 1
    assert max(grade(seed, row, make_plain_answer("")).parts.values()) <= 0


def test_an_evaluation_tells_the_mean_f1() -> None:
    parts = [{"f1": 1.0}, {"f1": 0.5}, {"f1": 0.0}]
    assert compute_summary(SearchQA(), [{}] * 3, parts) == {"f1": 0.5}
    assert compute_summary(SearchQA(reward="seed", context="tool"), [{}] * 3, parts) == {}


def test_the_grader_digest_covers_index_and_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (seen.add(path.name), read(path))[1])
    compute_grader_digest(SearchQA())
    assert {"task.py", "index.py", "grading.py", "rewards.py", "answers.py"} <= seen


def test_the_task_is_built_in_and_travels() -> None:
    assert get_task("search_qa") is SearchQA
    task = SearchQA(corpus="small", passages=("a.jsonl",), top_k=5)
    assert TaskRef.from_task(task).load() == task


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "top_k from 1"),
        ({"top_k": 101}, "top_k from 1"),
        ({"max_chars": 0}, "max_chars from 1"),
        ({"style": "x"}, "style among tags, think, none"),
        ({"context": "gold"}, "context among none, search, tool"),
        ({"reward": "seed"}, 'the context "tool"'),
        ({"corpus": "web"}, "corpus among squad"),
        ({"reward": "f1"}, "reward among correct, seed"),
        ({"corpus": "small", "data": "a.jsonl", "passages": ("b.jsonl",)}, "no corpus beside data and passages"),
    ],
)
def test_settings_that_are_not_allowed(settings: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        SearchQA(**settings)  # type: ignore[arg-type]


def test_a_run_keeps_absolute_paths_of_passages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", PASSAGES)
    write(tmp_path / "q.jsonl", QUESTIONS)
    task = SearchQA(data="q.jsonl", passages=("p.jsonl", "owner/name"))
    settled = settle_inputs(RL(model="tiny", task=task, steps=1)).task
    assert settled.data == str(tmp_path / "q.jsonl")
    assert settled.passages == (str(tmp_path / "p.jsonl"), "owner/name")
    by_meaning = SearchQA(context="tool", match="both", embedder="models/mine")
    settled = settle_inputs(RL(model="tiny", task=by_meaning, steps=1)).task
    assert settled.embedder == str(tmp_path / "models" / "mine")


SEARCHING = """
import cohort
from cohort.tasks.search.task import SearchQA


@cohort.task("searching")
class Searching:
    def rows(self, split): yield {"id": "0"}
    def prompt(self, row): return [{"role": "user", "content": "?"}]
    def score(self, row, answer):
        found = SearchQA(corpus="both").search(answer.text)
        return cohort.Verdict({"correct": float("Captain7 " in found)}, found[:60])
"""


def test_workers_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker finds data and index by the same variables, under its limits, whether or not the index is made."""
    monkeypatch.setenv("COHORT_DATA", str(write_rows(tmp_path)))
    (tmp_path / "searching.py").write_text(SEARCHING)
    load_file(tmp_path / "searching.py")
    items = [({"id": "0"}, make_plain_answer(query)) for query in ("founder of town 7", "film 9", 'zebra "')]
    for made in (False, True):
        if made:
            SearchQA(corpus="both").open_index()
        with ScoringPool(get_task("searching")()) as pool:
            outcomes = pool.score(items)
        assert [outcome.failure for outcome in outcomes] == ["", "", ""]
        assert [outcome.parts["correct"] for outcome in outcomes] == [1, 0, 0]
        assert outcomes[2].reason == NOTHING_FOUND[:60]


@pytest.mark.skipif("COHORT_DATA" not in os.environ, reason="needs the data sets in $COHORT_DATA")
def test_the_real_data() -> None:
    both = SearchQA(corpus="both")
    assert (len(load_rows(both, "train")), len(load_rows(both, "test"))) == (3282 + 800, 475 + 200)
    assert run_self_check(both, 10_000).num_gold == 4757
    assert len(both.open_index()) == 1283 + 6119
    squad = SearchQA(corpus="squad")
    rows = load_rows(squad, "test")
    found = [squad.open_index().search(row["question"], 3) for row in rows]
    hits = [row["passage_id"] in [p.id for p in passages] for row, passages in zip(rows, found, strict=True)]
    assert sum(hits) / len(hits) > 0.94
