"""`cohort plot` on whole runs, and on broken ones."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cohort.cli.main import main
from cohort.logs.view import make_view
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from tests.helpers.command_line import ENV, cohort
from tests.helpers.pretend_run import run_to_end, small_run
from tests.helpers.recorded_runs import recorded_run
from tests.helpers.terminal import Terminal

CURVE = {step: {"reward/mean": step / 10, "grad_norm": 1 / step} for step in range(1, 9)}


def finished_run(folder: Path, name: str, **settings: object) -> Path:
    """Returns a run that was done to its end, with four numbers in place of a model."""
    directory = RunDirectory.create(folder / "runs", small_run(**settings), name)
    run_to_end(directory, make_view("plain", io.StringIO()))
    return directory.path


def test_a_run_draws_its_curves_and_its_card_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, "first")
    picture = (run / "curves.svg").read_bytes()
    card = (run / "run.md").read_text(encoding="utf-8")
    assert "\n\n![Curves of the run](curves.svg)\n\n## Training" in card
    texts = [e.text for e in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"held-out accuracy", "reward/mean", "length/mean", "grad_norm", "step"} <= set(texts)
    assert b"first" not in picture, "the name of the run would differ in an equal run"
    # The command draws the same picture.
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'curves.svg'}\n"
    assert (run / "curves.svg").read_bytes() == picture


def test_a_picture_that_cannot_be_drawn_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cohort.plot.picture.draw_page", lambda page: 1 / 0)
    run = finished_run(tmp_path, "first")
    assert "curves.svg" not in (run / "run.md").read_text(encoding="utf-8")
    assert not (run / "curves.svg").exists()
    with Reader(run / "run.db") as reader:
        [event] = reader.read_events(kind="picture")
    assert event.text.startswith("curves.svg was not drawn (ZeroDivisionError")


def test_runs_are_overlaid_by_names_in_a_new_process(tmp_path: Path) -> None:
    for seed in (1, 2):
        recorded_run(tmp_path / "runs" / f"2026-11-15-pretend-xyz{seed}", CURVE, {0: (0.5, 0.4, 0.6)}, seed=seed)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    done = cohort("plot", "xyz1", "xyz2", "--smooth", 3, "--log", "grad_norm", at=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote curves.svg\n", "")
    text = (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert ">seed 1</text>" in text and ">seed 2</text>" in text and "grad_norm (log scale)" in text
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before, "runs are only read"
    # A folder of runs means all of them.
    again = cohort("plot", "runs", "--out", "all.svg", "--smooth", 3, "--log", "grad_norm", at=tmp_path)
    assert again.returncode == 0 and (tmp_path / "all.svg").read_text(encoding="utf-8") == text


def test_broken_runs_are_named_and_left_out(tmp_path: Path) -> None:
    good = recorded_run(tmp_path / "good", CURVE)
    bad = recorded_run(tmp_path / "bad", CURVE)
    lost = recorded_run(tmp_path / "lost", CURVE)
    (bad / "run.db").write_bytes(b"not a database" * 500)
    (lost / "run.db").unlink()
    (good / "config.yaml").write_text("{broken", encoding="utf-8")
    done = cohort("plot", good, bad, lost, at=tmp_path)
    assert done.returncode == 0 and done.stdout == "wrote curves.svg\n"
    notes = done.stderr.splitlines()
    assert len(notes) == 2
    assert notes[0].startswith(f"left out: {bad / 'run.db'} cannot be read")
    assert notes[1].startswith(f"left out: there is no file {lost / 'run.db'}")
    alone = cohort("plot", bad, at=tmp_path)
    assert alone.returncode == 2 and alone.stderr.startswith(f"cohort: {bad / 'run.db'} cannot be read")
    assert not (bad / "curves.svg").exists()


def test_a_run_that_is_being_written_is_drawn(tmp_path: Path) -> None:
    codes = []

    def draw(step: int) -> None:
        if step in (0, 4):
            codes.append(main(["plot", str(tmp_path / "runs" / "first"), "--out", str(tmp_path / f"{step}.svg")]))

    directory = RunDirectory.create(tmp_path / "runs", small_run(), "first")
    run_to_end(directory, make_view("plain", io.StringIO()), draw)
    assert codes == [0, 0]
    # Before the first step there is only an evaluation.
    assert "reward/mean" not in (tmp_path / "0.svg").read_text(encoding="utf-8")
    assert "reward/mean" in (tmp_path / "4.svg").read_text(encoding="utf-8")


def test_the_series_as_json_and_as_text(tmp_path: Path) -> None:
    hostile = "re</text>\x1b[2Jward"
    steps = {step: {**metrics, hostile: float("nan") if step == 2 else 1.0} for step, metrics in CURVE.items()}
    run = recorded_run(tmp_path / "one", steps, {0: (0.5, 0.4, 0.6)})
    done = cohort("plot", run, "--json", "--metrics", f"accuracy,{hostile}", "--steps", "0:2", at=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy, odd = json.loads(done.stdout)["charts"]
    assert accuracy["metric"] == "held-out accuracy"
    assert accuracy["runs"][0]["points"] == [{"x": 0.0, "y": 0.5, "low": 0.4, "high": 0.6, "after_gap": False}]
    assert [p["y"] for p in odd["runs"][0]["points"]] == [1.0, None]
    text = cohort("plot", run, "--text", "--metrics", hostile, at=tmp_path)
    assert text.returncode == 0 and "\x1b" not in text.stdout and "1 -> 1" in text.stdout
    listed = cohort("plot", run, "--metrics", "list", at=tmp_path)
    assert listed.stdout.splitlines()[0].split() == ["metric", "values", "first", "last", "meaning"]
    assert "reward/mean" in listed.stdout and "\x1b" not in listed.stdout
    assert not (run / "curves.svg").exists()
    drawn = cohort("plot", run, "--metrics", hostile, "--out", "h.svg", at=tmp_path)
    assert drawn.returncode == 0
    ElementTree.parse(tmp_path / "h.svg")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["one", "--metrics", "rewrad"], 'no run has the metric "rewrad". Did you mean "reward"? --metrics list shows'),
        (["one", "one"], "a run is named twice; name each run once."),
        (["one", "nowhere"], "there is no run nowhere."),
        (["one", "--out", "."], "--out . is a folder; name a file in it, such as curves.svg."),
        (["one", "--out", "x.png"], "--out x.png does not end in .svg, the only format. Write --out x.svg;"),
        (["one", "--out", "mine.svg"], "mine.svg exists and was not made by cohort plot;"),
        (["one", "--out", "no/x.svg"], "there is no folder no for x.svg;"),
        (["one", "--steps", "5"], '--steps is "5"; write two steps with a colon between'),
        (["one", "--steps", "9:1"], "--steps 9:1 ends before it begins; write --steps 1:9."),
        (["one", "--steps", "50:"], "no run has values of these metrics in these steps."),
        (["one", "--x", "time"], "one has not recorded time/step; use --x step."),
        (["one", "--smooth=-1"], "--smooth is -1"),
        (["one", "--text", "--json"], "--text and --json exclude each other; remove one."),
        (["empty"], "the run has no metrics yet."),
        (["one", "two", "--mean"], "--mean has no effect: no two of these runs differ only in their seed."),
    ],
)
def test_mistakes(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(tmp_path / "one", CURVE)
    recorded_run(tmp_path / "two", CURVE, model="other")
    recorded_run(tmp_path / "empty", {})
    (tmp_path / "mine.svg").write_text("<svg>my drawing</svg>", encoding="utf-8")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert main(["plot", *args]) == 2
    finally:
        os.chdir(here)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"cohort: {message}")
    assert (tmp_path / "mine.svg").read_text(encoding="utf-8") == "<svg>my drawing</svg>"


def test_a_terminal_shows_what_fits(tmp_path: Path) -> None:
    steps = {s: {**m, "entropy": 0.5, "length/mean": 9.0} for s, m in CURVE.items()}
    for name in ("a", "b", "c"):
        recorded_run(tmp_path / "runs" / name, steps, {0: (0.5, 0.4, 0.6), 8: (0.0, 1e-18, 0.1)})
    words = [sys.executable, "-m", "cohort", "plot", "runs"]
    with Terminal(words, at=tmp_path, env=ENV) as terminal:
        assert terminal.wait_for_end() == 0
    lines = terminal.screen.text.splitlines()
    # The command, what it prints, and the next prompt have room on the screen.
    assert len(lines) <= 22 and not terminal.screen.num_wraps
    assert lines[0].startswith("held-out accuracy") and lines[1] == "a: 0.500 -> 0.000 (0.000 to 0.100)"
    assert lines[-2:] == [
        "4 more charts: --text prints all, --metrics chooses, and the file has them",
        "wrote curves.svg",
    ]
    with Terminal([*words, "--out", "x.svg"], at=tmp_path, env=ENV) as terminal:
        assert terminal.wait_for_end() == 0 and terminal.screen.text == "wrote x.svg"


def test_help_explains_the_runs_once(tmp_path: Path) -> None:
    text = " ".join(cohort("plot", "--help", at=tmp_path).stdout.split())
    assert text.count("RUN is") == 1 and "stands for all runs in it" in text


def test_a_picture_goes_to_standard_output_alone(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "one", CURVE)
    done = cohort("plot", run, "--out", "/dev/stdout", at=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    ElementTree.fromstring(done.stdout)


def test_a_run_that_cannot_be_written_needs_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(tmp_path / "one", CURVE)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["plot", str(run)]) == 2
    assert capsys.readouterr().err == f"cohort: {run} cannot be written, so name a file elsewhere: --out curves.svg.\n"
    assert main(["plot", str(run), "--out", str(tmp_path / "x.svg")]) == 0


def test_the_commands_of_the_page_run_as_printed(tmp_path: Path) -> None:
    """Runs with the names of the page are recorded here instead of trained, which takes minutes."""
    page = (Path(__file__).parents[2] / "docs" / "plot.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    trained = [words[words.index("--name") + 1] for words in lines if words[:2] == ["cohort", "train"]]
    assert len(trained) == 3
    for seed, name in enumerate(trained):
        steps = {s: {**m, "length/mean": 9.0, "time/step": 1.0} for s, m in CURVE.items()}
        recorded_run(tmp_path / "runs" / name, steps, {0: (0.5, 0.4, 0.6)}, seed=seed)
    drawing = [words[1:] for words in lines if words[1] == "plot"]
    assert len(drawing) + len(trained) == len(lines) and len(drawing) == 8
    for words in drawing:
        done = cohort(*words, at=tmp_path)
        assert done.returncode == 0 and done.stdout and not done.stderr, (words, done.stderr)
        if "--out" in words:
            ElementTree.parse(tmp_path / words[words.index("--out") + 1])
