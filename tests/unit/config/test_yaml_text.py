"""Config files as hostile input: they are refused before they cost anything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cohort.config.document import dump_config, parse_config
from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.config.yaml_text import MAX_DEPTH, MAX_SIZE, dump_yaml, read_yaml
from cohort.errors import ConfigError
from cohort.run.directory import RunDirectory
from cohort.tasks.arithmetic import Arithmetic

BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 1: it has an anchor (&) or an alias (*), which a config must not have"),
        ("a: *b\n", "line 1: it has an anchor (&) or an alias (*)"),
        ("[" * 100_000, f"it has more than {MAX_DEPTH} levels"),
        ("\n".join(" " * n + "a:" for n in range(60)), f"it has more than {MAX_DEPTH} levels"),
        ("a: 1\n" * (MAX_SIZE // 5 + 1), "more than the 262144 that a config may have"),
        ("steps: 1\nseed: 2\nsteps: 3\n", 'line 3: the key "steps" occurs twice'),
        ("a: {b: 1, b: 1}\n", 'the key "b" occurs twice'),
        ("a: 1\n? [1, 2]\n: 4\n", "line 2: it has a key that is a list or a mapping"),
        ("{[1]: 2}\n", "it has a key that is a list or a mapping"),
        ("a: " + "1" * 10_000, "is not valid YAML"),
        ("a: 2026-13-45\n", "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "is not valid YAML in line 1"),
        ("a: [1\n", "is not valid YAML in line 2"),
        ("a: \x00\n", "is not valid YAML"),
    ],
)
def test_a_text_that_no_run_wrote_is_refused_at_once(text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "config.yaml")
    assert message in str(caught.value) and str(caught.value).startswith("config.yaml")
    assert len(str(caught.value)) < 400
    assert time.process_time() - began < 5  # expanded, the first one has 10^9 entries


def test_every_reader_of_a_config_uses_it(tmp_path: Path) -> None:
    config = RL(task=Arithmetic())
    text = dump_config(config).replace("seed: 0", "seed: &anchor 0")
    (tmp_path / "config.yaml").write_text(text)
    for read in (
        lambda: parse_config(text),
        lambda: RunDirectory.open(tmp_path),
        lambda: load_config(f"{tmp_path}/config.yaml"),
    ):
        with pytest.raises(ConfigError, match="it has an anchor"):
            read()


def test_what_is_written_can_be_read_or_is_refused() -> None:
    same = [1, 2]
    assert read_yaml(dump_yaml({"a": list(same), "b": list(same), "c": "\x85 &x *y"}), "x") == {
        "a": same,
        "b": same,
        "c": "\x85 &x *y",
    }
    with pytest.raises(ConfigError, match="Put long values of the task into a file of their own"):
        dump_yaml({"words": ["w" * 100] * 3000})
