"""`cohort chat` in a real terminal of 80 columns: two models, history, interrupts, every command, hostile answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cohort.models.catalog import BUNDLED
from cohort.text import Tokenizer
from tests.helpers.command_line import ENV, ROOT, cohort
from tests.helpers.terminal import ScreenModel, Terminal

SCRIPTED = [sys.executable, "-m", "tests.helpers.scripted_chat", "texts.json", "chat"]
REAL = [sys.executable, "-m", "cohort", "chat"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with `other`, a second model: the bundled one with noise in its weights."""
    folder = tmp_path_factory.mktemp("chat")
    other = folder / "other"
    other.mkdir()
    for file in BUNDLED["tiny"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    shaken = {
        name: (w.float() + 0.15 * w.float().std() * torch.randn(w.shape, generator=noise)).to(w.dtype)
        for name, w in weights.items()
    }
    save_file(shaken, other / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_terminal(place: Path, words: list[str], **options: Any) -> Terminal:
    """Starts a chat in a terminal, in the folder `place`, and waits for its first prompt."""
    terminal = Terminal(words, at=place, env={**ENV, "COHORT_CACHE": str(place / "cache")}, **options)
    terminal.wait_for_prompt(1)
    return terminal


@pytest.fixture
def scripted(place: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """Yields a chat with two models whose answers are the texts in the test's parameter."""
    (place / "texts.json").write_text(json.dumps(request.param))
    (place / "texts.json.requests").unlink(missing_ok=True)
    with open_terminal(place, [*SCRIPTED, "tiny", "./other"]) as terminal:
        yield terminal


def read_requests(place: Path) -> list[list[int]]:
    """Returns the token ids of all requests to scripted engines, in order."""
    return [json.loads(line) for line in (place / "texts.json.requests").read_text().splitlines()]


def find_separators(screen: ScreenModel) -> set[int]:
    """Returns the cells at which rows have the line between columns."""
    return {line.index("│") for line in screen.lines if "│" in line}


def measure_first_token(terminal: Terminal, question: str) -> float:
    """Asks a question in a new conversation. Returns the seconds from Enter to the first text of an answer."""
    terminal.ask("/reset")
    before = sum(line.startswith(">") for line in terminal.screen.text.split("\n"))
    terminal.type(question)
    terminal.wait_for(question)
    begin = time.monotonic()
    terminal.type("\n")
    terminal.wait_for(lambda text: text.rpartition(question)[2].replace("tiny", "").replace("other", "").strip(" \n│>"))
    seconds = time.monotonic() - begin
    terminal.wait_for_prompt(before + 1)
    return seconds


def test_two_models_answer_side_by_side_and_remember(place: Path) -> None:
    file = place / "talk.json"
    with open_terminal(place, [*REAL, "tiny", "./other", "--temperature", "0"]) as terminal:
        text = terminal.ask("What is 3 + 4?")
        assert re.search(r"^tiny +│ other$", text, re.MULTILINE)
        assert len(re.findall(r"^\S.* │ \S", text, re.MULTILINE)) >= 2
        terminal.ask("And 5 more?")
        assert f"wrote {file.name}" in terminal.ask(f"/save {file.name}")
        seconds = [measure_first_token(terminal, f"What is 3 + {number}?") for number in range(5)]
        terminal.type("/quit\n")
        assert terminal.wait_for_end() == 0
    # The best of several, because other programs use the machine too. Two models answer here, so one is faster still.
    assert min(seconds) < 0.3, seconds
    history = place / "cache" / "chat_history"
    assert "And 5 more?" in history.read_text() and history.stat().st_mode & 0o777 == 0o600
    assert find_separators(terminal.screen) == {39}
    assert not terminal.screen.unknown and not terminal.screen.num_wraps
    saved = json.loads(file.read_text())
    tokenizer = Tokenizer.load(BUNDLED["tiny"])
    # The conversations after /save are in the file too.
    assert [len(talk["exchanges"]) for talk in saved["conversations"]] == [2, 1, 1, 1, 1, 1]
    saved = saved["conversations"][0]
    first, second = saved["exchanges"]
    assert [model["name"] for model in saved["models"]] == ["tiny", "./other"]
    for one, two in zip(first["answers"], second["answers"], strict=True):
        # The second request continues the first: nothing that the model wrote is tokenised again.
        stream = tokenizer.spell([*one["asked"], *one["written"], *two["asked"], *two["written"]])
        assert stream.startswith("<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n")
        assert "<|im_end|>\n<|im_start|>user\nAnd 5 more?<|im_end|>\n<|im_start|>assistant\n" in stream
        assert "<|im_end|><|im_end|>" not in stream
        assert one["text"] == tokenizer.decode(one["written"])


HOSTILE = (
    "\x1b[2J\x1b[H\x1b]0;title\x07 \x9b31m red \r\rback \u202eevil\u202c \u2028 \x00 \x08\x08 tab\there "
    + "e"
    + "\u0301" * 100
    + " "
    + "漢字" * 30
    + " 👨\u200d👩\u200d👧 \U0001fae9 \ufdfd "
    + "w" * 90
    + " > /quit end"
)


LINES = "\n".join(f"line {n}" for n in range(60))


@pytest.mark.parametrize("scripted", [[HOSTILE, "é漢😀" * 20, LINES, "slow: word ", "after"]], indirect=True)
def test_hostile_long_and_interrupted_answers(scripted: Terminal, place: Path) -> None:
    # Control codes neither move the cursor nor break the columns.
    text = scripted.ask("Attack.")
    assert r"\x1b[2J\x1b[H\x1b]0;title\x07" in text and r"\u202eevil" in text
    assert text.splitlines()[0].startswith("loading tiny"), "the screen was not cleared"
    assert "\u0301" * 9 not in scripted.raw and "\u202e" not in scripted.raw and "\x1b]" not in scripted.raw
    # Characters whose bytes come in several tokens appear whole.
    assert re.search(r"^é漢😀.* │ é漢😀", scripted.ask("Write."), re.MULTILINE)
    assert "\ufffd" not in scripted.raw
    # An answer that is longer than the screen stays whole; rows that have left the screen cannot be changed any more.
    scripted.ask("/reset")
    rows = re.findall(r"^line (\d+) +│ line (\d+)$", scripted.ask("Count."), re.MULTILINE)
    assert rows == [(str(n), str(n)) for n in range(60)]
    assert scripted.screen.highest < scripted.screen.height
    # Ctrl-C stops the answer, which stays in the history. Its turn is closed before the next message.
    scripted.type("Tell me all.\n")
    scripted.wait_for(lambda text: text.count("word") > 20)
    scripted.type("\x03")
    stopped = scripted.wait_for_prompt(6)
    assert re.search(r"^\(stopped\) +│ \(stopped\)$", stopped, re.MULTILINE)
    assert re.search(r"^after +│ after$", scripted.ask("Go on."), re.MULTILINE)
    last = Tokenizer.load(BUNDLED["tiny"]).spell(read_requests(place)[-1])
    assert "slow: word slow:" in last and last.count("<|im_start|>user") == 3
    assert re.search(r"<\|im_end\|>\n<\|im_start\|>user\nGo on\.<\|im_end\|>", last)
    # At the prompt it clears the line.
    num = len(read_requests(place))
    scripted.type("half a line")
    scripted.wait_for("> half a line")
    scripted.interrupt("Ctrl-D or /quit leaves the chat.")
    scripted.wait_for(lambda text: text.endswith("\n>"))
    scripted.type("\x04")
    assert scripted.wait_for_end() == 0 and len(read_requests(place)) == num
    assert not scripted.screen.unknown and not scripted.screen.num_wraps
    assert find_separators(scripted.screen) == {39}


@pytest.mark.parametrize("scripted", [["one", "two", "three", "four", "five", "six", "seven"]], indirect=True)
def test_every_command(scripted: Terminal, place: Path) -> None:
    spell = Tokenizer.load(BUNDLED["tiny"]).spell
    help_text = scripted.ask("/help")
    for name in [
        "help",
        "reset",
        "undo",
        "retry",
        "system",
        "temperature",
        "top-p",
        "max-tokens",
        "seed",
        "model",
        "save",
        "next",
        "quit",
    ]:
        assert f"\n/{name} " in help_text
    assert "temperature 0.5" in scripted.ask("/temperature 0.5")
    assert '/temperature must be a number, not "warm"' in scripted.ask("/temperature warm")
    assert "temperature is -1" in scripted.ask("/temperature -1").replace("--", "")
    assert "max-tokens 40" in scripted.ask("/max-tokens 40") and "seed 7" in scripted.ask("/seed 7")
    assert 'Did you mean "/undo"?' in scripted.ask("/undoo")
    assert "nothing to take back" in scripted.ask("/undo")
    scripted.ask("First.")
    scripted.ask("Second.")
    assert "1 is left" in scripted.ask("/undo")
    scripted.ask("/system Be brief.")
    scripted.ask("//slash")
    assert spell(read_requests(place)[-1]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nFirst.<|im_end|>\n<|im_start|>assistant\none"
        "<|im_end|>\n<|im_start|>user\n/slash<|im_end|>\n<|im_start|>assistant\n"
    )
    scripted.ask("/retry")
    assert read_requests(place)[-1] == read_requests(place)[-3]
    assert "wrote all.md" in scripted.ask("/save all.md")
    assert "First." in (place / "all.md").read_text() and "four" in (place / "all.md").read_text()
    # Its own file is written again, another one is not.
    assert scripted.ask("/save all.md").count("wrote all.md") == 2
    (place / "precious.md").write_text("keep")
    assert "exists already" in scripted.ask("/save precious.md") and (place / "precious.md").read_text() == "keep"
    assert "begins anew" in scripted.ask("/reset")
    scripted.ask("Again.")
    assert spell(read_requests(place)[-1]).count("<|im_start|>user") == 1
    assert "there is no folder and no model" in scripted.ask("/model nothing")
    assert "\n./other: " in scripted.ask("/model ./other").rpartition("> /model ./other")[2]
    text = scripted.ask("Alone?")
    assert text.rpartition("> Alone?")[2].strip().splitlines()[0] == "one"  # a new engine begins its texts anew
    assert "start the chat with --task" in scripted.ask("/next")
    scripted.type("/quit\n")
    assert scripted.wait_for_end() == 0


def test_narrow_terminals_show_answers_one_after_the_other(place: Path) -> None:
    (place / "texts.json").write_text(json.dumps(["a short answer"]))
    with open_terminal(place, [*SCRIPTED, "tiny", "./other"], width=50) as terminal:
        shown = terminal.ask("Well?").rpartition("> Well?")[2].split()
    assert shown == ["tiny", "a", "short", "answer", "other", "a", "short", "answer", ">"]


def test_a_task_shows_problems_and_verdicts(place: Path) -> None:
    with open_terminal(place, [*REAL, "tiny", "./other", "--task", "countdown", "--task.test-size", "2"]) as terminal:
        text = terminal.ask("")
        assert "countdown, problem 1 of 2 (test)" in text and "Make " in text
        assert re.search(r"^(RIGHT|WRONG) \(correct [01], format [01]\) +│ (RIGHT|WRONG) \(", text, re.MULTILINE)
        assert re.search(r"right so far: tiny [01] of 1, other [01] of 1", text)
        assert "problem" not in terminal.ask("Why?").rpartition("> Why?")[2]
        assert "problem 2 of 2" in terminal.ask("")
        assert re.search(r"tiny \d of 2, other \d of 2", terminal.screen.text)
        assert "these were all 2 test problems" in terminal.ask("")
        terminal.interrupt("Ctrl-D or /quit leaves the chat.")
        # Keys that come before the prompt are read in another mode of the terminal, in which a Ctrl-D is lost.
        terminal.wait_for(lambda text: text.rpartition("leaves the chat.")[2].strip() == ">")
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0


def test_what_is_typed_while_models_load_waits_for_the_prompt(place: Path) -> None:
    (place / "texts.json").write_text(json.dumps(["Fine, thanks."]))
    env = {**ENV, "COHORT_CACHE": str(place / "cache")}
    with Terminal([*SCRIPTED, "tiny"], at=place, env=env) as terminal:
        terminal.wait_for("loading tiny ...")
        terminal.type("Hello there.\n")
        text = terminal.wait_for(lambda text: "Fine, thanks." in text and text.endswith("\n>"))
        assert text.count("Hello there.") == 1 and "\n> Hello there.\nFine, thanks." in text
        terminal.type("/save talk\n")
        terminal.wait_for("wrote talk.md, with 1 exchange since the start")
        terminal.ask("More.")
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
    assert "More." in (place / "talk.md").read_text()


def test_errors_in_a_pipe_end_the_command(place: Path) -> None:
    done = cohort("chat", "tiny", at=place, input="/undoo\nhello\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('cohort: unknown command "/undoo"') and done.stderr.count("\n") == 1


def test_the_page_about_chat_runs_as_printed(place: Path) -> None:
    page = (ROOT / "docs" / "chat.md").read_text()
    piped = re.findall(r"^\$ (.+ \| .+)\n((?:(?![$`]).*\n)*)", page, re.MULTILINE)
    assert len(piped) >= 2
    for line, printed in piped:
        words = line.replace("cohort ", f"{sys.executable} -m cohort ")
        done = subprocess.run(["bash", "-c", words], cwd=place, env=ENV, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "\x1b" not in done.stdout, done.stderr
        assert done.stdout == printed


ENDINGS = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("number", ENDINGS, ids=[number.name for number in ENDINGS])
def test_a_signal_during_an_answer_leaves_the_terminal_as_it_was(place: Path, number: signal.Signals) -> None:
    (place / "texts.json").write_text(json.dumps(["Hello.", "slow: word "]))
    file = f"{number.name}.md"
    with Terminal([*SCRIPTED, "tiny"], at=place, env={**ENV, "COHORT_CACHE": str(place / "cache")}) as terminal:
        before = termios.tcgetattr(terminal.master)
        terminal.wait_for_prompt(1)
        terminal.ask("Hi.")
        terminal.ask(f"/save {file}")
        terminal.type("Tell me all.\n")
        terminal.wait_for(lambda text: text.count("word") > 5)
        assert not termios.tcgetattr(terminal.master)[3] & termios.ECHO
        terminal.process.send_signal(number)
        assert terminal.wait_for_end() == 128 + number
        assert termios.tcgetattr(terminal.master) == before
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")
    assert "Traceback" not in terminal.screen.text and "(stopped)" in terminal.screen.text
    # What the model had written is in the file.
    assert "Tell me all." in (place / file).read_text() and "word slow: word" in (place / file).read_text()


def test_a_signal_at_the_prompt_or_during_loading_leaves_the_terminal_as_it_was(place: Path) -> None:
    (place / "texts.json").write_text(json.dumps(["Hello."]))
    env = {**ENV, "COHORT_CACHE": str(place / "cache")}
    for number, code in [(signal.SIGTERM, 143), (signal.SIGINT, 130)]:
        # The real command imports modules at this moment.
        with Terminal([*REAL, "tiny"], at=place, env=env) as terminal:
            before = termios.tcgetattr(terminal.master)
            terminal.wait_for("loading tiny ...")
            terminal.process.send_signal(number)
            assert terminal.wait_for_end() == code
            assert termios.tcgetattr(terminal.master) == before
    with Terminal([*SCRIPTED, "tiny"], at=place, env=env) as terminal:
        before = termios.tcgetattr(terminal.master)
        terminal.wait_for_prompt(1)
        terminal.type("half a line")
        terminal.wait_for("> half a line")
        assert terminal.end_by(signal.SIGTERM) == 143
        assert termios.tcgetattr(terminal.master) == before


def test_a_second_signal_ends_at_once(place: Path) -> None:
    words = [sys.executable, "-m", "tests.helpers.two_signals"]
    with Terminal(words, at=place, env=ENV) as terminal:
        before = termios.tcgetattr(terminal.master)
        assert terminal.wait_for_end() == 128 + signal.SIGHUP
        assert termios.tcgetattr(terminal.master) == before
    assert terminal.raw.endswith("\x1b[?25h") and "too late" not in terminal.raw


def test_a_closed_terminal_ends_the_chat_and_keeps_the_answer(place: Path) -> None:
    (place / "texts.json").write_text(json.dumps(["Hello.", "slow: word "]))
    with open_terminal(place, [*SCRIPTED, "tiny"]) as terminal:
        terminal.ask("Hi.")
        terminal.ask("/save closed.md")
        terminal.type("Tell me all.\n")
        terminal.wait_for(lambda text: text.count("word") > 5)
        os.close(terminal.master)
        assert terminal.process.wait(60) == 128 + signal.SIGHUP
        terminal.master = os.open(os.devnull, os.O_RDONLY)
    assert "word slow: word" in (place / "closed.md").read_text()


@pytest.mark.parametrize("flags", [[], ["--plain"]], ids=["columns", "plain"])
def test_ctrl_d_during_an_answer_leaves_after_it(place: Path, flags: list[str]) -> None:
    (place / "texts.json").write_text(json.dumps(["slow: word "]))
    with open_terminal(place, [*SCRIPTED, "tiny", "--max-tokens", "60", *flags]) as terminal:
        terminal.type("Tell me all.\n")
        terminal.wait_for(lambda text: text.count("word") > 2)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
    assert "(cut off after 60 tokens" in terminal.screen.text
