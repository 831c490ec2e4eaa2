"""Notes about curves that end before their run."""

from __future__ import annotations

import math
import re

from cohort.plot.endings import explain_endings
from cohort.plot.picture import PictureOptions, draw_runs
from cohort.plot.series import CurveOptions, RunSeries

REWARD = dict.fromkeys(range(1, 11), 0.5)


def make_run(label="a", **values):
    return RunSeries(
        label=label, values={"reward/mean": REWARD, **{k.replace("__", "/"): v for k, v in values.items()}}
    )


def explain(*runs, metrics=("reward/mean", "entropy", "gap"), **options):
    return explain_endings(runs, metrics, CurveOptions(**options))


def test_the_reason_is_told():
    short = {1: 0.4, 2: 0.3, 3: 0.2}
    dead = make_run(entropy=short, gap=short, updates__no_signal=dict.fromkeys(range(4, 11), 1.0))
    assert explain(dead) == [
        "entropy, gap end at step 3. After it there was no signal to learn from (equal rewards in every group), so no "
        "update was made."
    ]
    bad = make_run("b\x1b", entropy=short, updates__bad={4: 1.0})
    assert explain(bad, make_run()) == [
        "b\\x1b: entropy ends at step 3. After it gradients were not finite (NaN or infinite), and the updates were "
        "skipped."
    ]
    broken = make_run(entropy={**short, **dict.fromkeys(range(4, 11), math.nan)})
    assert explain(broken) == ["entropy ends at step 3. Later values are not finite or too large to draw."]
    assert explain(make_run(gap=short)) == ["gap ends at step 3. Later steps have no value."]


def test_complete_curves_need_no_note():
    whole = make_run(entropy=dict(REWARD), eval__accuracy={0: 0.5, 5: 0.6})
    assert explain(whole, metrics=("reward/mean", "entropy", "eval/accuracy")) == []
    # A gap in the middle is visible, and the steps after those that are shown do not count.
    assert explain(make_run(entropy={1: 0.1, 10: 0.2})) == []
    assert explain(make_run(entropy={1: 0.1, 2: 0.2}), last=2) == []
    assert explain(RunSeries(label="a", values={})) == explain(make_run(), first=99) == []


def test_many_runs_have_few_notes():
    notes = explain(*(make_run(f"run {number}", entropy={1: 0.1}) for number in range(9)))
    assert len(notes) == 5 and notes[-1] == "5 more such curves are not listed."


def test_notes_stand_below_the_charts():
    run = make_run("x" * 200, entropy={1: 0.3})
    picture = draw_runs([run, make_run("b")], PictureOptions(metrics=("entropy",)))
    below = " ".join(re.findall(r">([^<]+)</text>", picture.rpartition("</g>")[2]))
    assert "entropy ends at step 1. Later steps have no value." in below and picture.count("<text") == picture.count(
        "</text>"
    )
    plain = draw_runs([make_run(), make_run("b")], PictureOptions(metrics=("reward",)))
    assert "Later steps" not in plain
