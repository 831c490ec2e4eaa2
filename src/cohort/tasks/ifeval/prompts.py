"""Generated prompts for training instruction following: a request with one to three instructions.

Each row depends only on its number. The instructions of a prompt can be followed together: `CONFLICTS` names the pairs
that cannot, or only by accident, and `instructions.gold` can write a text for every prompt. No request and no wording
is taken from IFEval: no prompt shares 30 characters with one of IFEval. (The sentences "My answer is ..." are not
wording: they are what is checked.)
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
# Each topic with words that belong to it. None of these words occurs in a request: a request that has to be repeated
# could otherwise contain a forbidden word.
TOPICS: dict[str, tuple[str, ...]] = {
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
# Letters of which a prompt asks for "at least" or for "less than" a number.
LETTERS, RARE_LETTERS = "bcdfghklmpuvwy", "jqxz"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptContext:
    """State that the instructions of one prompt share: random draws, the request, and words of its topic.

    Every word is used by one instruction only, so that no word is both required and forbidden.
    """

    draws: Draws
    request: str
    unused_words: list[str]

    def draw_word(self) -> str:
        """Removes a random word from `unused_words` and returns it. Raises IndexError if none is left."""
        return self.unused_words.pop(self.draws.below(len(self.unused_words)))

    def draw_bound(
        self, at_least_range: tuple[int, int], less_than_range: tuple[int, int], prefix: str, count_name: str
    ) -> Arguments:
        """Returns two random arguments: `<prefix>relation`, "at least" or "less than", and `count_name`, a count.

        The count is from the range that belongs to the relation, both ends included.
        """
        relation, limits = self.draws.choice((("at least", at_least_range), ("less than", less_than_range)))
        return {f"{prefix}relation": relation, count_name: self.draws.between(*limits)}

    def draw_letter_bound(self) -> Arguments:
        """Returns random arguments `letter`, `let_relation` and `let_frequency`: how often a letter occurs.

        The letter is a common one for "at least" and a rare one for "less than".
        """
        bound = self.draw_bound((4, 16), (2, 5), "let_", "let_frequency")
        return {"letter": self.draws.choice(LETTERS if bound["let_relation"] == "at least" else RARE_LETTERS)} | bound

    def draw_nth_paragraph(self) -> Arguments:
        """Returns random arguments of an instruction about the first word of one of several paragraphs.

        They are `num_paragraphs` (2 to 5), `nth_paragraph` (from 1) and `first_word`, which is taken out of
        `unused_words`.
        """
        number = self.draws.between(2, 5)
        place = self.draws.between(1, number)
        return {"num_paragraphs": number, "nth_paragraph": place, "first_word": self.draw_word()}


@dataclass(frozen=True, slots=True)
class InstructionTemplate:
    """A kind of instruction: how its arguments are drawn, and sentences that ask for it.

    The sentences are format strings; `_format_arguments` says which names they may use.
    """

    draw_arguments: Callable[[PromptContext], Arguments]
    wordings: tuple[str, ...]


def _make_template(draw_arguments: Callable[[PromptContext], Arguments], *wordings: str) -> InstructionTemplate:
    """Returns a template with these wordings. For every prompt, `draw_arguments` draws the instruction's arguments."""
    return InstructionTemplate(draw_arguments, wordings)


def _make_fixed_template(*wordings: str) -> InstructionTemplate:
    """Returns a template with these wordings of an instruction that takes no arguments."""
    return InstructionTemplate(lambda _: {}, wordings)


TEMPLATES: dict[str, InstructionTemplate] = {
    "keywords:existence": _make_template(
        lambda context: {"keywords": [context.draw_word(), context.draw_word()]},
        "Make sure that both {words} appear.",
        "Work {words} into the text.",
    ),
    "keywords:frequency": _make_template(
        lambda context: {"keyword": context.draw_word()} | context.draw_bound((2, 4), (2, 4), "", "frequency"),
        'The word "{keyword}" should turn up {bound} times.',
        'Use "{keyword}" {bound} times in total.',
    ),
    "keywords:forbidden_words": _make_template(
        lambda context: {"forbidden_words": [context.draw_word(), context.draw_word()]},
        "Leave out {words} completely.",
        "Neither of these words may be used: {words}.",
    ),
    "keywords:letter_frequency": _make_template(
        PromptContext.draw_letter_bound,
        "The letter {letter} must occur {bound} times.",
        "As for the letter {letter}: it is to occur {bound} times.",
    ),
    "language:response_language": _make_template(
        lambda context: {"language": context.draws.choice([*PHRASES])},
        "Reply in {language} and in no other language.",
        "The whole reply has to be in {language}.",
    ),
    "length_constraints:number_sentences": _make_template(
        lambda context: context.draw_bound((3, 10), (5, 12), "", "num_sentences"),
        "Write {bound} sentences.",
        "The number of sentences should be {bound}.",
    ),
    "length_constraints:number_paragraphs": _make_template(
        lambda context: {"num_paragraphs": context.draws.between(2, 5)},
        "Divide the text into exactly {num_paragraphs} paragraphs with a line of three asterisks (***) between them.",
        "I want {num_paragraphs} paragraphs and the divider *** between one and the next.",
    ),
    "length_constraints:number_words": _make_template(
        lambda context: context.draw_bound((40, 200), (80, 200), "", "num_words"),
        "Write {bound} words.",
        "The length should be {bound} words.",
    ),
    "length_constraints:nth_paragraph_first_word": _make_template(
        PromptContext.draw_nth_paragraph,
        "Write {num_paragraphs} paragraphs with an empty line between them and only there; "
        'number {nth_paragraph} has to start with the word "{first_word}".',
        "Use empty lines to make {num_paragraphs} paragraphs and let the first word of paragraph {nth_paragraph} "
        'be "{first_word}".',
    ),
    "detectable_content:number_placeholders": _make_template(
        lambda context: {"num_placeholders": context.draws.between(2, 6)},
        "Leave at least {num_placeholders} blanks to be filled in later and write each in square brackets like [date].",
        "Put {num_placeholders} or more fields in square brackets (for instance [place]) where details are missing.",
    ),
    "detectable_content:postscript": _make_template(
        lambda context: {"postscript_marker": context.draws.choice(("P.S.", "P.P.S"))},
        'After the end comes a postscript; its mark is "{postscript_marker}".',
        'Do not forget an afterthought marked "{postscript_marker}".',
    ),
    "detectable_format:number_bullet_lists": _make_template(
        lambda context: {"num_bullets": context.draws.between(2, 7)},
        "Have exactly {num_bullets} bullet points: lines that start with an asterisk and a space.",
        "There should be {num_bullets} bullet points in markdown (* like this) and no more.",
    ),
    "detectable_format:constrained_response": _make_fixed_template(
        "Choose one of these sentences and put it in: My answer is yes. My answer is no. My answer is maybe."
    ),
    "detectable_format:number_highlighted_sections": _make_template(
        lambda context: {"num_highlights": context.draws.between(2, 5)},
        "Emphasise {num_highlights} or more phrases with single asterisks as in *this phrase*.",
        "Use markdown italics (*so*) for at least {num_highlights} passages.",
    ),
    "detectable_format:multiple_sections": _make_template(
        lambda context: {
            "section_spliter": context.draws.choice(SECTION_MARKS),
            "num_sections": context.draws.between(2, 5),
        },
        "Structure it in {num_sections} parts and head them {section_spliter} 1 and {section_spliter} 2 and so on.",
        "There are to be {num_sections} parts and each begins with {section_spliter} X where X is its number.",
    ),
    "detectable_format:json_format": _make_fixed_template(
        "Return nothing but valid JSON; a code fence around it is fine.",
        "The reply is going to be parsed as JSON so there must be nothing outside of it.",
    ),
    "detectable_format:title": _make_fixed_template(
        "Give it a title between double angle brackets: <<like this>>.",
        "It needs a <<title>> in double angle brackets.",
    ),
    "combination:two_responses": _make_fixed_template(
        "Offer two different versions with a line of six asterisks (******) between them and nowhere else.",
        "I want to choose: write it twice in different ways and separate the two with ******.",
    ),
    "combination:repeat_prompt": _make_template(
        lambda context: {"prompt_to_repeat": context.request},
        "Before anything else copy the first sentence of this message word for word; your own text follows it.",
        "Start with my first sentence exactly as I wrote it and then go on with your reply.",
    ),
    "startend:end_checker": _make_template(
        lambda context: {"end_phrase": context.draws.choice(ENDINGS)},
        'Finish with the words "{end_phrase}" and write nothing after them.',
        'The sentence "{end_phrase}" has to be the very last one.',
    ),
    "startend:quotation": _make_fixed_template(
        'Quote the entire reply: it opens with " and it closes with ".',
        'Your reply must open and close with a double quotation mark (").',
    ),
    "change_case:capital_word_frequency": _make_template(
        lambda context: context.draw_bound((2, 8), (3, 8), "capital_", "capital_frequency"),
        "Have {bound} words in CAPITAL letters.",
        "The number of words that are all capitals should be {bound}.",
    ),
    "change_case:english_capital": _make_fixed_template(
        "Use English and nothing but capital letters.", "SHOUT: every letter of your English reply has to be a capital."
    ),
    "change_case:english_lowercase": _make_fixed_template(
        "Use English and not a single capital letter.", "all of it in small letters please and in English."
    ),
    "punctuation:no_comma": _make_fixed_template("Do without commas.", "Not one comma is allowed."),
}


def _find_names(*endings: str) -> frozenset[str]:
    """Returns the full names, as in "startend:quotation", of the instructions whose parts after the colon are given."""
    return frozenset(name for name in TEMPLATES if name.partition(":")[2] in endings)


_DIVIDED_TEXTS = _find_names("number_paragraphs", "nth_paragraph_first_word", "two_responses")
# Instructions that must not stand in one prompt with the key. A pair needs an entry under one of its two names only.
CONFLICTS: dict[str, frozenset[str]] = {
    "detectable_format:json_format": _DIVIDED_TEXTS
    | _find_names("quotation", "repeat_prompt", "number_bullet_lists", "multiple_sections", "postscript", "end_checker")
    | _find_names("constrained_response", "response_language"),
    "language:response_language": _find_names("existence", "frequency", "forbidden_words", "letter_frequency")
    | _find_names("nth_paragraph_first_word", "number_placeholders", "number_sentences", "number_words", "postscript")
    | _find_names("multiple_sections", "repeat_prompt", "end_checker", "constrained_response", "capital_word_frequency")
    | _find_names("english_capital", "english_lowercase"),
    "change_case:english_capital": _find_names("english_lowercase", "capital_word_frequency", "letter_frequency")
    | _find_names("multiple_sections", "constrained_response"),
    "change_case:english_lowercase": _find_names("capital_word_frequency", "multiple_sections", "constrained_response"),
    "combination:repeat_prompt": _find_names("quotation", "nth_paragraph_first_word"),
    "combination:two_responses": _find_names("number_paragraphs", "nth_paragraph_first_word", "constrained_response"),
    "length_constraints:number_paragraphs": _find_names("nth_paragraph_first_word"),
    "detectable_format:constrained_response": _DIVIDED_TEXTS | _find_names("number_words", "multiple_sections"),
}


def are_compatible(one: str, other: str) -> bool:
    """Returns whether two instructions, given by name, can stand in one prompt and be followed together.

    The table CONFLICTS decides: names that it does not pair are compatible. An instruction is not compatible with
    itself.
    """
    return one != other and one not in CONFLICTS.get(other, ()) and other not in CONFLICTS.get(one, ())


def generate_row(index: int) -> Row:
    """Returns generated training row number `index`: id, prompt, one to three instructions and their arguments.

    Equal numbers give equal rows. Different numbers may give equal prompts.

    >>> generate_row(7) == generate_row(7)
    True
    """
    # The order of the draws is part of the data: another order would give other prompts.
    draws = Draws("ifeval", index)
    names = [draws.choice([*TEMPLATES])]
    for _ in range(draws.below(3)):
        names.append(draws.choice([name for name in TEMPLATES if all(are_compatible(name, n) for n in names)]))
    is_question = "detectable_format:constrained_response" in names
    topic = draws.choice([*TOPICS])
    request = draws.choice(QUESTIONS if is_question else REQUESTS).format(topic)
    scene = PromptContext(draws=draws, request=request, unused_words=[*TOPICS[topic]])
    arguments = [TEMPLATES[name].draw_arguments(scene) for name in names]
    wordings = [
        draws.choice(TEMPLATES[name].wordings).format(**_format_arguments(kwargs))
        for name, kwargs in zip(names, arguments, strict=True)
    ]
    return {
        "id": f"generated-{index}",
        "prompt": " ".join((request, *wordings)),
        "instruction_id_list": names,
        "kwargs": arguments,
    }


def _format_arguments(arguments: Arguments) -> dict[str, object]:
    """Returns the values that the wordings of an instruction may use: its arguments and perhaps `words` and `bound`.

    `words` is a list argument as text, its words in quotation marks and joined by "and". `bound` is a relation and its
    count, as in "at least 3" or "fewer than 3". A language code is replaced by the name of the language.
    """
    texts: dict[str, object] = {**arguments}
    for name, value in arguments.items():
        if isinstance(value, list):
            texts["words"] = " and ".join(f'"{word}"' for word in value)
        elif name == "language":
            texts[name] = PHRASES[value].language
        elif name.endswith("relation"):
            [number] = (other for other in arguments.values() if isinstance(other, int))
            texts["bound"] = f"{'at least' if value == 'at least' else 'fewer than'} {number}"
    return texts
