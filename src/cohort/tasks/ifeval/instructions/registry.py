"""Table of all instructions by their names in IFEval, and checks of the arguments that rows give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import suggest_name
from cohort.tasks.ifeval.instructions import cases, formats, frames, keywords, language, lengths

Arguments = dict[str, Any]

MAX_COUNT = 10_000
# Longest keyword. A search may compare that many characters at every place of an answer.
MAX_WORD_CHARS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """An instruction: the check that tells whether a text follows it, and the names of the check's arguments."""

    check: Callable[..., bool]
    arguments: tuple[str, ...] = ()


def _make_instruction(check: Callable[..., bool], *arguments: str) -> Instruction:
    """Returns an instruction from its check and the names of its arguments."""
    return Instruction(check=check, arguments=arguments)


INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": _make_instruction(keywords.has_keywords, "keywords"),
    "keywords:frequency": _make_instruction(keywords.has_keyword_count, "keyword", "relation", "frequency"),
    "keywords:forbidden_words": _make_instruction(keywords.has_no_forbidden_words, "forbidden_words"),
    "keywords:letter_frequency": _make_instruction(
        keywords.has_letter_count, "letter", "let_relation", "let_frequency"
    ),
    "language:response_language": _make_instruction(language.is_in_language, "language"),
    "length_constraints:number_sentences": _make_instruction(lengths.has_sentence_count, "relation", "num_sentences"),
    "length_constraints:number_paragraphs": _make_instruction(lengths.has_paragraph_count, "num_paragraphs"),
    "length_constraints:number_words": _make_instruction(lengths.has_word_count, "relation", "num_words"),
    "length_constraints:nth_paragraph_first_word": _make_instruction(
        lengths.has_first_word_in_paragraph, "num_paragraphs", "nth_paragraph", "first_word"
    ),
    "detectable_content:number_placeholders": _make_instruction(formats.has_placeholders, "num_placeholders"),
    "detectable_content:postscript": _make_instruction(formats.has_postscript, "postscript_marker"),
    "detectable_format:number_bullet_lists": _make_instruction(formats.has_bullet_count, "num_bullets"),
    "detectable_format:constrained_response": _make_instruction(formats.has_option),
    "detectable_format:number_highlighted_sections": _make_instruction(formats.has_highlights, "num_highlights"),
    "detectable_format:multiple_sections": _make_instruction(formats.has_sections, "section_spliter", "num_sections"),
    "detectable_format:json_format": _make_instruction(formats.is_json),
    "detectable_format:title": _make_instruction(formats.has_title),
    "combination:two_responses": _make_instruction(frames.has_two_responses),
    "combination:repeat_prompt": _make_instruction(frames.begins_with_prompt, "prompt_to_repeat"),
    "startend:end_checker": _make_instruction(frames.ends_with_phrase, "end_phrase"),
    "startend:quotation": _make_instruction(frames.is_quoted),
    "change_case:capital_word_frequency": _make_instruction(
        cases.has_capital_word_count, "capital_relation", "capital_frequency"
    ),
    "change_case:english_capital": _make_instruction(cases.is_english_capitals),
    "change_case:english_lowercase": _make_instruction(cases.is_english_lowercase),
    "punctuation:no_comma": _make_instruction(frames.has_no_comma),
}


def _is_count(value: Any) -> bool:
    """Returns whether the value is a whole number from 0 to MAX_COUNT; True and False are none."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_relation(value: Any) -> bool:
    """Returns whether the value is "at least" or "less than", the two relations of IFEval."""
    return value in ("at least", "less than")


def _is_text(value: Any) -> bool:
    """Returns whether the value is a string with more than white space in it."""
    return isinstance(value, str) and value.strip() != ""


def _is_word(value: Any) -> bool:
    """Returns whether the value is a text of at most MAX_WORD_CHARS characters that is not blank."""
    return _is_text(value) and len(value) <= MAX_WORD_CHARS


def _is_word_list(value: Any) -> bool:
    """Returns whether the value is a list of at least one word."""
    return isinstance(value, list) and value != [] and all(map(_is_word, value))


# For each argument, a test of its value and what the value must be. Arguments without an entry are counts.
_ARGUMENT_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("keywords", "forbidden_words"), (_is_word_list, f"a list of words of at most {MAX_WORD_CHARS} characters")
    ),
    **dict.fromkeys(("keyword", "first_word"), (_is_word, f"a word of at most {MAX_WORD_CHARS} characters")),
    **dict.fromkeys(
        ("section_spliter", "postscript_marker"), (_is_word, f"a mark of at most {MAX_WORD_CHARS} characters")
    ),
    **dict.fromkeys(("end_phrase", "prompt_to_repeat"), (_is_text, "a text")),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), (_is_relation, '"at least" or "less than"')),
    "letter": (lambda value: _is_text(value) and len(value) == 1, "one letter"),
    "language": (lambda value: value in language.LANGUAGES.split(), "a language that langdetect knows"),
}


def read_arguments(name: Any, kwargs: Any) -> Arguments:
    """Checks the arguments that a row gives the instruction `name`, and returns them without those that are None.

    They are in the order of the instruction's own list. Raises ValueError for an unknown instruction, for arguments
    that are missing, unknown or of the wrong kind, and for an nth paragraph that is not among the paragraphs.

    >>> read_arguments("length_constraints:number_words", {"relation": "at least", "num_words": 5, "letter": None})
    {'relation': 'at least', 'num_words': 5}
    """
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise ValueError(f'there is no instruction "{name}".{suggest_name(str(name), INSTRUCTIONS)}')
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"the kwargs of {name} are {kwargs!r:.60}, not an object")
    # Rows of the hub have every argument of every instruction; those that are not meant are None.
    expected = INSTRUCTIONS[name].arguments
    arguments = {key: value for key, value in kwargs.items() if value is not None}
    if extra := sorted(arguments.keys() - {*expected}):
        raise ValueError(f'{name} takes no "{extra[0]}"; it takes {", ".join(expected) or "nothing"}')
    for key in expected:
        is_valid, requirement = _ARGUMENT_RULES.get(key, (_is_count, f"a whole number from 0 to {MAX_COUNT}"))
        if not is_valid(arguments.get(key)):
            raise ValueError(f'{name} needs "{key}", {requirement}, not {arguments.get(key)!r:.60}')
    if name.endswith("first_word") and not 1 <= arguments["nth_paragraph"] <= arguments["num_paragraphs"]:
        raise ValueError(f"{name} has no paragraph {arguments['nth_paragraph']} of {arguments['num_paragraphs']}")
    return {key: arguments[key] for key in expected}
