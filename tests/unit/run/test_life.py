"""A run from start to end: what it records and keeps, how it stops, and that killing it changes nothing."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cohort.config.schema import EvalConfig, SaveConfig
from cohort.errors import RunError
from cohort.evaluation.records import Evaluation
from cohort.fates import Fate
from cohort.logs.view import GuardedView, View, make_view
from cohort.loops.stats import choose_showcase, compute_rollout_metrics, summarise_failures
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.job import StepRecord, make_step_record
from cohort.run.life import Run
from cohort.run.naming import choose_checkpoint
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
    assert closing[-3] == f"next cohort eval arithmetic --model {directory.path}@6"
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


def test_accuracies_before_a_change_of_the_grader_choose_no_checkpoint(tmp_path, monkeypatch):
    """The accuracies of the first grader are higher, and mean something else."""
    config = small_run(steps=6, eval=EvalConfig(every=2), save=SaveConfig(every=2, keep_last=1))
    directory = RunDirectory.create(tmp_path, config, "a")
    evaluate = PretendJob.evaluate

    def evaluate_by_another(job: PretendJob, step: int) -> Evaluation:
        made = evaluate(job, step)
        if step > 2:
            return replace(made, accuracy=0.1 * (6 - step))
        return replace(made, accuracy=0.9, setting=replace(made.setting, grader="g-0"))

    monkeypatch.setattr(PretendJob, "evaluate", evaluate_by_another)
    output = io.StringIO()
    run_to_end(directory, make_view("plain", output))
    assert checkpoint.list_steps(directory.checkpoints) == [4, 6]
    assert choose_checkpoint(directory.path, "best").step == 4
    card = directory.card.read_text()
    assert "The grader has changed between steps 2 and 4: accuracies before and after cannot be compared." in card
    assert "held-out accuracy 0.90 ->" not in output.getvalue() + card
    assert "held-out accuracy 0.00 at step 6; no comparison with step 0, because the grader" in card


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


def test_a_run_that_starts_again_is_evaluated_again(tmp_path):
    """Without a checkpoint nothing is compared with the start, so an evaluation of other problems must not stay."""
    directory = RunDirectory.create(tmp_path, small_run(save=SaveConfig(every=6, keep_best=False)), "r")
    directory.save_evaluation(dataclasses.replace(PretendJob().evaluate(0), accuracy=0.9))
    directory.unlock()
    run_to_end(RunDirectory.open(directory.path))
    assert directory.load_evaluations()[0].accuracy == PretendJob().evaluate(0).accuracy != 0.9


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
    longer.adopt(dataclasses.replace(longer.config, steps=8))
    run_to_end(longer, make_quiet_view())
    assert RunDirectory.open(directory.path).config.steps == 8
    with Reader(directory.database) as reader:
        assert list(reader.read_series("loss")) == [1, 2, 3, 4, 5, 6, 7, 8]
    straight = RunDirectory.create(tmp_path, small_run(steps=8), "b")
    assert torch.equal(run_to_end(straight, make_quiet_view()).weights, load_checkpoint_weights(directory, 8))


def test_an_extended_run_says_so_in_its_events_and_on_its_card(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    run_to_end(directory, make_quiet_view())
    assert "The same numbers, bit for bit, need the same versions" in directory.card.read_text()
    effect = "the learning rate goes from 0.1 (step 6) to 0.2 (step 7)"

    class DecayingJob(PretendJob):
        def describe_extension(self, step: int, old_steps: int, new_steps: int) -> str:
            assert (step, old_steps, new_steps) == (6, 6, 8)
            return effect

    config = small_run(steps=8)
    expected = f"extended after step 6, from 6 to 8 steps; {effect}"
    for _ in range(2):
        output = io.StringIO()
        # The run is left before the first new step is done, as by a kill: the extension must not be told twice.
        with Run(RunDirectory.open(directory.path), config, DecayingJob(), make_view("plain", output)):
            assert expected in output.getvalue()
    job = DecayingJob()
    with Run(RunDirectory.open(directory.path), config, job, make_quiet_view()) as run:
        for step in run.steps():
            run.end_step(step, job.step(step, pretend_groups(step)))
        run.finish()
    with Reader(directory.database) as reader:
        assert [(e.step, e.text) for e in reader.read_events(kind="extension")] == [(6, expected)]
    card = directory.card.read_text()
    assert "so its command alone makes another one" in card and f"- {expected}" in card
    assert "need the same versions, the same extensions after the same steps, and" in card and "- extension" not in card


@pytest.mark.parametrize("steps", [3, 5])
def test_steps_lowered_by_hand_are_refused_with_the_way_on(tmp_path, steps):
    """5 is more than the newest checkpoint has, but the schedule would change in silence."""
    directory = RunDirectory.create(tmp_path, small_run(), "a")

    def stop(step: int) -> None:
        if step == 4:
            raise RuntimeError("bug")

    with pytest.raises(RuntimeError):
        run_to_end(directory, make_quiet_view(), stop)
    text = directory.config_file.read_text()
    directory.config_file.write_text(text.replace("steps: 6", f"steps: {steps}"))
    with pytest.raises(RunError, match=rf"had 6 steps, but .*config.yaml now says steps: {steps}.*--steps 6`"):
        run_to_end(RunDirectory.open(directory.path), make_quiet_view())
    # The advised command.
    with Run(RunDirectory.open(directory.path), small_run(steps=6), PretendJob(), make_quiet_view()) as run:
        assert run.step == 4
    assert directory.config_file.read_text() == text


def test_folders_that_were_removed_are_made_again(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")

    def remove(step: int) -> None:
        if step in (1, 4):
            shutil.rmtree(directory.rollouts)
            shutil.rmtree(directory.eval)
        if step == 4:
            raise RuntimeError("bug")

    with pytest.raises(RuntimeError):
        run_to_end(directory, make_quiet_view(), remove)
    output = io.StringIO()
    run_to_end(RunDirectory.open(directory.path), make_view("plain", output))
    assert list_rollout_steps(directory.rollouts) == [5, 6] and list(directory.load_evaluations()) == [6]
    assert "the evaluations after steps 0, 3 are in run.db, but their files in eval are gone" in output.getvalue()


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
    with pytest.raises(RunError, match=r"seed = 0, not 7.*A run keeps its settings"):
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
        "- samples left out of the loss: 1 of 4 (failed 1)",
    ]


def test_the_card_counts_every_sample_that_is_left_out(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(steps=1), "a")
    with Run(directory, directory.config, PretendJob(), make_quiet_view()) as run:
        for step in run.steps():
            groups = pretend_groups(step, num_groups=4, group_size=3)
            groups[0].excluded = groups[1].excluded = Fate.CONSTANT_REWARD
            groups[2].samples[0].masked = Fate.TRUNCATED
            run.end_step(step, make_step_record(step, groups, {}))
        run.finish()
    expected = "- samples left out of the loss: 7 of 12 (constant reward 6, truncated 1)"
    assert expected in directory.card.read_text()


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


def test_a_card_cannot_act_on_the_terminal_that_shows_it(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(recipe="a\x1b[2J\u202eb", steps=1), "a")
    run_counting_job(directory, make_view("plain", io.StringIO()))
    card = directory.card.read_text()
    assert "Recipe `a\\x1b[2J\\u202eb`" in card and not set("\x1b\u202e") & set(card)


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


def make_dead(groups):
    """Returns the groups with equal rewards and no advantages."""
    for sample in (s for group in groups for s in group.samples):
        sample.reward, sample.advantage = 0.0, 0.0
    return groups


def train_with_signal(directory, alive, stop_after=None):
    """Runs or resumes a pretended run in which only the steps in `alive` have a signal. Returns what it printed."""
    output = io.StringIO()
    job = PretendJob(directory.config)
    with Run(directory, directory.config, job, make_view("plain", output)) as run:
        for step in run.steps():
            groups = pretend_groups(step)
            run.end_step(step, job.step(step, groups if step + 1 in alive else make_dead(groups)))
            if step + 1 == stop_after:
                return output.getvalue()
        run.finish()
    return output.getvalue()


@pytest.mark.parametrize("stop_after", [None, 14])
def test_ten_steps_in_a_row_without_a_signal_get_a_warning(tmp_path, stop_after):
    """After a resume it comes at the same step."""
    config = small_run(steps=33, eval=EvalConfig(), save=SaveConfig(every=5))
    directory = RunDirectory.create(tmp_path, config, "a")
    alive = {1, 2, 23}
    printed = train_with_signal(directory, alive, stop_after)
    if stop_after:
        printed += train_with_signal(RunDirectory.open(directory.path), alive)
    with Reader(directory.database) as reader:
        events = [(event.step, event.text) for event in reader.read_events(kind="signal")]
    assert [step for step, _ in events] == [12, 22, 33]
    assert [text.split()[0] for _, text in events] == ["10", "20", "10"]
    assert all("more --batch.samples" in text and "--sampling.temperature" in text for _, text in events)
    assert "step 33 · signal · 10 steps in a row taught nothing" in printed and "more characters" not in printed


def train_with_bad_updates(directory: RunDirectory, bad: set[int], stop_after: int | None = None) -> str:
    """Trains a pretended run in which an update of each step in `bad` was skipped. Returns what it printed."""
    output = io.StringIO()
    job = PretendJob(directory.config)
    with Run(directory, directory.config, job, make_view("plain", output)) as run:
        for step in run.steps():
            record = job.step(step, pretend_groups(step))
            metrics = {**record.metrics, **({"updates/bad": 1.0} if step + 1 in bad else {})}
            run.end_step(step, dataclasses.replace(record, metrics=metrics))
            if step + 1 == stop_after:
                return output.getvalue()
        run.finish()
    return output.getvalue()


@pytest.mark.parametrize("stop_after", [None, 4])
def test_the_first_skipped_update_is_an_event_and_the_card_counts_all(tmp_path, stop_after):
    """After a resume there is no second event."""
    config = small_run(steps=8, eval=EvalConfig(), save=SaveConfig(every=2))
    directory = RunDirectory.create(tmp_path, config, "a")
    bad = {3, 4, 7}
    printed = train_with_bad_updates(directory, bad, stop_after)
    if stop_after:
        train_with_bad_updates(RunDirectory.open(directory.path), bad)
    with Reader(directory.database) as reader:
        events = [(event.step, event.text) for event in reader.read_events(kind="update")]
    assert [step for step, _ in events] == [3]
    assert "1 update was skipped: the gradient was not finite" in events[0][1] and "policy_loss" in events[0][1]
    assert "step 3 · update · 1 update was skipped" in printed and "more characters" not in printed
    assert "- updates skipped because their gradient was not finite: 3\n" in directory.card.read_text()


def test_a_run_whose_updates_are_all_made_speaks_of_no_others(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(steps=2, eval=EvalConfig()), "a")
    printed = train_with_bad_updates(directory, set())
    assert "not finite" not in printed + directory.card.read_text()


def test_the_bundled_model_on_a_task_that_it_was_not_taught(tmp_path):
    from cohort.models.catalog import notice_if_not_taught

    assert notice_if_not_taught("tiny", "countdown") == "" == notice_if_not_taught("smollm2-135m", "gsm8k")
    assert "was taught sums and Countdown only: if the rewards of gsm8k stay 0" in notice_if_not_taught("tiny", "gsm8k")
