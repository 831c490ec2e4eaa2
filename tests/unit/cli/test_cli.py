"""The command line: one line for every mistake, instant help, and the right call for every command."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cohort
import cohort.inspect.bench
import cohort.jobs
from cohort.cli.main import COMMANDS, main
from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, EvalOptions
from cohort.config.schema import DrGRPO
from cohort.errors import CohortError, ConfigError
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.countdown import Countdown
from cohort.world import ONE_PROCESS
from tests.helpers.evaluations import evaluation


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the modules that build, export and measure; records their calls in `calls`."""
    calls: list[tuple[Any, ...]] = []

    def record(name: str, result: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, *args, *options.values()))
            return result

        return call

    result = BenchResult(
        what="engine",
        seconds=1.5,
        tokens_per_second=2730.4,
        fraction=0.42,
        limit="48 GFLOP/s",
        details={"gap": 0.125},
    )
    fake = SimpleNamespace(
        calls=calls,
        train=record("train", Path("runs/x")),
        resume=record("resume"),
        export_model=record("export_model"),
        export_adapters=record("export_adapters"),
        bench_engine=record("bench_engine", result),
        bench_learner=record("bench_learner", result),
        bench_step=record("bench_step", result),
    )
    monkeypatch.setitem(sys.modules, "cohort.jobs.build", fake)  # type: ignore[arg-type]
    # `from cohort.jobs import build` takes the package's attribute, if another test has imported the module before.
    monkeypatch.setattr(cohort.jobs, "build", fake, raising=False)
    monkeypatch.setitem(sys.modules, "cohort.inspect.bench.run", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(cohort.inspect.bench, "run", fake, raising=False)
    monkeypatch.setitem(sys.modules, "cohort.inspect.export", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(cohort.inspect, "export", fake, raising=False)
    return fake


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command, (_, about) in COMMANDS.items():
        assert f"  {command} " in shown
        assert about in shown


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from cohort.cli.main import main\n"
        "main(['--help'])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich', 'tyro', 'yaml'} & sys.modules.keys()))"
    )
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - begin)
    assert done.stdout.splitlines()[-1] == "[]"
    assert min(times) < 0.5


@pytest.mark.parametrize("command", [*COMMANDS, "train quickstart", "eval countdown", "data countdown", "bench step"])
def test_every_command_has_help_without_torch(command: str) -> None:
    program = (
        "import sys\n"
        "from cohort.cli.main import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as error: code = error.code\n"
        "print('code', code, sorted({'torch', 'transformers', 'rich'} & sys.modules.keys()))"
    )
    words = [*command.split(), "--help"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith(f"usage: cohort {command.split()[0]}")
    assert done.stdout.splitlines()[-1] == "code 0 []"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cohort {cohort.__version__}\n"


MISTAKES = {
    "trian quickstart": 'unknown command "trian". Did you mean "train"?',
    "--hlep": 'unknown flag "--hlep"',
    "train": "the recipe is missing. Name it first, for example: cohort train quickstart [--flags]. Recipes: ",
    "train --steps 5": "the recipe is missing. Name it first",
    "train quikstart": 'Did you mean "quickstart"? Name a recipe, or path/to/file.py:function; cohort train --help',
    "train missing.py:f": 'there is no file "missing.py"',
    "train quickstart --lr 3": "Did you mean --optim.lr?",
    "train quickstart --steps x": '--steps must be a whole number, not "x".',
    "train quickstart --log loud": '--log must be one of live, plain, json, not "loud".',
    "train quickstart --log": "--log takes one value",
    "train quickstart --out": "--out takes one value",
    "train quickstart --batch.samples 1": "Raise --batch.samples, for example to 8",
    "resume": "RUN is missing; write: cohort resume RUN [--flags].",
    "resume a b": 'unexpected word "b"',
    "resume a --steps 0": "--steps is 0; it must be at least 1: the number of the step at which the run ends.",
    "resume a --steps two": "--steps must be a whole number or None",
    "resume a --algo.kl.weight 1": "--algo.kl.weight cannot change",
    "eval": "name a task first: cohort eval TASK [--flags]. Tasks: aime24, ",
    "eval cuontdown": 'unknown task "cuontdown". Did you mean "countdown"?',
    "eval countdown --sample 4": "unknown flag --sample. Did you mean --samples?",
    "eval countdown --samples 0": "--samples is 0; it must be at least 1.",
    "eval countdown --temperature 0 --samples 2": "--samples has no effect at temperature 0",
    "eval countdown --temperature 0 --top-k 5": "have no effect at temperature 0",
    "eval countdown --top-p 0": "--top-p is 0.0",
    "eval countdown --out x.txt": "--out x.txt must be a folder or end in .json",
    "eval countdown arithmetic --out x.json": "one file, but there are 2 tasks",
    "eval countdown countdown": "a task is named twice",
    "eval countdown --engine server": "--engine server needs --url",
    "eval countdown --url http://x": "--url has no effect without --engine server",
    "data countdown arithmetic --out x": "takes one task, but 2 are given",
    "compare a.json": "B is missing",
    "compare a.json b.json --show -2": "--show is -2",
    "compare nowhere.json b.json": "there is no evaluation or run nowhere.json",
    "pull": "MODEL is missing",
    "pull nothing-of-that-name": 'no model "nothing-of-that-name"',
    "export run": "OUT is missing; write: cohort export RUN OUT [--flags].",
    "export run out --step first": '--step must be a step number, best or last, not "first".',
    "data countdown": "--out is missing",
    "data countdown --out no/such/folder/x": "there is no folder",
    "data countdown --out x --n -1": "--n is -1; it must be at least 0 (0 = all rows).",
    "data countdown --out x --task.test-size 5 --split test --n 6": "countdown has 5 test rows; lower --n",
    "data countdown --out x --task.max-numbr 5": "Did you mean --task.max-number?",
    "bench": "the benchmark is missing; name it first: cohort bench engine|learner|step",
    "bench enginee": 'unknown benchmark "enginee". Did you mean "engine"?',
    "bench engine --repeats 0": "--repeats is 0; it must be at least 1.",
    "bench engine --slots -1": "--slots is -1; it must be at least 0.",
    "bench engine --weights fp16": '--weights must be one of files, random, not "fp16".',
    "bench engine --device cuda --copies fp16": "--copies fp16 is only for CPUs",
    "bench step --device gpu": '--device must be one of auto, cpu, cuda, not "gpu".',
    "bench step --prefix-sharing True": "unknown flag --prefix-sharing",
    "models tiny": 'unexpected word "tiny"',
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    command: str,
    message: str,
    build: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("cohort: ") and err.count("\n") == 1
    assert message in err
    assert build.calls == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", ["sweep quickstart --optim.lr 1,2", "chat tiny", "check quickstart", "replay runs/a --step 1"]
)
def test_several_ranks_are_refused_before_anything_is_done(
    command: str, build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun every process would make the whole run, and say nothing of the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "WORLD_SIZE is 2" in err and "Start one process" in err and "unset WORLD_SIZE" in err
    assert build.calls == []


@pytest.mark.parametrize("size", ["1", "", "auto"])
def test_one_rank_is_no_reason_to_refuse(size: str, build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(["train", "quickstart"]) == 0
    assert len(build.calls) == 1


def test_a_mistake_in_a_process_of_its_own(run_cohort: Callable[..., Any]) -> None:
    done = run_cohort("train", "quickstart", "--algo.clip-hihg", "0.3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "cohort: unknown flag --algo.clip-hihg. Did you mean --algo.clip-high?\n"


def test_train_passes_config_folder_and_view(build: SimpleNamespace) -> None:
    args = ["train", "quickstart", "--out", "here", "--steps", "3", "--algo", "dr_grpo", "--log", "json"]
    assert main([*args, "--name", "new"]) == 0
    [(name, config, out, log, run)] = build.calls
    assert (name, config.steps, config.algo, out, log, run) == ("train", 3, DrGRPO(), Path("here"), "json", "new")


def test_train_defaults_to_plain_lines_off_a_terminal(build: SimpleNamespace) -> None:
    assert main(["train", "quickstart"]) == 0
    [(_, _, out, log, name)] = build.calls
    assert (out, log, name) == (Path("runs"), "plain", None)


@pytest.fixture
def run_a(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run runs/a in the working directory, with checkpoints of the steps 3 and 5; it is best after 3."""
    monkeypatch.chdir(tmp_path)
    for step, score in ((3, 1.0), (5, 0.0)):
        (tmp_path / "runs" / "a" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        file = tmp_path / "runs" / "a" / "eval" / f"step-{step:06d}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(evaluation({"x": [score]}, step=step).to_json()))
    (tmp_path / "runs" / "a" / "config.yaml").touch()


@pytest.mark.usefixtures("run_a")
@pytest.mark.parametrize("args", [["runs/a", "--steps", "9"], ["--steps", "9", "runs/a"], ["a", "--steps=9"]])
def test_resume_takes_the_run_before_or_after_its_flags(args: list[str], build: SimpleNamespace) -> None:
    assert main(["resume", *args]) == 0
    assert build.calls == [("resume", Path("runs/a"), 9, "plain", [])]


@pytest.mark.usefixtures("run_a")
def test_resume_takes_settings_that_may_change(build: SimpleNamespace) -> None:
    assert main(["resume", "runs/a", "--learner.shard", "full", "--scoring.env", "A", "B", "--steps=9"]) == 0
    changes = ["--learner.shard=full", "--scoring.env", "A", "B"]
    assert build.calls == [("resume", Path("runs/a"), 9, "plain", changes)]


@pytest.mark.parametrize("command", ["train quickstart", "resume runs/a", "eval countdown"])
@pytest.mark.usefixtures("run_a")
def test_half_of_the_variables_of_a_launcher_are_refused(
    command: str, build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler may set WORLD_SIZE without starting ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "RANK, LOCAL_RANK is not set" in err and "--ranks N" in err
    assert [call for call in build.calls if call[0] != "find_model"] == []


@pytest.mark.usefixtures("run_a")
def test_export(build: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/a", "out", "--step", "best"]) == 0
    assert main(["export", "a@3", "some/out 2"]) == 0
    assert main(["export", "runs/a", "out", "--adapters"]) == 0
    assert main(["export", "--adapters", "runs/a", "out", "--step", "3"]) == 0
    assert main(["export", "runs/a", "--adapters", "false", "out"]) == 0
    assert build.calls == [
        ("export_model", Path("runs/a"), Path("out"), "3"),
        ("export_model", Path("runs/a"), Path("some/out 2"), "3"),
        ("export_adapters", Path("runs/a"), Path("out"), "5"),
        ("export_adapters", Path("runs/a"), Path("out"), "3"),
        ("export_model", Path("runs/a"), Path("out"), "5"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["wrote out: the model of runs/a after step 3", "talk to it with: cohort chat ./out"]
    assert lines[3] == "talk to it with: cohort chat 'some/out 2'"
    assert lines[4] == "wrote out: the adapters of runs/a after step 5" and "--learner.lora.load ./out" in lines[5]


@pytest.mark.usefixtures("run_a")
def test_part_of_a_sweeps_name_continues_it(monkeypatch: pytest.MonkeyPatch, build: SimpleNamespace) -> None:
    continued: list[Path] = []
    monkeypatch.setattr("cohort.cli.resume._resume_sweep", lambda path, options: continued.append(path))
    Path("runs/grid").mkdir()
    Path("runs/grid/sweep.yaml").touch()
    for name in ("grid", "gri", "runs/gri", "runs/grid"):
        assert main(["resume", name]) == 0
    assert continued == [Path("runs/grid")] * 4 and build.calls == []
    # Two sweeps fit.
    Path("runs/grid-2").mkdir()
    Path("runs/grid-2/sweep.yaml").touch()
    assert main(["resume", "gri"]) == 2 and main(["resume", "grid"]) == 0
    assert continued == [Path("runs/grid")] * 5


@pytest.fixture
def evaluator_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replaces `cohort.evaluation.standalone` and returns the list of recorded calls."""
    calls: list[tuple[Any, ...]] = []

    class ModelEvaluator:
        def __init__(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append(("closed",))

        def prepare(self, task: Any) -> Any:
            return task

        def run(self, task: Any, out: Path, progress: Any) -> Any:
            progress(task.name, 2, 2)
            calls.append((task, out))
            scores = {"a": [1.0, 1.0, 1.0, 1.0], "b": [1.0, 0.0, 0.0, 0.0]}
            made = replace(evaluation(scores, task=task.name), finishes={"stop": 6, "length": 2})
            return SimpleNamespace(evaluation=made, path=out / "x.json", is_new=True)

    monkeypatch.setitem(sys.modules, "cohort.evaluation.standalone", SimpleNamespace(ModelEvaluator=ModelEvaluator))  # type: ignore[arg-type]
    return calls


def test_eval_prints_the_numbers(evaluator_calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", "countdown", "--model", "tiny", "--samples", "4", "--task.max-target", "50", "--out", "some"]
    assert main(args) == 0
    assert evaluator_calls == [
        ("tiny", EvalOptions(samples=4), ONE_PROCESS),
        (Countdown(max_target=50), Path("some")),
        ("closed",),
    ]
    shown, progress = capsys.readouterr()
    assert "avg@4        0.625, 95% interval 0.173 to 0.930" in shown  # worth 2.7 independent answers
    assert "pass@2       0.750" in shown  # problem b: 1 of 4 right, 1 - C(3,2)/C(4,2) = 0.5
    assert "pass@4       1.000" in shown
    assert "how          native engine, chat template, temperature 1, at most 64 tokens" in shown
    assert "finish       length 25%, stop 75%" in shown and "cut off      2 of 8 answers" in shown
    assert shown.endswith("wrote some/x.json\n") and progress == "countdown: 2 of 2 problems\n"


def test_eval_of_several_tasks(evaluator_calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "countdown", "arithmetic", "--countdown.max-target", "50", "--limit", "3"]) == 0
    assert evaluator_calls[0] == ("tiny", EvalOptions(limit=3), ONE_PROCESS)
    assert evaluator_calls[1:3] == [(Countdown(max_target=50), Path("evals")), (Arithmetic(), Path("evals"))]
    shown = capsys.readouterr().out
    assert shown.index("task         countdown") < shown.index("task         arithmetic")


def test_bench(build: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--copies", "fp16", "--samples", "2"]) == 0
    assert main(["bench", "step"]) == 0
    assert build.calls == [
        ("bench_engine", EngineBenchOptions(copies="fp16", samples=2)),
        ("bench_step", BenchOptions()),
    ]
    shown = capsys.readouterr().out
    assert "8 x 2 samples, 64+64 tokens" in shown
    assert "tokens/s      2730" in shown
    assert "42% (48 GFLOP/s)" in shown
    assert "gap           0.125" in shown


def test_bench_on_a_gpu(build: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench engine --model qwen2.5-0.5b --weights random --device cuda --dtype bfloat16 --lengths lognormal"
    assert main(command.split()) == 0
    [(_, options)] = build.calls
    assert (options.weights, options.device, options.dtype) == ("random", "cuda", "bfloat16")
    shown = capsys.readouterr().out
    assert "8 x 8 samples, 64+64 tokens at most, log-normal" in shown


def test_models_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    from cohort.models.catalog import list_models

    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "state", "size", "source"]
    assert [line.split()[0] for line in lines[1:]] == [entry.name for entry in list_models()]


def test_data_writes_the_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "prompts.jsonl"
    assert main(["data", "countdown", "--out", str(out), "--split", "test", "--n", "3"]) == 0
    assert capsys.readouterr().out == f"wrote 3 countdown prompts (test) to {out}\n"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 3
    task = Countdown()
    assert all(row["messages"] == task.prompt(row["row"]) for row in rows)
    assert list(tmp_path.iterdir()) == [out], "nothing is left beside it"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m cohort data arithmetic --out - | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


def test_errors_of_a_run(build: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    build.train = raising(CohortError("the disk\nis gone"))
    assert main(["train", "quickstart"]) == 2
    assert capsys.readouterr().err == "cohort: the disk is gone\n"
    build.train = raising(PermissionError(13, "Permission denied", "runs/x"))
    assert main(["train", "quickstart"]) == 2
    assert (
        capsys.readouterr().err
        == "cohort: Permission denied: runs/x. Use another path, or give this one space and permissions.\n"
    )
    build.train = raising(KeyboardInterrupt())
    assert main(["train", "quickstart"]) == 130
    build.train = raising(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        main(["train", "quickstart"])


def test_train_from_python(build: SimpleNamespace) -> None:
    import cohort.loops.rl  # importing any part of the package must not hide the function

    assert inspect.isfunction(cohort.train) and type(cohort) is ModuleType
    assert pydoc.plain(pydoc.render_doc(cohort.train)).splitlines()[2].startswith("train(recipe: ")
    with pytest.raises(ConfigError, match=r"settings must be a dict such as .*, not a list"):
        cohort.build("quickstart", [("steps", 1)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a recipe must be a name, .* not a int"):
        cohort.build(5)  # type: ignore[arg-type]
    run = cohort.train("quickstart", {"steps": 3, "algo": "dr_grpo"}, out="here")
    assert run == Path("runs/x")
    config = cohort.RL(task=Countdown(), steps=2)
    cohort.train(config)
    with pytest.raises(ConfigError, match='--name "a/b" cannot be the name of a run'):
        cohort.train(config, name="a/b")
    (_, first, out, log, _), (_, second, *_) = build.calls
    assert (first.steps, first.algo, out, log) == (3, DrGRPO(), Path("here"), "plain")
    assert second.steps == 2 and second.reward == {"correct": 1.0, "format": 1.0}


def test_data_writes_into_a_device_and_does_not_replace_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The devices are nodes in tmp_path where that is allowed, so that a failure harms nothing."""
    for name in ("full", "null"):
        path = tmp_path / name
        if os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
        else:
            path.symlink_to(f"/dev/{name}")
    rows = ["data", "arithmetic", "--n", "3", "--task.train-size", "5"]
    assert main([*rows, "--out", str(tmp_path / "full")]) == 2
    assert "the disk is full or your quota is used up. Free some space" in capfd.readouterr().err
    assert main([*rows, "--out", str(tmp_path / "null")]) == 0
    assert "wrote 3 arithmetic prompts" in capfd.readouterr().out
    assert all(stat.S_ISCHR((tmp_path / name).stat().st_mode) for name in ("full", "null"))
    (tmp_path / "stdout").symlink_to("/dev/fd/1")
    assert main([*rows, "--out", str(tmp_path / "stdout")]) == 0
    assert (tmp_path / "stdout").is_symlink()
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3 and all(json.loads(line)["id"] for line in lines)
