"""The index of passages: what a search finds, any query, the cache, damage, and several processes at once."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cohort.errors import TaskError
from cohort.tasks import places
from cohort.tasks.search import index
from cohort.tasks.search.index import PassageIndex, make_expression, open_index

ROWS = [
    {"id": "b", "title": "Rivers", "text": "The Mirrow is a river. It was named by settlers."},
    {"id": "a", "title": "Rivers", "text": "The Mirrow is a river. It was named by settlers."},
    {"id": "c", "title": "Towns", "text": "Corvane was founded in 1540. AND or NOT, its market is NEAR the harbour."},
    {"id": 7, "title": None, "text": "La Marca de Satanás is a film of 1957."},
    {"id": "e", "title": "Bands", "text": "The Who was a band."},
]
SOURCE = Path(__file__).resolve().parents[4] / "src"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; returns its folder for indexes."""
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    open_index.cache_clear()
    yield tmp_path / "cache" / "search"
    open_index.cache_clear()


def write(path: Path, rows: list[dict[str, object]] | None = None) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS), encoding="utf-8")
    return str(path)


def open_again(*names: str, columns: tuple[tuple[str, str], ...] = ()) -> PassageIndex:
    """Opens an index as a new process would."""
    open_index.cache_clear()
    return open_index(names, columns)


def find(made: PassageIndex, query: str, limit: int = 10) -> list[str]:
    return [passage.id for passage in made.search(query, limit)]


# ---- what is found


def test_words_find_passages(tmp_path: Path) -> None:
    made = open_index((write(tmp_path / "p.jsonl"),))
    assert len(made) == 5
    assert find(made, "When was Corvane founded?") == ["c"]
    assert find(made, "the founding of corvane") == ["c"], "other forms of a word"
    assert find(made, "satanas") == find(made, "SATANÁS") == ["7"], "with or without accents"
    assert find(made, "towns") == ["c"], "the title counts"
    assert find(made, "harbour film", limit=1) in (["c"], ["7"])
    found = made.search("film", 1)[0]
    assert (found.id, found.title, found.text) == ("7", "", "La Marca de Satanás is a film of 1957.")


def test_equally_good_passages_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    made = open_index((write(tmp_path / "p.jsonl"),))
    assert find(made, "mirrow") == ["a", "b"] and find(made, "mirrow", 1) == ["a"]
    other = open_index((write(tmp_path / "q.jsonl", ROWS[::-1]),))
    assert find(other, "mirrow") == ["a", "b"]


def test_a_rare_word_weighs_more_than_frequent_ones(tmp_path: Path) -> None:
    rows = [{"id": str(n), "text": "river stone wood " * 3} for n in range(20)] + [{"id": "x", "text": "quartz wood"}]
    assert find(open_index((write(tmp_path / "p.jsonl", rows),)), "river of quartz", 1) == ["x"]


def test_stop_words_count_only_if_there_is_nothing_else(tmp_path: Path) -> None:
    made = open_index((write(tmp_path / "p.jsonl"),))
    assert find(made, "The Who")[0] == "e"
    assert "e" not in find(made, "who founded the market")


@pytest.mark.parametrize("query", ["", "   ", "?!", '"', "***", "\0", "_", "\ud800", "\u3164"])
def test_a_query_without_words_finds_nothing(tmp_path: Path, query: str) -> None:
    assert open_index((write(tmp_path / "p.jsonl"),)).search(query, 3) == []


# ---- any text is a query


@pytest.mark.parametrize(
    "query",
    [
        'corvane AND "', "NOT corvane", "corvane NOT", "NEAR(corvane, 5)", "text:corvane", "corvane*", "^corvane",
        "{title text}: corvane", "(corvane", "corvane)", "corvane; DROP TABLE passages", "corvane -- x", "'corvane'",
        "corvane + + market", "\0corvane\0", "corvane\ud800", "corvane " * 5000, "x " * 100_000, "corvane_market",
        "c\u0300 corvane", "½ ² corvane",
    ],
)  # fmt: skip
def test_nothing_in_a_query_is_syntax(tmp_path: Path, query: str) -> None:
    made = open_index((write(tmp_path / "p.jsonl"),))
    assert ("c" in find(made, query)) == ("corvane" in query)
    assert len(made) == 5


@pytest.fixture(scope="module")
def in_memory() -> PassageIndex:
    connection = sqlite3.connect(":memory:")
    index._fill(connection, [index.Passage(str(r["id"]), str(r["title"]), str(r["text"])) for r in ROWS])
    return PassageIndex(connection)


@given(st.text(max_size=80))
@example("NOT")
@example('""""')
@example("\U0001fbf9 \u0378")
def test_any_text_can_be_searched_for(in_memory: PassageIndex, query: str) -> None:
    found = in_memory.search(query, 2)
    assert len(found) <= 2 and found == in_memory.search(query, 2)
    assert in_memory.search(f"{query} corvane", 5), "a known word is found whatever stands before it"


def test_a_long_query_has_a_bounded_expression() -> None:
    words = " ".join(f"w{n}" for n in range(10_000))
    assert make_expression(words).count(" OR ") == index.MAX_WORDS - 1
    assert make_expression("Word word WORD") == '"word"'


# ---- sources


def test_several_files_of_several_forms_and_columns(tmp_path: Path) -> None:
    one, two = tmp_path / "a.csv", tmp_path / "b.json"
    one.write_text('key,title,body\n1,Tea,"Mint, fresh"\n2,,Salt\n', encoding="utf-8")
    two.write_text(json.dumps([{"key": "3", "title": "Ink", "body": "Blue ink"}]), encoding="utf-8")
    made = open_index((str(one), str(two)), (("id", "key"), ("text", "body")))
    assert len(made) == 3 and find(made, "mint") == ["1"] and find(made, "blue") == ["3"]


def test_a_parquet_file(tmp_path: Path) -> None:
    rows = [{"id": "1", "title": "Tea", "text": "Mint"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert find(open_index((str(tmp_path / "p.parquet"),)), "mint") == ["1"]


def test_a_data_set_of_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dict(row) for row in ROWS]
    opened = []

    def open_hub(name: str, split: str, remedy: str, flags: str) -> Iterator[tuple[int, dict[str, object]]]:
        opened.append((name, split))
        return enumerate(rows, 1)

    monkeypatch.setattr(places, "_open_hub", open_hub)
    assert find(open_again("owner/name:part"), "corvane") == ["c"] and {*opened} == {("owner/name:part", "train")}
    rows[2]["text"] = "Nothing is known."
    assert find(open_again("owner/name:part"), "corvane") == []
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "T", "text": "x"}, r'line 2 has no column "id"; it has .*--task.columns id=COLUMN'),
        ({"id": "1", "body": "x"}, r'line 2 has no column "text"; it has .*body'),
        ({"id": True, "text": "x"}, "line 2 has the id True"),
        ({"id": "", "text": "x"}, "line 2 has the id ''"),
        ({"id": "1", "text": "  "}, "line 2 has the text '  '"),
        ({"id": "1", "text": 3}, "line 2 has the text 3"),
        ({"id": "1", "text": "x", "title": 3}, "line 2 has the title 3"),
        ({"id": "0", "text": "x"}, r"line 2 and .*line 1 have the same id '0'"),
        ([1], r"line 2 is \[1\]"),
    ],
)
def test_a_bad_passage_is_named(tmp_path: Path, cache: Path, row: object, message: str) -> None:
    rows = [{"id": 0, "text": "first"}, row]
    with pytest.raises(TaskError, match=message):
        open_index((write(tmp_path / "p.jsonl", rows),))  # type: ignore[arg-type]
    assert not list(cache.glob("*")) and not list(cache.glob(".*")), "nothing is left behind"


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no such file; set --task.passages"):
        open_index((str(tmp_path / "none.jsonl"),))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TaskError, match="no passages to search"):
        open_index((str(tmp_path / "empty.jsonl"),))


def test_sqlite_without_full_text_search_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
            if "fts5" in sql:
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(sql, *args)  # type: ignore[arg-type]

    connect = sqlite3.connect
    monkeypatch.setattr(index.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Old))
    with pytest.raises(TaskError, match=r"needs SQLite with FTS5.*no such module"):
        open_index((write(tmp_path / "p.jsonl"),))


# ---- the cache


def test_an_index_is_made_once_for_the_same_content(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_again(write(tmp_path / "p.jsonl"))
    files = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert len(files) == 1
    with monkeypatch.context() as patch:
        patch.setattr(index, "_fill", lambda *_: pytest.fail("it was made again"))
        assert find(open_again(write(tmp_path / "another name.jsonl")), "corvane") == ["c"]
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == files


def test_other_content_columns_or_order_of_files_is_another_index(tmp_path: Path, cache: Path) -> None:
    name = write(tmp_path / "p.jsonl")
    open_again(name)
    write(tmp_path / "p.jsonl", [{"id": "n", "text": "Corvane was moved."}])
    assert find(open_again(name), "corvane") == ["n"], "the old index is not used for new content"
    rows: list[dict[str, object]] = [{"id": "1", "text": "tea", "body": "ink"}]
    both = write(tmp_path / "q.jsonl", rows)
    assert find(open_again(both), "tea") == ["1"]
    assert find(open_again(both, columns=(("text", "body"),)), "tea") == []
    assert len(list(cache.glob("*.db"))) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    name = write(tmp_path / "p.jsonl")
    open_again(name).close()
    (file,) = cache.iterdir()
    content = file.read_bytes()
    at = content.index(b"Corvane")
    file.write_bytes(
        {
            "cut": content[: len(content) // 2],
            # one letter of a passage, which SQLite's own check does not see
            "changed": content[:at] + b"X" + content[at + 1 :],
            "empty": b"",
            "other": b"no database",
        }[damage]
    )
    made = open_again(name)
    assert find(made, "corvane") == ["c"] and made.search("corvane", 1)[0].text.startswith("Corvane")
    assert [f.read_bytes() for f in cache.iterdir()] == [content]


def test_the_index_is_open_for_reading_only(tmp_path: Path) -> None:
    made = open_index((write(tmp_path / "p.jsonl"),))
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        made._connection.execute("DELETE FROM passages")


def test_without_a_cache_that_can_be_written_the_index_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    assert find(open_again(write(tmp_path / "p.jsonl")), "corvane") == ["c"]
    assert "made in memory" in caplog.text


PROGRAM = """
import resource, sys
from cohort.tasks.search.index import open_index
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
made = open_index((sys.argv[1],))
print(len(made), [p.id for p in made.search("number 500 river", 3)])
"""


def start(name: str, most: int = 0) -> subprocess.Popen[str]:
    """Starts a process that opens the index and searches; it may write files of `most` bytes, 0 = any size."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, str(most)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_many(path: Path) -> str:
    return write(path, [{"id": f"{n:04}", "text": f"Passage number {n} of the river. " * 20} for n in range(2000)])


def test_processes_make_and_open_it_at_the_same_time(tmp_path: Path, cache: Path) -> None:
    name = write_many(tmp_path / "p.jsonl")
    running = [start(name) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert {out for out, _ in said} == {said[0][0]} and said[0][0].startswith("2000 ['0500'")
    assert [file.suffix for file in cache.iterdir()] == [".db"], "one file, and nothing aside"


def test_a_process_that_may_write_only_small_files_has_it_in_memory(tmp_path: Path, cache: Path) -> None:
    """As a scoring worker, whose largest file is a megabyte."""
    process = start(write_many(tmp_path / "p.jsonl"), most=1 << 18)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and out.startswith("2000 ['0500'"), error
    assert not list(cache.iterdir())


def test_threads_share_an_index(tmp_path: Path) -> None:
    made = open_index((write(tmp_path / "p.jsonl"),))
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(find(made, "corvane"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["c"]] * 8


def test_words_in_one_sentence_and_side_by_side_count_more(tmp_path: Path) -> None:
    """Both passages have the same words and lengths; in one they stand together."""
    texts = {
        "apart": "The bridge is old. Nobody crosses it. A river flows there. The green hills are near.",
        "close": "Hills are old. Nobody crosses a bridge. There it is. The green river flows near the.",
    }
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"id": id, "title": "", "text": text}) + "\n" for id, text in texts.items()))
    made = open_index((str(file),))
    assert find(made, "Where is the green river?") == ["close", "apart"]
    assert find(made, "green hills") == ["apart", "close"]
