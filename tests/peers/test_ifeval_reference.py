"""Compares our checks of IFEval's instructions with the published checker, as lm-eval 0.4.13 has it, with nltk 3.9.2.

The checker's langdetect gets the same seed as ours; without a seed, a verdict may change from call to call. The trained
lists of its sentence tokenizer come from the wheel of llama-index-core, because no package has them alone. Strict and
loose verdicts are compared instruction by instruction, on the prompts of IFEval (if COHORT_DATA names a folder with
them) and on generated ones. The answers are texts that follow the instructions of a prompt, the same texts damaged in
many ways, and texts that were written for no prompt. All verdicts are equal, except for these:

| what | the checker | ours |
|---|---|---|
| number_sentences | looks up 20,000 words | 250 words; 1 of 11,880 verdicts here, see `test_real_answers` |
| letter_frequency of another sign than a-z (# and ! in two rows) | draws a letter at random | counts the sign |
| a count of 0 | draws a count at random (lm-eval takes 0 for a missing value) | 0 |
| keywords with signs of regular expressions | read as a pattern; a stray bracket raises | taken literally |
| capital_word_frequency of words with several apostrophes, such as MR.'TIS | by the order of 20 patterns | off by one |
| JSON nested a thousand deep | raises RecursionError | not followed |
| more than 200,000 characters | minutes to hours for some instructions | wrong (`ifeval.MAX_CHARS`) |
| the language of a text whose first 20,000 characters are half addresses | reads on | reads no further |

nltk 3.10 changed its tokenizers (curly quotation marks end sentences, dashes separate words, signs of Indian scripts
belong to words). Published numbers were made with 3.9, so our checks follow 3.9.

Some verdicts of the checker look like mistakes and are kept, because published numbers contain them: a text without any
letter is in every language; a lone asterisk takes the line after it; a numbered list has twice as many sentences; empty
paragraphs count for the place of a paragraph but not for the number of paragraphs; a postscript may stand anywhere; "I"
and "A" are words in capitals; keywords are found inside other words, forbidden words are not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cohort.tasks.draws import Draws
from cohort.tasks.ifeval.instructions.cases import count_capital_words
from cohort.tasks.ifeval.instructions.gold import write_text
from cohort.tasks.ifeval.instructions.phrases import PHRASES
from cohort.tasks.ifeval.instructions.sentences import count_sentences
from cohort.tasks.ifeval.instructions.verdicts import check_instructions
from cohort.tasks.ifeval.prompts import generate_row
from cohort.tasks.ifeval.task import IFEval

pytestmark = pytest.mark.peers

DATA = os.environ.get("COHORT_DATA", "")
NUM_GENERATED = 500
# answers per row that are damaged twice
NUM_PAIRS = 8
SENTENCES = "length_constraints:number_sentences"


@cache
def load_reference() -> ModuleType:
    """Returns the module of the published checker; skips the test if it or the right nltk is not installed.

    The packages around it are replaced by empty modules, because importing lm-eval would import all its other tasks.
    """
    try:
        import langdetect
        import nltk
        from langdetect.detector_factory import DetectorFactory

        if not nltk.__version__.startswith("3.9."):
            raise ImportError(f"nltk {nltk.__version__} counts otherwise; install nltk==3.9.2")
        root = Path(str(importlib.util.find_spec("lm_eval").origin)).parent  # type: ignore[union-attr]
        words = Path(importlib.util.find_spec("llama_index.core").origin).parent  # type: ignore[union-attr,arg-type]
    except (ImportError, AttributeError) as error:
        if os.environ.get("COHORT_REQUIRE_PEERS") == "1":
            raise
        pytest.skip(f"the reference is not installed: {error}")
    nltk.data.path.append(str(words / "_static" / "nltk_cache"))
    for name, folder in {"lm_eval": root, "lm_eval.tasks": root / "tasks"}.items():
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    DetectorFactory.seed = 0
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)  # it reports every text that has no language
    checker = importlib.import_module("lm_eval.tasks.ifeval.utils")
    langdetect.detect = cache(langdetect.detect)
    return checker


def check_by_reference(row: dict[str, Any], text: str) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns the strict and the loose verdicts of the published checker, one per instruction of the row."""
    given = SimpleNamespace(**row)
    strict = load_reference().test_instruction_following_strict(given, text)
    loose = load_reference().test_instruction_following_loose(given, text)
    return tuple(strict.follow_instruction_list), tuple(loose.follow_instruction_list)


# ---- answers

TEXTS = (
    "Sure! Here is what you asked for:\n\n**Dear neighbour**,\n\nI hope you are well. I'd like to tell you about the "
    "fence, e.g. its colour.\n\n* It is old.\n* It is grey.\n- It leans.\n\nKind regards,\nA. Smith\n\nP.S. Call me!",
    "1. First, heat the oven to 200 C. Then mix 2.5 cups of flour with water.\n2. Wait... It takes about 3 hrs. at "
    'least.\n3. Bake! (Do NOT open the door.) "Enjoy," said Dr. Crumb of the U.S. Bread Co. in Mich. last Jan. 5th.',
    "# Title\n\n<<The Long Way Home>>\n\nSECTION 1\nOnce upon a time there lived a king.\n\nSection 2\nHe couldn't "
    "sleep; WE'RE NOT SURE WHY. It's NASA's fault, I think.\n***\nThe end?!\n***\n",
    '```json\n{"name": "[name]", "list": [1, 2, 3], "nested": {"a": null}}\n```',
    '{"answer": "My answer is yes."}',
    "My answer is maybe. But I'm not convinced -- are you? My answer is no.",
    '"All of this stands in quotation marks, from the first word to the last."',
    "all of this is written in small letters and it is about the weather, which was fine; nobody complained about it.",
    "ALL OF THIS IS WRITTEN IN CAPITAL LETTERS AND IT IS ABOUT THE WEATHER. DON'T WORRY! IT CANNOT LAST, SAID O'NEIL.",
    "Response one is short.\n******\nResponse two is a little longer, with *one* highlight and **two** of them.",
    "******\nalpha\n******\nbeta\n******",
    "[address] [name] [date]\nDear [name],\n[unclosed\nSee [1], [2] and [3].",
    "P.P.S I forgot to say\np. s. that the cat, the dog and the Cat's kitten say hello. THE END.",
    "*",
    "*\n* swallowed\n- kept\n  * indented *so* it goes\n** not one\n***",
    "12345 67890",
    "!!! ??? ...",
    "\n\n\n",
    "\n\nfirst\n\n\n\nsecond paragraph here\n\n'third' paragraph\n\n\"Fourth!\" she said.\n\n",
    "Les enfants jouent dans le jardin, tandis que leur grand-mère prépare le dîner. Il fait beau aujourd'hui !",
    "Die Kinder spielen im Garten, während ihre Großmutter das Abendessen kocht. Das Wetter ist z. B. heute schön.",
    "नमस्ते! आज मौसम बहुत अच्छा है, और बच्चे बगीचे में खेल रहे हैं। दादी खाना बना रही हैं।",
    "今天天气很好。孩子们在花园里玩。奶奶正在做晚饭。",
    "Добрый день, дорогой друг! Сегодня хорошая погода, и дети играют в саду. Ал. Блок был поэтом.",
    "This sentence is English. Aber dieser hier ist Deutsch. Et celui-ci est en français. I AM DONE.",
    "Le matin est calme <<titre>> *un* *deux* [nom]\n******\nLa nuit aussi",
    "Is there anything else I can help with?",
    'I said: "Is there anything else I can help with?"',
    "A. I. B. Stewart met J. K. Smith at 5 p.m. The U.S. won. Gimme more'n that! 'Tis WANNA-BE. D'YE KNOW? A--B, C:D.",
)


def _insert(text: str, extra: str, draws: Draws) -> str:
    """Returns the text with `extra` between two words at a random place."""
    words = text.split(" ")
    words.insert(draws.below(len(words) + 1), extra)
    return " ".join(words)


def _drop_word(text: str, draws: Draws) -> str:
    """Returns the text without one random word."""
    words = text.split(" ")
    del words[draws.below(len(words))]
    return " ".join(words)


def _draw_argument_word(row: dict[str, Any], draws: Draws) -> str:
    """Returns a random word or phrase of the row's arguments, or "word" if they have none."""
    values = [v for given in row["kwargs"] for v in given.values()]
    found = [w for v in values for w in (v if isinstance(v, list) else [v]) if isinstance(w, str)]
    return draws.choice(found) if found else "word"


Damage = Callable[[str, dict[str, Any], Draws], str]
DAMAGES: dict[str, Damage] = {
    "cut": lambda t, _, d: t[: d.below(len(t) + 1)],
    "cut the beginning": lambda t, _, d: t[d.below(len(t) + 1) :],
    "drop a word": lambda t, _, d: _drop_word(t, d),
    "upper": lambda t, _, d: t.upper(),
    "lower": lambda t, _, d: t.lower(),
    "title": lambda t, _, d: t.title(),
    "swap": lambda t, _, d: t.swapcase(),
    "comma": lambda t, _, d: _insert(t, "well, then", d),
    "no commas": lambda t, _, d: t.replace(",", ""),
    "no stops": lambda t, _, d: t.replace(".", ""),
    "the row's word": lambda t, r, d: _insert(t, _draw_argument_word(r, d), d),
    "the row's word in capitals": lambda t, r, d: _insert(t, _draw_argument_word(r, d).upper() + ".", d),
    "the row's word glued": lambda t, r, d: _insert(t, "x" + _draw_argument_word(r, d) + "'s", d),
    "without the row's word": lambda t, r, d: t.replace(_draw_argument_word(r, d), "", 1),
    "chat": lambda t, _, d: "Sure! Here is my reply:\n" + t + "\nLet me know if you need more.",
    "chat before": lambda t, _, d: "Certainly, here you are:\n\n" + t,
    "chat after": lambda t, _, d: t + "\n\nI hope this helps!",
    "postscript": lambda t, _, d: t + "\n\nP.S. " + d.choice(("more", "p. p. s more", "")),
    "bullets": lambda t, _, d: t + d.choice(("\n* one\n* two", "\n- one", "\n  *\n* two", "\n** bold **\n-")),
    "bold": lambda t, _, d: f"**{t}**",
    "italics": lambda t, _, d: _insert(t, d.choice(("*so*", "**so**", "***", "* *", "**")), d),
    "marks": lambda t, _, d: _insert(t, d.choice(("[name]", "[", "]", "<<title>>", "<< >>", ">>", "<<")), d),
    "section": lambda t, _, d: _insert(t, d.choice(("SECTION 1", "Section2", "Day 3", "section 4")), d),
    "divider": lambda t, _, d: _insert(t, d.choice(("\n***\n", "******", "\n******\n", "****")), d),
    "quoted": lambda t, _, d: f'"{t}"',
    "unquoted": lambda t, _, d: t.strip().strip('"'),
    "json": lambda t, _, d: json.dumps({"text": t}),
    "fence": lambda t, _, d: f"```{d.choice(('json', 'JSON', ''))}\n{t}\n```",
    "paragraphs": lambda t, _, d: t.replace(". ", ".\n\n"),
    "blank lines": lambda t, _, d: d.choice(("\n\n", " \n")) + t.replace("\n", "\n\n") + "\n",
    "one line": lambda t, _, d: " ".join(t.split()),
    "capitals": lambda t, _, d: _insert(t, d.choice(("NASA", "I", "DON'T", "U.S.", "CANNOT", "A-B", "X:Y")), d),
    "abbreviations": lambda t, _, d: _insert(
        t, d.choice(("Mr. Jones", "e.g. this", "5 p.m. The", "Wait... It", "No. 5")), d
    ),
    "other language": lambda t, _, d: t + "\n" + d.choice([*PHRASES.values()]).sentence,
    "twice": lambda t, _, d: t + "\n" + t,
    "option": lambda t, _, d: _insert(t, d.choice(("My answer is yes.", "my answer is no.", "My answer is")), d),
    "strange": lambda t, _, d: _insert(
        t, d.choice(("\x00", "\u2028", "\x85", "\r\n", "\ufeff", "İ", "ß", "\u200b")), d
    ),
    "spaces": lambda t, _, d: d.choice((" ", "\t", "\xa0", "\u3000")) + t + d.choice((" ", "\n\n", "\x0b")),
}


def make_answers(row: dict[str, Any]) -> Iterator[str]:
    """Yields about 54 answers: a text that follows the row's instructions, damaged copies, and texts for no prompt."""
    draws = Draws("reference", row["prompt"])
    gold = write_text(row["instruction_id_list"], row["kwargs"]) or row["prompt"]
    yield gold
    for damage in DAMAGES.values():
        yield damage(gold, row, draws)
    for _ in range(NUM_PAIRS):
        first, second = (draws.choice([*DAMAGES.values()]) for _ in range(2))
        yield second(first(gold, row, draws), row, draws)
    yield row["prompt"]
    for _ in range(6):
        text = draws.choice(TEXTS)
        yield draws.choice([*DAMAGES.values()])(text, row, draws) if draws.below(2) else text


# ---- tests


def compare_verdicts(rows: list[dict[str, Any]]) -> tuple[Counter[str], list[str]]:
    """Returns how many verdicts of each kind of instruction were compared, and a description of each difference."""
    compared: Counter[str] = Counter()
    different: list[str] = []
    for row in rows:
        # The reference draws a letter at random if it is not one of a-z, so these instructions are left out.
        kept = [i for i, given in enumerate(row["kwargs"]) if str(given.get("letter", "a")).isalpha()]
        names, kwargs = ([row[key][i] for i in kept] for key in ("instruction_id_list", "kwargs"))
        for text in make_answers(row):
            ours = check_instructions(names, kwargs, text)
            theirs = check_by_reference(
                {"prompt": row["prompt"], "instruction_id_list": names, "kwargs": kwargs, "key": 0}, text
            )
            for level, mine, other in (("strict", ours.strict, theirs[0]), ("loose", ours.loose, theirs[1])):
                for name, given, a, b in zip(names, kwargs, mine, other, strict=True):
                    compared[name] += 1
                    if a != b:
                        different.append(f"{name} {given} {level}: ours {a}, theirs {b}: {text!r:.2000}")
    return compared, different


def assert_equal_verdicts(rows: list[dict[str, Any]]) -> None:
    """Fails if a verdict differs, apart from at most 0.2% of those on the number of sentences."""
    compared, different = compare_verdicts(rows)
    of_sentences = [d for d in different if d.startswith(SENTENCES)]
    others = [d for d in different if not d.startswith(SENTENCES)]
    print(f"{compared.total()} verdicts, {compared[SENTENCES]} of them on sentences; differences:", len(different))
    print("\n".join(different[:20]))
    assert len(compared) == 25
    assert not others, f"{len(others)} of {compared.total()}:\n" + "\n".join(others[:10])
    assert len(of_sentences) <= 0.002 * compared[SENTENCES], "\n".join(of_sentences[:10])


def test_generated_prompts() -> None:
    load_reference()
    assert_equal_verdicts([generate_row(index) for index in range(NUM_GENERATED)])


@pytest.mark.skipif(not DATA, reason="COHORT_DATA names no folder with ifeval.jsonl")
def test_the_prompts_of_ifeval() -> None:
    load_reference()
    assert_equal_verdicts(list(IFEval().rows("test")))


@pytest.mark.skipif(not DATA, reason="COHORT_DATA names no folder with real answers")
def test_real_answers() -> None:
    """On answers of chat models, the counts of words in capitals are always equal, those of sentences nearly always."""
    nltk = pytest.importorskip("nltk")
    util = importlib.import_module("lm_eval.tasks.ifeval.instructions_util") if load_reference() else None
    with (Path(DATA) / "preference_ultrafeedback_train.jsonl").open(encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    texts = [text for pair in pairs for text in (pair["chosen"], pair["rejected"]) if text.strip()]
    sentences = [(count_sentences(text), util.count_sentences(text)) for text in texts]  # type: ignore[union-attr]
    wrong = [i for i, (ours, theirs) in enumerate(sentences) if ours != theirs]
    off = sum(abs(ours - theirs) for ours, theirs in sentences) / sum(theirs for _, theirs in sentences)
    print(f"{len(texts)} answers, {sum(t for _, t in sentences)} sentences, {len(wrong)} counted otherwise; {off:.5f}")
    assert len(wrong) <= 0.012 * len(texts)
    assert off <= 0.0025
    for text in texts:
        assert count_capital_words(text) == sum(map(str.isupper, nltk.word_tokenize(text))), text


def test_the_reference_fails_where_the_table_says() -> None:
    def row(name: str, **given: Any) -> dict[str, Any]:
        return {"prompt": "p", "key": 0, "instruction_id_list": [name], "kwargs": [given]}

    with pytest.raises(RecursionError):
        check_by_reference(row("detectable_format:json_format"), "[" * 100_000)
    assert check_instructions(["detectable_format:json_format"], [{}], "[" * 100_000).loose == (False,)
    with pytest.raises(importlib.import_module("re").error):
        check_by_reference(row("keywords:existence", keywords=["c++ ("]), "I like C++ (a lot)")
    assert check_instructions(["keywords:existence"], [{"keywords": ["c++ ("]}], "I like C++ (a lot)").strict == (True,)
    signs = row("keywords:letter_frequency", letter="#", let_relation="at least", let_frequency=4)
    verdicts = {check_by_reference(signs, "#### " + "etaoin" * 5)[0] for _ in range(200)}
    assert len(verdicts) == 2, "a letter drawn at random is there sometimes"
    assert check_instructions(signs["instruction_id_list"], signs["kwargs"], "####").strict == (True,)
