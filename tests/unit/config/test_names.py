"""Old names of settings and metrics: files of earlier versions are read with the present names."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.config import names
from cohort.config.load import dump_config, load_config, parse_config
from cohort.errors import ConfigError
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `opt.rate` the old name of `optim.lr`, `keep` that of `save`, and `train/loss` that of `loss`."""
    monkeypatch.setattr(names, "SETTINGS", {"opt.rate": "optim.lr", "keep": "save"})
    monkeypatch.setattr(names, "METRICS", {"train/loss": "loss"})


@pytest.mark.usefixtures("renamed")
def test_a_file_with_old_keys_is_the_same_config() -> None:
    config = load_config("quickstart")
    text = dump_config(config)
    old = text.replace("  lr: 0.0003\n", "", 1).replace("save:\n", "keep:\n", 1) + "opt:\n  rate: 0.0003\n"
    assert "save:" not in old and old.count("0.0003") == 1
    assert parse_config(old) == config and dump_config(parse_config(old)) == text
    with pytest.raises(ConfigError, match="unknown setting opt"):  # other keys of the old section are unknown
        parse_config(old + "  beta: 0.5\n")


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--opt.rate=1", "--opt.rate has a new name; write --optim.lr instead."),
        ("--keep.every=3", "--keep.every has a new name; write --save.every instead."),
    ],
)
def test_an_old_flag_names_the_new_one(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [flag])
    assert str(caught.value) == message


@pytest.mark.usefixtures("renamed")
def test_old_metrics_have_their_new_names(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    store.write_step(1, {"train/loss": 1.0, "lr": 0.5})
    store.write_step(2, {"loss": 2.0})
    store.close()
    with Reader(tmp_path / "run.db") as reader:
        assert reader.read_series("loss") == {1: 1.0, 2: 2.0}
        assert [(row.step, row.name) for row in reader.read_metrics()] == [(1, "loss"), (1, "lr"), (2, "loss")]


def test_no_name_is_both_old_and_new() -> None:
    """The table is applied only once, so a second renaming must also change the line of the first one."""
    for table in (names.SETTINGS, names.METRICS):
        assert not set(table) & set(table.values())
