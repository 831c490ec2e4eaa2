"""Plans: which runs a command line stands for, and which ones are refused before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cohort.config.flags import split_args
from cohort.errors import ConfigError, RunError
from cohort.run.finding import list_runs
from cohort.sweep.directory import RunResult, SweepDirectory
from cohort.sweep.plan import Plan, check_recipe, format_train_command
from cohort.sweep.prepare import SweepRequest, prepare_plan
from cohort.system.kernel import count_cores

SMALL = "--task.train-size=300 --batch.prompts=4"


def prepare(line: str, recipe: str = "quickstart", **options: object) -> Plan:
    """Returns the plan of the settings in `line`."""
    given = split_args([*line.split(), *(SMALL.split() if recipe == "quickstart" else ())])[1]
    return prepare_plan(SweepRequest(recipe=recipe, given=given, **options)).plan  # type: ignore[arg-type]


def test_a_grid_has_every_combination_and_the_last_axis_changes_fastest() -> None:
    plan = prepare("--optim.lr 1e-4,1e-3 --batch.samples 4,8 --steps 5", seeds=2)
    runs = plan.list_runs()
    assert [run.name for run in runs[:4]] == [
        "001-optim.lr=1e-4-batch.samples=4-seed=0",
        "002-optim.lr=1e-4-batch.samples=4-seed=1",
        "003-optim.lr=1e-4-batch.samples=8-seed=0",
        "004-optim.lr=1e-4-batch.samples=8-seed=1",
    ]
    assert len(runs) == 8 and runs[7].label == "optim.lr=1e-3 batch.samples=8" and runs[7].combination == 3
    config = plan.load_config(runs[7].values, runs[7].seed)
    assert (config.optim.lr, config.seed, config.steps, config.eval.split) == (1e-3, 1, 5, "validation")
    assert getattr(config, "batch").samples == 8  # noqa: B009
    command = format_train_command(plan, runs[7])
    assert command.startswith("cohort train quickstart --steps=5 ") and "--eval.split=validation" in command


def test_seeds_are_counted_from_that_of_the_recipe_or_given() -> None:
    assert prepare("--optim.lr 1e-4,1e-3").seeds == [0]
    assert prepare("--seed 5", seeds=3).seeds == [5, 6, 7]
    assert prepare("--seed 3,1").seeds == [3, 1]
    names = [run.name for run in prepare("--seed 3,1").list_runs()]
    assert names == ["001-seed=3", "002-seed=1"]


def test_lists_and_variants_can_be_swept() -> None:
    plan = prepare("--learner.lora.rank 4 --learner.lora.targets [q_proj,v_proj],[o_proj] --algo grpo,dr_grpo")
    runs = plan.list_runs()
    assert runs[1].name == "002-learner.lora.targets=q_proj+v_proj-algo=dr_grpo"
    assert plan.load_config(runs[0].values, 0).learner.lora.targets == ("q_proj", "v_proj")
    assert plan.load_config(runs[3].values, 0).learner.lora.targets == ("o_proj",)


def test_random_combinations_are_distinct_and_repeatable() -> None:
    line = "--optim.lr 1e-5..1e-3 --batch.samples 4,8"
    plan = prepare(line, random=6, random_seed=3)
    assert plan == prepare(line, random=6, random_seed=3) != prepare(line, random=6, random_seed=4)
    assert len({tuple(map(tuple, c)) for c in plan.combinations}) == 6
    grid = prepare("--optim.lr 1e-4,2e-4,3e-4 --batch.samples 4,8", random=6)
    assert len({tuple(map(tuple, c)) for c in grid.combinations}) == 6


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("--steps 3", {}, "nothing is swept"),
        ("--optim.lr 1e-4,x", {}, "the combination optim.lr=x is refused: --optim.lr must be a number"),
        ("--optim.lr 1e-4,99", {}, "the combination optim.lr=99 is refused"),
        ("--optim.lr 1e-4,0.0001", {}, "two runs would be the same: optim.lr=1e-4 and optim.lr=0.0001"),
        ("--optim.lr 1e-4,1e-4", {}, "two runs would be the same"),
        ("--optim.lr 1e-5..1e-3", {}, "Add --random N"),
        ("--optim.lr 1e-4,1e-3", {"random": 3}, "more than the 2 combinations"),
        ("--batch.samples 7..8", {"random": 3}, "more than the combinations"),
        ("--steps 3", {"random": 3, "seeds": 2}, "no setting has several values"),
        ("--seed 1,1", {}, "a seed twice"),
        ("--seed 1,2", {"seeds": 2}, "Remove one of them"),
        ("--seed x,y", {}, "takes whole numbers"),
        ("--optim.lr 1,2 --optim.lr 3,4", {}, "given twice"),
        ("--optim.lrr 1,2", {}, "unknown flag --optim.lrr. Did you mean --optim.lr?"),
        ("--optim.lr 1e-4,1e-3 --seed 0", {"seeds": 600}, "1200 runs, more than 1000"),
    ],
)
def test_a_wrong_plan_is_refused(line: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(line, **options)


def test_combinations_that_rules_refuse_are_all_named() -> None:
    with pytest.raises(ConfigError) as refused:
        prepare("--learner.minibatches 1,8,9")
    assert "the combination learner.minibatches=8 is refused" in str(refused.value)
    assert "(also refused: learner.minibatches=9)" in str(refused.value)


def test_threads_are_divided_among_the_runs_and_kept() -> None:
    assert prepare("--optim.lr 1e-4,1e-3", jobs=10**6).threads == 1
    first = prepare("--optim.lr 1e-4,1e-3")
    assert first.threads == count_cores()
    assert prepare("--optim.lr 1e-4,1e-3 --threads 3").threads == 0  # the user's own number is among the settings
    given = split_args(["--optim.lr", "1e-4,1e-3", *SMALL.split()])[1]
    again = prepare_plan(SweepRequest(recipe="quickstart", given=given, jobs=2), replace(first, date="2026-01-01"))
    assert again.plan == replace(first, date="2026-01-01")


def test_a_sweep_chooses_on_the_validation_split_where_there_is_one() -> None:
    line = "--optim.lr 1e-4,1e-3"
    assert (prepare(line).split, prepare(line).split_note) == ("validation", "")
    few = prepare_plan(
        SweepRequest(recipe="quickstart", given=split_args([*line.split(), "--task.train-size=100"])[1])
    ).plan
    assert few.split == "" and "has 100 training rows, too few" in few.split_note
    asked = prepare(f"{line} --eval.split test")
    assert (asked.split, asked.split_note) == ("", "as --eval.split asks for")
    assert prepare(f"{line} --eval.split validation --eval.validation-share 0.2").split == ""
    assert prepare(f"{line} --eval.validation-share 0.2").split == "validation"
    assert prepare(line, recipe="tiny_sft").split == ""


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    plan = prepare("--learner.lora.rank 4 --learner.lora.targets [q_proj,v_proj],[o_proj]", seeds=2)
    SweepDirectory.create(tmp_path / "s", plan)
    assert SweepDirectory.open(tmp_path / "s").plan == plan
    text = (tmp_path / "s" / "sweep.yaml").read_text()
    # The number of threads is no setting of the user, and the file says so.
    assert "threads" not in [setting.name for setting in plan.settings] and f"\nthreads: {plan.threads}\n" in text
    assert "# The plan of a sweep." in text and "`threads`, `split` and `date` are chosen by the sweep" in text
    (tmp_path / "s" / "sweep.yaml").write_text(text.replace("format: 1", "format: 2"))
    with pytest.raises(RunError, match=r"has format 2.*upgrade"):
        SweepDirectory.open(tmp_path / "s")
    for damaged in ("format: 1\nrecipe: 3\n", text.replace("- learner.lora.targets\n", ""), "- 1\n", "a: [", ""):
        (tmp_path / "s" / "sweep.yaml").write_text(damaged)
        with pytest.raises(RunError, match=r"is damaged|not valid YAML"):
            SweepDirectory.open(tmp_path / "s")


def test_the_word_of_the_first_sweeps_for_done_is_understood(tmp_path: Path) -> None:
    plan = prepare("--optim.lr 1e-4,1e-3")
    directory = SweepDirectory.create(tmp_path / "s", plan)
    directory.save_result(plan.list_runs()[0], RunResult(state="finished", step=3))
    assert directory.load_result(plan.list_runs()[0]) == RunResult(state="done", step=3)


def test_a_changed_recipe_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = "from dataclasses import replace\nfrom cohort.recipes import RECIPES\n"
    file.write_text(f"{source}def mine():\n    return replace(RECIPES['tiny_sft'](), steps=4)\n")
    plan = prepare("--optim.lr 1e-4,1e-3", recipe=f"{file}:mine")
    assert plan.recipe == f"{file}:mine"
    check_recipe(plan)
    with pytest.raises(RunError, match="other settings than when the sweep was started"):
        check_recipe(Plan(**{**asdict(plan), "digest": "0" * 16, "method": plan.method, "settings": plan.settings}))


def test_the_process_of_a_sweep_does_not_import_torch() -> None:
    """Its children do. On a machine with many cores and little memory one more torch would be felt."""
    names = ["cohort.cli.sweep", "cohort.cli.sweep_progress"]
    names += [f"cohort.sweep.{file.stem}" for file in Path(prepare_plan.__code__.co_filename).parent.glob("[a-z]*.py")]
    program = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False" and len(names) > 10


def test_the_folder_of_a_sweep_is_no_run(tmp_path: Path) -> None:
    SweepDirectory.create(tmp_path / "s", prepare("--optim.lr 1e-4,1e-3"))
    assert list_runs(tmp_path) == [] and not (tmp_path / "s" / ".lock").exists()
    with pytest.raises(RunError, match="is being written by process"):
        SweepDirectory.open(tmp_path / "s").lock()
