"""What commands print on a terminal of 80 columns: no word is broken in half, and switches look like switches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.config.document import dump_config
from cohort.config.load import load_config
from tests.helpers.command_line import ENV, cohort, command
from tests.helpers.many_runs import write_run_database
from tests.helpers.terminal import Terminal


def read_screen(at: Path, *args: str) -> tuple[str, int]:
    """Returns what `cohort ARGS` shows on 80 columns, and how many lines the terminal had to break."""
    with Terminal(command(args), at=at, env=ENV) as terminal:
        terminal.wait_for_end()
        assert terminal.screen.unknown == []
        return terminal.screen.text, terminal.screen.num_wraps


@pytest.mark.parametrize(
    "line",
    ["--help", "train --help", "train quickstart --help", "sweep --help", "runs --help", "eval --help", "models"],
)
def test_help_fits(tmp_path: Path, line: str) -> None:
    text, num_wraps = read_screen(tmp_path, *line.split())
    assert num_wraps == 0 and text
    assert "{True,False}" not in text or line == "train quickstart --help"


def test_an_error_is_broken_between_words_only_on_a_terminal(tmp_path: Path) -> None:
    text, num_wraps = read_screen(tmp_path, "train", "nothing")
    piped = cohort("train", "nothing", at=tmp_path).stderr
    assert num_wraps == 0 and text.count("\n") > 3
    assert piped.count("\n") == 1 and text.replace("\n", " ") == piped.strip()


def test_a_switch_is_shown_without_values(tmp_path: Path) -> None:
    text, _ = read_screen(tmp_path, "runs", "--help")
    assert "--reverse   " in text and "\nList the runs in FOLDER" in text


def test_the_table_of_runs_of_a_sweep_fits_and_tells_them_apart(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "grid"
    config = dump_config(load_config("quickstart"))
    for number, rate in ((1, "3e-4"), (2, "1e-4")):
        run = folder / f"00{number}-optim.lr={rate}-batch.samples=8-seed=0"
        run.mkdir(parents=True)
        write_run_database(run / "run.db", 5)
        text = config.replace("split: test", "split: validation") if number == 1 else config
        lines = [f"  lr: {rate}" if line.startswith("  lr: ") else line for line in text.splitlines()]
        lines = ["steps: 5" if line.startswith("steps: ") else line for line in lines]
        (run / "config.yaml").write_text("\n".join(lines) + "\n")
    (folder / "sweep.yaml").write_text("format: 1\naxes:\n- optim.lr\nseeds:\n- 0\nthreads: 1\nsplit: ''\n")
    text, num_wraps = read_screen(tmp_path, "runs", "--sort", "accuracy", "--metrics", "optim.lr,batch.samples,seed")
    assert num_wraps == 0 and "\ngrid/001  done" in text and "\ngrid/002  done" in text and "no room for: " in text
    text, num_wraps = read_screen(tmp_path, "runs", "grid", "--sort", "accuracy")
    words = " ".join(text.split())
    # The first one has the learning rate of the recipe.
    assert num_wraps == 0 and "lr=3e-4" in text and "lr=1e-4" in text and "threads" not in text
    assert "0.700v @5" in text and "v = measured on the validation split; the other" in words
    assert "Choosing a run by its accuracy on the test split" in words
    assert "all runs: recipe quickstart, model tiny, steps=5" in words
