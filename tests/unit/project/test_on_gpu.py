"""The list of measurements on a GPU runs: in order, alone or beside each other, with limits, and never twice."""

from __future__ import annotations

import doctest
import os
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import CALCULATOR, STEPS, Campaign, Step, find_values, main, read_state
from cohort.config.load import load_config

# A step: notes that it runs, does what its words say, and notes that it has ended.
PROGRAM = """
import os, subprocess, sys, time
folder, name, *words = sys.argv[1:]
running = f"{folder}/running"
os.makedirs(running, exist_ok=True)
open(f"{running}/{name}", "w").close()
with open(f"{folder}/order", "a") as order:
    order.write(name + "\\n")

def wait(found):
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()

code = 0
for word in words:
    what, _, value = word.partition("=")
    if what == "beside":
        wait(lambda: os.path.exists(f"{folder}/{value}/log"))
    if what == "alone":
        assert os.listdir(running) == [name], os.listdir(running)
    if what == "code":
        code = int(open(value).read())
    if what == "write":
        os.makedirs(os.path.dirname(value), exist_ok=True)
        open(value, "w").close()
    if what == "forever":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(value, "w").write(str(child.pid))
        time.sleep(600)
print("words:", *words)
os.remove(f"{running}/{name}")
sys.exit(code)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program of steps. No environment variable names a need."""
    (tmp_path / "step.py").write_text(PROGRAM)
    for variable in on_gpu.NEEDS.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(on_gpu, "PAUSE", 0.01)
    return tmp_path


def step(name: str, *words: str, minutes: float = 2, alone: bool = False, after: tuple[str, ...] = ()) -> Step:
    """Returns a step that runs the program with these words."""
    command = " ".join(["{python} {folder}/step.py {folder}", name, *words])
    return Step(name=name, command=command, minutes=minutes, alone=alone, after=after)


def run(folder: Path, *steps: Step) -> dict[str, str]:
    """Runs steps and returns their states by name."""
    campaign = Campaign(steps, folder, find_values(folder))
    campaign.run()
    return {name: state.state for name, state in campaign.states.items()}


def test_the_examples() -> None:
    assert doctest.testmod(on_gpu).attempted > 0 == doctest.testmod(on_gpu).failed


def test_what_is_done_is_not_repeated(folder: Path) -> None:
    code = folder / "code"
    code.write_text("1")
    steps = [step("one"), step("two", f"code={code}"), step("three", after=("two",))]
    assert run(folder, *steps) == {"one": "done", "two": "failed", "three": "left out"}
    (folder / "two" / "half").write_text("what a script would find, and refuse")
    assert read_state(folder, "two").reason == "exit status 1"
    assert read_state(folder, "three").reason == "two is not done"
    code.write_text("0")
    assert run(folder, *steps) == {"one": "done", "two": "done", "three": "done"}
    assert not (folder / "two" / "half").exists()
    assert sorted((folder / "order").read_text().split()) == ["one", "three", "two", "two"]


def test_steps_run_beside_each_other_or_alone(folder: Path) -> None:
    """Each of the first two waits until the other one has started."""
    steps = [step("a", "beside=b"), step("b", "beside=a"), step("c", "alone", alone=True), step("d"), step("e")]
    assert set(run(folder, *steps).values()) == {"done"}
    order = (folder / "order").read_text().split()
    assert {*order[:2]} == {"a", "b"} and order[2] == "c"


def test_a_step_waits_for_what_it_needs_also_in_another_order(folder: Path) -> None:
    assert run(folder, step("late", after=("early",)), step("early")) == {"late": "done", "early": "done"}
    assert (folder / "order").read_text().split() == ["early", "late"]
    # What an earlier call has done counts.
    assert run(folder, step("later", after=("early",)), step("never", after=("unknown",))) == {
        "later": "done",
        "never": "left out",
    }


def test_a_step_that_takes_too_long_ends_with_its_family(folder: Path) -> None:
    child = folder / "child"
    assert run(folder, step("slow", f"forever={child}", minutes=0.05), step("next")) == {
        "slow": "ended",
        "next": "done",
    }
    assert read_state(folder, "slow").reason == "it took longer than 0.05 minutes"
    assert not is_running(int(child.read_text()))


def is_running(pid: int) -> bool:
    """Returns whether a process runs. One that has ended and nobody has waited for does not."""
    file = Path(f"/proc/{pid}/stat")
    return file.is_file() and file.read_text().rpartition(")")[2].split()[0] != "Z"


def test_packages_are_found_from_the_folder_of_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "packages").mkdir()
    (folder / "packages" / "carried.py").write_text("")
    (folder / "find.py").write_text("import carried, cohort")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "packages")
    assert run(folder, Step(name="find", command="{python} {folder}/find.py", minutes=1)) == {"find": "done"}


def test_what_is_missing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Step(name="data", command="{python} {folder}/step.py {folder} data {data}/x_{split}", minutes=1)
    absent = Step(name="absent", command="{python} benchmarks/absent.py", minutes=1)
    assert run(folder, data, absent) == {"data": "left out", "absent": "left out"}
    assert read_state(folder, "data").reason == "COHORT_DATA is not set"
    assert read_state(folder, "absent").reason == "there is no benchmarks/absent.py"
    monkeypatch.setenv("COHORT_DATA", "/d")
    assert run(folder, data) == {"data": "done"}
    assert "words: /d/x_{split}" in (folder / "data" / "log").read_text()


def test_the_command_tells_and_packs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step("one", "hello"), step("two")]
    assert main(["--folder", str(folder), "--status"], steps) == 1
    assert capsys.readouterr().out.split()[:2] == ["one", "waiting"]
    assert main(["--folder", str(folder), "--only", "one"], steps) == 0
    assert main(["--folder", str(folder), "--status"], steps) == 1
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith("one ") and " done " in lines[0] and lines[0].endswith("| words: hello")
    (folder / "one" / "checkpoints").mkdir()
    (folder / "one" / "checkpoints" / "weights").write_text("x")
    (folder / "one" / "large").write_bytes(bytes(on_gpu.LARGEST + 1))
    main(["--folder", str(folder), "--pack", str(folder / "all.tar.gz")], steps)
    with tarfile.open(folder / "all.tar.gz") as archive:
        names = archive.getnames()
    assert {"one/log", "one/state.json"} <= {*names} and not {"one/large", "one/checkpoints/weights"} & {*names}
    with pytest.raises(SystemExit, match="there is no step three"):
        main(["--folder", str(folder), "--only", "three"], steps)


def test_waiting_ends_with_the_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step("one")]
    monkeypatch.setattr(on_gpu, "GRACE", 0.0)
    began = time.monotonic()
    # No campaign runs; then its step is done.
    for expected in (1, 0):
        assert main(["--folder", str(folder), "--status", "--wait", "600"], steps) == expected
        run(folder, *steps)
    assert time.monotonic() - began < 300


def test_states_of_optimizers_are_removed(folder: Path) -> None:
    runs = folder / "one" / "runs"
    run(folder, step("one", f"write={runs}/optimizer.safetensors", f"write={runs}/model.safetensors"))
    assert [path.name for path in runs.iterdir()] == ["model.safetensors"]


def test_a_folder_has_one_campaign(folder: Path) -> None:
    (folder / "campaign.pid").write_text(str(os.getpid()))
    with pytest.raises(SystemExit, match=r"runs in .* already"):
        main(["--folder", str(folder)], [step("one")])


def test_the_list_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step comes after what it needs, and all its words can be filled in."""
    for variable in on_gpu.NEEDS.values():
        monkeypatch.setenv(variable, "/somewhere")
    values = {**find_values(folder), "folder": "f", "out": "o", "python": "p"}
    seen: set[str] = set()
    for one in STEPS:
        assert one.name not in seen and {*one.after} <= seen, one.name
        seen.add(one.name)
        words = [on_gpu.fill(on_gpu.WORDS.get(word, word), values) for word in one.command.split()]
        left = " ".join([*words, *(on_gpu.fill(text, values) for text in one.env.values())])
        assert "{" not in left.replace("{split}", ""), left


def test_the_calculator_is_evaluated_as_it_is_trained() -> None:
    assert load_config("coder_calculator", CALCULATOR.split()) == load_config("coder_calculator", [])
    assert load_config("coder_calculator", ["--task.max-terms", "7"]) != load_config("coder_calculator", [])
