"""A Jinja sandbox for programs of unknown origin: it also bounds the steps, the time and the memory of a template.

Every statement, comparison, call, filter and test counts as a step. Every text and list that the template makes counts
with its size, before or as it is made. A list counts with all that is in it, so that lists of lists of lists, each
twice the same, cannot grow unseen.
"""

from __future__ import annotations

import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MAX_SOURCE = 2**18
"""Characters that a template may have. Those of known models have at most 30,000."""
MAX_STEPS = 10**7
MAX_SECONDS = 10.0
"""Seconds of processor time that one rendering may take. A long conversation takes a hundredth of a second."""
MAX_SIZE = 2**26
"""Characters that one rendering may make, besides `SIZE_PER_INPUT` for each character of the conversation."""
SIZE_PER_INPUT = 64
ITEM_SIZE = 16
"""What an item of a list or dict counts, in characters, besides its own size."""
MAX_BITS = 2**14
"""Bits of a whole number."""
MAX_PRECISION = 1000
"""Digits that `round` and formats may be asked for, and spaces that JSON may be indented by."""

_STEPS_PER_LOOK = 128  # steps between two looks at the clock
# These may take time that grows with the square of the text, and no template needs them.
_UNSAFE_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_CODECS = ("utf-8", "utf8", "ascii", "latin-1", "utf-16", "utf-32")
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)|:[^{}]*\d{4,}[^{}]*\}")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template takes more steps, time or memory than a chat template needs."""


class _RunningTotal(threading.local):
    """What the rendering in this thread has used so far, and what it may use."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begins a new rendering."""
        self.steps = 0
        self.size = 0
        self.limit = MAX_SIZE
        self.deadline = time.thread_time() + MAX_SECONDS
        # Sizes of lists and dicts by id, with the object itself, so that no other object gets its id.
        self.known: dict[int, tuple[object, int]] = {}


class _StepCounter(jinja2.compiler.CodeGenerator):
    """Jinja's compiler, which here also writes the calls that count steps and sizes."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        """Writes a block of statements. The block and each of its statements count as a step."""
        self.writeline("environment.count_step()")
        for node in nodes:
            self.writeline("environment.count_step()")
            super().blockvisit([node], frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        """Writes a comparison, which counts as a step."""
        # `count_step` returns None, so that the value is that of the comparison.
        self.write("(environment.count_step() or ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """Writes the operator ~, whose result counts with its size."""
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        """Writes a subscription. A slice is a copy, so it counts with its size."""
        is_slice = isinstance(node.arg, jinja2.nodes.Slice)
        self.write("environment.weigh(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        """Writes a list, which counts with its size."""
        self.write("environment.weigh(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        """Writes a dict, which counts with its size."""
        self.write("environment.weigh(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        """Writes a tuple, which counts with its size unless it is the target of an assignment."""
        self.write("environment.weigh(" if node.ctx == "load" else "")
        super().visit_Tuple(node, frame)
        self.write(")" if node.ctx == "load" else "")


class _Namespace(jinja2.utils.Namespace):
    """A namespace that shows none of its contents as text: they may name other namespaces, twice each."""

    def __repr__(self) -> str:
        return "<Namespace>"


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates raise TemplateLimitError where they take too many steps, seconds or characters.

    `start` must be called before a template is compiled and before each rendering. Some filters are left out, because
    their time grows with the square of the text: pprint, striptags, urlize, wordwrap, xmlattr; and so is `lipsum`.
    """

    code_generator_class = _StepCounter
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._make_text, **options)
        self._used = _RunningTotal()
        for name in _UNSAFE_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        for name, function in self.filters.items():
            self.add_filter(name, function)
        tests: Any = self.tests  # whose type in jinja2 names no callable
        for name, function in tests.items():
            tests[name] = self._count_test(function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a filter, or replaces one. It counts as a step, and its result with its size."""
        self.filters[name] = self._count_filter(name, function)

    def start(self, *given: Any) -> None:
        """Begins a new compilation or rendering in this thread. `given` are the values that the template gets."""
        self._used.start()
        self._used.limit += SIZE_PER_INPUT * sum(map(self._measure, given))

    def count_step(self) -> None:
        """Counts one step. Raises TemplateLimitError if it is one too many, or if the time is over."""
        used = self._used
        used.steps = steps = used.steps + 1
        if steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        if steps % _STEPS_PER_LOOK == 0 and time.thread_time() > used.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def reserve(self, size: int) -> None:
        """Raises TemplateLimitError if a value of this size would be one too many. Does not count it."""
        used = self._used
        if used.size + size > used.limit:
            raise TemplateLimitError(f"it makes texts and lists of more than {used.limit} characters")

    def weigh(self, value: Any) -> Any:
        """Counts a new value with its size and returns it. One that was counted before counts nothing."""
        if type(value) is str or id(value) not in self._used.known:
            size = self._measure(value)
            self.reserve(size)
            self._used.size += size
        return value

    def _measure(self, value: Any) -> int:
        """Returns the size of a value in characters: about what it takes as text, shared parts as often as shown."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 8
        if not isinstance(value, list | tuple | dict):
            return ITEM_SIZE
        known = self._used.known.get(id(value))
        if known is None:
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known = (value, ITEM_SIZE * len(value) + sum(map(self._measure, parts)))
            self._used.known[id(value)] = known
        return known[1]

    def concat(self, pieces: Iterable[str]) -> str:
        """Returns the pieces as one text, whose size counts while the pieces come."""
        texts = []
        size = 0
        for piece in pieces:
            texts.append(piece)
            size += len(piece)
            self.reserve(size)
        self._used.size += size
        return "".join(texts)

    def _make_text(self, value: Any) -> str:
        """Returns a value as the text that `{{ value }}` writes. Jinja calls it for every such value."""
        return value if isinstance(value, str) else self.weigh(str(value))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Returns `left operator right`. What would be too large is refused before it is computed."""
        if operator == "%" and isinstance(left, str | bytes):
            self._check_format(left, [right])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(abs(right) * max(1, left.bit_length()))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
            elif isinstance(left, int):
                self.reserve(left * max(1, self._measure(right)))
            elif isinstance(right, int):
                self.reserve(right * max(1, self._measure(left)))
        return self.weigh(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method for a template. It counts as a step, and its result with its size."""
        self.count_step()
        if isinstance(obj, MethodType | BuiltinMethodType) and isinstance(obj.__self__, str | bytes | int):
            args = self._check_method(obj.__self__, obj.__name__, args, kwargs)
        return self.weigh(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns a safe form of the methods `format` and `format_map` of texts; None for anything else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            """Formats after a check of the sizes that are asked for."""
            # The width in "{:{}}" would be a value.
            if any("{" in (width or "") for _, _, width, _ in string.Formatter().parse(value.__self__)):
                raise TemplateLimitError("it formats with a width that is a value")
            self._check_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def _check_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Refuses a call of a method of a text or number whose result would be too large. Returns its arguments."""
        numbers = [abs(value) for value in (*args, *kwargs.values()) if isinstance(value, int)]
        if name in ("ljust", "rjust", "center", "zfill", "to_bytes"):
            self.reserve(max(numbers, default=0))
        elif name == "expandtabs":
            self.reserve(owner.count(b"\t" if isinstance(owner, bytes) else "\t") * max(numbers, default=8))
        elif name == "replace" and len(args) > 1:
            self._check_replace(owner, args[0], args[1])
        elif name == "join" and args:
            args = (list(args[0]), *args[1:])
            self.reserve(len(args[0]) * len(owner) + self._measure(args[0]))
        elif name == "translate" and args and isinstance(args[0], dict):
            self.reserve(len(owner) * max([1, *map(self._measure, args[0].values())]))
        elif name in ("encode", "decode") and str([*args, *kwargs.values(), "utf-8"][0]).lower() not in _CODECS:
            raise TemplateLimitError(f"it uses another encoding than {', '.join(_CODECS)}")
        return args

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        """Refuses the replacement of `old` by `new` in a text if the result would be too large."""
        if isinstance(text, str | bytes) and isinstance(old, type(text)) and isinstance(new, type(text)):
            self.reserve(text.count(old) * len(new))  # type: ignore[arg-type]  # both are of the text's type

    def _check_format(self, form: str | bytes, values: Sequence[Any]) -> None:
        """Refuses a format with values if the result would be too large: by a width, or by values used many times."""
        text = form.decode("latin-1") if isinstance(form, bytes) else form
        if _WIDE_FORMAT.search(text):
            raise TemplateLimitError(f"it formats with a width of more than {MAX_PRECISION} or with *")
        fields = text.count("%") + text.count("{")
        self.reserve(fields * (MAX_PRECISION + max([0, *map(self._measure, values)])))

    def _count_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a test of Jinja that counts as a step."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            """Counts a step and calls the test."""
            self.count_step()
            return function(*args, **kwargs)

        return counted

    def _count_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter of Jinja that counts as a step, and its result with its size."""
        # Some filters get the environment or context as their first argument.
        first = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            """Counts a step, refuses a result that would be too large, and calls the filter."""
            self.count_step()
            given = list(args)
            if name == "join" and len(given) > first and isinstance(given[first], Iterator):
                given[first] = list(given[first])
            self._check_filter(name, given[first:], kwargs)
            result = function(*given, **kwargs)
            return self._count_items(result) if isinstance(result, Iterator) else self.weigh(result)

        return counted

    def _check_filter(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Refuses a filter whose result would be too large. `args` begin with the value that is filtered."""

        def get(place: int, key: str, default: Any) -> Any:
            """Returns an argument by its place or name."""
            return args[place] if len(args) > place else kwargs.get(key, default)

        value = get(0, "value", "")
        if name == "center":
            self.reserve(_count(get(1, "width", 80)))
        elif name == "indent":
            self.reserve((str(value).count("\n") + 1) * _count(get(1, "width", 4)))
        elif name == "join":
            number = len(value) if isinstance(value, list | tuple | dict | str) else 1
            self.reserve(number * len(str(get(1, "d", ""))) + self._measure(value))
        elif name == "replace":
            self._check_replace(str(value), str(get(1, "old", "")), str(get(2, "new", "")))
        elif name == "format":
            self._check_format(str(value), [*args[1:], *kwargs.values()])
        elif name in ("batch", "slice"):
            self.reserve(ITEM_SIZE * _count(get(1, "linecount" if name == "batch" else "slices", 1)))
        elif name == "round" and _count(get(1, "precision", 0)) > MAX_PRECISION:
            raise TemplateLimitError(f"it rounds to more than {MAX_PRECISION} digits")
        elif name == "sum" and not isinstance(get(2, "start", 0), int | float):
            raise TemplateLimitError("it adds up what are not numbers")

    def _count_items(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yields the items. Each counts as a step, and with its size."""
        for item in items:
            self.count_step()
            self._used.size += ITEM_SIZE
            yield self.weigh(item)


def _count(value: Any) -> int:
    """Returns the absolute value of a whole number, the length of a text, and 0 for anything else."""
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _check_bits(bits: int) -> None:
    """Raises TemplateLimitError for a whole number of too many bits."""
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {MAX_BITS} bits")
