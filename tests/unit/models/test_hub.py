"""Tests of models of the hub, with a fake huggingface_hub that has a model, lacks it, or is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cohort.errors import ModelError
from cohort.models import hub
from cohort.models.catalog import find_pulled, pull, resolve_model

NAME = "Owner/Some-Model.1"


class FakeLibrary:
    """A fake huggingface_hub with one model, which is in `folder` once it is fetched."""

    def __init__(self, folder: Path, files: tuple[str, ...] = ("config.json", "model.safetensors")) -> None:
        self.folder, self.files = folder, files
        self.asked: list[dict[str, object]] = []

    def snapshot_download(self, name: str, **options: object) -> str:
        self.asked.append({"name": name, **options})
        if name != NAME:
            raise OSError("404 Client Error\nand a page of text")
        if options.get("local_files_only"):
            if not self.folder.exists():
                raise OSError("not in the cache")
        else:
            self.folder.mkdir(exist_ok=True)
            for file in self.files:
                (self.folder / file).write_text("{}")
        return str(self.folder)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary(tmp_path / "snapshot")
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)  # type: ignore[arg-type]
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return made


def test_a_model_is_fetched_when_asked_for_and_then_found(library: FakeLibrary) -> None:
    with pytest.raises(ModelError, match=f"{NAME} is not here yet: fetch it .* with `cohort pull {NAME}`"):
        resolve_model(NAME)
    assert pull(NAME) == library.folder == resolve_model(NAME)
    fetched = [asked for asked in library.asked if "local_files_only" not in asked]
    assert len(fetched) == 1 and library.asked[-1]["local_files_only"] is True
    patterns = fetched[0]["allow_patterns"]
    assert "*.safetensors" in patterns and not any("bin" in p or "*.py" in p or p == "*" for p in patterns)


def test_a_model_that_is_here_is_fetched_again_only_if_forced_or_incomplete(library: FakeLibrary) -> None:
    def num_fetches() -> int:
        return sum("local_files_only" not in asked for asked in library.asked)

    assert find_pulled(NAME) is None and num_fetches() == 0
    pull(NAME)
    assert pull(NAME) == find_pulled(NAME) == library.folder and num_fetches() == 1
    pull(NAME, force=True)
    assert num_fetches() == 2 and library.asked[-1]["force_download"] is True
    index = {"weight_map": {"a": "model.safetensors", "b": "lost.safetensors"}}
    (library.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_pulled(NAME) is None
    library.files = (*library.files, "lost.safetensors")
    pull(NAME)
    assert num_fetches() == 3 and find_pulled(NAME) == library.folder


def test_a_failed_fetch_raises_an_error_of_one_line(library: FakeLibrary) -> None:
    with pytest.raises(ModelError, match=r"Owner/None could not be fetched .* 404 Client Error; check the name") as e:
        pull("Owner/None")
    assert "page of text" not in str(e.value)


def test_a_model_without_safetensors_is_refused(library: FakeLibrary) -> None:
    library.files = ("config.json", "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no config.json with safetensors"):
        pull(NAME)


def test_a_folder_of_that_name_comes_first(library: FakeLibrary, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    assert resolve_model(NAME) == Path(NAME) and pull(NAME) == Path(NAME) and not library.asked


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"pip install 'cohort\[hub\]'"):
        pull(NAME)
    with pytest.raises(ModelError, match="cohort pull"):
        resolve_model(NAME)


def test_the_real_library_has_the_functions_that_are_called() -> None:
    real = pytest.importorskip("huggingface_hub")
    assert isinstance(hub._import_hub(), type(real)) and callable(real.snapshot_download)
    assert hub.find_cached("no-such-owner-xyz/no-such-model") is None
