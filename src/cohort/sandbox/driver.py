"""The program that runs in the sandbox before that of the model: it loads that one as a module and calls its functions.

It is alone there: no other module of Cohort can be imported. Results go to file descriptor 3. The calls, with a word
that must stand before each result, come on stdin when the module is loaded, not before. The module can do everything
that this program can: so a result is what the module says, and no more. Whether it is right is judged outside.

Arguments and results are plain values: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and
dict. They travel as JSON, which alone would make tuples lists, and keys texts. The judge uses the same two functions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import Any

RESULTS = 3  # file descriptor
MAX_DECIMAL_BITS = 10_000  # of a whole number that is written in decimal digits
MAX_ERROR = 300  # characters of an error
MAX_ITEMS = 10_000
"""Members of all containers of a value. Keys can be chosen so that a dict of n of them takes n^2 steps to build."""


def encode_value(value: Any) -> Any:
    """Returns a plain value as a value of JSON. An object of a derived class becomes one of the plain class.

    Raises TypeError for any other value, and RecursionError for one that is nested too deeply.

    >>> encode_value([1, (2.5, "a"), {3: None}])
    [1, {'tuple': [{'float': '2.5'}, 'a']}, {'dict': [[3, None]]}]
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python refuses to write or read thousands of decimal digits.
        return int(value) if int(value).bit_length() <= MAX_DECIMAL_BITS else {"int": hex(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: [encode_value(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode_value(data: Any) -> Any:
    """Returns the plain value that `encode_value` wrote. Raises ValueError for anything else, and for a large value.

    >>> decode_value({"tuple": [1, {"float": "2.5"}]})
    (1, 2.5)
    """
    try:
        return _decode(data, [MAX_ITEMS])
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"no value: {type(error).__name__}") from None


def _decode(data: Any, left: list[int]) -> Any:
    """Returns the value of `data`. `left` has the number of items that may still come."""
    if data is None or isinstance(data, bool | int | str):
        return data
    if isinstance(data, list):
        return [_decode(item, left) for item in _count(data, left)]
    [(name, content)] = data.items()
    if name == "float":
        return float(content)
    if name == "int":
        return int(content, 16)
    if name == "complex":
        return complex(float(content[0]), float(content[1]))
    if name == "bytes":
        return bytes.fromhex(content)
    items = [_decode(item, left) for item in _count(content, left)]
    if name == "dict":
        return {key: item for key, item in items}  # noqa: C416  (pairs are lists of exactly two)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](items)


def _count(items: Any, left: list[int]) -> list[Any]:
    """Returns a list after its length was taken from what is left. Raises ValueError if nothing is, or for no list."""
    if not isinstance(items, list):
        raise ValueError("no list")
    left[0] -= len(items)
    if left[0] < 0:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return items


def load_program(path: str) -> types.ModuleType:
    """Returns the program as a module with the name "program", so that its `if __name__ == "__main__"` does not run."""
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    return module


def read_line() -> bytes:
    """Returns the next line of stdin, which is then empty: functions that read get nothing."""
    data = b""
    while not data.endswith(b"\n") and (piece := os.read(0, 1 << 16)):
        data += piece
    return data


def do_call(module: types.ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a call: {"value": ...} or {"error": text}."""
    try:
        if "statement" in call:
            # The same as the statement in the module. Only rows whose tests are trusted have one.
            code = compile(call["statement"], "<test>", "exec")
            types.FunctionType(code, module.__dict__)()
            return {"value": True}
        function: Any = module
        for name in call["function"].split("."):
            function = getattr(function, name)
        keywords = {name: decode_value(value) for name, value in call["keywords"].items()}
        return {"value": encode_value(function(*map(decode_value, call["arguments"]), **keywords))}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}


def write_result(line: str) -> None:
    """Writes a whole line to the results."""
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(RESULTS, data) :]


def main(path: str) -> None:
    """Loads the program, reads the calls, and writes the result of each, one line per call."""
    module = load_program(path)
    write_result("loaded")
    request = json.loads(read_line())
    for number, call in enumerate(request["calls"]):
        write_result(f"{request['word']} {number} {json.dumps(do_call(module, call))}")
    sys.stdout.flush()
    # Threads and exit handlers of the program have no say any more.
    os._exit(0)


if __name__ == "__main__":
    main(os.path.join(os.path.dirname(os.path.abspath(__file__)), "program.py"))
