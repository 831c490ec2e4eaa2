"""Checkpoints: exact round trip, atomic writes, detection of damage, removal of old ones."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cohort.errors import ModelError, RunError
from cohort.learner.base import StateStream, StateTensor
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[3]


def make_model_writer(value: float = 1.0, size: int = 10):
    """Returns a function that writes a model of one tensor into a folder."""

    def write(folder: Path) -> None:
        folder.mkdir()
        save_file({"w": torch.full((size,), value)}, folder / "model.safetensors")

    return write


def make_checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step=step, cursor=3 * step, optimizer={"w.exp_avg": torch.full((4,), float(step))})


def test_exact_round_trip(tmp_path):
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(6, 5, generator=generator)
    optimizer = {
        "layers.0.q.exp_avg": fused[:2],  # views of one storage, as the learner has them
        "layers.0.k.exp_avg": fused[2:],
        "layers.0.q.exp_avg_sq": torch.tensor([float("inf"), -0.0, 1e-45, 3.4e38]),
        "scalar": torch.tensor(0.1),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "wide": torch.tensor([1 / 3], dtype=torch.float64),
    }
    numbers = {
        "step": 7,
        "lr": 0.1 + 0.2,
        "best": float("-inf"),
        "nested": {"threads": 2, "names": ["a", None]},
    }
    saved = Checkpoint(step=100, cursor=12345678901, optimizer=optimizer, numbers=numbers)
    path = checkpoint.save(tmp_path, saved, make_model_writer(0.5))
    assert path == tmp_path / "step-000100" and saved.model == path / "model"
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.cursor, loaded.numbers) == (100, 12345678901, numbers)
    assert loaded.optimizer.keys() == optimizer.keys()
    for name, tensor in optimizer.items():
        assert loaded.optimizer[name].dtype == tensor.dtype and torch.equal(loaded.optimizer[name], tensor)
    assert loaded.model is not None
    assert torch.equal(load_file(loaded.model / "model.safetensors")["w"], torch.full((10,), 0.5))


def test_moments_of_less_than_fp32_are_refused(tmp_path):
    bad = Checkpoint(step=1, cursor=0, optimizer={"w.exp_avg": torch.zeros(2, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r'"w.exp_avg" is torch.bfloat16'):
        checkpoint.save(tmp_path, bad, make_model_writer())
    assert list(tmp_path.iterdir()) == []


def test_latest_and_prune(tmp_path):
    assert checkpoint.find_latest(tmp_path) is None and checkpoint.find_latest(tmp_path / "missing") is None
    for step in (5, 10, 15, 20, 1_000_000):
        checkpoint.save(tmp_path, make_checkpoint(step), make_model_writer())
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert checkpoint.find_latest(tmp_path) == tmp_path / "step-1000000"
    assert checkpoint.prune(tmp_path, keep_last=2, keep={10}) == [5, 15]
    assert checkpoint.list_steps(tmp_path) == [10, 20, 1_000_000]
    assert checkpoint.prune(tmp_path, keep_last=0, keep=set()) == [10, 20]  # the newest always stays
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-1000000"]


def test_saving_a_step_again_is_refused(tmp_path):
    checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())
    with pytest.raises(RunError, match="exists already"):
        checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model/model.safetensors", "flip", "model/model.safetensors has changed"),
        ("optimizer.safetensors", "flip", "optimizer.safetensors has changed"),
        ("optimizer.safetensors", "cut", r"optimizer.safetensors has \d+ bytes instead of \d+"),
        ("model/model.safetensors", "remove", "model/model.safetensors is missing"),
        ("state.json", "cut", "state.json cannot be read"),
        ("state.json", "remove", "state.json cannot be read"),
    ],
)
def test_damage_is_found_and_named(tmp_path, file, damage, words):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, make_checkpoint(step), make_model_writer())
    for step in (2, 3):
        target = tmp_path / f"step-00000{step}" / file
        data = bytearray(target.read_bytes())
        data[-1] ^= 0x10
        target.unlink() if damage == "remove" else target.write_bytes(data if damage == "flip" else data[:-1])
    remedy = "step-000002 must be moved away too; then step-000001 is intact"
    with pytest.raises(RunError, match=f"step-000003 is damaged or cannot be read .{words}.*{remedy}"):
        checkpoint.load(tmp_path / "step-000003")
    with pytest.raises(RunError, match="step-000002 is damaged"):
        checkpoint.load(tmp_path / "step-000002")
    assert checkpoint.load(tmp_path / "step-000001").cursor == 3


@pytest.mark.parametrize(("name", "value"), [("cursor", 7), ("step", 2), ("numbers", {"threads": 3})])
def test_a_changed_state_is_found(tmp_path, name, value):
    path = checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state))  # other white space is no change
    assert checkpoint.load(path).cursor == 3
    (path / "state.json").write_text(json.dumps(state | {name: value}))
    with pytest.raises(RunError, match=r"damaged or cannot be read \(state.json has changed since it was written\)"):
        checkpoint.load(path)


def test_a_state_of_an_earlier_version_has_no_checksum(tmp_path):
    path = checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())
    state = json.loads((path / "state.json").read_text())
    del state["crc32"]
    (path / "state.json").write_text(json.dumps(state))
    assert checkpoint.load(path).cursor == 3
    # The name of the folder still tells the step.
    (path / "state.json").write_text(json.dumps(state | {"step": 3}))
    with pytest.raises(RunError, match=r"state.json has changed"):
        checkpoint.load(path)


def test_a_newer_format_is_told_as_such_whatever_else_it_has(tmp_path):
    path = checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())
    (path / "state.json").write_text('{"format": 2, "parts": []}')
    with pytest.raises(RunError, match="has format 2, but this version of Cohort reads formats up to 1 only: upgrade"):
        checkpoint.load(path)
    (path / "state.json").write_text('{"format": "two"}')
    with pytest.raises(RunError, match=r"damaged or cannot be read .*format is 'two', not int"):
        checkpoint.load(path)


def test_a_model_that_cannot_be_written_leaves_no_checkpoint(tmp_path):
    def refuse(folder):
        raise ModelError("cannot write model: the disk is full; free some space, then run the command again")

    with pytest.raises(RunError, match=r"the disk is full.*continue the run with `cohort resume"):
        checkpoint.save(tmp_path, make_checkpoint(1), refuse)
    assert list(tmp_path.iterdir()) == []


def test_the_only_one_damaged(tmp_path):
    path = checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())
    (path / "state.json").write_text("{}")
    with pytest.raises(RunError, match="no other checkpoint is intact"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EIO, "error")],
)
def test_a_disk_that_refuses_leaves_the_earlier_checkpoints_alone(tmp_path, number, words):
    checkpoint.save(tmp_path, make_checkpoint(1), make_model_writer())

    def refuse(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(number, os.strerror(number))

    with pytest.raises(RunError, match=f"step-000002: .*{words}"):
        checkpoint.save(tmp_path, make_checkpoint(2), refuse)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load(tmp_path / "step-000001").step == 1


SMALL_FILES = """
import resource, sys, torch
from pathlib import Path
from cohort.run import checkpoint
from cohort.errors import RunError
def write(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
folder = Path(sys.argv[1])
small = checkpoint.Checkpoint(step=1, cursor=0, optimizer={"a": torch.zeros(10)})
checkpoint.save(folder, small, write)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
large = checkpoint.Checkpoint(step=2, cursor=0, optimizer={"a": torch.zeros(100_000)})
try:
    checkpoint.save(folder, large, write)
except RunError as error:
    print(error)
assert checkpoint.load(checkpoint.find_latest(folder)).step == 1
assert [p.name for p in folder.iterdir()] == ["step-000001"]
"""


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_system_stops_the_write_of_the_tensors(tmp_path):
    """The kernel's limit on file sizes is reached inside the safetensors library."""
    result = run_python(SMALL_FILES, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "cannot write" in result.stdout and "everything written before is intact" in result.stdout


# Forks one child per line of input, because importing torch takes two seconds. Each child writes until it is killed.
WRITER = """
import os, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from cohort.run import checkpoint

def write_on(folder):
    folder.mkdir(exist_ok=True)
    checkpoint.remove_leftovers(folder)
    last = checkpoint.find_latest(folder)
    step = checkpoint.load(last).step if last else 0
    print("ready", os.getpid(), flush=True)
    def write(model):
        model.mkdir()
        save_file({"w": torch.full((200_000,), float(step))}, model / "model.safetensors")
    while True:
        step += 1
        optimizer = {"w": torch.full((200_000,), float(step))}
        state = checkpoint.Checkpoint(step=step, cursor=step, optimizer=optimizer)
        checkpoint.save(folder, state, write)
        checkpoint.prune(folder, keep_last=2, keep=set())
        print("saved", step, flush=True)

for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        write_on(Path(sys.argv[1]))
    print("ended", os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_killed_while_writing_the_newest_checkpoint_loads(tmp_path):
    """A process that only saves checkpoints is killed from outside, at random moments."""
    folder = tmp_path / "checkpoints"
    rng = random.Random(0)
    newest = 0
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None

        def read_number(kind: str) -> int:
            """Returns the number in the child's next line, which must be of this kind."""
            word, number = parent.stdout.readline().split()
            assert word == kind
            return int(number)

        for _ in range(3):
            parent.stdin.write("\n")
            parent.stdin.flush()
            pid = read_number("ready")
            for _ in range(rng.randint(1, 6)):
                announced = read_number("saved")
            os.kill(pid, signal.SIGKILL)
            ended = next(line for line in parent.stdout if line.startswith("ended"))
            assert ended == f"ended {signal.SIGKILL:d}\n"
            path = checkpoint.find_latest(folder)
            assert path is not None
            loaded = checkpoint.load(path)
            assert loaded.step >= announced > newest  # every announced checkpoint was durable
            newest = announced
            assert loaded.model is not None
            assert torch.equal(loaded.optimizer["w"], torch.full((200_000,), float(loaded.step)))
            assert torch.equal(load_file(loaded.model / "model.safetensors")["w"], loaded.optimizer["w"])
            assert 1 <= len(checkpoint.list_steps(folder)) <= 3
        parent.stdin.close()
    assert parent.returncode == 0
    checkpoint.remove_leftovers(folder)
    assert all(p.name.startswith("step-") for p in folder.iterdir())


def awkward_tensors() -> dict[str, torch.Tensor]:
    """Returns tensors of two types with names, shapes and strides that a writer could get wrong."""
    generator = torch.Generator().manual_seed(0)
    names = ["z", "a", "exp_avg/layers.10.out", "exp_avg/layers.2.out", "exp_avg_sq/a", "B", 'with "quotes"', "ä"]
    tensors = {name: torch.randn(3, n + 1, generator=generator) for n, name in enumerate(names)}
    tensors |= {"double": torch.randn(5, generator=generator).double(), "another double": torch.zeros(1).double()}
    # -0.0, nan and denormals must survive.
    return tensors | {
        "odd": torch.tensor([-0.0, float("nan"), 1e-45]),
        "empty": torch.zeros(0, 4),
        "one": torch.ones(()),
    }


def test_the_file_has_the_bytes_that_the_library_would_write(tmp_path):
    tensors = awkward_tensors()
    path = checkpoint.save(tmp_path, Checkpoint(step=1, cursor=0, optimizer=tensors), write_nothing)
    save_file(tensors, tmp_path / "expected")
    assert (path / "optimizer.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_view_is_written_with_its_own_entries(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    views = {"transposed": matrix.t(), "row": matrix[1]}
    path = checkpoint.save(tmp_path, Checkpoint(step=1, cursor=0, optimizer=views), write_nothing)
    stored = load_file(path / "optimizer.safetensors")
    assert stored.keys() == views.keys() and all(torch.equal(t, views[n]) for n, t in stored.items())


def test_a_stream_is_read_one_tensor_at_a_time(tmp_path):
    """When a tensor is put together, none of those before it is in memory any more."""
    tensors, made, alive = awkward_tensors(), [], []

    def entry(name: str) -> StateTensor:
        def read() -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in made))
            whole = tensors[name].clone()
            made.append(weakref.ref(whole))
            return whole

        return StateTensor(shape=tuple(tensors[name].shape), dtype=tensors[name].dtype, read=read)

    stream = StateStream(numbers={}, entries={name: entry(name) for name in tensors})
    path = checkpoint.save(tmp_path, Checkpoint(step=1, cursor=0, optimizer=stream), write_nothing)
    save_file(tensors, tmp_path / "expected")
    assert (path / "optimizer.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert len(alive) == len(tensors) and not any(alive)


def test_stored_tensors_are_a_mapping_that_reads_when_asked(tmp_path):
    tensors = awkward_tensors()
    path = checkpoint.save(tmp_path, Checkpoint(step=1, cursor=0, optimizer=tensors), write_nothing)
    stored = checkpoint.load(path).tensors
    assert stored.keys() == tensors.keys() and len(stored) == len(tensors) and "z" in stored
    assert all(torch.equal(stored[n], t) for n, t in tensors.items() if n != "odd")
    with pytest.raises(KeyError, match="unknown"):
        stored["unknown"]


def write_nothing(folder: Path) -> None:
    """Writes a model folder without a model."""
    folder.mkdir()
