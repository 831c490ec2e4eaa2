"""The vocabulary in CONTRIBUTING.md covers the code, and the code keeps to it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.project.test_architecture import ROOT, dotted, modules, tree

# Words of programming in general, which need no entry in the vocabulary.
EVERYDAY = """
    abilities attempt block bound cache call case check client clock config connection console context conversion copy
    count counter curve data demand description difference directory end entry error family file flag format formatter
    function gradient handler header id input layer leaf length line lock loss machine markup matrix model monitor
    namespace number optimizer option output parser phrase place point pool quantity question rate reader renderer
    rendering result rule script second section share signal span spec state stats status stopped stream summary table
    tensor timer token tokenizer total unit unreadable variant wheel writer
"""
# Names of papers, data sets and operations: proper names, written as their authors write them.
PROPER = """
    24 again amc angles arithmetic attention base calculator cispo clipped countdown dapo dpo eval gmpo grpo gspo gym
    hinge ifeval imitation instruction ipo k linear math12k math500 mathematics minerva mix norm olympiad orpo
    pass po pp qa reinforce rl rloo robust rope rotation sapo sft sigmoid
"""
# Function names that tell nothing. A reader has to open the function to learn what it does.
EMPTY_NAMES = {
    *("take", "hear", "found", "taken", "settled", "slope", "go_on", "say", "tell", "about", "of", "make", "do"),
    *("handle", "process", "again", "words", "shown", "left", "rest", "thing", "stuff", "helper", "util"),
}
# Stored or foreign names that a synonym is part of: they cannot change.
STORED = re.compile(
    r"\bknobs\b"  # the task's settings in the files of evaluations
    r"|\*\.ckpt"  # how others name pickled weights
    r"|\bnum_iterations\b|\bexperiment_name\b"  # settings of other tools, for which the command line names ours
)


def vocabulary() -> list[tuple[str, list[str]]]:
    """Returns (word, words that must not be used for it) for every row of the vocabulary's tables."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Vocabulary")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    found = [(row[0], row[2]) for row in rows if len(row) == 3 and row[0] not in ("word", "---")]
    return [(word, [other.strip() for other in others.split(",") if other.strip()]) for word, others in found]


def split_words(name: str) -> list[str]:
    """Returns the words of an identifier, in lower case: `SampleId` and `sample_id` are sample, id."""
    words = [w for part in name.split("_") for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", part)]
    return [word.lower() for word in words]


def singular(word: str) -> list[str]:
    """Returns what the word may be the plural of, and the word itself."""
    forms = [word]
    for ending, instead in (("ies", "y"), ("xes", "x"), ("s", "")):
        if word.endswith(ending):
            forms.append(word.removesuffix(ending) + instead)
    return forms


def test_the_tables_are_read() -> None:
    words = dict(vocabulary())
    assert len(words) > 100 and sum(map(len, words.values())) >= 15
    assert words["setting"] == ["knob", "hyperparameter"] and words["group"] == []


def test_the_vocabulary_covers_every_noun() -> None:
    known = {word for entry, _ in vocabulary() for part in entry.split(",") for word in part.strip(" `").split()}
    known |= {*EVERYDAY.split(), *PROPER.split()}
    missing = set()
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                noun = split_words(node.name)[-1]
                if not known & set(singular(noun)):
                    missing.add(f"{noun} ({dotted(path)}.{node.name})")
    listed = "\n".join(sorted(missing))
    assert not missing, f"explain these in CONTRIBUTING.md, or choose a word that is there:\n{listed}"


def prose_and_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) for every comment, string and identifier of a module."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.NAME):
            yield token.start[0], token.string


@pytest.mark.parametrize(("word", "others"), [(word, others) for word, others in vocabulary() if others])
def test_synonyms_stay_out(word: str, others: list[str]) -> None:
    pattern = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, others))})(s|ies)?(?![a-z])", re.IGNORECASE)
    wrong = []
    for path in modules():
        for line, text in prose_and_names(path):
            if match := pattern.search(STORED.sub("", text)):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert not wrong, f'write "{word}":\n' + "\n".join(wrong)


def test_functions_have_names_that_tell() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in EMPTY_NAMES:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not wrong, "find names that say what these do:\n" + "\n".join(wrong)


def test_things_are_not_called_people() -> None:
    """A program has callers, requests and readers. It has nobody who asks, and no he."""
    pattern = re.compile(r"\b(whoever|nobody|somebody|anybody|everybody|himself)\b", re.IGNORECASE)
    wrong = []
    for path in modules():
        # Generated prompts may speak of people.
        lines = () if dotted(path) == "tasks.ifeval.prompts" else prose_and_names(path)
        for line, text in lines:
            if match := pattern.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert not wrong, "name the thing:\n" + "\n".join(wrong)


def documents() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return sorted(pages)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_have_short_lines(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = [f"{path.name}:{number}: {len(line)}" for number, line in enumerate(lines, 1) if len(line) > 120]
    assert not wrong, "at most 120 columns:\n" + "\n".join(wrong)


def test_an_identifier_is_split_into_words() -> None:
    assert split_words("SampleId") == ["sample", "id"] and split_words("KLConfig") == ["kl", "config"]
    assert split_words("_num_tokens") == ["num", "tokens"] and split_words("Math500") == ["math500"]
    assert "copy" in singular("copies") and "prefix" in singular("prefixes") and "slot" in singular("slots")
