"""What an answer begins with, ends with, keeps out, or is divided by."""

from __future__ import annotations


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    """The whole answer stands between double quotation marks.

    >>> quotation(' "Yes." '), quotation('"')
    (True, False)
    """
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Ends with the phrase, in any case; a quotation mark may follow."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Begins with the request, word for word, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def two_responses(text: str) -> bool:
    """Two different answers with six asterisks between them."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]
