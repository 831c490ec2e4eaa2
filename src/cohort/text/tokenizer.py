"""Text to tokens and back, and conversations to prompts. No transformers, no torch.

Tokens equal those of transformers' apply_chat_template, except that the spelling of a special token in row,
user, system or tool text stays text. Assistant text may hold markup ("<think>"), but not end its own turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from cohort.errors import ModelError, TaskError
from cohort.text.markup import Markup, added_tokens, mapped, renamed, strings, unused
from cohort.text.plain import plain_text
from cohort.text.template import ChatTemplate
from cohort.types import Message, Provenance

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as tokens, ready for the assistant's next word."""

    tokens: list[int]
    provenance: list[int]  # PROMPT or FORCED, one per token
    forced_text: str = ""  # the assistant message to be continued


class Tokenizer:
    """A model's vocabulary, its chat template and its stop tokens."""

    def __init__(self, spec: dict[str, Any], *, roles: dict[str, str], templates: dict[str, str], stop_ids: set[int]):
        self._spec = spec
        self._markup = Markup(added_tokens(spec))
        self._cores: dict[str, tokenizers.Tokenizer] = {}
        self._roles = roles
        self._templates = {name: ChatTemplate(source, roles) for name, source in templates.items()}
        core = self._core(unused(1, [])[0])
        self.vocab_size: int = max(core.get_vocab(with_added_tokens=True).values()) + 1
        self.special_ids: frozenset[int] = frozenset(t.id for t in self._markup.tokens if t.special)
        known = {t.spelling: t.id for t in self._markup.tokens}
        eos = roles.get("eos_token", "")
        self.eos_id: int | None = known.get(eos, core.token_to_id(eos))
        stops = stop_ids | ({self.eos_id} if self.eos_id is not None else set())
        self.stop_ids: tuple[int, ...] = tuple(sorted(i for i in stops if i < self.vocab_size))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, its settings and template, and the stop tokens of a model folder."""
        folder = Path(folder)
        spec = _json(folder / "tokenizer.json")
        if not isinstance(spec.get("model"), dict):
            raise ModelError(
                f"{folder} has no usable tokenizer.json: write one with transformers "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        roles = {role: text for role in ROLES if (text := _spelling(settings.get(role)))}
        stops: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            ids = _json(folder / name).get("eos_token_id")
            stops |= {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
        return cls(spec, roles=roles, templates=_templates(folder, settings), stop_ids=stops)

    def encode(self, text: str, *, markup: bool = False) -> list[int]:
        """Tokens of plain text: a special token's spelling stays text.

        With `markup` the text is an assistant's: added tokens are recognised, save those that frame turns.
        """
        mark = unused(1, [text])[0]
        written = self._markup.replace(text, mark, only=self._assistant_ids) if markup else text
        return self._core(mark).encode(written, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of tokens; special tokens are left out or spelled."""
        mark, ids = unused(1, [])[0], list(ids)
        text = self._core(mark).decode(ids, skip_special_tokens=skip_special)
        if mark not in text:
            return text
        spelled = {t.id for t in self._markup.tokens if not (skip_special and t.special)}
        if text.count(mark) != 2 * sum(i in spelled for i in ids):  # the model itself wrote that character
            mark = unused(1, [text])[0]
            text = self._core(mark).decode(ids, skip_special_tokens=skip_special)
        return self._markup.restore(text, mark)

    def spell(self, ids: Sequence[int]) -> str:
        """The text of tokens with every special token spelled: what exactly was asked."""
        return self.decode(ids, skip_special=False)

    def token_id(self, spelling: str) -> int:
        """The id of an added token, e.g. "<think>"."""
        for token in self._markup.tokens:
            if token.spelling == spelling:
                return token.id
        raise ModelError(f'the tokenizer has no special token "{spelling}"')

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """The prompt for the assistant's turn; a final assistant message is continued, its tokens FORCED."""
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise TaskError("a prompt is a non-empty list of messages, each a dict with a role")
        template = self._template(with_tools=bool(tools))
        mark, guard, tag = unused(3, [template.source, *strings(list(messages)), *strings(tools)])
        safe = [self._guarded(m, guard) for m in messages]
        safe_tools = None if tools is None else mapped(list(tools), lambda s: self._markup.replace(s, guard))
        history, forced = (safe[:-1], safe[-1]) if safe[-1]["role"] == "assistant" else (safe, None)
        head = template.render(history, safe_tools, generation_prompt=True)
        tail = ""
        if forced is not None:
            head, tail = _continued(template, history, forced, safe_tools, head, tag)
        head, tail = (self._markup.restore(self._markup.replace(part, mark), guard) for part in (head, tail))
        encoding = self._core(mark).encode(head + tail, add_special_tokens=False)
        provenance = [int(Provenance.FORCED if end > len(head) else Provenance.PROMPT) for _, end in encoding.offsets]
        forced_text = str(messages[-1].get("content") or "") if forced is not None else ""
        return Rendered(tokens=encoding.ids, provenance=provenance, forced_text=forced_text)

    def render_text(self, messages: Sequence[Message]) -> Rendered:
        """The same without a chat template: `plain_text`, after what the tokenizer begins every text with."""
        text = plain_text(messages)
        forced = str(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else ""
        mark, begin = unused(1, [text])[0], len(text) - len(forced)
        written = text[:begin] + self._markup.replace(forced, mark, only=self._assistant_ids)
        encoding = self._core(mark).encode(written, add_special_tokens=False)
        own = [int(Provenance.FORCED if end > begin else Provenance.PROMPT) for _, end in encoding.offsets]
        opening = self._opening
        provenance = [int(Provenance.PROMPT)] * len(opening) + own
        return Rendered(tokens=[*opening, *encoding.ids], provenance=provenance, forced_text=forced)

    def follow_up(self, words: str) -> list[int]:
        """The tokens from the end token of an assistant's turn, through a user's turn, to the assistant's next.

        What the assistant said is not rendered again: its tokens stay what they were.
        """
        template = self._template(with_tools=False)
        mark, guard, tag = unused(3, [template.source, words])
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": tag}]
        asked = self._guarded({"role": "user", "content": words}, guard)
        text = template.render([*turns, asked], None, generation_prompt=True)
        _, found, rest = text.partition(tag)
        if not found:
            raise ModelError("the chat template drops what the assistant said before: there can be no further turn")
        rest = rest.lstrip()
        if not any(t.id in self.stop_ids and rest.startswith(t.spelling) for t in self._markup.tokens):
            raise ModelError("the chat template does not end the assistant's turn: there can be no further turn")
        rest = self._markup.restore(self._markup.replace(rest, mark), guard)
        return self._core(mark).encode(rest, add_special_tokens=False).ids

    @cached_property
    def _opening(self) -> list[int]:
        """The tokens before a text: a beginning-of-sequence token, or none."""
        whole = tokenizers.Tokenizer.from_str(json.dumps(self._spec))
        alone, framed = (whole.encode("x", add_special_tokens=special).ids for special in (False, True))
        return framed[: next((i for i in range(len(framed)) if framed[i : i + len(alone)] == alone), 0)]

    @cached_property
    def end_of_turn(self) -> int:
        """The stop token the template writes after an assistant message: what SFT ends a target with."""
        tag = unused(1, [])[0]
        if self._templates:
            turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": tag}]
            rest = self._template(with_tools=False).render(turn, None, generation_prompt=False).rpartition(tag)[2]
            ends = [t for t in self._markup.tokens if t.id in self.stop_ids and t.spelling in rest]
            if ends:
                return min(ends, key=lambda t: rest.index(t.spelling)).id
        if self.eos_id is None:
            raise ModelError("the tokenizer names no end-of-sequence token: set eos_token in tokenizer_config.json")
        return self.eos_id

    @cached_property
    def _assistant_ids(self) -> frozenset[int]:
        """Added tokens an assistant may write: all but the stop tokens and those around a user's message."""
        frame = {t.id for t in self._markup.tokens if t.spelling in self._roles.values()} | set(self.stop_ids)
        if self._templates:
            alone = [{"role": "user", "content": "x"}]
            frame |= self._markup.ids(self._template(with_tools=False).render(alone, None, generation_prompt=False))
        return frozenset(t.id for t in self._markup.tokens if t.id not in frame)

    @cached_property
    def _frame_ids(self) -> frozenset[int]:
        return frozenset(t.id for t in self._markup.tokens) - self._assistant_ids

    def _guarded(self, message: Message, guard: str) -> Message:
        """The message with the spelling of special tokens put out of the tokenizer's reach."""
        own = ("content", "reasoning_content") if message["role"] == "assistant" else ()

        def guard_all(text: str) -> str:
            return self._markup.replace(text, guard)

        def guard_frame(text: str) -> str:
            return self._markup.replace(text, guard, only=self._frame_ids)

        return {key: mapped(value, guard_frame if key in own else guard_all) for key, value in message.items()}

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise ModelError("the model has no chat template: use an instruct model or add chat_template.jinja")
        named = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if named not in self._templates:
            raise ModelError(f"the model has no default chat template, only {', '.join(sorted(self._templates))}")
        return self._templates[named]

    def _core(self, mark: str) -> tokenizers.Tokenizer:
        """The tokenizer for text without the character `mark`; nearly always the same one."""
        if mark not in self._cores:
            self._cores[mark] = renamed(self._spec, self._markup, mark)
        return self._cores[mark]


class RawText:
    """A tokenizer whose prompts are raw text: no chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        if tools:
            raise TaskError("tools need a chat template: drop template = text")
        return self._tokenizer.render_text(messages)


class TextStream:
    """Text of tokens as they come: a character is given out when all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids: list[int] = []  # from the start of the window: earlier text no longer matters
        self._given = 0  # tokens of the window whose text was given out

    def push(self, ids: Iterable[int]) -> str:
        """The new text that is certain."""
        self._ids.extend(ids)
        text = self._rest()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text

    def finish(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        text = self._rest()
        self._ids, self._given = [], 0
        return text

    def _rest(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._given], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(before) :]


def _continued(
    template: ChatTemplate, history: list[Message], forced: Message, tools: Any, head: str, tag: str
) -> tuple[str, str]:
    """What comes before a final assistant message, and the message, its turn left open.

    A template with a header for the assistant's turn gets the message verbatim after it (one that fills in an
    empty thought before finished messages must not do so here); from one without, it is cut out of the turn.
    """
    content = forced.get("content") or ""
    if not isinstance(content, str) or forced.get("tool_calls"):
        raise TaskError("a final assistant message is continued: it must be plain text without tool calls")
    if head != template.render(history, tools, generation_prompt=False):
        return head, content
    full = template.render([*history, forced | {"content": f"{content}{tag} "}], tools, generation_prompt=False)
    before, found, after = full.rpartition(tag)
    if not found:
        raise ModelError("the chat template drops a final assistant message: it cannot be continued")
    before = before if after.startswith(" ") else before.rstrip()  # a template that trims would trim this too
    split = len(head) if before.startswith(head) else len(before) - len(content)
    return before[:split], before[split:]


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name. A file of its own wins over the settings."""
    if (folder / "chat_template.jinja").is_file():
        return {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    given = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    return {t["name"]: t["template"] for t in given or []}


def _spelling(token: Any) -> str:
    """A special token's text: a string, or a record with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{file} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value
