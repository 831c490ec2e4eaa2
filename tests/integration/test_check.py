"""`cohort check` as a user calls it: on the built-in recipes and a broken task, for people and programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cohort.cli.check import run
from cohort.config.kinds import RL
from cohort.errors import ConfigError
from cohort.inspect.check.findings import Finding
from cohort.inspect.check.run import run_checks
from cohort.text import Tokenizer
from tests.helpers.data_rows import use_written_rows
from tests.helpers.installed_recipes import CALLABLE as RECIPES
from tests.helpers.small_runs import keep_torch_settings

SMALL = shlex.split("--threads 1 --batch.prompts 2 --batch.samples 4 --eval.problems 8 --sampling.max-tokens 24")
OWN = '''
import cohort
from cohort.config.schema import BatchConfig, EvalConfig, SamplingConfig


@cohort.task("pasted")
class EchoTask:
    """A task that rewards naming a number which is in the prompt."""

    def rows(self, split):
        return ({"id": f"{split}-{n}", "n": n + 16 * (split == "test")} for n in range(16))

    def prompt(self, row):
        return [{"role": "user", "content": f"Write \\x1b[2J{row['n']} in tags."}]

    def gold(self, row):
        return f"<answer>{row['n']}</answer>"

    def score(self, row, answer):
        return {"correct": float(str(row["n"]) in answer.text)}


def recipe():
    return cohort.RL(
        model="tiny", task=EchoTask(), steps=2, threads=1, batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=16), eval=EvalConfig(problems=4),
    )
'''


@pytest.fixture(autouse=True)
def settings_kept():
    with keep_torch_settings():
        yield


def test_the_quickstart_passes_with_one_line_per_check(capsys: pytest.CaptureFixture[str]) -> None:
    run(["quickstart", "--threads", "1"])
    shown = capsys.readouterr()
    *lines, last = shown.out.splitlines()
    assert len(lines) == 31 and all(line.startswith("ok    ") for line in lines), shown.out
    assert last == "31 checks: 0 failed, 0 with a warning"
    assert shown.err == ""  # progress is for terminals
    assert {line.split()[1].split("/")[0] for line in lines} == {"task", "reward", "update", "plan"}


def different_recipes() -> list[str]:
    """Returns one recipe out of each set that differs in model and adapters only: the test uses the bundled model."""
    seen: dict[str, str] = {}
    for name, make in sorted(RECIPES.items()):
        config = make()
        if not isinstance(config, RL):
            continue
        seen.setdefault(repr((config.task, config.turns, config.reward, config.algo)), name)
    return sorted(set(seen.values()) - {"quickstart"})


# The check of a task with programs runs all of them, which takes most of a minute.
SLOW_RECIPES = {"smollm2_code"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_RECIPES)) for name in different_recipes()]
)
def test_no_built_in_recipe_fails_a_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_written_rows(tmp_path, monkeypatch)
    # The small batch has two groups to divide.
    divided = ["--learner.minibatches", "2"] if RECIPES[name]().learner.minibatches > 2 else []
    run([name, "--model", "tiny", *SMALL, *divided, "--json"])
    found = json.loads(capsys.readouterr().out)
    names = [f["name"] for f in found["findings"]]
    # Samples of several turns are also compared with a whole render, if the bundled model has made some.
    num = len({*names} - {"conversation/stream"})
    assert found["ok"] and found["recipe"] == name and num == 31
    # The bundled model replaces the others here: its samples may all be wrong, or never end, and it is told so. Half of
    # a text that follows an instruction often follows it too.
    usual = {"reward/signal", "update/end-token"} | ({"reward/truncated"} if "ifeval" in name else set())
    # re-grpo pays nothing without a call of a tool.
    usual |= {"reward/varies"} if name in ("calculator", "search_qa") else set()
    # Every program starts an interpreter, which takes a while on a busy machine.
    usual |= {"reward/speed"} if name == "smollm2_code" else set()
    assert {f["name"] for f in found["findings"] if f["status"] == "warn"} <= usual


def test_a_broken_task_ends_with_exit_code_1_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task is checked once, and the findings are printed in both forms."""
    (tmp_path / "pasted.py").write_text(OWN)
    known: list[Finding] = []

    def check_once(config: RL, progress: Callable[[str], None], num_ranks: int) -> Iterator[Finding]:
        if not known:
            known.extend(run_checks(config, progress))
        yield from known

    monkeypatch.setattr("cohort.inspect.check.run.run_checks", check_once)
    for form in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            run([f"{tmp_path}/pasted.py:recipe", *form])
        assert ended.value.code == 1
        out = capsys.readouterr().out
        assert "\x1b" not in out
        if form:
            report = json.loads(out)
            failed = [f for f in report["findings"] if f["status"] == "FAIL"]
            assert not report["ok"] and [f["name"] for f in failed] == ["reward/echo"]
            assert failed[0]["details"] == {"reward": 1.0} and "repeating the prompt earns 1 of 1" in failed[0]["text"]
        else:
            lines = out.splitlines()
            first, again = [line for line in lines if line.startswith("FAIL")]
            assert first == again == lines[-1] and first.split()[1] == "reward/echo" and "1 failed" in lines[-2]


def test_what_cannot_be_checked_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in (
        ([], "the recipe is missing"),
        (["--json"], "the recipe is missing"),
        (["quickstart", "--lr", "1"], "optim.lr"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(args)
    run(["--help"])
    assert "usage: cohort check RECIPE" in capsys.readouterr().out


def test_a_loss_that_raises_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("no tokens")

    monkeypatch.setattr("cohort.algos.policy.PolicyGradient.loss", broken)
    with pytest.raises(SystemExit) as ended:
        run(["quickstart", "--batch.prompts", "8", "--eval.problems", "8", "--threads", "1"])
    assert ended.value.code == 1
    assert "FAIL  update/raises" in (said := capsys.readouterr().out) and "ZeroDivisionError: no tokens" in said


@pytest.mark.parametrize(("name", "num"), [("tiny_sft", 19), ("tiny_dpo", 25)])
def test_recipes_on_given_answers_pass(name: str, num: int, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--batch.examples", "4"] if name == "tiny_sft" else ["--batch.pairs", "4", "--data.rows", "20"]
    run([name, "--threads", "1", *size])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == num and all(line.startswith("ok    ") for line in lines), lines
    assert last == f"{num} checks: 0 failed, 0 with a warning"
    assert {line.split()[1].split("/")[0] for line in lines} >= {"data", "template", "update", "plan"}


def test_a_fault_of_given_answers_is_one_object_and_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": f"{n}\x1b[2J"} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Tokenizer, "_guard_message", lambda self, message, guard: message)
    with pytest.raises(SystemExit) as ended:
        run(["sft", "--model", "tiny", "--threads", "1", "--data.path", str(file), "--batch.examples", "4", "--json"])
    printed = capsys.readouterr().out
    report = json.loads(printed)
    assert ended.value.code == 1 and not report["ok"] and "\x1b" not in printed
    failed = {f["name"] for f in report["findings"] if f["status"] == "FAIL"}
    assert failed == {"template/special-text"}
