"""The choice of metrics, titles and labels of a picture."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.schema import OptimConfig
from cohort.errors import ConfigError, RunError
from cohort.plot.labels import describe_run, describe_runs, label_runs, read_config
from cohort.plot.picture import (
    PictureOptions,
    choose_metrics,
    draw_runs,
    explain_metric,
    find_metric,
    is_our_picture,
    make_charts,
    write_card_picture,
)
from cohort.plot.series import CurveOptions, RunSeries
from cohort.plot.text import draw_on_screen, draw_text
from tests.helpers.pretend_run import small_run
from tests.helpers.recorded_runs import recorded_run

RL_RUN = RunSeries(
    label="a",
    values={
        "loss": {1: 0.1},
        "entropy": {1: 0.3, 2: 0.2},
        "reward/mean": {1: 0.25, 2: 0.75},
        "eval/accuracy": {0: 0.5},
        "eval/accuracy_low": {0: 0.4},
        "eval/accuracy_high": {0: 0.6},
        "time/step": {1: 60.0, 2: 180.0},
    },
)
SFT_RUN = RunSeries(label="b", values={"loss": {1: 2.0, 2: 1.5}, "perplexity": {1: 9.0}, "lr": {1: 0.1}})


def test_the_main_metrics_with_values_are_shown():
    assert choose_metrics([RL_RUN], ()) == ["eval/accuracy", "reward/mean", "entropy"]
    assert choose_metrics([SFT_RUN], ()) == ["loss", "perplexity", "lr"]
    assert choose_metrics([RL_RUN, SFT_RUN], ())[:2] == ["eval/accuracy", "reward/mean"]
    assert "perplexity" in choose_metrics([RL_RUN, SFT_RUN], ())
    assert choose_metrics([RunSeries(label="c", values={"own/number": {1: 1.0}})], ()) == ["own/number"]


def test_a_run_on_pairs_shows_margins_rewards_and_held_out_numbers():
    names = ["eval/accuracy", "loss", "eval/loss", "reward/margin", "eval/reward/margin", "reward/accuracy"]
    names += ["reward/chosen", "reward/rejected", "grad_norm"]
    ends = {"eval/accuracy_low": {1: 0.1}, "eval/accuracy_high": {1: 0.9}}
    run = RunSeries(label="d", values={**{name: {1: 0.5} for name in names}, **ends, "nll": {1: 1.0}})
    assert choose_metrics([run], ()) == names
    charts = make_charts([run], PictureOptions())
    assert charts[0].meaning == "share of held-out pairs ranked right; 95% intervals"
    assert charts[0].series[0].points[0].low == 0.1
    assert [chart.title for chart in charts[1:5]] == ["loss", "held-out loss", "reward/margin", "held-out margin"]
    assert all(chart.meaning for chart in charts)


def test_metrics_have_names_and_labels():
    known = ["reward/mean", "eval/accuracy", "groups/dead"]
    assert [find_metric(word, known) for word in ("reward/mean", "reward", "accuracy", "dead")] == [
        *("reward/mean", "reward/mean", "eval/accuracy", "groups/dead")
    ]
    with pytest.raises(ConfigError, match=r'no run has the metric "reward/men"\. Did you mean "reward/mean"\?'):
        find_metric("reward/men", known)
    with pytest.raises(ConfigError, match=r'"zzz"\. --metrics list shows'):
        find_metric("zzz", known)
    with pytest.raises(ConfigError, match="--log names lr"):
        make_charts([SFT_RUN], PictureOptions(metrics=("loss",), log=("lr",)))


def test_a_run_without_metrics_is_refused():
    with pytest.raises(RunError, match="the run has no metrics yet"):
        draw_runs([RunSeries(label="a", values={})], PictureOptions())
    with pytest.raises(RunError, match="in these steps"):
        draw_runs([SFT_RUN], PictureOptions(curves=CurveOptions(first=100)))


def test_time_has_a_unit_that_fits():
    charts = make_charts([RL_RUN], PictureOptions(curves=CurveOptions(x="time")))
    reward = next(chart for chart in charts if chart.title == "reward/mean")
    assert reward.x_label == "minutes of training steps"
    assert [p.x for p in reward.series[0].points] == [1.0, 4.0] and reward.x_range == (0.0, 4.0)


def test_the_loss_of_imitation_is_progress_and_that_of_rewards_is_not():
    [sft] = make_charts([SFT_RUN], PictureOptions(metrics=("loss",)))
    [rl] = make_charts([RL_RUN], PictureOptions(metrics=("loss",)))
    assert sft.meaning == "loss on the given answers" and "no sign of progress" in rl.meaning


def test_meanings_are_whole_clauses():
    assert explain_metric("entropy") == "nats per token: how undecided the policy is"
    assert explain_metric("entropy", 100) == "nats per token"
    assert explain_metric("unknown") == ""


def test_the_same_data_gives_the_same_bytes():
    options = PictureOptions(title="t", log=("all",), curves=CurveOptions(smooth=2))
    other = replace(RL_RUN, values=dict(reversed(RL_RUN.values.items())))
    assert draw_runs([RL_RUN, SFT_RUN], options) == draw_runs([other, SFT_RUN], options)


def test_labels_tell_what_differs(tmp_path: Path):
    def label(*settings):
        configs = [small_run(**s) for s in settings]
        runs = [tmp_path / f"2026-11-1{i}-pretend-ab{i}d" for i in range(len(configs))]
        return label_runs(runs, configs)

    assert label({"seed": 1}, {"seed": 2}) == ["seed 1", "seed 2"]
    assert label({}, {"optim": OptimConfig(lr=0.5)}) == [
        f"optim.lr {OptimConfig().lr:g}",
        "optim.lr 0.5",
    ]
    # Equal settings, or only more steps: the part of the name that differs.
    assert label({}, {"steps": 9}) == ["10-pretend-ab0d", "11-pretend-ab1d"]
    # Two of three are equal.
    assert label({"seed": 1}, {"seed": 2}, {"seed": 1}) == [
        "seed 1 (10-pretend-ab0d)",
        "seed 2",
        "seed 1 (12-pretend-ab2d)",
    ]
    names = [tmp_path / "long-answers", tmp_path / "2026-11-10-pretend-ab0d"]
    assert label_runs(names, [small_run(seed=1), small_run(seed=2)]) == ["long-answers", "seed 2"]
    assert label_runs(names, [small_run(seed=1), None]) == ["long-answers", "2026-11-10-pretend-ab0d"]
    assert label_runs([Path("a/same"), Path("b/same")], [small_run(), small_run(seed=1)]) == ["a/same", "b/same"]
    assert label_runs(names[:1], [None]) == ["long-answers"]


def test_titles_say_what_a_run_is_and_not_where():
    assert describe_run(small_run(seed=3)) == "pretend: model tiny, task arithmetic, algorithm grpo, seed 3"
    assert describe_runs([small_run(), small_run(seed=1)]) == "pretend, model tiny: 2 runs"
    assert describe_runs([small_run(), None]) == "2 runs"


def test_the_picture_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = recorded_run(tmp_path / "a", {1: {"reward/mean": 0.5}})
    config = read_config(run)
    assert config is not None
    assert write_card_picture(run, config) == ("curves.svg", "")
    assert is_our_picture(run / "curves.svg")
    assert not is_our_picture(run / "config.yaml") and not is_our_picture(run)
    assert write_card_picture(recorded_run(tmp_path / "b", {}), config) == ("", "")
    monkeypatch.setattr("cohort.plot.picture.draw_runs", lambda *_: 1 / 0)
    name, problem = write_card_picture(run, config)
    assert name == "" and problem.startswith("curves.svg was not drawn (ZeroDivisionError")


def test_curves_as_text():
    text = draw_text(make_charts([RL_RUN], PictureOptions(metrics=("reward", "accuracy"))), ["noted " * 12], 60)
    lines = text.splitlines()
    assert lines[0] == "reward/mean: 0.25 -> 0.75  mean reward of the step's samples"
    assert lines[1].startswith("0.75 │") and lines[4].startswith("0.25 │")
    assert lines[5].split() == ["0", "2", "step"]
    assert lines[7].startswith("held-out accuracy: 0.500 -> 0.500 (0.400 to 0.600)")
    assert [line.split() for line in lines[-2:]] == [["noted"] * 10, ["noted"] * 2]
    assert all(len(line) <= 60 for line in lines)
    odd = RunSeries(label="x\x1b[2J", values={"loss": {1: math.nan, 2: math.inf}})
    both = draw_text(make_charts([odd, SFT_RUN], PictureOptions(metrics=("loss",), log=("loss",))), [], 40)
    assert "x\\x1b[2J: nan -> inf" in both and "loss (log scale)" in both
    assert all(len(line) <= 40 for line in both.splitlines())


def test_an_accuracy_has_three_decimals_as_elsewhere():
    values = {"eval/accuracy": {0: 0.31, 8: 0.0}, "eval/accuracy_low": {8: 3.47e-18}, "eval/accuracy_high": {8: 0.037}}
    text = draw_text(make_charts([RunSeries(label="a", values=values)], PictureOptions()), [], 80)
    assert text.startswith("held-out accuracy: 0.310 -> 0.000 (0.000 to 0.037)") and "e-18" not in text


@pytest.mark.parametrize("num", [1, 2, 4, 9, 40])
def test_a_screen_shows_the_first_charts_whole(num):
    runs = [replace(RL_RUN, label=f"run {number}") for number in range(num)]
    charts = make_charts(runs, PictureOptions())
    text = draw_on_screen(charts, ["a note"], 80, 21)
    lines = text.splitlines()
    assert len(lines) <= 21 and lines[0].startswith("held-out accuracy") and "a note" in lines
    num_shown = sum(line.startswith(("held-out", "reward/mean", "entropy")) for line in lines)
    left = len(charts) - num_shown
    assert left == (1 if num == 1 else 2)
    noun = "chart" if left == 1 else "charts"
    assert lines[-1] == f"{left} more {noun}: --text prints all, --metrics chooses, and the file has them"
    # Curves become lower, then leave, and at last runs are counted.
    assert ("│" in text) == (num <= 4) and ("more runs" in text) == (num == 40)
    assert "run 0" in text or num == 1
    # A long note has no room on a small screen.
    assert "noted" not in draw_on_screen(charts, ["noted " * 80], 40, 12)
    whole = draw_on_screen(charts, [], 80, 1000)
    assert "more" not in whole and whole == draw_text(charts, [], 80)
