"""The fast reader of config files agrees with the full one wherever it gives an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config.document import dump_config
from cohort.config.load import load_config
from cohort.config.regular_yaml import read_regular_yaml
from cohort.config.yaml_text import dump_yaml, read_yaml
from cohort.errors import ConfigError
from tests.helpers.installed_recipes import CALLABLE as RECIPES

BUILT_IN = sorted(name for name, recipe in RECIPES.items() if recipe.__module__.startswith("cohort."))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(["on", "1_0", "-", "~"]),
)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), lambda inner: st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_size=6,
)


def read_fully(text: str) -> Any:
    """Returns what the full reader gives; ConfigError if it refuses the text."""
    try:
        return read_yaml(text, "it")
    except ConfigError:
        return ConfigError


def agree(text: str) -> bool:
    """Returns whether the fast reader gives up, or gives the answer of the full one, types and order included."""
    fast = read_regular_yaml(text)
    return fast is None or repr(fast) == repr(read_fully(text))


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_it_reads_the_config_of_every_recipe(recipe: str) -> None:
    text = dump_config(load_config(recipe))
    assert repr(read_regular_yaml(text)) == repr(read_yaml(text, "it"))


@given(TREES)
def test_it_agrees_on_what_is_written(tree: dict[str, Any]) -> None:
    assert agree(dump_yaml(tree))


def test_it_agrees_on_texts_that_were_changed_by_hand() -> None:
    rng = random.Random(0)
    tree = read_yaml(dump_config(load_config("gsm8k_again")), "it")
    # A part of the config, because the full reader is slow.
    original = dump_yaml({name: tree[name] for name in ("steps", "template", "optim", "turns", "reward", "sampling")})
    changes = ["\n", " ", "  ", ":", ": ", "- ", "#", " #", "'", '"', "0", "x", ",", "\t", "&", "", "[]", "\n- "]
    answered = 0
    for _ in range(3000):
        text = original
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(changes) + text[place + rng.randint(0, 3) :]
        answered += read_regular_yaml(text) is not None
        assert agree(text), text
    # It must not give up on everything.
    assert answered > 150


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "\n",
            "a",
            "a:\n",
            "a: 1",
            "- 1\n",
            "---\na: 1\n",
            "a: 1\na: 2\n",
            "on: 1\n",
            "a:\n- - 1\n",
            "a:\n  - 1\n",
        ),
        *(
            "a: b\n  c: d\n",
            "a: text\n  goes on\n",
            "a: 1\n- 2\n",
            "a: 'it''s'\n",
            'a: "x"\n',
            "a: b # c\n",
            "a: b: c\n",
        ),
        *("a: 0x1f\n", "a: 017\n", "a: 1_000\n", "a: 1:30\n", "a: 2026-01-31\n", "a: .nan\n", "a: ~\n", "a: !!str 1\n"),
        *("a: &b 1\n", "a: *b\n", "a: {b: 1}\n", "a: |\n  x\n", "\ufeffa: 1\n", "a: 1\r\n", "a:\n b: 1\n  c: 2\n"),
        *(f"{'k' * 2000}: 1\n", "".join("  " * n + "a:\n" for n in range(60)) + "  " * 60 + "a: 1\n"),
    ],
)
def test_it_gives_up_on_what_is_not_regular(text: str) -> None:
    assert read_regular_yaml(text) is None


def test_values_and_places() -> None:
    text = "a: 1\nb:\n  c: -2.5e-05\n  d:\n  - x y\n  - '3'\n  e: []\n  f:\n    g: .inf\n"
    text += "h: ''\ni: {}\nj: null\nk: file.py:name\n"
    assert read_regular_yaml(text) == {
        "a": 1,
        "b": {"c": -2.5e-05, "d": ["x y", "3"], "e": [], "f": {"g": float("inf")}},
        "h": "",
        "i": {},
        "j": None,
        "k": "file.py:name",
    }
    assert read_regular_yaml(text) == read_yaml(text, "it")
