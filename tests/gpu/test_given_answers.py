"""SFT and DPO on a GPU: whole runs with held-out examples, and what the learner measures against the same on a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.gpu.device import DEVICE, only_gpu

pytest.importorskip("tyro")

# isort: split

from cohort.algos.imitation import Imitation
from cohort.algos.preferences import PreferenceLoss
from cohort.config.preferences import Sigmoid
from cohort.config.schema import EvalConfig, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.jobs import build
from cohort.learner.local import LocalLearner
from cohort.loops.dpo import make_pair_batch
from cohort.loops.learning import annotate
from cohort.recipes.tiny import tiny_countdown_sft, tiny_dpo
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.types import Provenance
from tests.helpers.decoders_and_groups import random_groups, small_decoder

pytestmark = only_gpu


@pytest.mark.parametrize("loss", [Imitation(), PreferenceLoss(Sigmoid())], ids=["sft", "dpo"])
def test_measured_metrics_and_updates_are_those_of_a_cpu(loss):
    metrics = []
    for device in (torch.device("cpu"), DEVICE):
        decoder = small_decoder().to(device)
        learner = LocalLearner(
            decoder,
            LearnerConfig(token_budget=64),
            OptimConfig(lr=1e-3),
            num_updates=2,
            reference=copy.deepcopy(decoder),
        )
        groups = random_groups(6, 2)
        for group in groups:
            for sample in group.samples:
                sample.provenance = [int(Provenance.TARGET)] * len(sample.tokens)
        if loss.whole_groups:
            annotate(learner, groups, {"ref"}, Provenance.TARGET)
        batch = make_pair_batch(groups) if loss.whole_groups else make_batch(groups, loss_on=Provenance.TARGET)
        before = learner.measure(batch, loss)
        update = learner.update(batch, loss).metrics
        metrics.append([before, update, learner.measure(batch, loss)])
    on_cpu, on_gpu = metrics
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert on_gpu[2]["loss"] < on_gpu[0]["loss"]


@pytest.mark.parametrize("reference", ["copy", "stored"])
def test_a_run_on_pairs_measures_the_held_out_ones(tmp_path, monkeypatch, reference):
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    config = replace(tiny_dpo(), steps=12, reference=reference, eval=EvalConfig(every=6))
    path = build.train(config, tmp_path, "plain")
    evaluations = RunDirectory.open(path).load_evaluations()
    # The policy is its own reference before training, and ties count half.
    assert evaluations[0].accuracy == 0.5 and evaluations[12].accuracy > 0.6


def test_a_run_of_imitation_measures_held_out_loss_and_accuracy(tmp_path):
    config = replace(tiny_countdown_sft(), steps=6, eval=EvalConfig(every=3, problems=50))
    path = build.train(config, tmp_path, "plain")
    with Reader(path / "run.db") as reader:
        losses = reader.read_series("eval/loss")
    assert len(losses) >= 2 and losses[max(losses)] < losses[min(losses)]
