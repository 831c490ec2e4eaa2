"""Supervised fine-tuning through the command line: what a run writes, and that a kill changes none of it."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch

from cohort.config.imitation import SFT
from cohort.models.files import load_folder
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps
from tests.helpers.command_line import Census, cohort, differences, next_args, only_run, reference, remains

# Saves checkpoints after steps 2, 4 and 6.
SMALL = ["--steps=6", "--batch.examples=6", "--data.rows=40", "--save.every=2", "--optim.warmup=2", "--threads=1"]
STORIES = {
    "checkpoint": [("creation", 1), ("checkpoint", 2), ("recovery", 1), ("prune", 2)],
    "step": [("update", 3), ("database", 4), ("update", 2), ("finish", 1)],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Census]:
    return reference(tmp_path_factory.mktemp("sft"), SMALL, "tiny_sft")


def test_a_run_has_metrics_checkpoints_and_a_card(undisturbed: tuple[Path, Census]) -> None:
    run, _ = undisturbed
    directory = RunDirectory.open(run)
    assert isinstance(directory.config, SFT) and directory.config.data.rows == 40
    with Reader(directory.database) as reader:
        for name in ("loss", "perplexity", "tokens", "lr", "grad_norm", "entropy", "updates/done", "time/step"):
            assert list(reader.read_series(name)) == [1, 2, 3, 4, 5, 6], name
        losses, tokens = reader.read_series("loss"), reader.read_series("tokens")
    assert losses[6] < losses[1] and len(set(tokens.values())) > 3  # every step has examples of its own
    assert list_rollout_steps(directory.rollouts) == [1, 2, 3, 4, 5, 6] and directory.load_evaluations() == {}
    card = directory.card.read_text()
    assert "data `traces`, algorithm `sft`, 6 steps of 6 examples, seed 0. This run is complete." in card
    assert "| step | loss | perplexity | target tokens | gradient norm | learning rate |" in card
    shown = (run.parents[1] / "output.txt").read_text()
    assert "cohort · tiny_sft · tiny · traces · sft · 6 examples · to step 6" in shown
    assert "perplexity" in shown and "held-out" not in shown and "\nnext cohort eval arithmetic --model runs/" in shown


@pytest.mark.parametrize("story", STORIES)
def test_killed_anywhere_and_resumed_it_ends_the_same(
    story: str, undisturbed: tuple[Path, Census], tmp_path: Path
) -> None:
    original, census = undisturbed
    rng = random.Random(story)
    for place, call in STORIES[story]:
        strike = census.strike(place, call, rng)
        struck = cohort(*next_args(tmp_path, SMALL, "tiny_sft"), at=tmp_path, orders=[strike])
        assert struck.returncode == -signal.SIGKILL, f"{strike} did not happen: {struck.stdout}{struck.stderr}"
    done = cohort(*next_args(tmp_path, SMALL, "tiny_sft"), at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None
    left = remains(run)
    assert len(left["checkpoints/step-000006/optimizer.safetensors"]) == 64
    assert {(step, name) for step, name, _ in left["metrics"]} >= {(s, "loss") for s in range(1, 7)}
    assert differences(left, remains(original)) == []


def test_a_run_with_adapters_can_be_extended(tmp_path: Path) -> None:
    """A run that a resume extends ends with the same files as one that had all steps from the beginning."""
    lora = [*SMALL[1:], "--learner.lora.rank=2", "--learner.minibatches=2", "--optim.schedule=constant", "--out=."]
    assert cohort("train", "tiny_sft", *lora, "--steps=2", at=tmp_path).returncode == 0
    [run] = tmp_path.glob("*tiny_sft*")
    done = cohort("resume", run.name, "--steps=4", at=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = tmp_path / "whole"
    whole.mkdir()
    assert cohort("train", "tiny_sft", *lora, "--steps=4", at=whole).returncode == 0
    [other] = whole.glob("*tiny_sft*")
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        same = [(r / "checkpoints/step-000004" / file).read_bytes() for r in (run, other)]
        assert same[0] == same[1], file
    assert cohort("export", run.name, "adapters", "--adapters", at=tmp_path).returncode == 0


def test_its_model_is_exported_and_other_commands_say_what_they_are_for(
    undisturbed: tuple[Path, Census], tmp_path: Path
) -> None:
    run, _ = undisturbed
    assert cohort("export", run, "out", at=tmp_path).returncode == 0
    saved = load_folder(run / "checkpoints" / "step-000006" / "model").decoder.state_dict()
    exported = load_folder(tmp_path / "out").decoder.state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    refused = cohort("replay", run, "--step", "1", at=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    message = (
        "the command cohort replay is for runs of reinforcement learning (kind rl), but this run is of the kind sft"
    )
    assert refused.stderr.startswith(f"cohort: {message}")
    explained = cohort("explain", run, "--step", "3", at=tmp_path)
    assert explained.returncode == 0 and explained.stdout.startswith("step 3 of 6 · tiny_sft · tiny · traces\n")
