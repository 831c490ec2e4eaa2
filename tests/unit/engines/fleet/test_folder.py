"""Weights in a private folder, and private folders that vanish with their program."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cohort.engines.fleet.folder import FileWeights, WeightFolder
from cohort.errors import EngineError
from cohort.learner.base import LiveWeights
from cohort.system import private_folder
from cohort.system.private_folder import PrivateFolder
from tests.helpers.decoders_and_groups import small_decoder


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + 20
    while path.exists():
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_read_is_what_was_written(tmp_path: Path, dtype: torch.dtype):
    decoder = small_decoder(dtype)
    weights = WeightFolder(parent=tmp_path)
    for version, seed in ((0, 1), (1, 2)):
        decoder.load_state_dict(small_decoder(dtype, seed=seed).state_dict())
        weights.write(LiveWeights(decoder), version)
        found = dict(FileWeights(weights.path))
        expected = dict(decoder.named_weights())
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
        assert weights.version == version and weights.checksums.keys() == expected.keys()
    weights.close()
    weights.close()
    assert not list(tmp_path.iterdir())


def test_the_folder_is_for_this_user_alone_and_has_the_side_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights").mkdir()
    side = {"config.json": tmp_path / "config.json", "missing.json": tmp_path / "missing.json"}
    weights = WeightFolder(parent=tmp_path / "weights", side_files=side)
    weights.write(LiveWeights(small_decoder()), 0)
    assert stat.S_IMODE(weights.path.stat().st_mode) == 0o700
    assert {p.name for p in weights.path.iterdir()} == {"config.json", "model.safetensors", private_folder.LOCK}
    weights.close()


class Full:
    """Weights whose disk is full."""

    module = None
    specs = small_decoder().weight_specs()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield next(small_decoder().named_weights())
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_one_line_that_says_how_much_is_needed(tmp_path: Path):
    weights = WeightFolder(parent=tmp_path)
    weights.write(LiveWeights(small_decoder()), 0)
    with pytest.raises(EngineError, match=r"No space left on device. They need 0.00 GiB") as error:
        weights.write(Full(), 1)
    assert "\n" not in str(error.value) and weights.version == -1
    weights.close()


def test_shared_memory_is_used_only_where_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(tmp_path))
    rooms: list[int] = []

    def find(num_bytes: int) -> Path | None:
        rooms.append(num_bytes)
        return None

    monkeypatch.setattr(private_folder, "find_shared_memory", find)
    folder = PrivateFolder.create("test", 9_000)
    assert folder.path.parent == tmp_path and rooms == [10_000]
    folder.close()


PROGRAM = """
import os, sys, time
from pathlib import Path
from cohort.system.private_folder import PrivateFolder
folder = PrivateFolder.create("test", 10, Path(sys.argv[1]))
(folder.path / "file").write_text("x")
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_the_folder_of_a_program_that_was_killed_is_removed(tmp_path: Path, how: str):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), how], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    path = Path(program.stdout.readline().strip())
    assert (path / "file").exists()
    program.send_signal(signal.SIGKILL)
    program.wait()
    wait_until_gone(path)


def test_what_a_killed_janitor_left_is_removed_by_the_next_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private_folder, "NEW_SECONDS", -1.0)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    path = Path(program.stdout.readline().strip())
    [janitor] = list(private_folder_janitors(path))
    # A program that lives keeps its folder.
    PrivateFolder.create("test", 10, tmp_path).close()
    assert path.exists()
    os.kill(janitor, signal.SIGKILL)
    program.kill()
    program.wait()
    assert path.exists()
    PrivateFolder.create("test", 10, tmp_path).close()
    assert not path.exists()


def private_folder_janitors(path: Path) -> list[int]:
    """Returns the process ids of the janitors of a folder."""
    listed = subprocess.run(["ps", "-ww", "-A", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    wanted = f"-m cohort.system.private_folder {path}"
    return [int(line.split()[0]) for line in listed.splitlines() if wanted in line]
