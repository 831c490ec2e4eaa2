"""Starting ranks: their environment, how failures are told, and what the environment of a launcher means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cohort.errors import AgreedError, ConfigError, RankError
from cohort.ranks import agree
from cohort.ranks.agree import agree_on_errors, should_say
from cohort.ranks.environment import count_local_ranks, count_sharing_ranks, is_following_rank, is_rank
from cohort.ranks.launch import launch_ranks, remove_flag
from cohort.world import World


def write_program(folder: Path, text: str) -> list[str]:
    """Writes a program for ranks, and returns the words that run it."""
    file = folder / "program.py"
    file.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{text}")
    return [str(file)]


def test_ranks_get_their_place_and_their_words(tmp_path: Path) -> None:
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    text = (
        f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(' '.join([*map(os.environ.get, {names}), *sys.argv[1:]]))"
    )
    assert launch_ranks(["a", "--b"], 3, program=write_program(tmp_path, text)) == 0
    assert [(tmp_path / str(n)).read_text() for n in range(3)] == [f"{n} {n} 3 3 a --b" for n in range(3)]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cohort.ranks.launch.GRACE_SECONDS", 0.2)
    program = write_program(tmp_path, "sys.exit(3) if rank == 1 else time.sleep(60)")
    assert launch_ranks([], 3, program=program) == 3
    program = write_program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else time.sleep(60)")
    with pytest.raises(RankError, match="rank 2 of 3 was ended by SIGKILL"):
        launch_ranks([], 3, program=program)


def test_signals_go_to_all_ranks_once(tmp_path: Path) -> None:
    text = f"""
count = 0
def note(number, frame):
    global count
    count += 1
signal.signal(signal.SIGTERM, note)
open({str(tmp_path)!r} + f'/ready{{rank}}', 'w').close()
deadline = time.monotonic() + 20
while not count and time.monotonic() < deadline: time.sleep(0.01)
time.sleep(0.3)
open({str(tmp_path)!r} + f'/count{{rank}}', 'w').write(str(count))
"""
    program = write_program(tmp_path, text)
    launcher = f"from cohort.ranks.launch import launch_ranks; launch_ranks([], 2, program={program!r})"
    process = subprocess.Popen([sys.executable, "-c", launcher])
    while not all((tmp_path / f"ready{n}").exists() for n in range(2)):
        assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 0
    assert [(tmp_path / f"count{n}").read_text() for n in range(2)] == ["1", "1"]


def test_the_flag_is_removed_however_it_is_written() -> None:
    assert remove_flag(["train", "--ranks", "2", "--ranks=3", "--x", "--ranks"], "ranks") == ["train", "--x"]


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_rank() and count_local_ranks() == 1 and not is_following_rank()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK is not set"):
        is_rank()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert is_rank() and is_following_rank() and count_local_ranks() == 4
    assert [count_sharing_ranks(gpus) for gpus in (0, 1, 2, 3, 4, 8)] == [4, 4, 2, 2, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert count_local_ranks() == 2


class TwoRanks(World):
    """A world of two ranks in which the other one reports `problem`."""

    size = 2

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem

    def gather(self, value: object) -> list[object]:
        return [value, self.problem]


def fail() -> None:
    raise ConfigError("wrong")


def test_all_ranks_raise_the_error_of_the_first_that_failed() -> None:
    assert agree_on_errors(TwoRanks(""), lambda: 7) == 7
    with pytest.raises(AgreedError, match=r"^rank 1: broken$"):
        agree_on_errors(TwoRanks("broken"), lambda: 7)
    with pytest.raises(AgreedError, match=r"^wrong$"):
        agree_on_errors(TwoRanks("broken"), fail)
    with pytest.raises(ConfigError, match="wrong"):
        agree_on_errors(World(), fail)


def test_an_error_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(dict):
        def add(self, key: str, number: int) -> int:
            self[key] = self.get(key, 0) + number
            return self[key]

    monkeypatch.setattr(agree, "_store", Store())
    monkeypatch.setattr(agree, "_PATIENCE", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, says in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert should_say(AgreedError("known to all")) == says
    # Lost ranks are said once, and not at all if one of them has said why.
    assert should_say(RankError("lost")) and not should_say(RankError("lost too"))
    assert should_say(ConfigError("wrong")) and not should_say(ConfigError("wrong"))
    monkeypatch.setattr(agree, "_store", Store({"cohort/errors": 1}))
    assert not should_say(RankError("lost"))
