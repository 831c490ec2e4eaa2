"""Views: what they show, and that no text can break them."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cohort.errors import ConfigError
from cohort.evaluation.records import Evaluation
from cohort.logs import panels
from cohort.logs.curve import draw_braille
from cohort.logs.escape import escape_line, escape_text
from cohort.logs.jsonlines import JsonView
from cohort.logs.live import LiveView
from cohort.logs.plain import PlainView
from cohort.logs.view import GuardedView, Header, Showcase, StepReport, Summary, make_view
from cohort.run.store.records import Curve
from tests.helpers.evaluations import eval_setting

HOSTILE = [
    "[/INST] [bold]not bold[/bold] [/] [link=http://x]y[/link] :smile:",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "\x9b31m C1 \x85 \x90q",
    "carriage\rreturn \b\b\b back \x00 nul \x7f del",
    "\u202eright to left\u2066 \u200bzero\ufeff",
    "lone \ud800 surrogate",
    "line\u2028separator\u2029",
    "汉字 wide " * 200,
    "x" * 100_000,
    "\n" * 5000,
    "a\u0301\u0301\u0301\u0301 🧑‍🚀",
    "\t|\t{}%s %d {0}",
]


def evaluation(step: int, accuracy: float, grader: str = "g-1") -> Evaluation:
    return Evaluation(
        setting=eval_setting(step=step, num_problems=512, grader=grader),
        accuracy=accuracy,
        low=accuracy - 0.04,
        high=accuracy + 0.04,
        mean_tokens=20.0,
    )


def header(**changes) -> Header:
    values = {"path": "runs/a", "recipe": "quickstart", "model": "tiny", "task": "arithmetic", "algo": "grpo"}
    rest = {"num_steps": 60, "first_step": 0, "batch": "32 prompts x 8 samples"}
    return Header(**{**values, **rest, **changes})


METRICS = {
    "reward/mean": 0.5321,
    "length/mean": 43.2,
    "finish/length": 0.03,
    "groups/dead": 0.125,
    "lr": 1e-3,
    "sampler_gap/max": 3e-6,
    "time/step": 1.8,
    "time/tokens_per_s": 5234.4,
    "time/stage/rollout": 0.9,
    "time/stage/update": 0.45,
}


def report(step: int = 7, text: str = "<answer>92</answer>", **metrics: float) -> StepReport:
    shown = Showcase(step=step, prompt=text, completion=text, reward=1.0, note=text)
    return StepReport(step=step, num_steps=60, metrics={**METRICS, **metrics}, eta=95.0, showcase=shown)


def summary(complete: bool = True) -> Summary:
    return Summary(
        path="runs/a",
        step=60 if complete else 12,
        num_steps=60,
        seconds=100.0,
        first=evaluation(0, 0.41),
        last=evaluation(60 if complete else 10, 0.87),
        complete=complete,
    )


def test_the_closing_lines_name_the_steps_if_the_last_one_was_not_evaluated():
    assert summary().format_lines()[0] == "held-out accuracy 0.41 -> 0.87"
    lines = summary(complete=False).format_lines()
    assert lines[1] == "held-out accuracy 0.41 at step 0 -> 0.87 at step 10; step 12 is not evaluated"


def test_accuracies_of_different_graders_are_never_joined():
    changed = replace(summary(), first=evaluation(0, 0.41, "g-0"))
    [line] = [line for line in changed.format_lines() if "accuracy" in line]
    assert line == (
        "held-out accuracy 0.87 at step 60; no comparison with step 0, because the grader has changed in between"
    )
    output = io.StringIO()
    JsonView(output).finish(changed)
    assert json.loads(output.getvalue())["before"] is None and json.loads(output.getvalue())["after"] == 0.87
    view, _ = live_view()
    view.start(header(evaluations=[evaluation(0, 0.41, "g-0")]))
    view.show_evaluation(evaluation(60, 0.87))
    frame = draw_frame(view)
    view.close()
    assert "0.87" in frame and "0.41 →" not in frame


def live_view(width: int = 100, height: int = 40) -> tuple[LiveView, io.StringIO]:
    """A live view whose console has no colours: any control character in its output came from a text."""
    output = io.StringIO()
    console = Console(file=output, width=width, height=height, color_system=None, markup=False, emoji=False)
    return LiveView(output, console), output


def draw_frame(view: LiveView) -> str:
    with view.console.capture() as capture:
        view.console.print(view.render_frame())
    return capture.get()


def show_two_steps(view, text: str = "fine") -> None:
    view.start(header())
    view.show_evaluation(evaluation(0, 0.41))
    view.show_phase("training")
    view.show_step(report(1, **{"reward/mean": 0.4}))
    view.show_event(1, "failure", text)
    view.show_step(report(2, text))
    view.show_evaluation(evaluation(2, 0.63))


def test_plain_prints_one_compact_line_per_step():
    output = io.StringIO()
    view = PlainView(output)
    show_two_steps(view)
    view.finish(summary())
    lines = output.getvalue().splitlines()
    assert lines[0] == "cohort · quickstart · tiny · arithmetic · grpo · 32 prompts x 8 samples · to step 60"
    assert lines[2] == "held-out accuracy 0.410 (0.370 to 0.450) at step 0, 512 problems"
    assert lines[5] == (
        "step  2/60  reward 0.532  length 43.2  dead 0.125  lr 0.001  gap 3e-06  5,234 tok/s  1.80 s  eta 1:35"
    )
    assert "held-out accuracy 0.41 -> 0.87" in lines[-3:]


def test_a_stopped_run_says_how_to_go_on():
    output = io.StringIO()
    PlainView(output).finish(summary(complete=False))
    first = output.getvalue().splitlines()[0]
    assert first == "stopped after step 12 of 60; go on with: cohort resume runs/a"


def test_plain_in_an_old_encoding():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show_two_steps(PlainView(stream), "é → 汉")
    assert b"\\xe9 \\u2192 \\u6c49" in raw.getvalue()


def test_json_lines():
    output = io.StringIO()
    view = JsonView(output)
    show_two_steps(view, HOSTILE[1])
    view.show_step(report(3, **{"loss": math.nan, "grad_norm": math.inf}))
    view.finish(summary())
    assert output.getvalue().isascii()
    lines = [json.loads(line, parse_constant=lambda c: pytest.fail(c)) for line in output.getvalue().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["start", "evaluation", "step", "event", "step", "evaluation", "step", "finish"]
    assert lines[3]["text"] == HOSTILE[1]  # exact: it is data here
    assert lines[6]["metrics"]["loss"] is None and lines[6]["metrics"]["grad_norm"] is None
    assert lines[4]["metrics"]["reward/mean"] == 0.5321 and lines[4]["step"] == 2
    assert (lines[-1]["before"], lines[-1]["after"]) == (0.41, 0.87)
    assert all(line["time"] > 1.7e9 for line in lines)


def test_the_live_frame_shows_what_matters():
    view, _ = live_view()
    show_two_steps(view)
    frame = draw_frame(view)
    view.close()
    for expected in (
        "quickstart · tiny · arithmetic · grpo",
        "step 2/60",
        "eta 1:35",
        "0.532 ▲0.13",
        "0.41 → 0.63",
        "5,234",
        "43.2",
        "12%",
        "rollout 50%",
        "update 25%",
        "other 25%",
        "sample of step 2",
        "failure",
    ):
        assert expected in frame, expected


def test_checkpoints_do_not_push_failures_out_of_sight():
    view, _ = live_view()
    view.start(header())
    view.show_event(1, "failure", "worker died")
    for step in range(2, 9):
        view.show_event(step, "checkpoint", f"step-00000{step}")
    frame = draw_frame(view)
    view.close()
    assert "worker died" in frame and "step-000008" in frame and "step-000007" not in frame


def test_a_resumed_run_shows_its_whole_history():
    view, _ = live_view()
    view.start(header(first_step=30, values={s: s / 30 for s in range(1, 31)}, evaluations=[evaluation(0, 0.1)]))
    frame = draw_frame(view)
    view.close()
    assert "step 30/60" in frame and "1.0" in frame
    assert sum(0x2800 < ord(c) < 0x2900 for c in frame) > 15


def test_a_run_without_rewards_shows_its_own_curve():
    """A falling loss is shown as good, and no evaluation is announced."""
    view, _ = live_view()
    curve = Curve(label="loss", metric="loss", rising=False)
    view.start(header(task="traces", algo="sft", batch="64 examples", curve=curve, has_evaluation=False))
    for step, loss in ((1, 2.0), (2, 1.5)):
        metrics = {"loss": loss, "perplexity": 4.5, "time/trained_per_s": 812.0}
        view.show_step(StepReport(step=step, num_steps=60, metrics=metrics, eta=1.0))
    frame = draw_frame(view)
    assert "64 examples" in frame and "━ loss" in frame and "1.500 ▼0.50" in frame
    assert "perplexity" in frame and "812" in frame
    assert "reward" not in frame and "held-out" not in frame
    trend = panels._draw_trend(curve, {1: 2.0, 2: 1.5})
    assert [str(span.style) for span in trend.spans][-1] == panels.GOOD
    view.close()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("size", [(100, 40), (80, 24), (40, 16), (12, 6), (3, 2)])
def test_no_text_breaks_the_live_view(text, size):
    view, output = live_view(*size)
    view.start(header(recipe=text, model=text))
    view.show_step(report(1, text))
    view.show_event(1, text, text)
    view.show_evaluation(evaluation(1, 0.5))
    frame = draw_frame(view)
    view.finish(summary())
    for shown in (frame, output.getvalue()):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800]", shown)
    if size[0] >= 40:
        # The frame keeps its size whatever the text is.
        assert all(cell_len(line) <= size[0] for line in frame.splitlines())
        assert len(frame.splitlines()) <= max(size[1], 16)


def test_on_80_columns_words_are_apart_and_events_are_whole():
    view, _ = live_view(80, 24)
    view.start(header(recipe="quickstart", model="tiny", batch="32 prompts x 8 samples of the whole batch"))
    view.show_phase("evaluating")
    text = "evaluations use all 12 test rows of the task, because there are no more; the run visits its 24 prompts once"
    for step in (1, 2, 3):
        view.show_event(step, "notice", text)
    frame = draw_frame(view)
    view.close()
    first = frame.splitlines()[0]
    assert first.endswith("…  evaluating") and cell_len(first) == 80
    assert len(frame.splitlines()) <= 24
    assert " ".join(frame.split()).count(f"notice {text}") == 3


def test_markup_stays_text():
    view, _ = live_view()
    view.start(header())
    view.show_step(report(1, HOSTILE[0]))
    view.show_event(1, "failure", HOSTILE[0])
    frame = draw_frame(view)
    view.close()
    assert frame.count("[/INST] [bold]not bold[/bold] [/] [link=http://x]y[/link] :smile:") >= 3


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_breaks_the_plain_view(text):
    output = io.StringIO()
    view = PlainView(output)
    view.start(header(recipe=text))
    view.show_event(1, text, text)
    assert output.getvalue().count("\n") == 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800]", output.getvalue())


@given(st.text(st.characters(exclude_categories=()), max_size=60))
@settings(max_examples=300, deadline=None)
def test_escaped_text_can_be_printed(text):
    shown = escape_text(text)
    shown.encode("utf-8")
    assert all(c == "\n" or c.isprintable() or not c.isascii() for c in shown)
    assert "\n" not in escape_line(text)


def test_escapes_by_hand():
    assert escape_text("a\x1b[0m\tb\r\nc") == "a\\x1b[0m    b\\r\nc"
    assert escape_text("x" * 40, limit=4) == "xxxx… (36 more characters)"
    # The rest is never shorter than the note in its place.
    assert escape_text("x" * 12, limit=4) == "x" * 12
    assert all(len(escape_text("x" * n, limit=4)) <= n for n in range(200))
    assert escape_text("नमस्ते 🧑‍🚀 [x]") == "नमस्ते 🧑‍🚀 [x]"


def test_metrics_that_are_not_numbers_do_not_break_the_view():
    for bad in (math.nan, math.inf, -math.inf):
        view, _ = live_view()
        view.start(header())
        view.show_step(report(1, **dict.fromkeys(METRICS, bad)))
        view.show_step(report(2))
        view.show_evaluation(evaluation(2, bad))
        assert "step 2/60" in draw_frame(view)
        view.close()


def test_curves_by_hand():
    # One character: columns 0-1, rows 0-3 from the top. Rising from the lowest to the highest dot.
    assert draw_braille([(0, 0.0), (1, 1.0)], 1, 1, (0, 1), (0.0, 1.0)) == ["⡜"]
    # A flat line at the bottom of two characters: dots 7 and 8 of each.
    assert draw_braille([(0, 0.0), (3, 0.0)], 2, 1, (0, 3), (0.0, 1.0)) == ["⣀⣀"]
    # Two values in the same column are averaged: one dot in the upper half.
    assert draw_braille([(0, 0.4), (0, 0.8)], 1, 1, (0, 9), (0.0, 1.0)) == ["⠂"]
    assert draw_braille([(0, math.nan)], 2, 2, (0, 1), (0.0, 1.0)) == ["⠀⠀", "⠀⠀"]


def test_the_view_fits_the_stream(monkeypatch):
    def kind(view) -> str:
        assert isinstance(view, GuardedView)
        return type(view.view).__name__

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert kind(make_view("auto", io.StringIO())) == "PlainView"
    assert kind(make_view("auto", Terminal())) == "LiveView"
    assert kind(make_view("json", Terminal())) == "JsonView"
    assert kind(make_view("plain", Terminal())) == "PlainView"
    monkeypatch.setenv("TERM", "dumb")
    assert kind(make_view("auto", Terminal())) == "PlainView"
    with pytest.raises(ConfigError, match=r'unknown progress view "jsno" for log. Did you mean "json"'):
        make_view("jsno")


def test_a_broken_stream_ends_the_view_only(capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    view = make_view("plain", Closed())
    show_two_steps(view)
    view.finish(summary())
    assert capsys.readouterr().err.count("the run goes on without it") == 1


def test_a_real_terminal_gets_its_cursor_back():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, height=40)
    view = LiveView(output, console)
    show_two_steps(view)
    view.finish(summary())
    said = output.getvalue()
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1
    assert "held-out accuracy 0.41 -> 0.87" in said


def test_the_frame_can_be_recorded_as_a_picture():
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=100, height=40)
    view = LiveView(io.StringIO(), console)
    show_two_steps(view, HOSTILE[0])
    view.finish(summary())
    picture = console.export_svg(title="cohort")
    assert picture.startswith("<svg") and "held-out" in picture
