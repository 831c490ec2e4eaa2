"""Values of settings: conversion of texts and of Python values to the type of a setting, and their place in a record.

A value is converted as a whole and put into its field. It is never part of a command line again, so a text that looks
like a flag stays a text.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from cohort.user_code import report_errors

T = TypeVar("T")


class WrongTypeError(ValueError):
    """A value does not have the type of its setting. The caller knows the setting and writes the message."""


def describe_type(hint: Any) -> str:
    """Returns a type in words, for messages. A type that is none of the usual ones is given by its Python name.

    >>> describe_type(int), describe_type(Literal["a", "b"]), describe_type(tuple[str, ...])
    ('a whole number', 'one of a, b', 'text (several, separated by spaces)')
    """
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in inner)
    if origin is tuple and inner[-1] is not ...:
        return f"{len(inner)} values ({', '.join(describe_type(t) for t in inner)})"
    if takes_many(hint):
        return f"{describe_type(_get_item_type(hint))} (several, separated by spaces)"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(t) for t in inner)
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def takes_many(hint: Any) -> bool:
    """Returns whether a setting of this type may have several values: a tuple, of any form, or a list."""
    return hint in (tuple, list) or get_origin(hint) in (tuple, list)


def parse_texts(texts: Sequence[str], hint: Any) -> Any:
    """Returns the texts of a flag as a value of the type `hint`. Raises WrongTypeError if they do not have that type.

    "true" and "false" in any case are truth values. "None" is None where the type allows it.

    >>> parse_texts(["2"], float), parse_texts(["a", "b"], tuple[str, ...]), parse_texts(["None"], int | None)
    (2.0, ('a', 'b'), None)
    """
    if takes_many(hint):
        item_types = _list_item_types(hint, len(texts))
        items = [parse_texts([text], t) for text, t in zip(texts, item_types, strict=True)]
        return items if list in (hint, get_origin(hint)) else tuple(items)
    if len(texts) != 1:
        raise WrongTypeError
    text = texts[0]
    origin = get_origin(hint)
    if origin is Literal:
        for choice in get_args(hint):
            if str(choice) == text:
                return choice
    elif origin in (Union, types.UnionType):
        return _parse_option(texts, get_args(hint))
    elif hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    elif hint is type(None) and text == "None":
        return None
    elif hint is str:
        return text
    elif hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise WrongTypeError from None
    raise WrongTypeError


def _parse_option(texts: Sequence[str], options: Sequence[Any]) -> Any:
    """Returns the texts of a flag as a value of the first of the types `options` that they have; None goes first."""
    for option in sorted(options, key=lambda option: option is not type(None)):
        try:
            return parse_texts(texts, option)
        except WrongTypeError:
            continue
    raise WrongTypeError


def convert_value(value: Any, hint: Any) -> Any:
    """Returns a Python value as the type `hint`. Raises WrongTypeError if it does not have that type.

    A whole number is a number too. A text is read as on the command line where the type is not a text: "5" is a whole
    number. Numbers of numpy and paths count as plain numbers and texts. One value is enough where several may stand.

    >>> convert_value(["a"], tuple[str, ...]), convert_value(2, float), convert_value("2", int)
    (('a',), 2.0, 2)
    """
    origin = get_origin(hint)
    if takes_many(hint):
        values = list(value) if isinstance(value, tuple | list) else [value]
        items = [convert_value(v, t) for v, t in zip(values, _list_item_types(hint, len(values)), strict=True)]
        return items if list in (hint, origin) else tuple(items)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return parse_texts([value], hint)
    if origin in (Union, types.UnionType):
        for option in get_args(hint):
            try:
                return convert_value(value, option)
            except WrongTypeError:
                continue
    elif (origin is Literal and any(value is choice or value == choice for choice in get_args(hint))) or (
        hint in (bool, type(None)) and isinstance(value, hint)
    ):
        return value
    # To Python True is a number. numpy's truth values are none anyway.
    elif isinstance(value, bool):
        raise WrongTypeError
    elif hint is int and isinstance(value, numbers.Integral):
        return int(value)
    elif hint is float and isinstance(value, numbers.Real):
        try:
            return float(value)
        # A whole number of more than 308 digits is too large for a float.
        except OverflowError:
            raise WrongTypeError from None
    raise WrongTypeError


def _get_item_type(hint: Any) -> Any:
    """Returns the type of the items of a tuple or list type; str if the type does not say."""
    return (get_args(hint) or (str,))[0]


def _list_item_types(hint: Any, count: int) -> list[Any]:
    """Returns the types of `count` items of a tuple or list type. Raises WrongTypeError if it has another number."""
    inner = get_args(hint)
    if get_origin(hint) is tuple and inner[-1] is not ...:
        if len(inner) != count:
            raise WrongTypeError
        return list(inner)
    return [_get_item_type(hint)] * count


def replace_settings(record: T, changes: Mapping[str, Any]) -> T:
    """Returns a copy of a dataclass instance with the values of `changes`, by full name such as `algo.kl.weight`.

    The last part of a name may be the key of a dict. Each record is made once, with all its changes, because a record
    may refuse a part of them. Names must exist.
    """
    inner: dict[str, dict[str, Any]] = {}
    new: dict[str, Any] = {}
    for name, value in changes.items():
        first, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
        else:
            new[first] = value
    for first, deeper in inner.items():
        owner = getattr(record, first)
        new[first] = owner | deeper if isinstance(owner, dict) else replace_settings(owner, deeper)
    # The task of a user may refuse values by raising what it likes.
    with report_errors(f"the class {type(record).__name__}, made with these settings,", type(record)):
        return typing.cast(T, dataclasses.replace(typing.cast(Any, record), **new)) if new else record
