"""Texts that follow given instructions. They prove that a row can be satisfied; their content means nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cohort.tasks.ifeval.instructions.formats import OPTIONS
from cohort.tasks.ifeval.instructions.keywords import Relation
from cohort.tasks.ifeval.instructions.phrases import ENGLISH, PHRASES
from cohort.tasks.ifeval.instructions.registry import Arguments
from cohort.tasks.ifeval.instructions.verdicts import check_instructions

# Words to fill texts with: the first one without a forbidden part is used.
_FILLER_WORDS = ("note", "idea", "plan", "moss", "fjord", "lynx")
_MAX_SENTENCES = 400


@dataclass(kw_only=True, slots=True)
class Draft:
    """A text in the making: blocks with a separator between them. The functions below add what instructions ask for.

    The first block has the `beginning`, the filling sentences and the `lines`; the last block ends with `final_lines`.
    `openings` maps the index of a block to its first word. Words that contain one of `forbidden_parts` are left out.
    `transforms` change the finished text, in order.
    """

    beginning: str = ""
    lines: list[str] = field(default_factory=list)
    final_lines: list[str] = field(default_factory=list)
    sentences: Sequence[str] = ENGLISH
    num_blocks: int = 1
    separator: str = "\n"
    openings: dict[int, str] = field(default_factory=dict)
    forbidden_parts: list[str] = field(default_factory=list)
    transforms: list[Callable[[str], str]] = field(default_factory=list)

    def is_allowed(self, word: str) -> bool:
        """Returns whether the word contains none of the `forbidden_parts`, in upper or lower case."""
        return not any(part.lower() in word.lower() for part in self.forbidden_parts)

    @property
    def allowed_word(self) -> str:
        """The first filler word that is allowed, or "" if all are forbidden."""
        return next(filter(self.is_allowed, _FILLER_WORDS), "")

    def write_sentences(self, num_sentences: int, stop: str) -> str:
        """Returns `num_sentences` filling sentences in one line, each followed by `stop`, such as "."; "" for none.

        Words that are not allowed are left out of them. If there are not enough sentences, they repeat from the first.
        """
        chosen = (self.sentences[i % len(self.sentences)] for i in range(num_sentences))
        return " ".join(" ".join(filter(self.is_allowed, sentence.split())) + stop for sentence in chosen)

    def render(self, num_sentences: int, stop: str) -> str:
        """Returns the finished text, with `num_sentences` sentences in its first block and one in every other block.

        Each sentence ends with `stop`. The draft itself does not change.
        """
        blocks = [
            [self.openings.get(i, ""), self.write_sentences(1, stop) or self.allowed_word]
            for i in range(self.num_blocks)
        ]
        blocks[0] = [self.beginning, self.openings.get(0, ""), self.write_sentences(num_sentences, stop), *self.lines]
        blocks[-1] += self.final_lines
        text = self.separator.join("\n".join(filter(None, block)) or self.allowed_word for block in blocks)
        for change in self.transforms:
            text = change(text)
        return text


def write_text(names: Sequence[str], arguments: Sequence[Arguments]) -> str | None:
    """Returns a text that strictly follows all named instructions; None if the search finds none.

    The `arguments` are those of the instructions, in the same order. Raises ValueError for an unknown name.

    >>> write_text(["startend:quotation", "keywords:existence"], [{}, {"keywords": ["owl"]}])
    '"The day is bright and the road is long.\\nowl"'
    """
    draft = Draft()
    ordered = sorted(zip(names, arguments, strict=True), key=lambda pair: list(WRITERS).index(pair[0]))
    for name, kwargs in ordered:
        WRITERS[name](draft, **kwargs)
    # The right length is found by trial: more and more sentences, each time with and without full stops.
    texts = (draft.render(num_sentences, stop) for num_sentences in _propose_sentence_counts() for stop in (".", ""))
    return next((text for text in texts if all(check_instructions(names, arguments, text).strict)), None)


def _propose_sentence_counts() -> Iterator[int]:
    """Yields numbers of sentences to try: 1, 0, 2, 3 and so on, up to about _MAX_SENTENCES.

    From 12 on, the steps grow.
    """
    count = 1
    yield from (1, 0)
    while count < _MAX_SENTENCES:
        count += 1 + count // 12
        yield count


# ---- Writers: each one takes the arguments of an instruction and changes a draft so that its text follows it.


def _avoid_forbidden_words(draft: Draft, *, forbidden_words: Sequence[str]) -> None:
    """Makes the draft leave every word that contains one of `forbidden_words` out of all filling text."""
    draft.forbidden_parts += forbidden_words


def _repeat_or_avoid_keyword(draft: Draft, *, keyword: str, relation: Relation, frequency: int) -> None:
    """Adds a line to the draft with the keyword `frequency` times for "at least"; forbids it for "less than"."""
    if relation == "at least":
        draft.lines.append(" ".join([keyword] * frequency))
    else:
        draft.forbidden_parts.append(keyword)


def _repeat_or_avoid_letter(draft: Draft, *, letter: str, let_relation: Relation, let_frequency: int) -> None:
    """Adds a line to the draft with the letter `let_frequency` times for "at least"; forbids it for "less than"."""
    if let_relation == "at least":
        draft.lines.append(letter * let_frequency)
    else:
        draft.forbidden_parts.append(letter)


def _remove_commas(draft: Draft) -> None:
    """Makes the draft remove all commas from its finished text."""
    draft.transforms.append(lambda text: text.replace(",", ""))


def _change_to_capitals(draft: Draft) -> None:
    """Makes the draft write its finished text in capital letters."""
    draft.transforms.append(str.upper)


def _change_to_lowercase(draft: Draft) -> None:
    """Makes the draft write its finished text in small letters."""
    draft.transforms.append(str.lower)


def _put_in_quotation_marks(draft: Draft) -> None:
    """Makes the draft put its finished text between double quotation marks."""
    draft.transforms.append('"{}"'.format)


def _wrap_in_json(draft: Draft) -> None:
    """Makes the draft turn its finished text into JSON: an object, in one line, with the text as its only value.

    Line breaks in the text become spaces.
    """
    draft.transforms.append(lambda text: json.dumps({draft.allowed_word: text.replace("\n", " ")}, ensure_ascii=False))


def _use_language(draft: Draft, *, language: str) -> None:
    """Fills the draft with one sentence of the language (a code such as "de"); does nothing if PHRASES has none."""
    if language in PHRASES:
        draft.sentences = (PHRASES[language].sentence,)


def _leave_length_to_search(draft: Draft, *, relation: Relation, num_words: int = 0, num_sentences: int = 0) -> None:
    """Does nothing: `write_text` tries different numbers of sentences until the length is right."""


def _add_capital_words(draft: Draft, *, capital_relation: Relation, capital_frequency: int) -> None:
    """For "at least", adds a line to the draft with `capital_frequency` words in capitals.

    Does nothing for "less than", since the sentences have none.
    """
    if capital_relation == "at least":
        draft.lines.append(" ".join([draft.allowed_word.upper()] * capital_frequency))


def _add_keywords(draft: Draft, *, keywords: Sequence[str]) -> None:
    """Adds a line with all keywords to the draft."""
    draft.lines.append(" ".join(keywords))


def _add_placeholders(draft: Draft, *, num_placeholders: int) -> None:
    """Adds a line to the draft with `num_placeholders` words in square brackets."""
    draft.lines.append(" ".join([f"[{draft.allowed_word}]"] * num_placeholders))


def _add_highlights(draft: Draft, *, num_highlights: int) -> None:
    """Adds a line to the draft with `num_highlights` words between asterisks, each after a plain word."""
    draft.lines.append(" ".join([f"{draft.allowed_word} *{draft.allowed_word}*"] * num_highlights))


def _add_title(draft: Draft) -> None:
    """Adds a line to the draft with a title in double angle brackets."""
    draft.lines.append(f"<<{draft.allowed_word}>>")


def _add_option(draft: Draft) -> None:
    """Adds a line to the draft with one of the three allowed answers, preferably one without a forbidden part."""
    draft.lines.append(next(filter(draft.is_allowed, OPTIONS), OPTIONS[0]))


def _add_sections(draft: Draft, *, section_spliter: str, num_sections: int) -> None:
    """Adds `num_sections` headings to the draft: `section_spliter` with the numbers from 1, as in "Section 1"."""
    draft.lines += [f"{section_spliter} {number}" for number in range(1, num_sections + 1)]


def _add_bullets(draft: Draft, *, num_bullets: int) -> None:
    """Adds `num_bullets` bullet points to the draft, each a line that begins with a hyphen."""
    draft.lines += [f"- {draft.allowed_word}"] * num_bullets


def _divide_into_paragraphs(draft: Draft, *, num_paragraphs: int) -> None:
    """Divides the draft into `num_paragraphs` paragraphs, at least one, with a line of three asterisks between them."""
    draft.num_blocks, draft.separator = max(1, num_paragraphs), "\n***\n"


def _divide_and_set_first_word(draft: Draft, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> None:
    """Divides the draft into `num_paragraphs` paragraphs with empty lines between them.

    Paragraph `nth_paragraph`, counted from 1, begins with `first_word`.
    """
    draft.num_blocks, draft.separator = num_paragraphs, "\n\n"
    draft.openings[nth_paragraph - 1] = first_word


def _divide_into_two_responses(draft: Draft) -> None:
    """Divides the draft into two different responses with a line of six asterisks between them."""
    draft.num_blocks, draft.separator = 2, "\n******\n"
    draft.openings[1] = draft.allowed_word


def _begin_with_prompt(draft: Draft, *, prompt_to_repeat: str) -> None:
    """Puts `prompt_to_repeat` at the beginning of the draft."""
    draft.beginning = prompt_to_repeat


def _add_postscript(draft: Draft, *, postscript_marker: str) -> None:
    """Adds a line with `postscript_marker` and a word to the end of the last block of the draft."""
    draft.final_lines.append(f"{postscript_marker} {draft.allowed_word}")


def _end_with_phrase(draft: Draft, *, end_phrase: str) -> None:
    """Adds `end_phrase` as the last line of the draft."""
    draft.final_lines.append(end_phrase)


# In the order in which they are applied: forbidden parts come first, because later writers choose allowed words.
# Transforms change the finished text in the same order, so that the quotation marks come last.
WRITERS: dict[str, Callable[..., None]] = {
    "keywords:forbidden_words": _avoid_forbidden_words,
    "keywords:frequency": _repeat_or_avoid_keyword,
    "keywords:letter_frequency": _repeat_or_avoid_letter,
    "punctuation:no_comma": _remove_commas,
    "detectable_format:json_format": _wrap_in_json,
    "change_case:english_capital": _change_to_capitals,
    "change_case:english_lowercase": _change_to_lowercase,
    "startend:quotation": _put_in_quotation_marks,
    "language:response_language": _use_language,
    "length_constraints:number_sentences": _leave_length_to_search,
    "length_constraints:number_words": _leave_length_to_search,
    "change_case:capital_word_frequency": _add_capital_words,
    "keywords:existence": _add_keywords,
    "detectable_content:number_placeholders": _add_placeholders,
    "detectable_format:number_highlighted_sections": _add_highlights,
    "detectable_format:title": _add_title,
    "detectable_format:constrained_response": _add_option,
    "detectable_format:multiple_sections": _add_sections,
    "detectable_format:number_bullet_lists": _add_bullets,
    "length_constraints:number_paragraphs": _divide_into_paragraphs,
    "length_constraints:nth_paragraph_first_word": _divide_and_set_first_word,
    "combination:two_responses": _divide_into_two_responses,
    "combination:repeat_prompt": _begin_with_prompt,
    "detectable_content:postscript": _add_postscript,
    "startend:end_checker": _end_with_phrase,
}
