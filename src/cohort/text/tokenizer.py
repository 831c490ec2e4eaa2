"""Tokenizers: text to tokens and back, and conversations to prompts, without transformers and torch.

Tokens are those of transformers' apply_chat_template, with one difference: the spelling of a special token in row,
user, system or tool text stays text. Assistant text may contain markup ("<think>"), but cannot end its own turn.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from cohort.errors import ModelError, TaskError
from cohort.text.folder import SURROGATE, as_list, get_spelling, read_object, read_templates
from cohort.text.markup import (
    Markup,
    build_renamed_tokenizer,
    find_unused_characters,
    list_strings,
    map_strings,
    read_added_tokens,
)
from cohort.text.plain import join_contents
from cohort.text.template import FROM_FILE, FROM_MODEL, ChatTemplate, TemplateDescription
from cohort.types import Message, Provenance

# The names under which tokenizer_config.json gives special tokens, and by which templates ask for them.
SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedPrompt:
    """A conversation as the tokens of a prompt, which the assistant's completion follows."""

    tokens: list[int]
    provenance: list[int]  # PROMPT or FORCED, one per token
    forced_text: str = ""  # the assistant message to be continued; "" if there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardedConversation:
    """A conversation whose texts have names with `guard` in place of spellings of special tokens.

    `mark` renames the tokens that are meant, and the two `tags` are for finding places in the rendered text. None of
    these four characters occurs in any text of the conversation or the template.
    """

    template: ChatTemplate
    messages: list[Message]
    tools: list[Any] | None
    mark: str
    guard: str
    tags: tuple[str, str]
    has_half_character: bool  # whether a message has a lone surrogate


class Tokenizer:
    """The vocabulary of a model with its chat templates and stop tokens.

    `spec` is the content of tokenizer.json, `roles` the spellings of special tokens by role, `templates` the sources of
    chat templates by name, and `stop_ids` the tokens that end a turn besides eos. `date` is the day, as YYYY-MM-DD,
    that templates see as today; "" = the real one. `origin` says where the templates come from.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        roles: dict[str, str],
        templates: dict[str, str],
        stop_ids: set[int],
        date: str = "",
        origin: TemplateDescription = FROM_MODEL,
    ):
        self._spec = spec
        self._markup = Markup(read_added_tokens(spec))
        self._cores: dict[str, tokenizers.Tokenizer] = {}  # by the mark with which the added tokens are renamed
        self._roles = roles
        self._templates = {name: ChatTemplate(source, roles, date, origin) for name, source in templates.items()}
        core = self._get_core(find_unused_characters(1, [])[0])
        self.vocab_size: int = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(t.id for t in self._markup.tokens if t.special)
        known = {t.spelling: t.id for t in self._markup.tokens}
        eos = roles.get("eos_token", "")
        self.eos_id: int | None = known.get(eos, core.token_to_id(eos))
        stops = stop_ids | ({self.eos_id} if self.eos_id is not None else set())
        self.stop_ids: tuple[int, ...] = tuple(sorted(i for i in stops if i < self.vocab_size))

    @classmethod
    def load(cls, folder: str | Path, date: str = "", template: str = "") -> Tokenizer:
        """Returns the tokenizer of a model folder, with its chat templates and stop tokens. `date` is as in the class.

        `template` is the source of a chat template to use in place of the model's own; "" = the model's own.
        Stop tokens are `eos_token` and each `eos_token_id` in config.json and generation_config.json. Raises ModelError
        if there is no usable tokenizer.json, if another JSON file is damaged, or if a template is not valid.
        """
        folder = Path(folder)
        spec = read_object(folder / "tokenizer.json")
        if not isinstance(spec.get("model"), dict):
            raise ModelError(
                f"{folder} has no usable tokenizer.json; use a model that has one, or write it with transformers: "
                f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(folder)!r})"
            )
        settings = read_object(folder / "special_tokens_map.json") | read_object(folder / "tokenizer_config.json")
        roles = {role: text for role in SPECIAL_TOKEN_ROLES if (text := get_spelling(settings.get(role)))}
        stops: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            ids = read_object(folder / name).get("eos_token_id")
            # bool is a subclass of int.
            stops |= {i for i in as_list(ids) if type(i) is int and i >= 0}
        try:
            templates = {"default": template} if template else read_templates(folder, settings)
            origin = FROM_FILE if template else FROM_MODEL
            return cls(spec, roles=roles, templates=templates, stop_ids=stops, date=date, origin=origin)
        except ModelError as e:
            raise ModelError(str(e) if template else f"{folder}: {e}") from e

    def encode(self, text: str, *, markup: bool = False) -> list[int]:
        """Returns the token ids of a text. The spelling of a special token in it is encoded as ordinary text.

        No beginning-of-sequence token is added. With `markup` the text is an assistant's: spellings of added tokens
        such as "<think>" become these tokens, except those that frame turns, such as "<|im_end|>".
        """
        mark = find_unused_characters(1, [text])[0]
        written = self._markup.mark_tokens(text, mark, only=self._assistant_ids) if markup else text
        return self._encode_text(written, mark).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Returns the text of token ids, with incomplete characters as U+FFFD.

        Special tokens are left out; with skip_special=False they are spelled, as in "<|im_end|>". Added tokens that are
        not special, such as "<think>" in many vocabularies, are always spelled. Ids that are no tokens have no text.
        """
        mark, ids = find_unused_characters(1, [])[0], list(ids)
        try:
            text = self._get_core(mark).decode(ids, skip_special_tokens=skip_special)
        # Ids below 0, or of more than 32 bits. They are no tokens, like other ids outside the vocabulary.
        except OverflowError:
            ids = [i for i in ids if 0 <= i < self.vocab_size]
            text = self._get_core(mark).decode(ids, skip_special_tokens=skip_special)
        if mark not in text:
            return text
        spelled = {t.id for t in self._markup.tokens if not (skip_special and t.special)}
        # Every spelled token has two marks. More of them mean that the model itself wrote that character.
        if text.count(mark) != 2 * sum(i in spelled for i in ids):
            mark = find_unused_characters(1, [text])[0]
            text = self._get_core(mark).decode(ids, skip_special_tokens=skip_special)
        return self._markup.restore_spellings(text, mark)

    def spell(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids with every special token spelled, as `decode` with skip_special=False does."""
        return self.decode(ids, skip_special=False)

    def get_token_id(self, spelling: str) -> int:
        """Returns the id of an added token, special or not, such as "<think>". Ordinary tokens are not searched.

        Raises ModelError if there is none with that spelling.
        """
        for token in self._markup.tokens:
            if token.spelling == spelling:
                return token.id
        raise ModelError(f'the model\'s tokenizer has no added token "{spelling}"; use a model that has it')

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> RenderedPrompt:
        """Returns the prompt for the assistant's next turn, as tokens that the chat template gives.

        The model continues a final assistant message: the tokens of that message are FORCED, all others PROMPT.
        Spellings of special tokens in messages stay text; only an assistant's content may contain markup such as
        "<think>". `tools` are JSON descriptions of functions that the model may call. Raises TaskError for messages
        that are no prompt, and ModelError if the model has no template or its template cannot render them.
        """
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise TaskError(
                "the prompt is not a list of one or more messages, each a dict with a string as its role; "
                "correct the task's method `prompt`"
            )
        chat = self.guard_chat(messages, tools)
        is_forced = chat.messages[-1]["role"] == "assistant"
        history = chat.messages[:-1] if is_forced else chat.messages
        head = chat.template.render(history, chat.tools, generation_prompt=True)
        tail = ""
        if is_forced:
            head, tail = _split_continued(chat.template, history, chat.messages[-1], chat.tools, head, chat.tags[0])
        tokens, pieces = self.encode_pieces(chat, [head, tail])
        provenance = [int(Provenance.FORCED if piece else Provenance.PROMPT) for piece in pieces]
        forced_text = str(messages[-1].get("content") or "") if is_forced else ""
        return RenderedPrompt(tokens=tokens, provenance=provenance, forced_text=forced_text)

    def guard_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> GuardedConversation:
        """Returns a conversation in which no spelling of a special token can become that token, with its template.

        Only an assistant's content may contain markup such as "<think>". Raises ModelError if there is no template.
        """
        template = self._choose_template(with_tools=bool(tools))
        texts = [template.source, *list_strings(list(messages)), *list_strings(tools)]
        mark, guard, *tags = find_unused_characters(4, texts)
        return GuardedConversation(
            template=template,
            messages=[self._guard_message(m, guard) for m in messages],
            tools=None if tools is None else map_strings(list(tools), lambda s: self._markup.mark_tokens(s, guard)),
            mark=mark,
            guard=guard,
            tags=(tags[0], tags[1]),
            has_half_character=any(map(SURROGATE.search, texts[1:])),
        )

    def encode_pieces(self, chat: GuardedConversation, pieces: Sequence[str]) -> tuple[list[int], list[int]]:
        """Returns the tokens of a text that the template of `chat` wrote, and for each the piece that it belongs to.

        The text is given in `pieces`. A token that reaches across a border belongs to the later piece. Raises
        ModelError if the template writes half of a character, TaskError if a message has one.
        """
        # Spellings that are left in the text are the template's: they become tokens. Then the guarded ones come back.
        written = [self._markup.restore_spellings(self._markup.mark_tokens(p, chat.mark), chat.guard) for p in pieces]
        text = "".join(written)
        if SURROGATE.search(text) and not chat.has_half_character:
            raise ModelError(
                f"{chat.template.origin.subject} writes half of a character (a lone surrogate), which has no tokens; "
                f"{chat.template.origin.remedy}"
            )
        encoding = self._encode_text(text, chat.mark)
        ends = list(accumulate(map(len, written)))
        return encoding.ids, [bisect_left(ends, end) for _, end in encoding.offsets]

    def find_stop(self, text: str) -> tuple[int, int] | None:
        """Returns where the first stop token that is spelled in `text` begins and ends; None if there is none."""
        spellings = [t.spelling for t in self._markup.tokens if t.id in self.stop_ids and t.spelling in text]
        first = min(spellings, key=text.index, default="")
        return (text.index(first), text.index(first) + len(first)) if first else None

    def render_text(self, messages: Sequence[Message]) -> RenderedPrompt:
        """Returns the prompt without a chat template: the contents of the messages as tokens, separated by blank lines.

        A beginning-of-sequence token comes first if the tokenizer puts one before texts. The tokens of a final
        assistant message are FORCED, all others PROMPT. Only there does markup such as "<think>" become special tokens.
        `messages` must not be empty. Raises TaskError if a content is not text.
        """
        text = join_contents(messages)
        forced = str(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else ""
        mark = find_unused_characters(1, [text])[0]
        forced_start = len(text) - len(forced)
        written = text[:forced_start] + self._markup.mark_tokens(forced, mark, only=self._assistant_ids)
        encoding = self._encode_text(written, mark)
        content = [int(Provenance.FORCED if end > forced_start else Provenance.PROMPT) for _, end in encoding.offsets]
        opening = self.opening_ids
        provenance = [int(Provenance.PROMPT)] * len(opening) + content
        return RenderedPrompt(tokens=[*opening, *encoding.ids], provenance=provenance, forced_text=forced)

    def encode_follow_up(self, words: str) -> list[int]:
        """Returns the token ids of a user's turn with the text `words`, which follows an assistant's turn.

        The tokens and what is raised are those of `encode_replies`.
        """
        return self.encode_replies([{"role": "user", "content": words}])

    def encode_replies(self, replies: Sequence[Message], with_tools: bool = False) -> list[int]:
        """Returns the token ids of messages, of users or tools, that follow an assistant's turn.

        They begin with the end token of the assistant's turn and end with the header of its next turn. The assistant's
        own tokens are not among them. `with_tools` = the conversation offers tools. Raises ModelError if there is no
        chat template, if it drops earlier turns of the assistant, or if it ends them without a stop token.
        """
        # A conversation with `tag` as the assistant's message is rendered, and the text after the tag is encoded.
        template = self._choose_template(with_tools=with_tools)
        mark, guard, tag = find_unused_characters(3, [template.source, *list_strings(list(replies))])
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": tag}]
        asked = [self._guard_message(reply, guard) for reply in replies]
        text = template.render([*turns, *asked], None, generation_prompt=True)
        _, tag_found, rest = text.partition(tag)
        if not tag_found:
            raise ModelError(
                f"{template.origin.subject} drops earlier turns of the assistant, so that no second turn can follow; "
                f"set --turns single or {template.origin.other}"
            )
        rest = rest.lstrip()
        if not any(t.id in self.stop_ids and rest.startswith(t.spelling) for t in self._markup.tokens):
            raise ModelError(
                f"{template.origin.subject} ends the assistant's turn without a stop token, so that no second turn can "
                f"follow; set --turns single or {template.origin.other}"
            )
        rest = self._markup.restore_spellings(self._markup.mark_tokens(rest, mark), guard)
        return self._encode_text(rest, mark).ids

    @cached_property
    def opening_ids(self) -> list[int]:
        """Ids of the tokens that the tokenizer puts before every text: a beginning-of-sequence token, or none."""
        # The same text is encoded without and with special tokens; the opening is what comes before it.
        whole = tokenizers.Tokenizer.from_str(json.dumps(self._spec))
        alone, framed = (whole.encode("x", add_special_tokens=special).ids for special in (False, True))
        return framed[: next((i for i in range(len(framed)) if framed[i : i + len(alone)] == alone), 0)]

    @cached_property
    def end_of_turn(self) -> int:
        """Id of the stop token that the chat template writes first after an assistant message.

        It is eos if the template writes none or there is no template. Raises ModelError if there is no eos either.
        """
        tag = find_unused_characters(1, [])[0]
        if self._templates:
            turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": tag}]
            rest = (
                self._choose_template(with_tools=False).render(turn, None, generation_prompt=False).rpartition(tag)[2]
            )
            ends = [t for t in self._markup.tokens if t.id in self.stop_ids and t.spelling in rest]
            if ends:
                return min(ends, key=lambda t: rest.index(t.spelling)).id
        if self.eos_id is None:
            raise ModelError(
                "the tokenizer has no end-of-sequence token; set eos_token in the model's tokenizer_config.json to a "
                "token of its vocabulary"
            )
        return self.eos_id

    @cached_property
    def _assistant_ids(self) -> frozenset[int]:
        """Ids of the added tokens that an assistant may write: all except stop tokens, special tokens with a role, and
        the tokens that the template writes around a user's message."""
        frame = {t.id for t in self._markup.tokens if t.spelling in self._roles.values()} | set(self.stop_ids)
        if self._templates:
            alone = [{"role": "user", "content": "x"}]
            frame |= self._markup.find_ids(
                self._choose_template(with_tools=False).render(alone, None, generation_prompt=False)
            )
        return frozenset(t.id for t in self._markup.tokens if t.id not in frame)

    @cached_property
    def _frame_ids(self) -> frozenset[int]:
        """Ids of the added tokens that an assistant may not write, since they frame turns: all but `_assistant_ids`."""
        return frozenset(t.id for t in self._markup.tokens) - self._assistant_ids

    def _guard_message(self, message: Message, guard: str) -> Message:
        """Returns a copy of the message with spellings of added tokens replaced by names with `guard`: they stay text.

        In content and reasoning_content of an assistant message, which may contain markup, only tokens that frame turns
        are replaced.
        """
        written_keys = ("content", "reasoning_content") if message["role"] == "assistant" else ()

        def guard_all(text: str) -> str:
            """Replaces all added tokens."""
            return self._markup.mark_tokens(text, guard)

        def guard_frame(text: str) -> str:
            """Replaces the added tokens that frame turns."""
            return self._markup.mark_tokens(text, guard, only=self._frame_ids)

        return {
            key: map_strings(value, guard_frame if key in written_keys else guard_all) for key, value in message.items()
        }

    def get_template_source(self, *, with_tools: bool) -> str:
        """Returns the chat template for conversations with or without tools, as its source; "" if there is none."""
        return self._choose_template(with_tools=with_tools).source if self._templates else ""

    def _choose_template(self, *, with_tools: bool) -> ChatTemplate:
        """Returns the template "tool_use" for prompts with tools if there is one, otherwise "default".

        Raises ModelError if that template does not exist.
        """
        if not self._templates:
            raise ModelError(
                "the model has no chat template. Add --template text to give it prompts as plain text, --template "
                "FILE.jinja with a template, or use an instruct model"
            )
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise ModelError(
                f'the model has no chat template named "default", only {names}; add the file '
                "chat_template.jinja to its folder"
            )
        return self._templates[name]

    def _encode_text(self, text: str, mark: str) -> tokenizers.Encoding:
        """Returns the tokens of a text in which added tokens that are meant are named with `mark`, and nothing else.

        Raises TaskError for a text with half a character, which has no bytes and so no tokens.
        """
        if half := SURROGATE.search(text):
            raise TaskError(
                f"a text of the prompt has half of a character (a lone surrogate, \\u{ord(half[0]):x}), which has no "
                "tokens; remove it from the row, or in the task's method `prompt`"
            )
        return self._get_core(mark).encode(text, add_special_tokens=False)

    def _get_core(self, mark: str) -> tokenizers.Tokenizer:
        """Returns the `tokenizers` object whose added tokens are renamed with `mark`. It is built once per mark."""
        # The mark is nearly always the same, because texts seldom contain a private-use character.
        if mark not in self._cores:
            self._cores[mark] = build_renamed_tokenizer(self._spec, self._markup, mark)
        return self._cores[mark]


class RawTextRenderer:
    """A renderer of prompts as raw text, without a chat template. It takes the place of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> RenderedPrompt:
        """Returns the prompt as tokens, without a chat template; see `Tokenizer.render_text`.

        Raises TaskError if there are tools, or if a content is not text.
        """
        if tools:
            raise TaskError("the prompt has tools, which need a chat template; set --template chat")
        return self._tokenizer.render_text(messages)


class TextStream:
    """Text of tokens that arrive one by one. A character is given out when all of its bytes have arrived."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # The tokens of the last piece of text that was given out, then newer ones. The text of a token may depend on
        # its neighbours, so the last piece is kept for decoding; earlier tokens no longer matter.
        self._ids: list[int] = []
        self._num_given = 0  # tokens at the front whose text was given out

    def push(self, ids: Iterable[int]) -> str:
        """Adds token ids and returns all text that was not returned before.

        If its last character is incomplete, all of it is held back and "" is returned.
        """
        self._ids.extend(ids)
        text = self._decode_rest()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids, self._num_given = self._ids[self._num_given :], len(self._ids) - self._num_given
        return text

    def finish(self) -> str:
        """Returns the text that was held back, "" if none, with incomplete characters as U+FFFD.

        The stream is empty afterwards and can be used anew.
        """
        text = self._decode_rest()
        self._ids, self._num_given = [], 0
        return text

    def _decode_rest(self) -> str:
        """Returns the text of the tokens that was not given out by `push` yet."""
        before = self._tokenizer.decode(self._ids[: self._num_given], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(before) :]


def _split_continued(
    template: ChatTemplate, history: list[Message], forced: Message, tools: Any, head: str, tag: str
) -> tuple[str, str]:
    """Returns two texts: the prompt before the assistant message `forced`, and that message with its turn left open.

    If the template trims messages and has no header for the assistant's turn, the message is trimmed. `head` is
    `history` rendered with that header; `tag` is a character that occurs nowhere. Raises TaskError for a message that
    is not text or has tool calls, and ModelError for a template that drops it.
    """
    content = forced.get("content") or ""
    if not isinstance(content, str) or forced.get("tool_calls"):
        raise TaskError(
            "the prompt ends with an assistant message that has tool calls or a content that is not text, so the model "
            "cannot continue it; remove or correct that message in the task's method `prompt`"
        )
    # A template with a header for the assistant's turn gets the message verbatim after the header. Rendering the
    # message is avoided there, because some templates add an empty thought to a finished message.
    if head != template.render(history, tools, generation_prompt=False):
        return head, content
    # A template without a header renders the message with a tag at its end, and the turn is cut off at the tag.
    full = template.render([*history, forced | {"content": f"{content}{tag} "}], tools, generation_prompt=False)
    before, tag_found, after = full.rpartition(tag)
    if not tag_found:
        raise ModelError(
            f"{template.origin.subject} drops a final assistant message, so that the model cannot continue it; "
            f"leave that message out of the prompt, or {template.origin.other}"
        )
    # The space after the tag shows whether the template trims messages; if so, this message is trimmed too.
    before = before if after.startswith(" ") else before.rstrip()
    split = len(head) if before.startswith(head) else len(before) - len(content)
    return before[:split], before[split:]
