"""Assertions that are judged outside the sandbox: only calls of the program's functions run in it.

`assert abs(area(2) - 12.56) < 0.1` becomes the call area(2). The program gets the arguments, never what they are
compared with. Its result comes back as a plain value, and everything else is computed here: so an object that equals
everything, a changed `abs`, or an early exit gain nothing.

The parts of an assertion that are computed here are literals, operators, comparisons, indices, and the functions in
FUNCTIONS. What cannot be computed here is refused.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cohort.sandbox.driver import encode_value

MAX_SIZE = 1_000_000  # of a list or text that an assertion makes
MAX_BITS = 100_000  # of a number that an assertion computes


def _make_range(*arguments: int) -> range:
    """Returns range(*arguments). Raises ValueError if it is large."""
    found = range(*arguments)
    if len(found) > MAX_SIZE:
        raise ValueError("a range is too large")
    return found


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, complex, dict, divmod, enumerate, float, frozenset, int)},
    **{f.__name__: f for f in (len, list, max, min, ord, chr, reversed, round, set, sorted, str, sum, tuple, zip)},
    "range": _make_range,
    "isinstance": lambda value, kind: isinstance(value, kind),
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "fabs", "gcd", "isclose", "isinf", "isnan")},
    **{f"math.{name}": getattr(math, name) for name in ("sqrt", "cos", "sin", "tan", "log", "exp", "trunc")},
}
CONSTANTS: Mapping[str, Any] = {
    "math.pi": math.pi,
    "math.e": math.e,
    "math.inf": math.inf,
    "math.nan": math.nan,
    # For isinstance.
    **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)},
}
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow},
    **{ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
# What a computation with values of a program may raise. Then the assertion does not hold.
_ERRORS = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError, MemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assertion:
    """A condition, and the calls of the program's functions whose results it needs."""

    condition: ast.expr
    nodes: tuple[ast.Call, ...]  # the calls in the condition
    calls: tuple[dict[str, Any], ...]  # the same for the sandbox

    def holds(self, results: Sequence[Any]) -> bool:
        """Returns whether the condition is true, given the results of `calls` as plain values."""
        known = dict(zip(map(id, self.nodes), results, strict=True))
        try:
            return bool(_compute(self.condition, known))
        except _ERRORS:
            return False


@lru_cache(maxsize=4096)
def parse_assertion(text: str, functions: frozenset[str] = frozenset()) -> Assertion:
    """Returns an assert statement in the form in which it is judged outside the sandbox.

    `functions` are names that the program defines, even if Python has functions of that name. Any other name that is
    called and is not in FUNCTIONS is taken for one of the program. Raises ValueError, with the reason, for a statement
    that cannot be judged outside.
    """
    try:
        [statement] = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is not one statement of Python") from None
    if not isinstance(statement, ast.Assert):
        raise ValueError("it is not an assert statement")
    nodes = _find_calls(statement.test, functions)
    if not nodes:
        raise ValueError("it calls no function of the program")
    assertion = Assertion(
        condition=statement.test, nodes=tuple(nodes), calls=tuple(_make_call(node, functions) for node in nodes)
    )
    _check_computable(statement.test, set(map(id, nodes)))
    return assertion


def _name_of(node: ast.expr) -> str:
    """Returns a name or dotted name as text; "" if the expression is neither."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _name_of(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _find_calls(node: ast.AST, functions: frozenset[str]) -> list[ast.Call]:
    """Returns the calls of the program's functions in an expression, in order, without those in arguments of others."""
    if isinstance(node, ast.Call):
        name = _name_of(node.func)
        if name in functions or (name and name not in FUNCTIONS and not name.startswith("math.")):
            return [node]
    return [call for child in ast.iter_child_nodes(node) for call in _find_calls(child, functions)]


def _make_call(node: ast.Call, functions: frozenset[str]) -> dict[str, Any]:
    """Returns a call for the sandbox. Raises ValueError if its arguments cannot be computed here."""
    if any(_find_calls(part, functions) for part in (*node.args, *(keyword.value for keyword in node.keywords))):
        raise ValueError("the result of one call is the argument of another")
    try:
        arguments = [encode_value(_compute(argument, {})) for argument in node.args]
        keywords = {str(k.arg): encode_value(_compute(k.value, {})) for k in node.keywords if k.arg}
    except _ERRORS as error:
        raise ValueError(f"an argument is no plain value ({error})") from None
    if len(keywords) < len(node.keywords):
        raise ValueError("it has arguments that are not written out")
    return {"function": _name_of(node.func), "arguments": arguments, "keywords": keywords}


def _check_computable(node: ast.AST, calls: set[int]) -> None:
    """Raises ValueError if a part of a condition, other than the `calls`, cannot be computed here."""
    if id(node) in calls:
        return
    allowed = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare)
    if isinstance(node, ast.Call):
        if _name_of(node.func) not in FUNCTIONS or any(k.arg is None for k in node.keywords):
            raise ValueError(f"it calls {ast.unparse(node.func)[:60]}")
        parts: list[ast.AST] = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Name | ast.Attribute):
        if _name_of(node) not in CONSTANTS:
            raise ValueError(f"it uses {ast.unparse(node)[:60]}")
        return
    elif isinstance(node, (*allowed, ast.Subscript, ast.Slice, ast.IfExp)):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    else:
        raise ValueError(f"it has a part that is not computed: {ast.unparse(node)[:60]}")
    operators = [
        part for part in ast.iter_child_nodes(node) if isinstance(part, ast.operator | ast.unaryop | ast.cmpop)
    ]
    if any(type(part) not in _OPERATORS for part in operators):
        raise ValueError(f"it has an operator that is not computed: {ast.unparse(node)[:60]}")
    for part in parts:
        _check_computable(part, calls)


def _compute(node: Any, known: Mapping[int, Any]) -> Any:
    """Returns the value of an expression. `known` has the values of calls by the id of their node.

    Raises one of _ERRORS where Python would, for a part that is not computed here, and for what would become large.
    """
    if id(node) in known:
        return known[id(node)]
    match node:
        case None:
            return None
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple() | ast.Set():
            kinds = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
            return kinds[type(node)]([_compute(item, known) for item in node.elts])
        case ast.Dict():
            return {_compute(k, known): _compute(v, known) for k, v in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](_compute(node.operand, known))
        case ast.BinOp():
            return _combine(node.op, _compute(node.left, known), _compute(node.right, known))
        case ast.BoolOp():
            value: Any = None
            for part in node.values:
                value = _compute(part, known)
                if bool(value) is isinstance(node.op, ast.Or):
                    break
            return value
        case ast.IfExp():
            return _compute(node.body if _compute(node.test, known) else node.orelse, known)
        case ast.Compare():
            left = _compute(node.left, known)
            for sign, part in zip(node.ops, node.comparators, strict=True):
                right = _compute(part, known)
                if not _OPERATORS[type(sign)](left, right):
                    return False
                left = right
            return True
        case ast.Subscript():
            return _compute(node.value, known)[_compute(node.slice, known)]
        case ast.Slice():
            return slice(*(_compute(part, known) for part in (node.lower, node.upper, node.step)))
        case ast.Name() | ast.Attribute():
            return CONSTANTS[_name_of(node)]
        case ast.Call():
            keywords = {str(keyword.arg): _compute(keyword.value, known) for keyword in node.keywords}
            return FUNCTIONS[_name_of(node.func)](*(_compute(part, known) for part in node.args), **keywords)
    raise ValueError(f"{ast.unparse(node)[:60]} is not computed")


def _combine(sign: ast.operator, left: Any, right: Any) -> Any:
    """Returns the value of a binary operation. Raises ValueError for one with a large result, and for a text format."""
    if isinstance(sign, ast.Mod) and isinstance(left, str | bytes):
        raise ValueError("formats are not computed")
    if isinstance(sign, ast.Mult):
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and hasattr(other, "__len__") and one * len(other) > MAX_SIZE:
                raise ValueError("a repetition is too large")
    if isinstance(left, int) and isinstance(right, int):
        power = max(2, left.bit_length()) * max(1, abs(right)) if isinstance(sign, ast.Pow) else 0
        if max(power, left.bit_length(), right.bit_length()) > MAX_BITS:
            raise ValueError("a number is too large")
    return _OPERATORS[type(sign)](left, right)
