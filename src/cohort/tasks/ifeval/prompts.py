"""Prompts to train instruction following on: own requests with one to three instructions, drawn by number.

Prompt k depends on k alone. Its instructions can be followed together: `AGAINST` names the pairs that cannot, or only
by accident, and `instructions.gold` writes a text for every prompt. No request and no wording is IFEval's: no prompt
shares 30 characters with one of it. (The sentences "My answer is ..." are not wording: they are what is checked.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cohort.tasks.draws import Draws
from cohort.tasks.ifeval.instructions.phrases import PHRASES
from cohort.tasks.ifeval.instructions.registry import Arguments
from cohort.types import Row

REQUESTS = (
    "Write a short story in which {} matters.",
    "Explain {} to a curious ten-year-old.",
    "Draft a friendly email to a neighbour about {}.",
    "Compose a poem inspired by {}.",
    "Give practical advice to somebody who has to deal with {}.",
    "Describe a board game about {} to people who might buy it.",
    "Prepare the opening of a podcast episode on {}.",
    "Argue for spending public money on {}.",
    "Describe {} to a visitor who has never seen it.",
    "Summarise what a beginner should know about {}.",
    "Write a dialogue between two strangers on the subject of {}.",
    "Sketch a one-day workshop built around {}.",
    "Write a diary entry by someone who cannot stop thinking of {}.",
    "Pitch a museum exhibit devoted to {}.",
)
QUESTIONS = (
    "Would you recommend {} to a friend?",
    "Is {} something that schools should teach about?",
    "Will people still care about {} in a hundred years?",
)
TOPICS: dict[str, tuple[str, ...]] = {  # with words that belong to it and stand in no request
    "a lighthouse on a rocky coast": ("lamp", "storm", "keeper", "fog", "ship", "signal"),
    "the night market downtown": ("noodle", "lantern", "crowd", "bargain", "spice", "stall"),
    "a beehive on the roof": ("honey", "swarm", "queen", "nectar", "smoke", "wax"),
    "learning the cello": ("bow", "practice", "melody", "string", "teacher", "rhythm"),
    "the last steam train": ("coal", "whistle", "platform", "engine", "ticket", "tunnel"),
    "growing tomatoes on a balcony": ("soil", "harvest", "water", "seed", "sunlight", "pot"),
    "a village library": ("shelf", "novel", "silence", "borrow", "chapter", "archive"),
    "deep sea fishing": ("net", "wave", "captain", "salt", "hook", "harbour"),
    "the first snow of winter": ("frost", "scarf", "sledge", "icicle", "silence", "fireplace"),
    "repairing old bicycles": ("wheel", "chain", "grease", "brake", "saddle", "spanner"),
    "a chess club in the park": ("pawn", "clock", "bench", "checkmate", "rival", "strategy"),
    "baking sourdough bread": ("flour", "oven", "crust", "yeast", "patience", "slice"),
    "the history of maps": ("compass", "border", "atlas", "voyage", "scale", "legend"),
    "volunteering at an animal shelter": ("kennel", "leash", "rescue", "kitten", "adoption", "vet"),
    "a solar eclipse": ("shadow", "moon", "telescope", "orbit", "crowd", "dusk"),
    "a strike at the harbour": ("wage", "union", "cargo", "picket", "crane", "demand"),
    "moving to a small island": ("ferry", "gull", "storm", "harvest", "silence", "tide"),
    "the town's oldest oak": ("root", "acorn", "branch", "squirrel", "shade", "bark"),
    "a robot that sorts laundry": ("sensor", "sock", "battery", "drum", "fabric", "error"),
    "running a first marathon": ("shoe", "water", "finish", "training", "blister", "pace"),
    "a forgotten radio play": ("actor", "microphone", "studio", "static", "voice", "archive"),
    "urban foxes": ("den", "cub", "alley", "dusk", "tail", "garden"),
    "making paper by hand": ("pulp", "fibre", "frame", "press", "sheet", "texture"),
    "the secret of good coffee": ("roast", "bean", "aroma", "grind", "filter", "cup"),
}
ENDINGS = (
    "That is all for today.",
    "Thank you for reading this far.",
    "And so the work goes on.",
    "Write back whenever you like.",
    "What would you have done?",
)


SECTION_MARKS = ("Section", "Part", "Chapter", "STEP")
LETTERS, RARE_LETTERS = "bcdfghklmpuvwy", "jqxz"  # to have often, and to have seldom


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the instructions of one prompt share; each of the topic's words is handed out once."""

    draws: Draws
    request: str
    words: list[str]

    def word(self) -> str:
        return self.words.pop(self.draws.below(len(self.words)))

    def bound(self, at_least: tuple[int, int], less_than: tuple[int, int], prefix: str, name: str) -> Arguments:
        relation, limits = self.draws.choice((("at least", at_least), ("less than", less_than)))
        return {f"{prefix}relation": relation, name: self.draws.between(*limits)}

    def letter(self) -> Arguments:
        bound = self.bound((4, 16), (2, 5), "let_", "let_frequency")
        return {"letter": self.draws.choice(LETTERS if bound["let_relation"] == "at least" else RARE_LETTERS)} | bound

    def nth_paragraph(self) -> Arguments:
        number = self.draws.between(2, 5)
        place = self.draws.between(1, number)
        return {"num_paragraphs": number, "nth_paragraph": place, "first_word": self.word()}


@dataclass(frozen=True, slots=True)
class Offer:
    """How an instruction's arguments are drawn, and how it is put into words."""

    draw: Callable[[Scene], Arguments]
    wordings: tuple[str, ...]


def _offer(draw: Callable[[Scene], Arguments], *wordings: str) -> Offer:
    return Offer(draw, wordings)


def _fixed(*wordings: str) -> Offer:
    return Offer(lambda _: {}, wordings)


OFFERS: dict[str, Offer] = {
    "keywords:existence": _offer(
        lambda s: {"keywords": [s.word(), s.word()]},
        "Make sure that both {words} appear.",
        "Work {words} into the text.",
    ),
    "keywords:frequency": _offer(
        lambda s: {"keyword": s.word()} | s.bound((2, 4), (2, 4), "", "frequency"),
        'The word "{keyword}" should turn up {bound} times.',
        'Use "{keyword}" {bound} times in total.',
    ),
    "keywords:forbidden_words": _offer(
        lambda s: {"forbidden_words": [s.word(), s.word()]},
        "Leave out {words} completely.",
        "Neither of these words may be used: {words}.",
    ),
    "keywords:letter_frequency": _offer(
        Scene.letter,
        "The letter {letter} must occur {bound} times.",
        "As for the letter {letter}: it is to occur {bound} times.",
    ),
    "language:response_language": _offer(
        lambda s: {"language": s.draws.choice([*PHRASES])},
        "Reply in {language} and in no other language.",
        "The whole reply has to be in {language}.",
    ),
    "length_constraints:number_sentences": _offer(
        lambda s: s.bound((3, 10), (5, 12), "", "num_sentences"),
        "Write {bound} sentences.",
        "The number of sentences should be {bound}.",
    ),
    "length_constraints:number_paragraphs": _offer(
        lambda s: {"num_paragraphs": s.draws.between(2, 5)},
        "Divide the text into exactly {num_paragraphs} paragraphs with a line of three asterisks (***) between them.",
        "I want {num_paragraphs} paragraphs and the divider *** between one and the next.",
    ),
    "length_constraints:number_words": _offer(
        lambda s: s.bound((40, 200), (80, 200), "", "num_words"),
        "Write {bound} words.",
        "The length should be {bound} words.",
    ),
    "length_constraints:nth_paragraph_first_word": _offer(
        Scene.nth_paragraph,
        "Write {num_paragraphs} paragraphs with an empty line between them and only there; "
        'number {nth_paragraph} has to start with the word "{first_word}".',
        "Use empty lines to make {num_paragraphs} paragraphs and let the first word of paragraph {nth_paragraph} "
        'be "{first_word}".',
    ),
    "detectable_content:number_placeholders": _offer(
        lambda s: {"num_placeholders": s.draws.between(2, 6)},
        "Leave at least {num_placeholders} blanks to be filled in later and write each in square brackets like [date].",
        "Put {num_placeholders} or more fields in square brackets (for instance [place]) where details are missing.",
    ),
    "detectable_content:postscript": _offer(
        lambda s: {"postscript_marker": s.draws.choice(("P.S.", "P.P.S"))},
        'After the end comes a postscript; its mark is "{postscript_marker}".',
        'Do not forget an afterthought marked "{postscript_marker}".',
    ),
    "detectable_format:number_bullet_lists": _offer(
        lambda s: {"num_bullets": s.draws.between(2, 7)},
        "Have exactly {num_bullets} bullet points: lines that start with an asterisk and a space.",
        "There should be {num_bullets} bullet points in markdown (* like this) and no more.",
    ),
    "detectable_format:constrained_response": _fixed(
        "Choose one of these sentences and put it in: My answer is yes. My answer is no. My answer is maybe."
    ),
    "detectable_format:number_highlighted_sections": _offer(
        lambda s: {"num_highlights": s.draws.between(2, 5)},
        "Emphasise {num_highlights} or more phrases with single asterisks as in *this phrase*.",
        "Use markdown italics (*so*) for at least {num_highlights} passages.",
    ),
    "detectable_format:multiple_sections": _offer(
        lambda s: {"section_spliter": s.draws.choice(SECTION_MARKS), "num_sections": s.draws.between(2, 5)},
        "Structure it in {num_sections} parts and head them {section_spliter} 1 and {section_spliter} 2 and so on.",
        "There are to be {num_sections} parts and each begins with {section_spliter} X where X is its number.",
    ),
    "detectable_format:json_format": _fixed(
        "Return nothing but valid JSON; a code fence around it is fine.",
        "The reply is going to be parsed as JSON so there must be nothing outside of it.",
    ),
    "detectable_format:title": _fixed(
        "Give it a title between double angle brackets: <<like this>>.",
        "It needs a <<title>> in double angle brackets.",
    ),
    "combination:two_responses": _fixed(
        "Offer two different versions with a line of six asterisks (******) between them and nowhere else.",
        "I want to choose: write it twice in different ways and separate the two with ******.",
    ),
    "combination:repeat_prompt": _offer(
        lambda s: {"prompt_to_repeat": s.request},
        "Before anything else copy the first sentence of this message word for word; your own text follows it.",
        "Start with my first sentence exactly as I wrote it and then go on with your reply.",
    ),
    "startend:end_checker": _offer(
        lambda s: {"end_phrase": s.draws.choice(ENDINGS)},
        'Finish with the words "{end_phrase}" and write nothing after them.',
        'The sentence "{end_phrase}" has to be the very last one.',
    ),
    "startend:quotation": _fixed(
        'Quote the entire reply: it opens with " and it closes with ".',
        'Your reply must open and close with a double quotation mark (").',
    ),
    "change_case:capital_word_frequency": _offer(
        lambda s: s.bound((2, 8), (3, 8), "capital_", "capital_frequency"),
        "Have {bound} words in CAPITAL letters.",
        "The number of words that are all capitals should be {bound}.",
    ),
    "change_case:english_capital": _fixed(
        "Use English and nothing but capital letters.", "SHOUT: every letter of your English reply has to be a capital."
    ),
    "change_case:english_lowercase": _fixed(
        "Use English and not a single capital letter.", "all of it in small letters please and in English."
    ),
    "punctuation:no_comma": _fixed("Do without commas.", "Not one comma is allowed."),
}


def _names(*endings: str) -> frozenset[str]:
    return frozenset(name for name in OFFERS if name.partition(":")[2] in endings)


_DIVIDED = _names("number_paragraphs", "nth_paragraph_first_word", "two_responses")
AGAINST: dict[str, frozenset[str]] = {
    "detectable_format:json_format": _DIVIDED
    | _names("quotation", "repeat_prompt", "number_bullet_lists", "multiple_sections", "postscript", "end_checker")
    | _names("constrained_response", "response_language"),
    "language:response_language": _names("existence", "frequency", "forbidden_words", "letter_frequency")
    | _names("nth_paragraph_first_word", "number_placeholders", "number_sentences", "number_words", "postscript")
    | _names("multiple_sections", "repeat_prompt", "end_checker", "constrained_response", "capital_word_frequency")
    | _names("english_capital", "english_lowercase"),
    "change_case:english_capital": _names("english_lowercase", "capital_word_frequency", "letter_frequency")
    | _names("multiple_sections", "constrained_response"),
    "change_case:english_lowercase": _names("capital_word_frequency", "multiple_sections", "constrained_response"),
    "combination:repeat_prompt": _names("quotation", "nth_paragraph_first_word"),
    "combination:two_responses": _names("number_paragraphs", "nth_paragraph_first_word", "constrained_response"),
    "length_constraints:number_paragraphs": _names("nth_paragraph_first_word"),
    "detectable_format:constrained_response": _DIVIDED | _names("number_words", "multiple_sections"),
}


def are_compatible(one: str, other: str) -> bool:
    """Whether two instructions can stand in one prompt."""
    return one != other and one not in AGAINST.get(other, ()) and other not in AGAINST.get(one, ())


def make_prompt(index: int) -> Row:
    """The row of a number, always the same.

    >>> make_prompt(7) == make_prompt(7)
    True
    """
    draws = Draws("ifeval", index)
    names = [draws.choice([*OFFERS])]
    for _ in range(draws.below(3)):
        names.append(draws.choice([name for name in OFFERS if all(are_compatible(name, n) for n in names)]))
    is_question = "detectable_format:constrained_response" in names
    topic = draws.choice([*TOPICS])
    request = draws.choice(QUESTIONS if is_question else REQUESTS).format(topic)
    scene = Scene(draws=draws, request=request, words=[*TOPICS[topic]])
    arguments = [OFFERS[name].draw(scene) for name in names]
    wordings = [
        draws.choice(OFFERS[name].wordings).format(**_shown(given))
        for name, given in zip(names, arguments, strict=True)
    ]
    return {
        "id": f"generated-{index}",
        "prompt": " ".join((request, *wordings)),
        "instruction_id_list": names,
        "kwargs": arguments,
    }


def _shown(arguments: Arguments) -> dict[str, object]:
    """Arguments as they are read in a sentence."""
    shown: dict[str, object] = {**arguments}
    for name, value in arguments.items():
        if isinstance(value, list):
            shown["words"] = " and ".join(f'"{word}"' for word in value)
        elif name == "language":
            shown[name] = PHRASES[value].language
        elif name.endswith("relation"):
            [number] = (other for other in arguments.values() if isinstance(other, int))
            shown["bound"] = f"{'at least' if value == 'at least' else 'fewer than'} {number}"
    return shown
