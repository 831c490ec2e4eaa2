"""IFEval: instructions that a program can check (arXiv:2311.07911; 541 prompts to test on, 25 kinds of instruction).

Verdicts are those of the published checker, so that numbers can be compared with published ones; where that one draws
at random, crashes or takes a quadratic time, `tests/peers/test_ifeval_reference.py` says what is done here instead.
Five of the 541 prompts contradict themselves (repeat a request with commas in it, use no comma): 99.1% is the ceiling.

IFEval is a test set, so training has rows of its own: generated ones (`if_prompts`), or a file of questions with
required and forbidden keywords.

Parts: of the prompt's instructions, all are followed (`prompt_strict`, `prompt_loose`: 0 or 1), or a share of them
(`instruction_strict`, `instruction_loose`); loose is after taking off asterisks, a first line and a last line. With
answer = tags, `format` says that there is exactly one answer block, outside of thoughts and with a letter or digit in
it, and `thinks` that one think block with something in it was closed before that; otherwise they are 0. An answer of
which nothing can be seen follows nothing, though it has no comma. Many instructions are followed by text that says
nothing, such as a full stop, the prompt again or thoughts that never end, and a policy would find that: `effort` is -1
there and 0 otherwise (the other parts stay what the published checker says). RECIPE weights, for `reward`, are those of
TorchRL's recipe, the last ours: {"prompt_strict": 0.4, "instruction_strict": 0.3, "prompt_loose": 0.2,
"instruction_loose": 0.1, "format": 0.1, "thinks": 0.05, "effort": 2.0}.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.tasks.answers import BLANK, after_thoughts, has_text
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.ifeval.instructions import gold, language
from cohort.tasks.ifeval.instructions.registry import read_arguments
from cohort.tasks.ifeval.instructions.verdicts import follow
from cohort.tasks.ifeval.prompts import make_prompt
from cohort.tasks.source import FOLDER, Place, read_rows
from cohort.types import Answer, Message, Row

Train = Literal["generated", "keywords"]
Reading = Literal["whole", "tags"]

PLACES = {
    "train": Place(file="if_keywords_train.jsonl", hub="", split="train"),  # no hub has it
    "test": Place(file="ifeval.jsonl", hub="google/IFEval", split="train"),
}
COLUMNS = ("prompt", "instruction_id_list", "kwargs", "key")
LEVELS = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
SYSTEM = (
    "Think first, between <think> and </think>. Then write your reply between <answer> and </answer>, once. "
    "Whatever the user asks of the reply holds for what stands between these two tags; nothing else is read."
)
MAX_CHARS = 200_000  # of an answer: what its checks cost is bounded, and no prompt asks for a tenth of that
MAX_TRAIN = 1_000_000
_MARK = re.compile(r"<[^<>]{0,40}>")
_WORD = re.compile(r"[^\W\d_]+")
_BLANK = BLANK + "\u2800"  # and a sign without ink
MIN_LETTERS, MIN_DIFFERENT = 8, 4  # of an answer that says something, in any script


@task("ifeval")
class IFEval:
    """Prompts with verifiable instructions: to test, the 541 of IFEval; to train, others."""

    train: Train = "generated"
    """Rows to train on: generated ones, or keywords = from a file (if_keywords_train.jsonl, or `data` with {split})."""
    train_size: int = 10_000
    """Generated rows."""
    answer: Reading = "whole"
    """What is checked: the whole completion (after a closed think block), or what stands in its answer tags."""
    data: str = ""
    """Where the rows lie: a file (perhaps with {split} in its name) or a hub data set; "" = $COHORT_DATA or the hub."""
    columns: tuple[str, ...] = ()
    """Columns that are named otherwise there, as in prompt=question."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "prompt_strict"
    parts: ClassVar[tuple[str, ...]] = (*LEVELS, "format", "thinks", "effort")
    max_tokens: ClassVar[int] = 1280  # of a completion, in evaluations that do not say

    def __post_init__(self) -> None:
        need = partial(require, "ifeval")
        for knob, kind in {"train": Train, "answer": Reading}.items():
            known, given = get_args(kind), getattr(self, knob)
            need(given in known, f"{knob} among {', '.join(known)}, not {given!r}")
        need(1 <= self.train_size <= MAX_TRAIN, f"1 <= train_size <= {MAX_TRAIN}, not {self.train_size}")
        reads_train = self.train == "keywords" or "{split}" not in self.data
        need(reads_train, f'train = keywords to train on rows of data "{self.data}"; generated ones need no {{split}}')

    def rows(self, split: str) -> Iterator[Row]:
        language.require()
        if split == "train" and self.train == "generated":
            return self._generate()
        if split == "train" and not self.data:
            _find_keywords()
        return read_rows(
            "ifeval", split, data=self.data, columns=self.columns, places=PLACES, make=_row, key="prompt", own=COLUMNS
        )

    def prompt(self, row: Row) -> list[Message]:
        asked = [{"role": "user", "content": row["prompt"]}]
        return asked if self.answer == "whole" else [{"role": "system", "content": SYSTEM}, *asked]

    def score(self, row: Row, answer: Answer) -> Verdict:
        names = row["instruction_id_list"]
        parts = dict.fromkeys(self.parts, 0.0)
        text: str | None = _after_thinking(answer.text)
        said, _ = after_thoughts(answer.text)
        if self.answer == "tags":
            text, said = _block(answer.text, "answer"), _block(said, "answer") or ""
            parts["format"] = float(text is not None and has_text(said))
            parts["thinks"] = parts["format"] * has_text(_block(answer.text, "think") or "")
        if text is None or not _is_visible(text):
            nothing = dict.fromkeys(self.parts, 0.0)
            return Verdict(nothing, "not exactly one answer block" if text is None else "the answer is empty")
        if len(text) > MAX_CHARS:
            return Verdict(parts, f"the answer is longer than {MAX_CHARS} characters")
        followed = follow(names, row["kwargs"], text)
        for level, verdicts in (("strict", followed.strict), ("loose", followed.loose)):
            parts[f"prompt_{level}"] = float(all(verdicts))
            parts[f"instruction_{level}"] = sum(verdicts) / len(verdicts)
        parts["effort"] = -1.0 if is_hollow(said, row["prompt"]) else 0.0
        missed = [name for name, holds in zip(names, followed.strict, strict=True) if not holds]
        return Verdict(parts, f"not followed: {', '.join(missed)}" if missed else "")

    def summary(self, rows: Sequence[Row], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The four numbers that are reported for IFEval, from answers and their rows.

        Instruction-level accuracy counts every instruction once, so a row weighs as much as it has instructions.

        >>> rows = [{"instruction_id_list": ["a"]}, {"instruction_id_list": ["a", "b", "c"]}]
        >>> found = IFEval().summary(rows, [dict.fromkeys(LEVELS, 1.0), dict.fromkeys(LEVELS, 0.0)])
        >>> found["strict, prompts"], found["strict, instructions"]
        (0.5, 0.25)
        """
        sizes = [len(row["instruction_id_list"]) for row in rows]
        found: dict[str, float] = {}
        for level in LEVELS:
            unit, strictness = level.split("_")
            weights = sizes if unit == "instruction" else [1] * len(rows)
            followed = sum(weight * part[level] for weight, part in zip(weights, parts, strict=True))
            found[f"{strictness}, {unit}s"] = followed / sum(weights)
        return found

    def gold(self, row: Row) -> str:
        """A text that follows the row's instructions, whatever it says."""
        text = gold.write(row["instruction_id_list"], row["kwargs"])
        if text is None:
            raise TaskError(f'ifeval, row "{row["id"]}": its instructions contradict each other, or no text was found')
        return text if self.answer == "whole" else f"<think>As asked.</think>\n<answer>{text}</answer>"

    def _generate(self) -> Iterator[Row]:
        seen: set[str] = set()
        index = 0
        while len(seen) < self.train_size:
            row = make_prompt(index)
            index += 1
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                yield row


def is_hollow(text: str, prompt: str) -> bool:
    """Text that says nothing: hardly a letter, few different ones, or hardly a word that the prompt does not say.

    A word counts once, and a single Latin letter not at all, so that neither "Section 1 Section 2" nor "P.S." is text.

    >>> [is_hollow(text, "Write a line.") for text in ("{ }", "<answer></answer>", "aaaa aaaa aaaa", "Write a line")]
    [True, True, True, True]
    >>> is_hollow("My answer is no.", "Is it so?")
    False
    """
    text, prompt = (_MARK.sub("", t).casefold() for t in (text, prompt))
    words = {*_WORD.findall(text)} - {*_WORD.findall(prompt)} - {*"abcdefghijklmnopqrstuvwxyz"}
    letters = [c for word in words for c in word if c not in _BLANK]
    if len(letters) < MIN_LETTERS or len(set(letters)) < MIN_DIFFERENT:
        return True
    said, asked = ("".join(filter(str.isalnum, t)) for t in (text, prompt))
    return said in asked or len(said.replace(asked, "")) < MIN_LETTERS


def _is_visible(text: str) -> bool:
    """Whether a letter, digit, punctuation mark or sign is there: no spaces, no controls, no zero widths."""
    return any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANK for c in text)


def _after_thinking(text: str) -> str:
    """What follows the think block; its beginning may have been in the prompt. One that never closes is the answer."""
    _, closed, rest = text.partition("</think>")
    return rest.strip() if closed else text


def _block(text: str, tag: str) -> str | None:
    """What stands between the one opening and the one closing tag."""
    begin, end = f"<{tag}>", f"</{tag}>"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        return None
    return text[text.index(begin) + len(begin) : text.index(end)].strip()


def _find_keywords() -> None:
    folder, file = os.environ.get(FOLDER, ""), PLACES["train"].file
    if not folder or not (Path(folder).expanduser() / file).exists():
        raise TaskError(
            f"ifeval: train = keywords reads {file} in the folder {FOLDER} ({folder or 'not set'}); "
            f"no hub has it: put it there, or use train = generated"
        )


def _row(given: dict[str, Any]) -> Row:
    """A checked row: as many kwargs as instructions, and what each instruction needs."""
    prompt, names, kwargs = given.get("prompt"), given.get("instruction_id_list"), given.get("kwargs")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("prompt is not a text")
    if not isinstance(names, list) or not names:
        raise ValueError("instruction_id_list is not a list of names")
    if not isinstance(kwargs, list) or len(kwargs) != len(names):
        raise ValueError(f"kwargs is not a list of {len(names)} objects, one for each instruction")
    arguments = [read_arguments(name, each) for name, each in zip(names, kwargs, strict=True)]
    row = {"prompt": prompt, "instruction_id_list": names, "kwargs": arguments}
    return row if given.get("key") is None else {"id": str(given["key"]), **row}
