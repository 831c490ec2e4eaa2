"""Tests of every kind of instruction on answers judged by hand, of arguments in rows, and of hostile answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.tasks.ifeval.instructions.cases import count_capital_words
from cohort.tasks.ifeval.instructions.gold import WRITERS, write_text
from cohort.tasks.ifeval.instructions.language import detect_language
from cohort.tasks.ifeval.instructions.phrases import PHRASES
from cohort.tasks.ifeval.instructions.registry import INSTRUCTIONS, MAX_WORD_CHARS, read_arguments
from cohort.tasks.ifeval.instructions.sentences import count_sentences
from cohort.tasks.ifeval.instructions.verdicts import check_instructions

KEYS = "keywords:"
LENGTH = "length_constraints:"
CONTENT = "detectable_content:"
FORMAT = "detectable_format:"
CASE = "change_case:"

OWL = {"keywords": ["owl", "Moon"]}
TWO_OWLS = {"keyword": "owl", "relation": "at least", "frequency": 2}
FEW_OWLS = {"keyword": "owl", "relation": "less than", "frequency": 2}
THREE_Q = {"letter": "q", "let_relation": "at least", "let_frequency": 3}
FEW_Q = {"letter": "Q", "let_relation": "less than", "let_frequency": 2}
SHORT = {"relation": "less than", "num_words": 4}
LONG = {"relation": "at least", "num_words": 4}
TWO_SENTENCES = {"relation": "at least", "num_sentences": 2}
ONE_SENTENCE = {"relation": "less than", "num_sentences": 2}
SECOND = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}
SECTIONS = {"section_spliter": "Section", "num_sections": 2}
CAPITALS = {"capital_relation": "at least", "capital_frequency": 2}
FEW_CAPITALS = {"capital_relation": "less than", "capital_frequency": 2}
END = {"end_phrase": "Peace!"}
REPEAT = {"prompt_to_repeat": "Write a poem."}
ENGLISH = "the sun was warm and the children were playing in the garden behind the house"

# instruction, arguments, answer, strict verdict, why
ROWS: list[tuple[str, dict[str, Any], str, bool, str]] = [
    (KEYS + "existence", OWL, "An owl under the moon.", True, "both occur; case does not matter"),
    (KEYS + "existence", OWL, "Two owls in moonlight.", True, "inside other words is enough"),
    (KEYS + "existence", OWL, "An owl at night.", False, "no moon"),
    (KEYS + "existence", {"keywords": ["c++", "a.b"]}, "C++ and a.b", True, "signs are literal"),
    (KEYS + "existence", {"keywords": ["a.b"]}, "axb", False, "a full stop is not any character"),
    (KEYS + "frequency", TWO_OWLS, "Owl owl", True, "twice"),
    (KEYS + "frequency", TWO_OWLS, "A bowl of owl soup", True, "bowl has an owl in it"),
    (KEYS + "frequency", TWO_OWLS, "One owl", False, "once is not twice"),
    (KEYS + "frequency", FEW_OWLS, "One owl", True, "once is less than twice"),
    (KEYS + "frequency", FEW_OWLS, "owlowl", False, "twice"),
    (KEYS + "forbidden_words", {"forbidden_words": ["cat", "dog"]}, "A scatter of dogma", True, "only inside words"),
    (KEYS + "forbidden_words", {"forbidden_words": ["cat", "dog"]}, "A hot-DOG", False, "a hyphen ends a word"),
    (KEYS + "forbidden_words", {"forbidden_words": ["cat"]}, "cat_food and cats", True, "_ and s are letters of words"),
    (KEYS + "letter_frequency", THREE_Q, "Quiet queen Quinn", True, "three, in any case"),
    (KEYS + "letter_frequency", THREE_Q, "Quiet queen", False, "two"),
    (KEYS + "letter_frequency", FEW_Q, "quiz", True, "one is less than two"),
    (KEYS + "letter_frequency", {**THREE_Q, "letter": "#"}, "#a #b #c", True, "other signs are counted too"),
    ("language:response_language", {"language": "de"}, "Der Hund schläft vor dem alten Haus.", True, "German"),
    ("language:response_language", {"language": "de"}, ENGLISH, False, "English"),
    ("language:response_language", {"language": "hi"}, PHRASES["hi"].sentence, True, "Hindi"),
    ("language:response_language", {"language": "hi"}, PHRASES["mr"].sentence, False, "the same script, but Marathi"),
    ("language:response_language", {"language": "fi"}, "12 + 30 = 42", True, "no letters: nothing tells against it"),
    (LENGTH + "number_sentences", TWO_SENTENCES, "It rains. It pours.", True, "two"),
    (LENGTH + "number_sentences", TWO_SENTENCES, "Dr. Smith left at 5 p.m. on Monday.", False, "abbreviations"),
    (LENGTH + "number_sentences", ONE_SENTENCE, "Why? Because!", False, "a question and an exclamation"),
    (LENGTH + "number_sentences", ONE_SENTENCE, "no stop, no second sentence\nthough a second line", True, "one"),
    (LENGTH + "number_words", LONG, "It's a test", True, "It and s are two words"),
    (LENGTH + "number_words", LONG, "one-two -- three", False, "a hyphen parts words, dashes are none"),
    (LENGTH + "number_words", SHORT, "snake_case is fine", True, "an underscore parts nothing"),
    (LENGTH + "number_words", SHORT, "1.5 is 3/2", False, "1 5 is 3 2"),
    (LENGTH + "number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", True, "one divider"),
    (LENGTH + "number_paragraphs", {"num_paragraphs": 2}, "***\none\n***\ntwo\n***", True, "empty ends do not count"),
    (LENGTH + "number_paragraphs", {"num_paragraphs": 2}, "one\n***\n***\ntwo", False, "an empty one in the middle"),
    (LENGTH + "number_paragraphs", {"num_paragraphs": 2}, "one\n\ntwo", False, "an empty line is no divider here"),
    (LENGTH + "nth_paragraph_first_word", SECOND, "First this.\n\nthen, that.", True, "the second begins with then"),
    (LENGTH + "nth_paragraph_first_word", SECOND, 'First.\n\n"Then" it was.', True, "quotation marks do not matter"),
    (LENGTH + "nth_paragraph_first_word", SECOND, "First.\n\nThenceforth", False, "another word"),
    (LENGTH + "nth_paragraph_first_word", SECOND, "First.\n\nThen.\n\nLast.", False, "three paragraphs"),
    (LENGTH + "nth_paragraph_first_word", SECOND, "First.\n\n\n\nThen.", False, "place two is empty, then is at three"),
    (CONTENT + "number_placeholders", {"num_placeholders": 2}, "[name] lives in [city]", True, "two"),
    (CONTENT + "number_placeholders", {"num_placeholders": 2}, "[[name]] and []", True, "what is inside is not read"),
    (CONTENT + "number_placeholders", {"num_placeholders": 2}, "[a] [b\n]", False, "one is closed in the next line"),
    (CONTENT + "postscript", {"postscript_marker": "P.S."}, "Bye.\n\np. s. Thanks", True, "spaces and case are free"),
    (CONTENT + "postscript", {"postscript_marker": "P.S."}, "Bye.\nPS: Thanks", False, "without full stops"),
    (CONTENT + "postscript", {"postscript_marker": "P.P.S"}, "P.P.S more", True, "as asked"),
    (CONTENT + "postscript", {"postscript_marker": "P.P.S"}, "P.S. more", False, "only one P"),
    (FORMAT + "number_bullet_lists", {"num_bullets": 2}, "So:\n* one\n  - two", True, "an asterisk and a hyphen"),
    (FORMAT + "number_bullet_lists", {"num_bullets": 2}, "* one\n* two\n* three", False, "three are too many"),
    (FORMAT + "number_bullet_lists", {"num_bullets": 1}, "**bold**\n* one\n1. two", True, "bold and numbers are none"),
    (FORMAT + "number_bullet_lists", {"num_bullets": 1}, "*\n* one", True, "the lone asterisk takes the next line"),
    (FORMAT + "number_bullet_lists", {"num_bullets": 0}, "---", False, "a rule begins with a hyphen"),
    (FORMAT + "constrained_response", {}, "Well: My answer is no. Sorry.", True, "it occurs"),
    (FORMAT + "constrained_response", {}, "My answer is no", False, "without its full stop"),
    (FORMAT + "constrained_response", {}, "my answer is maybe.", False, "in small letters"),
    (FORMAT + "number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", True, "two"),
    (FORMAT + "number_highlighted_sections", {"num_highlights": 2}, "**bold**", False, "the pattern meets ** twice"),
    (FORMAT + "number_highlighted_sections", {"num_highlights": 2}, "*one* * * *two\n*", False, "blank, or two lines"),
    (FORMAT + "number_highlighted_sections", {"num_highlights": 1}, "**bold**", True, "double ones count too"),
    (FORMAT + "multiple_sections", SECTIONS, "Section 1\na\nSection2\nb", True, "the space is free"),
    (FORMAT + "multiple_sections", SECTIONS, "SECTION 1\nSECTION 2", False, "in other letters"),
    (FORMAT + "multiple_sections", SECTIONS, "Section 1\nSection B", False, "only one has a number"),
    (FORMAT + "json_format", {}, '{"a": [1, 2]}', True, "JSON"),
    (FORMAT + "json_format", {}, '```json\n{"a": 1}\n```', True, "in a fence"),
    (FORMAT + "json_format", {}, '{"a": 1} Done.', False, "something follows"),
    (FORMAT + "json_format", {}, "{'a': 1}", False, "JSON has double quotation marks"),
    (FORMAT + "title", {}, "<<A Day>>\nIt was fine.", True, "a title"),
    (FORMAT + "title", {}, "<< >> <A Day>", False, "an empty one, and single brackets"),
    (FORMAT + "title", {}, "<<A\nDay>>", False, "over two lines"),
    (FORMAT + "title", {}, "a << b and c >> d", True, "something stands between two pairs of brackets"),
    ("combination:two_responses", {}, "One way.\n******\nAnother way.", True, "two, and different"),
    ("combination:two_responses", {}, "Same.\n******\n Same.", False, "twice the same"),
    ("combination:two_responses", {}, "a******b******c", False, "three"),
    ("combination:two_responses", {}, "******\na\n******\nb\n******", True, "dividers at the ends are free"),
    ("combination:repeat_prompt", REPEAT, "write a poem. Roses are red.", True, "case does not matter"),
    ("combination:repeat_prompt", REPEAT, "Sure. Write a poem. Roses", False, "something stands before it"),
    ("combination:repeat_prompt", REPEAT, "Write a  poem. Roses", False, "a space too many: not word for word"),
    ("startend:end_checker", END, 'He said: "Go in peace!" ', True, "case, a quotation mark and space are free"),
    ("startend:end_checker", END, "Peace! Bye.", False, "something follows"),
    ("startend:end_checker", END, "Peace", False, "the exclamation mark is part of it"),
    ("startend:quotation", {}, ' "All of it." \n', True, "space outside is free"),
    ("startend:quotation", {}, '"Some" of it', False, "not at the end"),
    ("startend:quotation", {}, "\u201cAll of it\u201d", False, "other quotation marks"),
    (CASE + "capital_word_frequency", CAPITALS, "I like NASA", True, "I counts"),
    (CASE + "capital_word_frequency", CAPITALS, "DON'T", True, "DO and N'T are two words"),
    (CASE + "capital_word_frequency", CAPITALS, "Nasa and IBMs", False, "mixed case"),
    (CASE + "capital_word_frequency", FEW_CAPITALS, "The U.S. won", True, "one"),
    (CASE + "capital_word_frequency", FEW_CAPITALS, "GO-GO, OK?", False, "GO-GO is one word, OK the second"),
    (CASE + "english_capital", {}, ENGLISH.upper() + "!", True, "English capitals"),
    (CASE + "english_capital", {}, ENGLISH.upper() + " and", False, "and is small"),
    (CASE + "english_capital", {}, "DER HUND SCHLÄFT VOR DEM ALTEN HAUS NEBEN DER KIRCHE", False, "German"),
    (CASE + "english_lowercase", {}, ENGLISH, True, "English, small"),
    (CASE + "english_lowercase", {}, "The " + ENGLISH, False, "a capital T"),
    (CASE + "english_lowercase", {}, "1, 2, 3!", False, "no letter is no small letter"),
    (CASE + "english_lowercase", {}, "der hund schläft vor dem alten haus neben der kirche", False, "German"),
    ("punctuation:no_comma", {}, "One; two: three.", True, "other signs are free"),
    ("punctuation:no_comma", {}, "One, two", False, "a comma"),
    ("punctuation:no_comma", {}, "1,000", False, "in a number it is one too"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "expected", "why"), ROWS, ids=[f"{r[0]}: {r[4]}" for r in ROWS]
)
def test_strict_verdicts_by_hand(name: str, arguments: dict[str, Any], answer: str, expected: bool, why: str) -> None:
    assert read_arguments(name, arguments) == arguments
    assert check_instructions([name], [arguments], answer).strict == (expected,), why


def test_every_kind_is_judged_three_times_with_both_outcomes() -> None:
    assert len(ROWS) >= 75
    assert {*WRITERS} == {*INSTRUCTIONS} == {row[0] for row in ROWS}
    assert len(INSTRUCTIONS) == 25
    assert min(Counter(row[0] for row in ROWS).values()) >= 3
    assert {(row[0], row[3]) for row in ROWS} == {(name, verdict) for name in INSTRUCTIONS for verdict in (True, False)}


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("blank", ["", " ", "\n\t\u3000\n"])
def test_a_blank_answer_follows_nothing(name: str, blank: str) -> None:
    arguments = next(row[1] for row in ROWS if row[0] == name)
    verdicts = check_instructions([name], [arguments], blank)
    assert verdicts.strict == verdicts.loose == (False,)


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "expected", "why"),
    [
        ("startend:quotation", {}, 'Here you are:\n"Fine."', True, "without its first line"),
        ("startend:end_checker", END, "Peace!\nI hope this helps.", True, "without its last line"),
        (FORMAT + "json_format", {}, 'Sure!\n{"a": 1}\nBye.', True, "without both"),
        (FORMAT + "constrained_response", {}, "**My** answer is yes.", True, "without asterisks"),
        ("startend:quotation", {}, '**Here:**\n*"Fine."*', True, "without its first line and asterisks"),
        ("punctuation:no_comma", {}, "Well, one line.", False, "a single line has no other to fall back on"),
        ("punctuation:no_comma", {}, "a, b\nc, d\ne, f", False, "the middle has one too"),
        (FORMAT + "number_bullet_lists", {"num_bullets": 1}, "* a\n* b", True, "either line may go"),
    ],
)
def test_loose_verdicts_by_hand(name: str, arguments: dict[str, Any], answer: str, expected: bool, why: str) -> None:
    verdicts = check_instructions([name], [arguments], answer)
    assert verdicts.strict == (False,)
    assert verdicts.loose == (expected,), why


def test_instructions_are_judged_one_by_one() -> None:
    names = ["punctuation:no_comma", "startend:quotation", FORMAT + "title"]
    verdicts = check_instructions(names, [{}, {}, {}], 'Sure, here:\n"No title."')
    assert verdicts.strict == (False, False, False)
    assert verdicts.loose == (True, True, False)


@pytest.mark.parametrize(
    ("text", "count", "why"),
    [
        ("Mr. Jones met Mrs. Dash. They talked.", 2, "titles are abbreviations"),
        ("He lives in the U.S. He likes it.", 2, "an abbreviation may end a sentence, before a word like He"),
        ("He lives in the U.S. Army base.", 1, "not before a name"),
        ("Use a tool, e.g. a hammer.", 2, "e.g. is none the reference knows"),
        ("1. Wash it.\n2. Dry it.", 4, "numbers of a list are sentences of their own"),
        ("It costs 3. and more", 1, "a number before a small letter is not the end"),
        ("Pi is 3.14 and no more.", 1, "a full stop inside a number"),
        ("J. Smith came.", 1, "an initial before a name"),
        ("So do I. The rest does not.", 2, "I is no initial before a common word"),
        ("a. Bread\nb. Butter", 3, "labels of a list end sentences"),
        ("Well... it depends.", 1, "an ellipsis before a small letter"),
        ("Well... It depends.", 2, "an ellipsis before a capital"),
        ('He said "Go!" and went.', 2, "a mark before a quotation mark is always an end"),
        ('"Go!"', 1, "what closes belongs to the sentence"),
        ("(It rains.) It pours.", 2, "brackets too"),
        ("**Bold.**", 2, "asterisks do not: the reference counts them as a sentence"),
        ("Really?! Yes.", 2, "several marks are one end"),
        ("See example.com for more.", 1, "no space after it"),
        ("He couldn't. But she could.", 2, "t is no initial after an apostrophe"),
        ("?! What", 3, "a row of marks without a word has two ends"),
    ],
)
def test_sentences_by_hand(text: str, count: int, why: str) -> None:
    assert count_sentences(text) == count, why


@pytest.mark.parametrize(
    ("text", "count", "why"),
    [
        ("", 0, "nothing"),
        ("WE'LL GO", 3, "WE and 'LL and GO"),
        ("I'm A OK", 3, "I and A and OK; 'm is small"),
        ("NASA's plan", 1, "NASA"),
        ("CANNOT", 2, "CAN and NOT"),
        ("GONNA WANNA-BE", 3, "GON NA, but a hyphen keeps WANNA together"),
        ("A/B TEST", 2, "a slash parts nothing"),
        ("HE SAID:\u201cNO\u201d", 3, "quotation marks part"),
        ("3D, X:1", 2, "digits have no case; a colon before one parts nothing"),
        ("\u00c9T\u00c9 \u0416", 2, "other alphabets have capitals"),
    ],
)
def test_words_in_capitals_by_hand(text: str, count: int, why: str) -> None:
    assert count_capital_words(text) == count, why


@pytest.mark.parametrize("code", PHRASES)
def test_the_phrases_are_in_their_languages(code: str) -> None:
    assert detect_language(PHRASES[code].sentence) == code
    assert not {",", "."} & {*PHRASES[code].sentence}


def test_a_text_always_gets_the_same_language() -> None:
    """The text is half in one language and half in another, so that unseeded draws would choose either."""
    text = "das ist gut and this is fine"
    assert len({detect_language(text) for _ in range(20)}) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("keywords:existance", {}, 'Did you mean "keywords:existence"?'),
        (7, {}, 'there is no instruction "7"'),
        ("punctuation:no_comma", None, "not an object"),
        ("punctuation:no_comma", {"num_words": 3}, 'takes no "num_words"; it takes nothing'),
        (KEYS + "existence", {}, 'needs "keywords", a list of words'),
        (KEYS + "existence", {"keywords": []}, "not []"),
        (KEYS + "existence", {"keywords": "owl"}, "not 'owl'"),
        (KEYS + "existence", {"keywords": ["x" * (MAX_WORD_CHARS + 1)]}, f"at most {MAX_WORD_CHARS} characters"),
        (KEYS + "letter_frequency", {**THREE_Q, "letter": "qu"}, "one letter"),
        (KEYS + "frequency", {**TWO_OWLS, "relation": "more than"}, '"at least" or "less than", not'),
        (
            LENGTH + "number_words",
            {"relation": "at least", "num_words": "5"},
            "a whole number from 0 to 10000, not '5'",
        ),
        (LENGTH + "number_words", {"relation": "at least", "num_words": True}, "not True"),
        (LENGTH + "number_words", {"relation": "at least", "num_words": -1}, "not -1"),
        (FORMAT + "title", {"num_words": 0}, 'takes no "num_words"'),
        (CONTENT + "number_placeholders", {"num_placeholders": 10**9}, "not 1000000000"),
        (LENGTH + "nth_paragraph_first_word", {**SECOND, "nth_paragraph": 3}, "no paragraph 3 of 2"),
        ("language:response_language", {"language": "xx"}, "a language that langdetect knows"),
        ("startend:end_checker", {"end_phrase": " "}, "a text"),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_arguments(name, arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_arguments_are_left_out() -> None:
    """Rows of the hub have every argument of every instruction, most of them empty."""
    given = {**dict.fromkeys((*SECOND, *TWO_OWLS)), "relation": "at least", "num_words": 5}
    assert read_arguments(LENGTH + "number_words", given) == {"relation": "at least", "num_words": 5}


SIZE = 200_000
HOSTILE = {
    "one letter": "a" * SIZE,
    "capitals": "A" * SIZE,
    "no spaces": "a." * (SIZE // 2),
    "empty lines": "\n" * (SIZE - 1) + "x",
    "spaces": " " * (SIZE - 1) + "x",
    "stars": "*" * SIZE,
    "stars in lines": "*\n" * (SIZE // 2),
    "open brackets": "[" * SIZE,
    "open titles": "<<" * (SIZE // 2),
    "open braces": '{"a":' * (SIZE // 5),
    "full stops": ". " * (SIZE // 2),
    "marks": "!" * SIZE,
    "quotation marks": "\"'" * (SIZE // 2),
    "apostrophes": "X'" * (SIZE // 2),
    "nulls": "\x00" * SIZE,
    "surrogates": "\ud800" * SIZE,
    "digits": "1" * SIZE,
    "sections": "Section" * (SIZE // 7),
    "postscripts": "p. " * (SIZE // 3),
    "addresses": "a@" * (SIZE // 2),
    "links": "http://" * (SIZE // 7),
    "chinese": "\u4e2d" * SIZE,
    "mixed": "The day is bright. DON'T! [x] *y* <<z>>\n- no, " * (SIZE // 48),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answers_take_less_than_a_second(kind: str) -> None:
    """Every kind of instruction is checked on the text and on all its loose variants."""
    # loads the language profiles, which must not count
    detect_language("x")
    first = {row[0]: row[1] for row in reversed(ROWS)}
    for name, arguments in first.items():
        begin = time.process_time()
        check_instructions([name], [arguments], HOSTILE[kind])
        assert time.process_time() - begin < 1, name


def test_hostile_keywords_are_literal_and_fast() -> None:
    text = "a" * SIZE
    begin = time.process_time()
    for keyword in ("(a+)+$", "(a|a)*b", "[", "\\", "a{1000}{1000}", "a" * (MAX_WORD_CHARS - 1) + "b", "\x00"):
        assert check_instructions([KEYS + "existence"], [{"keywords": [keyword]}], text).strict == (False,)
        assert check_instructions([KEYS + "forbidden_words"], [{"forbidden_words": [keyword]}], text).strict == (True,)
        assert check_instructions([KEYS + "frequency"], [{**TWO_OWLS, "keyword": keyword}], text).strict == (False,)
        assert check_instructions(
            [FORMAT + "multiple_sections"], [{**SECTIONS, "section_spliter": keyword}], text
        ).strict == (False,)
        assert check_instructions([CONTENT + "postscript"], [{"postscript_marker": keyword}], text).strict == (False,)
    assert time.process_time() - begin < 7


@given(st.text(alphabet=st.sampled_from("aZé中1 .,!?*'\"-[]<>{}\n\x00\ud800P.S"), max_size=60))
def test_any_text_gets_a_verdict(text: str) -> None:
    names = [row[0] for row in ROWS if not row[0].startswith(("language", CASE + "english"))]
    arguments = [row[1] for row in ROWS if not row[0].startswith(("language", CASE + "english"))]
    verdicts = check_instructions(names, arguments, text)
    for strict, loose in zip(verdicts.strict, verdicts.loose, strict=True):
        assert isinstance(strict, bool)
        assert loose >= strict, "a strict verdict is also a loose one"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_text_can_be_written_for_every_kind(row: tuple[str, dict[str, Any], str, bool, str]) -> None:
    name, arguments = row[0], row[1]
    text = write_text([name], [arguments])
    assert text is not None
    assert check_instructions([name], [arguments], text).strict == (True,)


def test_no_text_is_found_for_a_contradiction() -> None:
    assert write_text([CASE + "english_capital", CASE + "english_lowercase"], [{}, {}]) is None
    repeat = {"prompt_to_repeat": "Write it, please."}
    assert write_text(["combination:repeat_prompt", "punctuation:no_comma"], [repeat, {}]) is None
    assert write_text([LENGTH + "number_paragraphs"], [{"num_paragraphs": 0}]) is None
    assert write_text([LENGTH + "number_words"], [{"relation": "less than", "num_words": 0}]) is None
