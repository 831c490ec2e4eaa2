"""A run from start to end: what it records and keeps, how it stops, and that killing it changes nothing."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cohort.config.schema import EvalConfig, SaveConfig
from cohort.errors import RunError
from cohort.logs.view import GuardedView, View, make_view
from cohort.loops.stats import choose_showcase, compute_rollout_metrics, summarise_failures
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.job import StepRecord, make_step_record
from cohort.run.life import Run
from cohort.run.silent import SilentRun
from cohort.run.store.reader import Reader
from cohort.run.store.records import Curve, RunDescription
from cohort.run.store.rollouts import list_rollout_steps
from tests.helpers.pretend_run import LineCounter, PretendJob, collect_remains, pretend_groups, run_to_end, small_run

ROOT = Path(__file__).resolve().parents[3]


def make_quiet_view() -> View:
    return make_view("plain", io.StringIO())


def test_a_run_leaves_everything_in_its_place(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    output = io.StringIO()
    job = run_to_end(directory, make_view("plain", output))
    assert checkpoint.list_steps(directory.checkpoints) == [4, 6]  # every 2, the last two; 6 is also the best
    assert list_rollout_steps(directory.rollouts) == [1, 2, 3, 4, 5, 6]
    assert list(directory.load_evaluations()) == [0, 3, 6]
    with Reader(directory.database) as reader:
        assert reader.find_last_step() == 6
        assert list(reader.read_series("loss")) == [1, 2, 3, 4, 5, 6]
        assert list(reader.read_series("eval/accuracy")) == [0, 3, 6]
        assert len(reader.read_samples(step=2)) == 4
        assert all(v > 0 for v in reader.read_series("time/step").values())
        assert reader.read_events(kind="command")[0].text == "cohort train pretend"
    loaded = checkpoint.load(directory.checkpoints / "step-000006")
    assert torch.equal(loaded.optimizer["w.momentum"], job.momentum) and loaded.cursor == 12
    first, last = (directory.load_evaluations()[s].accuracy for s in (0, 6))
    line = f"held-out accuracy {first:.2f} -> {last:.2f}"
    closing = output.getvalue().splitlines()[-6:]
    assert line in closing
    assert closing[-3] == f"next cohort eval arithmetic --model {directory.path}/checkpoints/step-000006/model"
    card = directory.card.read_text()
    for expected in (
        line,
        "cohort train pretend",
        f"{torch.get_num_threads()} thread(s)",
        "| 6 |",
        "steps: 6",
    ):
        assert expected in card
    assert torch.__version__.split("+")[0] in card


def test_the_best_checkpoint_is_kept_besides_the_last(tmp_path):
    config = small_run(steps=9, eval=EvalConfig(every=3), save=SaveConfig(every=2, keep_last=1))
    directory = RunDirectory.create(tmp_path, config, "a")
    accuracies = {0: 0.1, 3: 0.9, 6: 0.5, 9: 0.9}
    job = PretendJob()
    measured = job.evaluate
    job.evaluate = lambda s: dataclasses.replace(measured(s), accuracy=accuracies[s])
    with Run(directory, config, job, make_quiet_view()) as run:
        for step in run.steps():
            run.end_step(step, StepRecord(metrics=job.update(pretend_groups(step))))
        run.finish()
    # 3 is not on the schedule of saving: it was saved because it was the best; 9 only equals it.
    assert checkpoint.list_steps(directory.checkpoints) == [3, 9]


def test_old_rollouts_are_removed(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(save=SaveConfig(every=2, rollouts=2)), "a")
    run_to_end(directory, make_quiet_view())
    assert list_rollout_steps(directory.rollouts) == [5, 6]


@pytest.fixture
def handled_signal(number: int) -> Iterator[None]:
    """Gives the signal a handler: nohup, under which tests may run, ignores some signals."""
    before = signal.signal(number, signal.default_int_handler)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("handled_signal")
def test_the_first_signal_finishes_the_step_and_resume_gives_the_same_run(tmp_path, number):
    reference = RunDirectory.create(tmp_path, small_run(), "reference")
    run_to_end(reference, make_quiet_view())
    former = signal.getsignal(number)
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    output = io.StringIO()

    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)

    run_to_end(directory, make_view("plain", output), interrupt)
    assert signal.getsignal(number) is former
    assert f"stopped after step 3 of 6; go on with: cohort resume {directory.path}" in output.getvalue()
    assert checkpoint.list_steps(directory.checkpoints) == [2, 3]
    assert 3 not in directory.load_evaluations()  # skipped to stop soon; the resume makes it
    run_to_end(RunDirectory.open(directory.path), make_quiet_view())
    assert collect_remains(directory) == collect_remains(reference)


def test_a_signal_before_the_first_step_leaves_a_run_that_can_be_resumed(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    job = PretendJob()
    with Run(directory, directory.config, job, make_quiet_view()) as run:
        os.kill(os.getpid(), signal.SIGINT)
        assert list(run.steps()) == []
        assert not run.finish().complete
    assert checkpoint.list_steps(directory.checkpoints) == [] and directory.load_evaluations() == {}
    run_to_end(RunDirectory.open(directory.path), make_quiet_view())
    assert list(directory.load_evaluations()) == [0, 3, 6]


def test_the_second_signal_stops_at_once(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")

    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_to_end(directory, make_quiet_view(), interrupt)
    with Reader(directory.database) as reader:
        assert reader.find_last_step() == 3
        assert "cohort resume" in reader.read_events(kind="run")[-1].text
    RunDirectory.open(directory.path).lock()  # the lock is free again


def test_extending_a_run(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    run_to_end(directory, make_quiet_view())
    longer = RunDirectory.open(directory.path)
    longer.lock()
    longer.extend_to(8)
    run_to_end(longer, make_quiet_view())
    assert RunDirectory.open(directory.path).config.steps == 8
    with Reader(directory.database) as reader:
        assert list(reader.read_series("loss")) == [1, 2, 3, 4, 5, 6, 7, 8]
    straight = RunDirectory.create(tmp_path, small_run(steps=8), "b")
    assert torch.equal(run_to_end(straight, make_quiet_view()).weights, load_checkpoint_weights(directory, 8))


def load_checkpoint_weights(directory: RunDirectory, step: int) -> torch.Tensor:
    job = PretendJob()
    job.restore(checkpoint.load(directory.checkpoints / checkpoint.folder_name(step)))
    return job.weights


def test_a_finished_run_resumes_to_its_own_end(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    run_to_end(directory, make_quiet_view())
    before = collect_remains(directory)
    output = io.StringIO()
    run_to_end(RunDirectory.open(directory.path), make_view("plain", output))
    assert collect_remains(directory) == before
    assert "held-out accuracy" in output.getvalue()


def test_other_settings_are_refused_and_nothing_is_touched(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    run_to_end(directory, make_quiet_view())
    before = collect_remains(directory)
    other = RunDirectory.open(directory.path)
    with pytest.raises(RunError, match=r"seed = 0, not 7.*all settings except steps"):
        Run(other, small_run(seed=7), PretendJob(), make_quiet_view()).__enter__()
    with pytest.raises(RunError, match="--steps is 2: a run can be extended"):
        Run(other, small_run(steps=2), PretendJob(), make_quiet_view()).__enter__()
    assert collect_remains(directory) == before
    other.lock()  # the refusal gave the lock back


def test_a_refused_restore_removes_nothing(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")

    def stop(step: int) -> None:
        if step == 5:  # step 5 is recorded, the newest checkpoint is that of step 4
            raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        run_to_end(directory, make_quiet_view(), stop)
    before = collect_remains(directory)
    assert (before["state"]["step"], max(before["rollouts"])) == (4, 5)

    def refuse(state: checkpoint.Checkpoint) -> None:
        raise RunError("the run used 8 threads")

    refusing = PretendJob()
    refusing.restore = refuse
    with pytest.raises(RunError, match="8 threads"):
        Run(RunDirectory.open(directory.path), directory.config, refusing, make_quiet_view()).__enter__()
    assert collect_remains(directory) == before


def test_a_view_that_fails_does_not_stop_the_run(tmp_path, capsys):
    class Broken:
        def __getattr__(self, name):
            raise OSError("the terminal is gone")

    directory = RunDirectory.create(tmp_path, small_run(), "a")
    run_to_end(directory, GuardedView(Broken()))
    assert checkpoint.list_steps(directory.checkpoints) == [4, 6]
    assert capsys.readouterr().err.count("the run goes on without it") == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    run_to_end(directory, make_quiet_view())
    before = collect_remains(directory)
    newest = directory.checkpoints / "step-000006"
    weights = newest / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(RunError, match=r"step-000006 is damaged .*model.safetensors.*step-000004 is intact"):
        run_to_end(RunDirectory.open(directory.path), make_quiet_view())
    newest.rename(tmp_path / "away")
    run_to_end(RunDirectory.open(directory.path), make_quiet_view())
    assert collect_remains(directory) == before


def test_metrics_of_groups_by_hand():
    a, b = pretend_groups(0, num_groups=2, group_size=2)
    for group, rewards, lengths in ((a, (1.0, 0.0), (3, 5)), (b, (0.5, 0.5), (4, 4))):
        for sample, reward, num in zip(group.samples, rewards, lengths, strict=True):
            sample.reward, sample.parts = reward, {"correct": reward}
            sample.tokens, sample.provenance = [0] * num, [1] * num
            sample.sampler_logprobs, sample.old_logprobs = [-1.0] * num, [-1.0] * (num - 1) + [-1.5]
            sample.finish = type(sample.finish)("stop")
    a.samples[1].finish = type(a.samples[1].finish)("length")
    b.excluded = "constant reward"
    metrics = compute_rollout_metrics([a, b])
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.125**0.5,
        "reward/correct": 0.5,
        "length/mean": 4.0,
        "length/stop": 11 / 3,
        "length/length": 5.0,
        "finish/length": 0.25,
        "groups/dead": 0.5,
        "tokens/sampled": 16,
        "tokens/prompt": 6,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    shown = choose_showcase(3, [b, a])
    assert shown is not None and shown.reward == 1.0 and shown.completion == a.samples[0].text
    assert summarise_failures([a, b]) == ""
    a.samples[0].failure = "worker died"
    assert summarise_failures([a, b]) == "1 sample could not be scored and left their groups: worker died"
    assert compute_rollout_metrics([]) == {} and choose_showcase(1, []) is None


def test_failures_are_recorded_with_their_step(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(steps=1), "a")
    job = PretendJob()
    with Run(directory, directory.config, job, make_quiet_view()) as run:
        for step in run.steps():
            groups = pretend_groups(step)
            groups[0].samples[0].failure, groups[0].samples[0].reward = "worker died", None
            run.record_event("skip", "non-finite gradient")
            run.end_step(step, make_step_record(step, groups, {}))
        run.finish()
    with Reader(directory.database) as reader:
        events = [(e.step, e.kind) for e in reader.read_events()]
    assert (1, "skip") in events and (1, "failure") in events
    incidents = directory.card.read_text().partition("## Skips and failures")[2].partition("##")[0].split("\n")
    assert [line for line in incidents if line] == [
        "- failure: 1",
        "- skip: 1",
        "- samples that could not be scored: 0",
        "- samples left out of the loss: 0",
    ]


class CountingJob(PretendJob):
    """A job without a task, rollouts or evaluations, none of which a run needs."""

    evaluate = None

    def describe(self) -> RunDescription:
        return RunDescription(
            source="numbers",
            source_is="data",
            algo="counting",
            batch="3 numbers",
            curve=Curve(label="loss", metric="loss", rising=False),
            columns=(("loss", "loss"),),
        )

    def suggest_commands(self, run, step):
        return [["count", str(step), f"{run} on"]]


def run_counting_job(directory: RunDirectory, view: View) -> CountingJob:
    job = CountingJob()
    with Run(directory, directory.config, job, view) as run:
        for step in run.steps():
            run.end_step(step, StepRecord(metrics=job.update(pretend_groups(step))))
        assert run.finish().complete
    return job


def test_a_run_without_tasks_rollouts_and_evaluations(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(recipe="counted"), "a b")
    output = io.StringIO()
    run_counting_job(directory, make_view("plain", output))
    assert checkpoint.list_steps(directory.checkpoints) == [4, 6]
    assert list_rollout_steps(directory.rollouts) == [] and directory.load_evaluations() == {}
    with Reader(directory.database) as reader:
        assert list(reader.read_series("loss")) == [1, 2, 3, 4, 5, 6]
        assert reader.read_series("rollouts/bytes") == {} and reader.read_groups() == []
    first, *_, last = output.getvalue().splitlines()
    assert first == "cohort · counted · tiny · numbers · counting · 3 numbers · to step 6"
    assert last == f"next count 6 '{directory.path} on'" and "held-out" not in output.getvalue()
    card = directory.card.read_text()
    assert "model `tiny`, data `numbers`, algorithm `counting`, 6 steps of 3 numbers, seed 0." in card
    assert "| step | loss |" in card and "## Skips and failures\n\nnone\n" in card


def test_a_silent_run_does_the_same_steps_and_leaves_nothing(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    loud = run_counting_job(directory, make_quiet_view())
    longer = RunDirectory.open(directory.path).config
    before = {path: path.stat().st_mtime_ns for path in directory.path.rglob("*")}
    job = CountingJob()
    with SilentRun(directory, dataclasses.replace(longer, steps=8), job) as run:
        assert run.step == 6 and torch.equal(job.weights, loud.weights)  # from the newest checkpoint
        done = []
        for step in run.steps():
            run.record_event("skip", "reported by the first rank")
            run.show_notice("algo", "reported by the first rank")
            run.end_step(step, StepRecord(metrics=job.update(pretend_groups(step))))
            done.append(step)
        run.finish()
    assert done == [6, 7]
    assert {path: path.stat().st_mtime_ns for path in directory.path.rglob("*")} == before


CAMPAIGN = """
import os, sys, torch
from pathlib import Path
from cohort.run.directory import RunDirectory
from tests.helpers.pretend_run import LineCounter, collect_remains, run_in_child, run_to_end, small_run
import io
from cohort.logs.view import make_view
torch.set_num_threads(1)
root, num = Path(sys.argv[1]), int(sys.argv[2])

reference = RunDirectory.create(root, small_run(), "reference")
with LineCounter() as lines:
    run_to_end(reference, make_view("plain", io.StringIO()))
expected, total = collect_remains(reference), lines.count
killed = 0
for trial in range(num):
    directory = RunDirectory.create(root, small_run(), f"run{trial}")
    directory.unlock()
    first = 1 + trial * total // num
    statuses = [run_in_child(directory.path, at) for at in (first, 1 + total // 3, -1)]
    assert os.WIFSIGNALED(statuses[0]) and os.WTERMSIG(statuses[0]) == 9, (first, statuses)
    assert statuses[-1] == 0, (first, statuses)
    killed += sum(map(os.WIFSIGNALED, statuses))
    found = collect_remains(directory)
    for part in expected:
        assert found[part] == expected[part], f"killed at line {first} of {total}: {part} differs"
print(f"{total} lines, {killed} kills")
"""


@pytest.fixture
def fast_path(tmp_path):
    """A directory in memory, if there is one: fsync costs nothing there, and SIGKILL leaves memory files intact."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as path:
        yield Path(path)


@pytest.mark.parametrize("num_trials", [24, pytest.param(150, marks=pytest.mark.slow)])
def test_killed_at_any_line_it_resumes_to_the_same_run(fast_path, num_trials):
    """SIGKILL at lines spread over everything that a run executes in `cohort.run` and `cohort.system.disk`.

    Each run is killed a second time during its resume, then finished, and compared with a run that was never killed.
    """
    result = subprocess.run(
        [sys.executable, "-c", CAMPAIGN, str(fast_path), str(num_trials)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    num_lines, num_kills = (int(word) for word in result.stdout.split() if word.isdigit())
    assert num_lines > 1000 and num_kills >= 1.5 * num_trials


def test_the_line_counter_sees_the_store(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(steps=1), "a")
    with LineCounter() as lines:
        run_to_end(directory, make_quiet_view())
    assert lines.count > 200
