"""Vectors in the cache: made once, for other texts or models again, after damage, and by several processes at once."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cohort.errors import TaskError
from cohort.tasks.search import kept
from cohort.tasks.search.dense import vectors
from cohort.tasks.search.dense.model import SentenceModel
from cohort.tasks.search.dense.vectors import open_vectors
from tests.helpers.sentence_models import make_weights, write_model

TEXTS = ["the river", "tea", "ink \ud800", "the town"]
SOURCE = Path(__file__).resolve().parents[5] / "src"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; returns its folder for indexes."""
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "search"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of texts that were embedded, one per call; they are embedded in this process."""
    calls: list[int] = []

    def embed(folder: Path, width: int, texts: Sequence[str]) -> np.ndarray:
        calls.append(len(texts))
        own = SentenceModel(folder)
        return np.stack([own.embed(text, "passage") for text in texts])

    monkeypatch.setattr(vectors, "embed_passages", embed)
    return calls


def test_vectors_are_made_once_and_only_read(model: Path, cache: Path, made: list[int]) -> None:
    first = open_vectors(TEXTS, model)
    again = open_vectors(TEXTS, model)
    assert made == [4] and (first == again).all() and first.shape == (4, 8) and first.dtype == np.float32
    own = SentenceModel(model)
    assert (first == [own.embed(text, "passage") for text in TEXTS]).all()
    assert isinstance(again, np.memmap) and not again.flags.writeable
    assert [file.suffix for file in cache.iterdir()] == [".npy"], "one file, and nothing beside it"


def test_other_texts_another_order_or_another_model_have_vectors_of_their_own(
    tmp_path: Path, model: Path, cache: Path, made: list[int]
) -> None:
    open_vectors(TEXTS, model)
    open_vectors(TEXTS[::-1], model)
    open_vectors([*TEXTS[:2], "the rivertea"], model)
    # The same characters, parted elsewhere.
    one, other = open_vectors(["tea", "ink"], model), open_vectors(["teai", "nk"], model)
    assert (one != other).any()
    changed = make_weights()
    changed["encoder.layer.1.output.dense.weight"][-1, -1] += 1
    assert (open_vectors(TEXTS, write_model(tmp_path / "other", weights=changed)) != open_vectors(TEXTS, model)).any()
    # A copy of the model elsewhere is the same model.
    open_vectors(TEXTS, write_model(tmp_path / "copy"))
    assert made == [4, 4, 3, 2, 2, 4] and len(list(cache.iterdir())) == 6


@pytest.mark.parametrize("damage", ["cut", "one bit", "empty", "other"])
def test_damaged_vectors_are_made_anew(
    model: Path, cache: Path, made: list[int], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = open_vectors(TEXTS, model).copy()
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "one bit": content[:-1] + bytes([content[-1] ^ 1]),
            "empty": b"",
            "other": b"no numbers",
        }[damage]
    )
    assert (open_vectors(TEXTS, model) == wanted).all() and made == [4, 4]
    assert "is damaged and is made anew" in caplog.text
    assert [f.read_bytes() for f in cache.iterdir()] == [content]


@pytest.mark.parametrize("content", [np.zeros((4, 9), np.float32), np.zeros((4, 8)), np.array([{}], object)])
def test_a_whole_file_of_other_numbers_is_not_used(
    model: Path, made: list[int], content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose own digest is right, but which holds another shape, another type, or what would run code."""
    key = vectors._compute_key(TEXTS, vectors.digest_model(model))
    kept.write_file(key, ".npy", lambda file: file.open("wb").close())
    (file,) = kept.locate_folder().iterdir()
    with file.open("wb") as stream:
        np.save(stream, content, allow_pickle=True)
    file.rename(file.with_name(f"{key}-{kept._digest(file)}.npy"))
    assert vectors._open_kept(key, (4, 8)) is None


def test_a_cache_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, model: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    with pytest.raises(TaskError, match=r"vectors of the passages cannot be kept in .*file/search .*COHORT_CACHE"):
        open_vectors(TEXTS, model)
    assert made == []


PROGRAM = """
import resource, sys
from pathlib import Path
from cohort.errors import TaskError
from cohort.tasks.search.dense.vectors import open_vectors
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
texts = [f"river town {n} " + "tea " * (n % 30) for n in range(int(sys.argv[3]))]
try:
    print(open_vectors(texts, Path(sys.argv[1])).sum(axis=1).tolist())
except TaskError as error:
    print(error)
"""


def start(model: Path, most: int = 0, number: int = 400) -> subprocess.Popen[str]:
    """Starts a process that opens vectors of `number` texts; it may write files of `most` bytes, 0 = any size."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model), str(most), str(number)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_start_together_get_the_same_vectors(model: Path, cache: Path) -> None:
    running = [start(model) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 3, said
    assert said[0][0].startswith("[") and {out for out, _ in said} == {said[0][0]}
    assert [file.suffix for file in cache.iterdir()] == [".npy"], "one file, and nothing beside it"


def test_a_process_that_may_write_only_small_files_says_so_at_once(model: Path, cache: Path) -> None:
    """As a scoring worker, whose largest file is a megabyte: it must not compute for minutes first."""
    process = start(model, most=1 << 10, number=100_000)
    out, error = process.communicate(timeout=60)
    assert "cannot be kept in" in out and "File too large" in out, error
    assert not list(cache.glob("*.npy")) and not list(cache.glob(".*.tmp"))


def test_while_one_process_makes_them_others_wait_and_use_its_file(
    model: Path, cache: Path, made: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="cohort.tasks.progress")
    wanted = open_vectors(TEXTS, model).copy()
    (file,) = cache.iterdir()
    key = file.stem.partition("-")[0]
    aside = file.rename(cache / "aside")
    holder = os.open(cache / f".{key}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    waits = threading.Event()
    flock = fcntl.flock

    def flock_and_tell(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            waits.set()
        flock(descriptor, operation)

    monkeypatch.setattr(vectors.fcntl, "flock", flock_and_tell)
    found: list[np.ndarray] = []
    waiting = threading.Thread(target=lambda: found.append(open_vectors(TEXTS, model)))
    waiting.start()
    assert waits.wait(30) and found == []
    # The other process finishes its file and frees the lock.
    aside.rename(file)
    os.close(holder)
    waiting.join(30)
    assert (found[0] == wanted).all() and made == [4]
    assert caplog.messages == ["waiting for another process, which computes the vectors of the same passages"]
    assert not list(cache.glob(".*"))
