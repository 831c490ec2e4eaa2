"""The tables of names: what a run records, and what it finds again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cohort.config.algos import ALGOS, GRPO, Policy, algorithm
from cohort.config.document import find_variant, get_variant_name
from cohort.errors import ConfigError
from cohort.registry import Registry
from cohort.tasks.arithmetic import Arithmetic
from cohort.user_code import load_file

CODE = """
import cohort

@cohort.algorithm("{name}")
class Own(cohort.Policy):
    def policy_loss(self, tokens):
        return -tokens.ratio * tokens.advantages
"""


def write_own(folder: Path, name: str) -> Path:
    """Writes a file with an algorithm of that name and returns it."""
    file = folder / f"{name}.py"
    file.write_text(CODE.format(name=name))
    return file


def test_what_is_in_a_file_is_recorded_with_its_path_and_found_by_it(tmp_path: Path) -> None:
    file = write_own(tmp_path, "own_a")
    cls = find_variant("algo", f"{file}:own_a")
    assert get_variant_name("algo", cls()) == f"{file}:own_a"
    assert find_variant("algo", get_variant_name("algo", cls())) is cls
    assert get_variant_name("algo", GRPO()) == "grpo"
    assert get_variant_name("task", Arithmetic()) == "arithmetic"


def test_a_class_that_its_file_made_twice_has_the_same_name(tmp_path: Path) -> None:
    """A script that runs as __main__ is loaded once more by its path."""
    file = write_own(tmp_path, "own_b")
    first = load_file(file).Own
    again = type(first.__name__, (Policy,), {"__module__": first.__module__, "__qualname__": first.__qualname__})
    assert ALGOS.get_name(again) == "own_b"
    assert ALGOS.get_name(type("Own", (Policy,), {"__module__": "elsewhere", "__qualname__": "Own"})) is None


def test_wrong_names_say_what_to_do(tmp_path: Path) -> None:
    file = write_own(tmp_path, "own_c")
    with pytest.raises(ConfigError, match=r'there is no algo "own_d" in .*own_c.py. Did you mean "own_c"'):
        ALGOS.find(f"{file}:own_d")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r'The file registers no algo\. .* @cohort.algorithm\("x"\) above its class'):
        ALGOS.find(f"{tmp_path}/empty.py:x")
    with pytest.raises(ConfigError, match=r'there is no file ".*gone.py"; put it back, or correct the path'):
        ALGOS.find(f"{tmp_path}/gone.py:x")
    with pytest.raises(ConfigError, match=r"path/to/file.py:NAME, or install the package that has it"):
        ALGOS.find("nowhere")
    with pytest.raises(ConfigError, match=r'unknown turns "x.py:y"\..* Correct --turns, or turns.name in config.yaml'):
        Registry("turns", {"single": int}, is_open=False).find("x.py:y")


def test_a_class_that_is_in_no_file_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = type("Lost", (Policy,), {"__module__": "typed_at_a_prompt", "policy_loss": lambda self, tokens: None})
    monkeypatch.setitem(ALGOS, "lost", lost)
    for file in ("<stdin>", "", "/nowhere/lost.py", __file__.removesuffix(".py")):
        monkeypatch.setitem(sys.modules, "typed_at_a_prompt", SimpleNamespace(__file__=file))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r'algo "lost" is not defined in a .py file.*put its code into one'):
            get_variant_name("algo", lost())
    with pytest.raises(ConfigError, match=r'class Stray is not registered: write @cohort.algorithm\("stray"\) above'):
        get_variant_name("algo", type("Stray", (Policy,), {})())


def test_classes_that_cannot_be_algorithms_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower-case"):
        algorithm("Bad Name")
    with pytest.raises(ConfigError, match=r"write class Bare\(cohort.Policy\)"):
        algorithm("bare")(type("Bare", (), {}))
    with pytest.raises(ConfigError, match="has no method policy_loss"):
        algorithm("mute")(type("Mute", (Policy,), {}))
    with pytest.raises(ConfigError, match='another class is already registered as algorithm "grpo"'):
        algorithm("grpo")(type("Mine", (GRPO,), {}))
    assert "mute" not in ALGOS and ALGOS["grpo"] is GRPO
