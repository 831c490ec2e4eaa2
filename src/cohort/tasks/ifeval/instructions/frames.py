"""Checks of how an answer begins and ends, of commas, and of two responses in one answer."""

from __future__ import annotations


def has_no_comma(text: str) -> bool:
    """Returns whether the text has no comma, not even in a number."""
    return "," not in text


def is_quoted(text: str) -> bool:
    """Returns whether the answer begins and ends with a double quotation mark, apart from spaces around it.

    Other quotation marks inside it do not matter.

    >>> is_quoted(' "Yes." '), is_quoted('"')
    (True, False)
    """
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def ends_with_phrase(text: str, *, end_phrase: str) -> bool:
    """Returns whether the text ends with `end_phrase`, in upper or lower case; quotation marks may follow it.

    Spaces around the text and the phrase are ignored.
    """
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def begins_with_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Returns whether the text begins with `prompt_to_repeat`, word for word, in upper or lower case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def has_two_responses(text: str) -> bool:
    """Returns whether the text is two different answers, neither blank, with six asterisks between them.

    Six asterisks may also stand before the first answer and after the second.
    """
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]
