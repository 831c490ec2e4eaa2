"""`cohort explain` on a short real run: it prints what the learner did."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.cli.main import main
from cohort.inspect.explain.step import load_step
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import load_rollouts, save_rollouts
from tests.helpers.command_line import ENV, SMALL, cohort, command, only_run
from tests.helpers.made_once import make_once

HOSTILE = "\ud800\x1b]0;x\x07\u202e"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:

    def make(folder: Path) -> None:
        """Makes the run."""
        settings = [s for s in SMALL if not s.startswith(("--steps", "--eval.every"))]
        done = cohort("train", "quickstart", *settings, "--steps=2", at=folder)
        assert done.returncode == 0, done.stderr

    run = only_run(make_once(tmp_path_factory, "explain", make))
    assert run is not None
    return run


@pytest.mark.parametrize("number", [1, 2])
def test_the_signal_is_what_the_learner_recorded(trained: Path, number: int) -> None:
    step = load_step(trained, number)
    with Reader(trained / "run.db") as reader:
        recorded = {m.name: m.value for m in reader.read_metrics(step=number)}
    assert step.effect.has_exact_ratios and step.num_changed == 0
    assert step.effect.signal == pytest.approx(recorded["signal"], rel=1e-6)
    in_loss = [e.is_in_loss for g in step.effect.groups for e in g]
    assert sum(in_loss) == 4 * recorded["groups/in_loss"] > 0


def test_a_step_is_explained_on_the_terminal_and_as_a_page(trained: Path, tmp_path: Path) -> None:
    done = cohort("explain", trained, "--step", 2, at=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 2 of 2 · quickstart · tiny · arithmetic · grpo\n  groups          6: ")
    assert "\x1b" not in done.stdout
    shares = [float(share) for share in re.findall(r"^  \d+ +([\d.]+)%", done.stdout, re.MULTILINE)]
    assert len(shares) == 6 and sum(shares) == pytest.approx(100.0, abs=0.4) and shares == sorted(shares, reverse=True)
    assert len(re.findall(r"^sample \d · ", done.stdout, re.MULTILINE)) == 4
    assert re.search(
        r"^  sampled +│ .*<answer>", done.stdout, re.MULTILINE
    )  # tokens as the run's tokenizer spells them
    assert "not known" not in done.stdout and "not quite" not in done.stdout and "today" not in done.stdout
    written = cohort("explain", trained, "--step=1", "--group=0", "--html=step.html", at=tmp_path)
    assert (written.returncode, written.stdout) == (0, "wrote step.html\n")
    assert "<title>step 1 of 2 · quickstart" in (tmp_path / "step.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_step_is_explained_on_every_terminal(trained: Path, tmp_path: Path, encoding: str) -> None:
    # `env` sets the encoding, because a forked command takes that of its parent.
    words = ["env", f"PYTHONIOENCODING={encoding}", *command(["explain", trained])]
    done = subprocess.run(words, cwd=tmp_path, env=ENV, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = done.stdout.decode(encoding)
    assert "\\u2502 " in shown and ("\\xb7" if encoding == "ascii" else "\xb7") in shown


def test_half_characters_and_control_codes_are_shown_as_escapes(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    file = run / "rollouts" / "step-000002.safetensors"
    groups = []
    for group in load_rollouts(file):
        prompt = replace(group.prompt, id=f"{HOSTILE}{group.prompt.id}", row={"id": HOSTILE})
        prompt.messages[0]["content"] = HOSTILE
        samples = [replace(s, text=HOSTILE + s.text, reason=HOSTILE) for s in group.samples]
        groups.append(replace(group, prompt=prompt, samples=samples))
    file.unlink()
    save_rollouts(file, groups)
    page = tmp_path / "step.html"
    for words in ([], ["--html", str(page)], ["--group", HOSTILE]):
        assert main(["explain", str(run), *words]) == (2 if "--group" in words else 0)
    shown = [*capsys.readouterr(), page.read_text(encoding="utf-8")]
    for text in shown:
        assert "\\ud800\\x1b]0;x\\x07" in text
        assert not set(HOSTILE) & set(text) - set("]0;x")


def test_a_step_that_is_not_kept_is_one_line(trained: Path, tmp_path: Path) -> None:
    done = cohort("explain", trained, "--step", 3, at=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"cohort: {trained} has no rollouts of step 3; use --step with one of these: 1-2.\n"
