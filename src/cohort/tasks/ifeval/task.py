"""IFEval: instructions that a program can check (arXiv:2311.07911; 541 test prompts, 25 kinds of instruction).

The verdicts are those of the published checker, so that results can be compared with published ones. In some cases that
checker draws at random, crashes or takes quadratic time; `tests/peers/test_ifeval_reference.py` says what is done here
instead. Five of the 541 prompts contradict themselves (repeat a request with commas in it, use no comma), so the best
possible result is 99.1%.

IFEval is a test set, so training uses other rows: generated ones (module `prompts`), or a file of questions with
required and forbidden keywords.

Reward parts: `prompt_strict` and `prompt_loose` are 1 if all instructions of the prompt are followed, else 0;
`instruction_strict` and `instruction_loose` are the share of followed instructions. Loose verdicts also try the text
without asterisks, without its first line and without its last line. With answer = tags, `format` is 1 if there is
exactly one answer block, outside of thoughts and with a letter or digit in it, and `thinks` is 1 if also exactly one
think block with text was closed before it; otherwise these parts are 0. An answer without a visible character follows
no instruction, although it has no comma.

Many instructions are followed by text that says nothing, such as a full stop, a copy of the prompt or thoughts that
never end, and a policy would find that out. So `effort` is -1 for such text and 0 otherwise; the other parts remain
those of the published checker. Coefficients for `reward` as in TorchRL's recipe, except for the last, which is ours:
{"prompt_strict": 0.4, "instruction_strict": 0.3, "prompt_loose": 0.2, "instruction_loose": 0.1, "format": 0.1,
"thinks": 0.05, "effort": 2.0}.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.system.paths import expand_home
from cohort.tasks.answers import INVISIBLE_LETTERS, has_visible_text, remove_thoughts
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.ifeval.instructions import gold, language
from cohort.tasks.ifeval.instructions.registry import read_arguments
from cohort.tasks.ifeval.instructions.verdicts import check_instructions
from cohort.tasks.ifeval.prompts import generate_row
from cohort.tasks.places import FOLDER_VARIABLE, Place
from cohort.tasks.source import read_rows
from cohort.types import Answer, Message, Row

TrainSource = Literal["generated", "keywords"]
AnswerScope = Literal["whole", "tags"]

PLACES = {
    # This file is not on the hub; `_require_keywords_file` explains where to put it.
    "train": Place(file="if_keywords_train.jsonl", hub="", split="train"),
    "test": Place(file="ifeval.jsonl", hub="google/IFEval", split="train"),
}
COLUMNS = ("prompt", "instruction_id_list", "kwargs", "key")
LEVELS = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
SYSTEM = (
    "Think first, between <think> and </think>. Then write your reply between <answer> and </answer>, once. "
    "Whatever the user asks of the reply holds for what stands between these two tags; nothing else is read."
)
# Longer answers are wrong. This bounds the cost of the checks; no prompt asks for a tenth of it.
MAX_CHARS = 200_000
MAX_TRAIN_SIZE = 1_000_000
_TAG = re.compile(r"<[^<>]{0,40}>")
_WORD = re.compile(r"[^\W\d_]+")
# The Braille blank is a symbol that shows nothing.
_INVISIBLE = INVISIBLE_LETTERS + "\u2800"
# Fewer letters, or fewer different ones, are no content in any script.
MIN_LETTERS, MIN_DIFFERENT_LETTERS = 8, 4


@task("ifeval")
class IFEval:
    """Prompts with verifiable instructions: the 541 of IFEval for testing, others for training."""

    train: TrainSource = "generated"
    """Rows to train on: generated, or keywords = from a file (if_keywords_train.jsonl, or `data` with {split})."""
    train_size: int = 10_000
    """Number of generated rows."""
    answer: AnswerScope = "whole"
    """What is checked: whole = the completion (after a closed think block), tags = the text inside its answer tags."""
    data: str = ""
    """Where the rows are: a file (perhaps with {split} in its name) or a hub data set; "" = $COHORT_DATA or the hub."""
    columns: tuple[str, ...] = ()
    """Columns that have another name there, as in prompt=question."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "prompt_strict"
    parts: ClassVar[tuple[str, ...]] = (*LEVELS, "format", "thinks", "effort")
    # per completion, in evaluations that do not set a number
    max_tokens: ClassVar[int] = 1280
    packages: ClassVar[Mapping[str, str]] = {language.PACKAGE: language.EXTRA}

    def __post_init__(self) -> None:
        need = partial(require, "ifeval")
        for setting, kind in {"train": TrainSource, "answer": AnswerScope}.items():
            known, value = get_args(kind), getattr(self, setting)
            need(value in known, f"{setting} among {', '.join(known)}, not {value!r}")
        need(1 <= self.train_size <= MAX_TRAIN_SIZE, f"1 <= train_size <= {MAX_TRAIN_SIZE}, not {self.train_size}")
        reads_train = self.train == "keywords" or "{split}" not in self.data
        need(reads_train, f'train = keywords to train on rows of data "{self.data}"; generated rows need no {{split}}')

    def rows(self, split: str) -> Iterator[Row]:
        """Returns an iterator over the rows of a split; those of "train" are generated unless train = keywords.

        Raises TaskError if the source of the rows is missing, and later for a row that cannot be used.
        """
        if split == "train" and self.train == "generated":
            return self._generate_rows()
        if split == "train" and not self.data:
            _require_keywords_file()
        return read_rows(
            "ifeval",
            split,
            data=self.data,
            columns=self.columns,
            places=PLACES,
            make=_make_row,
            key="prompt",
            task_columns=COLUMNS,
        )

    def prompt(self, row: Row) -> list[Message]:
        """Returns the prompt of a row as a user message; with answer = tags, after a system message about the tags."""
        messages = [{"role": "user", "content": row["prompt"]}]
        return messages if self.answer == "whole" else [{"role": "system", "content": SYSTEM}, *messages]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns all reward parts of an answer. The reason names the instructions that it does not follow strictly.

        An answer without a visible character, and with answer = tags one without exactly one answer block, has 0 in all
        parts. One of more than MAX_CHARS characters follows no instruction. Then the reason says so.
        """
        names = row["instruction_id_list"]
        parts = dict.fromkeys(self.parts, 0.0)
        # `text` is what the published checker would see. `visible` leaves out all thoughts, also unfinished ones: only
        # it counts for the parts of our own, which must not reward an answer inside thoughts.
        text: str | None = _strip_thinking(answer.text)
        visible, _ = remove_thoughts(answer.text)
        if self.answer == "tags":
            text, visible = _find_block(answer.text, "answer"), _find_block(visible, "answer") or ""
            parts["format"] = float(text is not None and has_visible_text(visible))
            parts["thinks"] = parts["format"] * has_visible_text(_find_block(answer.text, "think") or "")
        if text is None or not _has_visible_character(text):
            nothing = dict.fromkeys(self.parts, 0.0)
            return Verdict(nothing, "there is not exactly one answer block" if text is None else "the answer is empty")
        if len(text) > MAX_CHARS:
            return Verdict(parts, f"the answer is longer than {MAX_CHARS} characters")
        results = check_instructions(names, row["kwargs"], text)
        for level, verdicts in (("strict", results.strict), ("loose", results.loose)):
            parts[f"prompt_{level}"] = float(all(verdicts))
            parts[f"instruction_{level}"] = sum(verdicts) / len(verdicts)
        parts["effort"] = -1.0 if lacks_content(visible, row["prompt"]) else 0.0
        missed = [name for name, is_followed in zip(names, results.strict, strict=True) if not is_followed]
        return Verdict(parts, f"not followed: {', '.join(missed)}" if missed else "")

    def summary(self, rows: Sequence[Row], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Returns the four accuracies that are reported for IFEval, from rows and the reward parts of their answers.

        They are the means for prompts and for instructions, strict and loose. The accuracy of instructions counts every
        instruction once, so a row counts as often as it has instructions.

        >>> rows = [{"instruction_id_list": ["a"]}, {"instruction_id_list": ["a", "b", "c"]}]
        >>> accuracies = IFEval().summary(rows, [dict.fromkeys(LEVELS, 1.0), dict.fromkeys(LEVELS, 0.0)])
        >>> accuracies["strict, prompts"], accuracies["strict, instructions"]
        (0.5, 0.25)
        """
        sizes = [len(row["instruction_id_list"]) for row in rows]
        accuracies: dict[str, float] = {}
        for level in LEVELS:
            unit, strictness = level.split("_")
            counts = sizes if unit == "instruction" else [1] * len(rows)
            followed = sum(count * part[level] for count, part in zip(counts, parts, strict=True))
            accuracies[f"{strictness}, {unit}s"] = followed / sum(counts)
        return accuracies

    def gold(self, row: Row) -> str:
        """Returns a text that follows all instructions of a row but ignores its request.

        Raises TaskError if none is found.
        """
        text = gold.write_text(row["instruction_id_list"], row["kwargs"])
        if text is None:
            raise TaskError(
                f'ifeval, row "{row["id"]}": no text was found that follows all its instructions; '
                "they may contradict each other. Remove one of them, or the row, from the data"
            )
        return text if self.answer == "whole" else f"<think>As asked.</think>\n<answer>{text}</answer>"

    def _generate_rows(self) -> Iterator[Row]:
        """Yields `train_size` generated rows with different prompts, always the same ones."""
        seen: set[str] = set()
        index = 0
        while len(seen) < self.train_size:
            row = generate_row(index)
            index += 1
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                yield row


def lacks_content(text: str, prompt: str) -> bool:
    """Returns whether a text says nothing: hardly a letter, few different ones, or hardly a word beyond the prompt.

    Tags, digits and words of the prompt do not count. A word counts once and a single Latin letter not at all, so
    neither "Section 1 Section 2" nor "P.S." is content.

    >>> texts = ("{ }", "<answer></answer>", "aaaa aaaa aaaa", "Write a line")
    >>> [lacks_content(text, "Write a line.") for text in texts]
    [True, True, True, True]
    >>> lacks_content("My answer is no.", "Is it so?")
    False
    """
    text, prompt = (_TAG.sub("", t).casefold() for t in (text, prompt))
    words = {*_WORD.findall(text)} - {*_WORD.findall(prompt)} - {*"abcdefghijklmnopqrstuvwxyz"}
    letters = [c for word in words for c in word if c not in _INVISIBLE]
    if len(letters) < MIN_LETTERS or len(set(letters)) < MIN_DIFFERENT_LETTERS:
        return True
    # A copy of the prompt, a part of it, or a copy with hardly anything added.
    said, asked = ("".join(filter(str.isalnum, t)) for t in (text, prompt))
    return said in asked or len(said.replace(asked, "")) < MIN_LETTERS


def _has_visible_character(text: str) -> bool:
    """Returns whether the text has a letter, digit, punctuation mark or symbol that can be seen.

    Spaces, control characters and characters without width do not count.
    """
    return any(unicodedata.category(c)[0] in "LNPS" and c not in _INVISIBLE for c in text)


def _strip_thinking(text: str) -> str:
    """Returns the text after the first `</think>`, without spaces around it, or the whole text if there is none.

    The opening tag is not needed, since it may have been part of the prompt.
    """
    _, closed, rest = text.partition("</think>")
    return rest.strip() if closed else text


def _find_block(text: str, tag: str) -> str | None:
    """Returns the text between `<tag>` and `</tag>`, without spaces around it.

    None unless each of the two occurs exactly once, in this order.
    """
    begin, end = f"<{tag}>", f"</{tag}>"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        return None
    return text[text.index(begin) + len(begin) : text.index(end)].strip()


def _require_keywords_file() -> None:
    """Raises TaskError if the file of keyword rows is not in the folder that the variable COHORT_DATA names."""
    folder, file = os.environ.get(FOLDER_VARIABLE, ""), PLACES["train"].file
    if not folder or not (expand_home(folder) / file).exists():
        raise TaskError(
            f"ifeval with train = keywords needs {file} in the folder that the environment variable {FOLDER_VARIABLE} "
            f"names (now: {folder or 'not set'}). Set it to a folder with that file (the hub does "
            "not have it), or set --task.train generated"
        )


def _make_row(raw: dict[str, Any]) -> Row:
    """Returns a row with prompt, instruction_id_list and kwargs, made from a raw row; its key, if any, is the id.

    Raises ValueError for raw columns that are missing or of the wrong type, for an unknown instruction, and for
    arguments that an instruction does not accept. Arguments that are None are left out.
    """
    prompt = raw.get("prompt")
    names = raw.get("instruction_id_list")
    kwargs = raw.get("kwargs")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'column "prompt" has {prompt!r:.60}, not a text')
    if not isinstance(names, list) or not names:
        raise ValueError(f'column "instruction_id_list" has {names!r:.60}, not a list of names')
    if not isinstance(kwargs, list) or len(kwargs) != len(names):
        raise ValueError(f'column "kwargs" is not a list of {len(names)} objects, one for each instruction')
    arguments = [read_arguments(name, each) for name, each in zip(names, kwargs, strict=True)]
    row = {"prompt": prompt, "instruction_id_list": names, "kwargs": arguments}
    return row if raw.get("key") is None else {"id": str(raw["key"]), **row}
