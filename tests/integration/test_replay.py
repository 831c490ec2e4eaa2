"""`cohort replay` on short real runs: a replayed step gives the recorded metrics."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.cli import replay as command
from cohort.config.algo_sections import CorrectionConfig, CreditConfig, KLConfig
from cohort.config.algos import DAPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    GRPO,
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    ReplayConfig,
    SamplingConfig,
    SaveConfig,
    ThinkAgain,
)
from cohort.errors import RunError
from cohort.inspect import replay as replay_module
from cohort.inspect.replay import ReplayResult, replay_step
from cohort.jobs import build
from cohort.loops.stats import StepStats
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.store.db import Store
from cohort.run.store.rollouts import load_rollouts, make_rollout_path, save_rollouts
from cohort.types import Group
from tests.helpers.small_runs import built_job, keep_torch_settings, run_steps, small_run


def short_run(**changes: Any) -> RL:
    """Returns a config of four steps with checkpoints after steps 2 and 4 (by default). Their replays re-apply one."""
    values: dict[str, Any] = {
        "steps": 4,
        "batch": BatchConfig(prompts=6, samples=4),
        "sampling": SamplingConfig(max_tokens=20),
        "learner": LearnerConfig(token_budget=4096),
        "eval": EvalConfig(problems=2),
        "save": SaveConfig(every=2, keep_last=2, keep_best=False),
        "optim": OptimConfig(lr=5e-4),
    }
    return small_run(**{**values, **changes})


SEVERAL = LearnerConfig(token_budget=4096, epochs=2, minibatches=2)
RUNS = {
    "grpo": short_run(save=SaveConfig(every=2, keep_last=1, keep_best=False)),
    "kl": short_run(
        algo=GRPO(kl=KLConfig(weight=0.05, target=0.001, refresh=3), entropy=0.001, entropy_target=0.2),
        learner=SEVERAL,
        optim=OptimConfig(lr=1e-3, warmup=2, schedule="cosine"),
    ),
    "lora": short_run(
        algo=GRPO(kl=KLConfig(weight=0.05)), learner=LearnerConfig(token_budget=4096, lora=LoraConfig(rank=4))
    ),
    "dapo": short_run(algo=DAPO()),
    "bf16": short_run(learner=LearnerConfig(token_budget=4096, dtype="bfloat16")),
    "turns": short_run(
        algo=GRPO(credit=CreditConfig(per="turn", discount=0.9), correction=CorrectionConfig(kind="truncate")),
        turns=ThinkAgain(attempts=1),
        replay=ReplayConfig(prompts=2, steps=2),
    ),
    "reused": short_run(
        algo=GRPO(correction=CorrectionConfig(kind="truncate")), replay=ReplayConfig(prompts=2, steps=2)
    ),
}


def digest(run: Path) -> dict[str, str]:
    """Returns the digest of every file of a run by name. The lock file stays when the lock is released."""
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in run.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Yields the runs by kind. Each is made when a test first asks for it."""
    folder = tmp_path_factory.mktemp("replay")

    class Made(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            self[kind] = build.train(RUNS[kind], folder / kind, "json")
            return self[kind]

    with keep_torch_settings():
        yield Made()


def replay_quietly(run: Path, step: int, *settings: str) -> ReplayResult:
    with keep_torch_settings():
        return replay_step(run, step, settings, lambda text: None)


def metrics(replayed: ReplayResult) -> dict[str, float]:
    return {row.name: row.replayed for row in replayed.rows if row.replayed is not None}


@pytest.mark.parametrize("kind", RUNS)
def test_every_step_is_reproduced_to_the_last_bit_and_the_run_is_not_touched(runs: dict[str, Path], kind: str) -> None:
    run = runs[kind]
    before, trained = digest(run), 0
    for step in range(1, 5):
        found = replay_quietly(run, step)
        assert [(row.name, row.stored, row.replayed) for row in found.differing_rows] == []
        assert (found.changed, found.notes) == ({}, [])
        assert found.base == (2 if step > 2 and kind != "grpo" else 0)
        assert {"grad_norm", "lr", "groups/in_loss"} <= metrics(found).keys()
        trained += {"loss", "signal", "entropy", "ratio/max"} <= metrics(found).keys()
    assert trained >= 3  # a step may be without signal
    if kind == "kl":
        assert {"kl/ref", "kl/weight", "entropy/weight"} <= metrics(found).keys()
        assert metrics(found)["kl/weight"] != 0.05 and metrics(found)["updates/done"] == 4
    if kind == "reused":
        assert metrics(found)["replay/groups"] == 2
    if kind == "turns":
        groups = load_rollouts(make_rollout_path(run / "rollouts", 4))
        assert any(s.token_advantages for g in groups for s in g.samples) and any(g.reused for g in groups)
    assert digest(run) == before


@pytest.mark.parametrize("kind", RUNS)
def test_a_state_under_other_settings_is_the_same_state(runs: dict[str, Path], kind: str) -> None:
    """Everything fits into one microbatch of either size, so only the transfer of the state to a new job is tested."""
    found = replay_quietly(runs[kind], 4, "--learner.token-budget=8192")
    assert found.changed == {"learner.token_budget": (4096, 8192)}
    assert found.differing_rows == []


@pytest.mark.slow
def test_changed_settings_give_what_a_run_with_them_from_that_step_on_does(runs: dict[str, Path]) -> None:
    """Compares with the real loop, which samples step 2 itself: the policy, and so the groups, are those of the run."""
    config = RUNS["kl"]
    changed = replace(
        config,
        algo=replace(config.algo, clip_high=0.05, scale="none"),
        optim=replace(config.optim, lr=3e-3, clip_norm=0.1),
        learner=replace(config.learner, epochs=3),
    )
    with built_job(config) as parts:
        run_steps(parts, 1)
        learner, steered = parts.learner, parts.algo.state()
        parts.config = changed
        parts.algo = build_algorithm(changed.algo, config.sampling.max_tokens)
        parts.algo.load_state(steered)
        learner.config, learner.optim, learner.optimizer.config = changed.learner, changed.optim, changed.optim
        [(_, stats)] = run_steps(parts, 1, first=1)
    flags = ["--algo.clip-high=0.05", "--algo.scale=none", "--optim.lr=3e-3", "--optim.clip-norm=0.1"]
    found = replay_quietly(runs["kl"], 2, *flags, "--learner.epochs=3")
    assert metrics(found) == stats.metrics
    assert found.changed == {
        "algo.scale": ("std", "none"),
        "algo.clip_high": (0.2, 0.05),
        "optim.lr": (1e-3, 3e-3),
        "optim.clip_norm": (1.0, 0.1),
        "learner.epochs": (2, 3),
    }
    assert {"loss", "grad_norm", "lr", "kl/ref", "updates/done"} <= {row.name for row in found.differing_rows}


def test_a_reference_that_the_run_did_not_have_is_the_initial_model(runs: dict[str, Path]) -> None:
    config = RUNS["grpo"]
    with built_job(replace(config, algo=replace(config.algo, kl=KLConfig(weight=0.5)))) as parts:
        parts.algo.load_state(parts.algo.state() | {"kl": 0.0})  # as good as none: the run's own step 1
        run_steps(parts, 1)
        parts.algo.load_state(parts.algo.state() | {"kl": 0.5})
        [(_, stats)] = run_steps(parts, 1, first=1)
    found = replay_quietly(runs["grpo"], 2, "--algo.kl.weight=0.5")
    assert found.changed == {"algo.kl.weight": (0.0, 0.5)}
    assert metrics(found)["kl/ref"] == pytest.approx(stats.metrics["kl/ref"], rel=1e-3) and stats.metrics["kl/ref"] > 0
    assert metrics(found)["grad_norm"] == pytest.approx(stats.metrics["grad_norm"], rel=1e-3)


def test_another_algorithm_takes_out_the_groups_it_would_have_replaced(runs: dict[str, Path]) -> None:
    found = {step: replay_quietly(runs["grpo"], step) for step in range(1, 5)}
    step = next(s for s, f in found.items() if metrics(f).get("groups/constant_reward"))
    dead = metrics(found[step])["groups/constant_reward"]
    other = replay_quietly(runs["grpo"], step, "--algo", "dapo")
    assert other.changed["algo"] == ("grpo", "dapo")
    assert metrics(other)["groups/not_accepted"] == dead and "groups/constant_reward" not in metrics(other)
    assert other.notes == [
        f"groups that a run would have replaced by others, and that are only left out here: {dead:.0f}."
    ]


def test_the_compute_type_may_be_another(runs: dict[str, Path]) -> None:
    """The replay starts from the fp32 masters, not from weights rounded to the run's dtype."""
    exact, rounded = (replay_quietly(runs["grpo"], 2, f"--learner.dtype={t}") for t in ("float64", "bfloat16"))
    stored = metrics(replay_quietly(runs["grpo"], 2))["grad_norm"]
    assert metrics(exact)["grad_norm"] == pytest.approx(stored, rel=1e-4) and exact.differing_rows
    assert metrics(rounded)["grad_norm"] == pytest.approx(stored, rel=0.1) and rounded.differing_rows
    several, plain = (metrics(replay_quietly(runs["kl"], 4, *f)) for f in (["--learner.dtype=bfloat16"], []))
    assert several["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.1)  # updates go on from the masters
    single = replay_quietly(runs["bf16"], 4, "--learner.dtype=float32")
    assert metrics(single)["grad_norm"] == pytest.approx(metrics(replay_quietly(runs["bf16"], 4))["grad_norm"], rel=0.1)
    assert metrics(single)["sampler_gap/max"] > 1e-4  # bf16 sampled it


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Returns a copy of the run "kl" that a test may damage."""
    return Path(shutil.copytree(runs["kl"], tmp_path / "run"))


def test_a_difference_is_reported_with_its_size(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(copied / "run.db")) as db, db:
        (lr,) = db.execute("SELECT value FROM metrics WHERE step = 1 AND name = 'lr'").fetchone()
        db.execute("UPDATE metrics SET value = value + 0.5 WHERE step = 1 AND name = 'lr'")
    with keep_torch_settings():
        command.run([str(copied), "--step", "1"])
    out = capsys.readouterr().out
    assert "not reproduced: 1 of " in out
    cells = next(line for line in out.splitlines() if line.startswith("lr ")).split()
    assert cells == ["lr", f"{lr + 0.5:.6g}", f"{lr:.6g}", "-0.5"]
    assert "the run was extended since" in out
    [note] = replay_quietly(copied, 2).notes
    assert note == "step 1, which was re-applied first, was not reproduced: lr differ."


def test_changed_rollouts_of_an_earlier_step_are_reported(copied: Path) -> None:
    path = make_rollout_path(copied / "rollouts", 3)
    groups = load_rollouts(path)
    for sample in (s for g in groups for s in g.samples):
        sample.reward = 1.0 - (sample.reward or 0.0)
    save_rollouts(path, groups)
    found = replay_quietly(copied, 4)
    assert {"grad_norm", "kl/ref"} <= {row.name for row in found.differing_rows}
    assert found.notes[0].startswith("step 3, which was re-applied first, was not reproduced: reward/mean")


def test_a_step_that_cannot_be_replayed_names_those_that_can(copied: Path) -> None:
    make_rollout_path(copied / "rollouts", 1).unlink()
    for step, why in (
        (0, "steps count from 1"),
        (1, "its rollouts are not kept"),
        (2, "rollouts of steps between it and the last checkpoint before it are not kept"),
        (5, "the run has done 4 steps"),
    ):
        with pytest.raises(RunError) as refusal:
            replay_quietly(copied, step)
        assert (
            str(refusal.value)
            == f"step {step} of {copied} cannot be replayed: {why}. Use --step with one that can: 3-4."
        )
    assert replay_quietly(copied, 3).differing_rows == []
    make_rollout_path(copied / "rollouts", 3).unlink()
    with pytest.raises(RunError, match="no other step can either"):
        replay_quietly(copied, 4)


def test_a_run_under_way_is_replayed_beside_its_writer(copied: Path) -> None:
    """Its lock is held, its database open with a step in the log; a rollout file may be ahead of its rows."""
    directory = RunDirectory.open(copied)
    directory.lock()
    shutil.rmtree(directory.checkpoints / checkpoint.folder_name(4))
    store = Store(directory.database)
    store.remove_after(3)
    try:
        assert replay_quietly(copied, 3).differing_rows == []
        with pytest.raises(RunError, match=r"the run has done 3 steps. Use --step with one that can: 1-3\."):
            replay_quietly(copied, 4)
    finally:
        store.close()
        directory.unlock()


def test_a_database_that_lacks_the_step_is_named_with_the_remedy(copied: Path) -> None:
    """The checkpoint shows that step 4 was done, so run.db has lost it."""
    store = Store(copied / "run.db")
    store.remove_after(3)
    store.close()
    with pytest.raises(
        RunError, match=r"run.db has no metrics of step 4, although .*`cohort resume .*writes them again"
    ):
        replay_quietly(copied, 4)


def test_a_checkpoint_that_is_removed_meanwhile_is_not_needed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = checkpoint.load

    def removed(path: Path) -> checkpoint.Checkpoint:
        shutil.rmtree(path)
        return load(path)

    monkeypatch.setattr(replay_module.checkpoint, "load", removed)
    found = replay_quietly(copied, 4)
    assert (found.base, found.differing_rows) == (0, [])


@pytest.mark.parametrize("settings", [[], ["--optim.lr=1e-4"]])
def test_the_initial_model_too_gets_the_threads_of_the_run(
    copied: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = copied / "checkpoints" / checkpoint.folder_name(4) / "state.json"
    numbers = json.loads(state.read_text())
    numbers["numbers"]["threads"] = 3
    del numbers["crc32"]  # a checkpoint of an earlier version has no checksum of its own
    state.write_text(json.dumps(numbers))
    used = []

    def counted(*args: object) -> tuple[list[Group], StepStats]:
        used.append(torch.get_num_threads())
        return [], StepStats()

    monkeypatch.setattr(replay_module, "update_policy", counted)
    replay_quietly(copied, 2, *settings)
    assert used == [3, 3]


def test_the_command_prints_words_or_json(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs["grpo"])
    capsys.readouterr()  # what the run said, if it was made just now
    with keep_torch_settings():
        command.run(["--step", "3", run])
        said = capsys.readouterr()
        command.run([run, "--json", "--step=3", "--optim.lr", "1e-3"])
        found = json.loads(capsys.readouterr().out)
        command.run([run, "--step=3", "--optim.lr", "1e-3"])
        table = capsys.readouterr().out.splitlines()
    lines = said.out.splitlines()
    assert lines[0] == "step 3 from the initial model, steps 1-2 re-applied"
    assert lines[1].startswith("reproduced exactly: ") and len(lines) == 2
    assert said.err.splitlines()[0] == "re-applying step 1: 1 of 2 before step 3 ..."
    assert (found["run"], found["step"], found["base"], found["reapplied"]) == (run, 3, 0, [1, 2])
    assert found["changed"] == {"optim.lr": {"run": 5e-4, "replay": 1e-3}} and found["exact"] is None
    assert found["metrics"]["lr"] == {"stored": 5e-4, "replayed": 1e-3, "difference": 5e-4}
    assert found["metrics"]["grad_norm"]["difference"] == 0.0
    assert table[1:5] == [
        "changed: optim.lr 0.0005 -> 0.001",
        "",
        "metric  stored  replayed  difference",
        "lr      0.0005  0.001     +0.0005",
    ]
