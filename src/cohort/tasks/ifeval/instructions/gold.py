"""Texts that follow instructions, made to order: they prove that a row can be satisfied, not that it is fun to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cohort.tasks.ifeval.instructions.formats import OPTIONS
from cohort.tasks.ifeval.instructions.keywords import Relation
from cohort.tasks.ifeval.instructions.phrases import ENGLISH, PHRASES
from cohort.tasks.ifeval.instructions.registry import Arguments
from cohort.tasks.ifeval.instructions.verdicts import follow

_WORDS = ("note", "idea", "plan", "moss", "fjord", "lynx")
_MAX_FILL = 400  # sentences


@dataclass(kw_only=True, slots=True)
class Draft:
    """A text in parts: blocks with a joint between them, the first with the lines that instructions ask for."""

    begin: str = ""
    lines: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    sentences: Sequence[str] = ENGLISH
    num_blocks: int = 1
    joint: str = "\n"
    openings: dict[int, str] = field(default_factory=dict)  # of blocks: their first words
    avoid: list[str] = field(default_factory=list)
    finish: list[Callable[[str], str]] = field(default_factory=list)

    def is_free(self, word: str) -> bool:
        return not any(part.lower() in word.lower() for part in self.avoid)

    @property
    def word(self) -> str:
        return next(filter(self.is_free, _WORDS), "")

    def fill(self, num_sentences: int, stop: str) -> str:
        chosen = (self.sentences[i % len(self.sentences)] for i in range(num_sentences))
        return " ".join(" ".join(filter(self.is_free, sentence.split())) + stop for sentence in chosen)

    def render(self, num_sentences: int, stop: str) -> str:
        blocks = [[self.openings.get(i, ""), self.fill(1, stop) or self.word] for i in range(self.num_blocks)]
        blocks[0] = [self.begin, self.openings.get(0, ""), self.fill(num_sentences, stop), *self.lines]
        blocks[-1] += self.end
        text = self.joint.join("\n".join(filter(None, block)) or self.word for block in blocks)
        for change in self.finish:
            text = change(text)
        return text


def write(names: Sequence[str], arguments: Sequence[Arguments]) -> str | None:
    """A text that follows all of these instructions, or None where no way was found.

    >>> write(["startend:quotation", "keywords:existence"], [{}, {"keywords": ["owl"]}])
    '"The day is bright and the road is long.\\nowl"'
    """
    draft = Draft()
    ordered = sorted(zip(names, arguments, strict=True), key=lambda pair: list(WRITERS).index(pair[0]))
    for name, given in ordered:
        WRITERS[name](draft, **given)
    texts = (draft.render(num_sentences, stop) for num_sentences in _amounts() for stop in (".", ""))
    return next((text for text in texts if all(follow(names, arguments, text).strict)), None)


def _amounts() -> Iterator[int]:
    amount = 1
    yield from (1, 0)
    while amount < _MAX_FILL:
        amount += 1 + amount // 12
        yield amount


def _forbidden(draft: Draft, *, forbidden_words: Sequence[str]) -> None:
    draft.avoid += forbidden_words


def _frequency(draft: Draft, *, keyword: str, relation: Relation, frequency: int) -> None:
    if relation == "at least":
        draft.lines.append(" ".join([keyword] * frequency))
    else:
        draft.avoid.append(keyword)


def _letters(draft: Draft, *, letter: str, let_relation: Relation, let_frequency: int) -> None:
    if let_relation == "at least":
        draft.lines.append(letter * let_frequency)
    else:
        draft.avoid.append(letter)


def _no_comma(draft: Draft) -> None:
    draft.finish.append(lambda text: text.replace(",", ""))


def _upper(draft: Draft) -> None:
    draft.finish.append(str.upper)


def _lower(draft: Draft) -> None:
    draft.finish.append(str.lower)


def _quotation(draft: Draft) -> None:
    draft.finish.append('"{}"'.format)


def _json(draft: Draft) -> None:
    draft.finish.append(lambda text: json.dumps({draft.word: text.replace("\n", " ")}, ensure_ascii=False))


def _language(draft: Draft, *, language: str) -> None:
    if language in PHRASES:
        draft.sentences = (PHRASES[language].sentence,)


def _length(draft: Draft, *, relation: Relation, num_words: int = 0, num_sentences: int = 0) -> None:
    """The amount of filling, with full stops or without, sees to it."""


def _capitals(draft: Draft, *, capital_relation: Relation, capital_frequency: int) -> None:
    if capital_relation == "at least":
        draft.lines.append(" ".join([draft.word.upper()] * capital_frequency))


def _existence(draft: Draft, *, keywords: Sequence[str]) -> None:
    draft.lines.append(" ".join(keywords))


def _placeholders(draft: Draft, *, num_placeholders: int) -> None:
    draft.lines.append(" ".join([f"[{draft.word}]"] * num_placeholders))


def _highlights(draft: Draft, *, num_highlights: int) -> None:
    draft.lines.append(" ".join([f"{draft.word} *{draft.word}*"] * num_highlights))


def _title(draft: Draft) -> None:
    draft.lines.append(f"<<{draft.word}>>")


def _option(draft: Draft) -> None:
    draft.lines.append(next(filter(draft.is_free, OPTIONS), OPTIONS[0]))


def _sections(draft: Draft, *, section_spliter: str, num_sections: int) -> None:
    draft.lines += [f"{section_spliter} {number}" for number in range(1, num_sections + 1)]


def _bullets(draft: Draft, *, num_bullets: int) -> None:
    draft.lines += [f"- {draft.word}"] * num_bullets


def _paragraphs(draft: Draft, *, num_paragraphs: int) -> None:
    draft.num_blocks, draft.joint = max(1, num_paragraphs), "\n***\n"


def _nth_paragraph(draft: Draft, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> None:
    draft.num_blocks, draft.joint = num_paragraphs, "\n\n"
    draft.openings[nth_paragraph - 1] = first_word


def _two_responses(draft: Draft) -> None:
    draft.num_blocks, draft.joint = 2, "\n******\n"
    draft.openings[1] = draft.word


def _repeat(draft: Draft, *, prompt_to_repeat: str) -> None:
    draft.begin = prompt_to_repeat


def _postscript(draft: Draft, *, postscript_marker: str) -> None:
    draft.end.append(f"{postscript_marker} {draft.word}")


def _end(draft: Draft, *, end_phrase: str) -> None:
    draft.end.append(end_phrase)


WRITERS: dict[str, Callable[..., None]] = {  # in the order they are applied: what is to be avoided first
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "punctuation:no_comma": _no_comma,
    "detectable_format:json_format": _json,
    "change_case:english_capital": _upper,
    "change_case:english_lowercase": _lower,
    "startend:quotation": _quotation,
    "language:response_language": _language,
    "length_constraints:number_sentences": _length,
    "length_constraints:number_words": _length,
    "change_case:capital_word_frequency": _capitals,
    "keywords:existence": _existence,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "detectable_format:constrained_response": _option,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "detectable_content:postscript": _postscript,
    "startend:end_checker": _end,
}
