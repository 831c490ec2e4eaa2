"""An index of passages that finds those which fit a query best, ranked by BM25 with the full-text search of SQLite.

The index is a file in the cache (`kept`), opened for reading only. Where the cache cannot be written, the index is made
in memory.

Nothing in a query has a special meaning: only its words count. They match other forms of the same English word
("founded" finds "founding"), and letters with or without accents. The rank of a passage is its BM25 for the words, plus
a share of that of its best sentence and of that for pairs of neighbouring words: what belongs together stands together.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from cohort.errors import TaskError
from cohort.system.digest import digest_file
from cohort.tasks.formats import RawRow
from cohort.tasks.places import COLUMNS_FLAG, RowSource, list_columns, locate_rows, rename_columns, shorten
from cohort.tasks.search import kept

log = logging.getLogger(__name__)

COLUMNS = ("id", "title", "text")  # of a passage
FLAG = "--task.passages"
SUFFIX = ".db"
MAX_QUERY = 2000  # characters of a query that are read
MAX_WORDS = 64  # different words of a query that are looked up
_TOKENIZER = "porter unicode61 remove_diacritics 2"
# Changes when the same passages are indexed in another way: files of another version are not used.
_VERSION = "2"
# What the best sentence and the pairs of words count beside the words of the whole passage. Chosen on the training
# questions of SQuAD (`benchmarks/search_recall.py`), from 0, 0.3, 0.5, 0.8, 1.2 and 0, 0.1, 0.2, 0.4.
SENTENCE_WEIGHT, PAIR_WEIGHT = 0.3, 0.2
# How many of each are compared. A passage that is in none of the lists is not found.
NUM_PASSAGES, NUM_SENTENCES = 300, 500
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"[^\W_]+")  # letters and digits, as the tokenizer parts them
# Words that are in most passages. Without them a search is several times as quick, and finds slightly more.
_STOP_TEXT = """
    a an and are as at be by did do does for from had has have how in is it its of on or that the their there these they
    this to was were what when where which who whom whose why will with would
"""
_STOP_WORDS = frozenset(_STOP_TEXT.split())


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that a search can find."""

    id: str
    title: str  # "" if it has none
    text: str


class PassageIndex:
    """An open index of passages. Threads may share it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # Some builds of SQLite do not allow several threads in one connection.
        self._lock = threading.Lock()

    def search(self, query: str, limit: int) -> list[Passage]:
        """Returns the `limit` passages that fit the query best, the best first; equally good ones in the order of ids.

        The query is any text. The result is empty if no passage has one of its words, or if it has no words.
        """
        expression = make_expression(query)
        if not expression:
            return []
        with self._lock:
            ranked = self._rank_passages(expression, make_pairs_expression(query), max(limit, NUM_PASSAGES))
        return self.fetch([number for _, _, number in sorted(ranked)[:limit]])

    def rank(self, query: str) -> dict[int, float]:
        """Returns the BM25 of the passages that fit a query's words best, by number; the best is the smallest.

        The numbers of passages begin with 1. Passages with none of the words, and those far behind, are left out.
        """
        expression = make_expression(query)
        if not expression:
            return {}
        with self._lock:
            ranked = self._rank_passages(expression, make_pairs_expression(query), NUM_PASSAGES)
        return {number: rank for rank, _, number in ranked}

    def fetch(self, numbers: Sequence[int]) -> list[Passage]:
        """Returns the passages with these numbers, in the same order."""
        marks = ", ".join("?" * len(numbers))
        select = f"SELECT rowid, id, title, text FROM passages WHERE rowid IN ({marks})"
        with self._lock:
            found = {number: Passage(*rest) for number, *rest in self._connection.execute(select, numbers)}
        return [found[number] for number in numbers]

    def list_texts(self) -> list[str]:
        """Returns title and text of every passage, in the order of their numbers."""
        with self._lock:
            rows = self._connection.execute("SELECT title, text FROM passages ORDER BY rowid").fetchall()
        return [f"{title}\n{text}".strip() for title, text in rows]

    def _rank_passages(self, words: str, pairs: str, num_passages: int) -> list[tuple[float, str, int]]:
        """Returns the passages that have any of the words: rank (the best is the smallest), id, and number."""
        match = "SELECT rowid, id, bm25(passages) FROM passages WHERE passages MATCH ? ORDER BY 3, 1 LIMIT ?"
        ids: dict[int, str] = {}
        ranks: dict[int, float] = defaultdict(float)
        for number, id, rank in self._connection.execute(match, (words, num_passages)):
            ids[number], ranks[number] = id, rank
        select = "SELECT passage, id, bm25(sentences) FROM sentences WHERE sentences MATCH ? ORDER BY 3, rowid LIMIT ?"
        seen: set[int] = set()
        for number, id, rank in self._connection.execute(select, (words, NUM_SENTENCES)):
            # The best sentence of a passage comes first, and alone counts.
            if number not in seen:
                seen.add(number)
                ids[number] = id
                ranks[number] += SENTENCE_WEIGHT * rank
        for number, _, rank in self._connection.execute(match, (pairs, num_passages)) if pairs else ():
            if number in ids:
                ranks[number] += PAIR_WEIGHT * rank
        return [(ranks[number], id, number) for number, id in ids.items()]

    def __len__(self) -> int:
        with self._lock:
            count: int = self._connection.execute("SELECT count(*) FROM passages").fetchone()[0]
        return count

    def close(self) -> None:
        """Closes the index. It cannot be searched any more."""
        self._connection.close()


def make_expression(query: str) -> str:
    """Returns the query as an expression of SQLite's full-text search: any of its words; "" if it has no words.

    Stop words are left out unless there are no others.

    >>> make_expression('Who wrote "Ulysses" (1922)?')
    '"wrote" OR "ulysses" OR "1922"'
    >>> make_expression("the who"), make_expression("?!")
    ('"the" OR "who"', '')
    """
    words = list(dict.fromkeys(_WORD.findall(query[:MAX_QUERY].lower())))
    rare = [word for word in words if word not in _STOP_WORDS]
    # In quotation marks, so that AND, NOT, NEAR and the names of columns are words like others.
    return " OR ".join(f'"{word}"' for word in (rare or words)[:MAX_WORDS])


def make_pairs_expression(query: str) -> str:
    """Returns an expression for any two neighbouring words of the query; "" if it has none.

    Two stop words are no pair.

    >>> make_pairs_expression("Who is the founder of Rome?")
    '"the founder" OR "founder of" OR "of rome"'
    """
    words = _WORD.findall(query[:MAX_QUERY].lower())
    pairs = dict.fromkeys(pairwise(words))
    told = [f'"{one} {two}"' for one, two in pairs if not {one, two} <= _STOP_WORDS]
    return " OR ".join(told[:MAX_WORDS])


@lru_cache(maxsize=8)
def open_index(names: tuple[str, ...], columns: tuple[tuple[str, str], ...] = ()) -> PassageIndex:
    """Returns the index of all passages in some sources, which is made if it is not in the cache.

    `names` are paths of files or names of hub data sets, of which the split "train" is read. `columns` has pairs of our
    name of a column (id, title or text) and its name in the sources. Each call with the same arguments returns the same
    open index, even if the sources have changed. Raises TaskError if a source cannot be read or holds anything but
    passages, for two passages with the same id, and if SQLite has no full-text search.
    """
    _check_full_text_search()
    sources, mapping = [locate_rows(name, "train", FLAG) for name in names], dict(columns)
    key = _compute_key(sources, mapping)
    found = _open_kept(key)
    if found is None:
        try:
            kept.write_file(key, SUFFIX, lambda file: _write_index(file, read_passages(sources, mapping)))
            found = _open_kept(key)
        # The disk may be full, the folder not writable, and a scoring worker may write only small files.
        except (OSError, sqlite3.Error) as error:
            where = kept.locate_folder()
            log.warning("the index of passages cannot be kept in %s (%s); it is made in memory", where, error)
    if found is None:
        found = sqlite3.connect(":memory:", check_same_thread=False)
        _fill(found, read_passages(sources, mapping))
    return PassageIndex(found)


def read_passages(sources: Iterable[RowSource], columns: Mapping[str, str]) -> Iterator[Passage]:
    """Yields the passages of all sources in their order.

    `columns` maps our names of columns to those of the sources. Raises TaskError, with file and line, for a row that is
    no passage and for an id that occurs twice, and if there is no passage at all.
    """
    places: dict[str, str] = {}  # id -> where its passage is
    for source in sources:
        for number, raw in source.open():
            where = source.describe_row(number)
            passage = _make_passage(where, raw, columns)
            if passage.id in places:
                raise TaskError(
                    f"{where} and {places[passage.id]} have the same id {shorten(passage.id)}; give each passage its "
                    "own id"
                )
            places[passage.id] = where
            yield passage
    if not places:
        raise TaskError(f"there are no passages to search; name files that have some with {FLAG}")


def _make_passage(where: str, raw: RawRow, columns: Mapping[str, str]) -> Passage:
    """Returns the passage of a raw row. `where` is its place, for messages.

    Raises TaskError if the row has no id or no text, or values of other types. The title may be missing.
    """
    if not isinstance(raw, dict):
        raise TaskError(f"{where} is {shorten(raw)}; a passage must be a JSON object with the keys id, title and text")
    row = rename_columns(where, raw, columns)
    for name in ("id", "text"):
        if name not in row:
            raise TaskError(
                f'{where} has no column "{name}"; it has {list_columns(raw)}. Add it, or set {COLUMNS_FLAG} '
                f"{name}=COLUMN if it has another name there"
            )
    id, title, text = row["id"], row.get("title"), row["text"]
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise TaskError(f"{where} has the id {shorten(id)}; use a text that is not empty, or a whole number")
    if not isinstance(text, str) or not text.strip():
        raise TaskError(f"{where} has the text {shorten(text)}; a passage needs a text that is not empty")
    if title is not None and not isinstance(title, str):
        raise TaskError(f"{where} has the title {shorten(title)}; use a text, or none")
    # SQLite ends a text at a null character.
    return Passage(str(id), _clean(title or ""), _clean(text))


def _clean(text: str) -> str:
    """Returns the text without null characters and without spaces around it."""
    return text.replace("\0", "").strip()


def _compute_key(sources: Sequence[RowSource], columns: Mapping[str, str]) -> str:
    """Returns 32 hexadecimal digits that depend on the passages of all sources and on how they are indexed.

    Of files every byte counts; other sources are read. Raises TaskError if a source cannot be read.
    """
    hashed = hashlib.sha256("\0".join([_VERSION, _TOKENIZER, repr(sorted(columns.items()))]).encode())
    for source in sources:
        if source.path is None:
            for passage in read_passages([source], columns):
                hashed.update(repr((passage.id, passage.title, passage.text)).encode())
            continue
        # Raises an error that helps if there is no such file.
        source.open()
        try:
            hashed.update(f"{source.path.suffix} {digest_file(source.path)}\n".encode())
        except OSError as error:
            raise TaskError(f"cannot read {source.path}: {error.strerror}; check its permissions") from error
    return hashed.hexdigest()[:32]


def _open_kept(key: str) -> sqlite3.Connection | None:
    """Returns the index with this key from the cache, opened for reading only; None if there is no undamaged one."""
    # Another process may remove a file between two calls.
    with suppress(sqlite3.Error):
        file = kept.find_file(key, SUFFIX)
        if file is not None:
            # Immutable: SQLite then takes no locks, which some network file systems do not have.
            return sqlite3.connect(f"{file.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    return None


def _write_index(file: Path, passages: Iterable[Passage]) -> None:
    """Writes the index of the passages to a file. Raises sqlite3.Error if it cannot, and what `passages` raises."""
    with closing(sqlite3.connect(file)) as connection:
        # No file beside it: what was interrupted is thrown away as a whole.
        connection.execute("PRAGMA journal_mode = OFF")
        _fill(connection, passages)


def _fill(connection: sqlite3.Connection, passages: Iterable[Passage]) -> None:
    """Writes the tables of passages and of their sentences into an empty database."""
    connection.execute(
        f"CREATE VIRTUAL TABLE passages USING fts5(id UNINDEXED, title, text, tokenize = '{_TOKENIZER}')"
    )
    connection.execute(
        f"CREATE VIRTUAL TABLE sentences USING fts5(passage UNINDEXED, id UNINDEXED, text, tokenize = '{_TOKENIZER}')"
    )
    for number, passage in enumerate(passages, start=1):
        values = (number, passage.id, passage.title, passage.text)
        connection.execute("INSERT INTO passages (rowid, id, title, text) VALUES (?, ?, ?, ?)", values)
        sentences = [(number, passage.id, sentence) for sentence in _SENTENCE_END.split(passage.text)]
        connection.executemany("INSERT INTO sentences VALUES (?, ?, ?)", sentences)
    # One tree instead of several: searches are quicker, and the file does not depend on when parts were written.
    for table in ("passages", "sentences"):
        connection.execute(f"INSERT INTO {table} ({table}) VALUES ('optimize')")
    connection.commit()


def _check_full_text_search() -> None:
    """Raises TaskError if SQLite was built without its full-text search, FTS5."""
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE VIRTUAL TABLE probe USING fts5(text)")
    except sqlite3.Error as error:
        raise TaskError(
            f"searching passages needs SQLite with FTS5, its full-text search, which this Python's SQLite "
            f"{sqlite3.sqlite_version} does not have ({error}); use another build of Python, such as that of "
            "python.org, conda or a Linux distribution"
        ) from error
