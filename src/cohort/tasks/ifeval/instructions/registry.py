"""The table of instructions by their names in IFEval, and what a row may say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import nearest
from cohort.tasks.ifeval.instructions import cases, formats, frames, keywords, language, lengths

Arguments = dict[str, Any]

MAX_COUNT = 10_000
MAX_WORD = 200  # characters of a keyword: a search for it costs that much for each character of an answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """A check of a text, and the names of the arguments it takes."""

    check: Callable[..., bool]
    arguments: tuple[str, ...] = ()


def _of(check: Callable[..., bool], *arguments: str) -> Instruction:
    return Instruction(check=check, arguments=arguments)


INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": _of(keywords.existence, "keywords"),
    "keywords:frequency": _of(keywords.frequency, "keyword", "relation", "frequency"),
    "keywords:forbidden_words": _of(keywords.forbidden_words, "forbidden_words"),
    "keywords:letter_frequency": _of(keywords.letter_frequency, "letter", "let_relation", "let_frequency"),
    "language:response_language": _of(language.response_language, "language"),
    "length_constraints:number_sentences": _of(lengths.number_sentences, "relation", "num_sentences"),
    "length_constraints:number_paragraphs": _of(lengths.number_paragraphs, "num_paragraphs"),
    "length_constraints:number_words": _of(lengths.number_words, "relation", "num_words"),
    "length_constraints:nth_paragraph_first_word": _of(
        lengths.nth_paragraph_first_word, "num_paragraphs", "nth_paragraph", "first_word"
    ),
    "detectable_content:number_placeholders": _of(formats.number_placeholders, "num_placeholders"),
    "detectable_content:postscript": _of(formats.postscript, "postscript_marker"),
    "detectable_format:number_bullet_lists": _of(formats.number_bullet_lists, "num_bullets"),
    "detectable_format:constrained_response": _of(formats.constrained_response),
    "detectable_format:number_highlighted_sections": _of(formats.number_highlighted_sections, "num_highlights"),
    "detectable_format:multiple_sections": _of(formats.multiple_sections, "section_spliter", "num_sections"),
    "detectable_format:json_format": _of(formats.json_format),
    "detectable_format:title": _of(formats.title),
    "combination:two_responses": _of(frames.two_responses),
    "combination:repeat_prompt": _of(frames.repeat_prompt, "prompt_to_repeat"),
    "startend:end_checker": _of(frames.end_checker, "end_phrase"),
    "startend:quotation": _of(frames.quotation),
    "change_case:capital_word_frequency": _of(cases.capital_word_frequency, "capital_relation", "capital_frequency"),
    "change_case:english_capital": _of(cases.english_capital),
    "change_case:english_lowercase": _of(cases.english_lowercase),
    "punctuation:no_comma": _of(frames.no_comma),
}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_relation(value: Any) -> bool:
    return value in ("at least", "less than")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_word(value: Any) -> bool:
    return _is_text(value) and len(value) <= MAX_WORD


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_word, value))


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("keywords", "forbidden_words"), (_is_words, f"a list of words of at most {MAX_WORD} characters")),
    **dict.fromkeys(("keyword", "first_word"), (_is_word, f"a word of at most {MAX_WORD} characters")),
    **dict.fromkeys(("section_spliter", "postscript_marker"), (_is_word, f"a mark of at most {MAX_WORD} characters")),
    **dict.fromkeys(("end_phrase", "prompt_to_repeat"), (_is_text, "a text")),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), (_is_relation, '"at least" or "less than"')),
    "letter": (lambda value: _is_text(value) and len(value) == 1, "one letter"),
    "language": (lambda value: value in language.LANGUAGES.split(), "a language that langdetect knows"),
}


def read_arguments(name: Any, given: Any) -> Arguments:
    """An instruction's arguments without the empty ones; ValueError says what is wrong with them.

    >>> read_arguments("length_constraints:number_words", {"relation": "at least", "num_words": 5, "letter": None})
    {'relation': 'at least', 'num_words': 5}
    """
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise ValueError(f'there is no instruction "{name}".{nearest(str(name), INSTRUCTIONS)}')
    if not isinstance(given, Mapping):
        raise ValueError(f"the kwargs of {name} are {given!r:.60}, not an object")
    expected = INSTRUCTIONS[name].arguments
    arguments = {key: value for key, value in given.items() if value is not None}
    if extra := sorted(arguments.keys() - {*expected}):
        raise ValueError(f'{name} takes no "{extra[0]}"; it takes {", ".join(expected) or "nothing"}')
    for key in expected:
        holds, what = _RULES.get(key, (_is_count, f"a whole number from 0 to {MAX_COUNT}"))
        if not holds(arguments.get(key)):
            raise ValueError(f'{name} needs "{key}", {what}, not {arguments.get(key)!r:.60}')
    if name.endswith("first_word") and not 1 <= arguments["nth_paragraph"] <= arguments["num_paragraphs"]:
        raise ValueError(f"{name} has no paragraph {arguments['nth_paragraph']} of {arguments['num_paragraphs']}")
    return {key: arguments[key] for key in expected}
