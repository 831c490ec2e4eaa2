"""Runs on pairs from a reward: what they record, that a resume repeats them, and what check, explain and replay say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cohort.config.algos import OnlineDPO, OnlineIPO, OnlineSimPO, PairPolicy
from cohort.config.kinds import RL
from cohort.config.schema import EvalConfig, LearnerConfig, LoraConfig, OptimConfig, ReplayConfig, SaveConfig
from cohort.inspect.check.run import run_checks
from cohort.inspect.explain.report import explain_step
from cohort.inspect.replay import replay_step
from cohort.jobs import build
from cohort.learner.local import LocalLearner
from cohort.models.decoder import Decoder
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import load_rollouts, make_rollout_path
from cohort.types import Group
from tests.helpers.small_runs import built_job, keep_torch_settings, small_run

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
CASES = {
    "frozen copy": {"algo": OnlineDPO()},
    "adapters": {"algo": OnlineIPO(), "learner": LearnerConfig(token_budget=512, lora=LoraConfig(rank=2))},
    "no reference": {"algo": OnlineSimPO(nll=0.1)},
    "several updates": {
        "algo": OnlineDPO(pairs="random", truncated="mask"),
        "learner": LearnerConfig(token_budget=512, epochs=2, minibatches=2),
    },
    "reuse": {"algo": OnlineDPO(), "replay": ReplayConfig(prompts=2, steps=2)},
}


def make_config(**changes: Any) -> RL:
    values = {"steps": 4, "optim": OptimConfig(lr=1e-3), "eval": EvalConfig(problems=2), "save": SaveConfig(every=2)}
    return small_run(**{**values, **changes})


def metrics_of(run: Path) -> list[tuple[int, str, str]]:
    with Reader(run / "run.db") as reader:
        rows = reader.read_metrics()
    return sorted((row.step, row.name, repr(row.value)) for row in rows if not row.name.startswith("time/"))


@contextmanager
def watch_reference() -> Iterator[list[int]]:
    """Yields a list that gets the number of samples of every call that asks for the reference."""
    asked: list[int] = []
    original = LocalLearner.annotate

    def watch(self: LocalLearner, groups: list[Group], needs: Any, *args: Any) -> Any:
        result = original(self, groups, needs, *args)
        if "ref" in needs:
            assert result.ref is not None
            asked.append(len(result.ref.ids))
        return result

    LocalLearner.annotate = watch  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        LocalLearner.annotate = original  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RL, Path, list[int]]:
    """A config, its run of four steps, and how many samples the reference saw in each step."""
    config = make_config(**CASES[request.param])
    with keep_torch_settings(), watch_reference() as asked:
        run = build.train(config, tmp_path_factory.mktemp("runs"), "plain", name="whole")
    return config, run, asked


def test_a_resumed_run_is_the_same_to_the_last_bit(trained: tuple[RL, Path, list[int]], tmp_path: Path) -> None:
    config, whole, _ = trained
    with keep_torch_settings():
        run = build.train(make_config(**{**vars_of(config), "steps": 2}), tmp_path, "plain", name="part")
        build.resume(run, 4, "plain")
    # The part was evaluated at its own end.
    found, expected = ([row for row in metrics_of(path) if not row[1].startswith("eval/")] for path in (run, whole))
    assert found == expected and len(found) > 100
    last = [make_rollout_path(path / "rollouts", 4).read_bytes() for path in (run, whole)]
    assert last[0] == last[1]


def vars_of(config: RL) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("algo", "learner", "replay")}


def test_a_replay_repeats_every_metric(trained: tuple[RL, Path, list[int]]) -> None:
    with keep_torch_settings():
        result = replay_step(trained[1], 4, [], lambda text: None)
    assert result.rows and not result.differing_rows and not result.notes


def test_explain_shows_the_pairs_and_the_signal_that_was_recorded(trained: tuple[RL, Path, list[int]]) -> None:
    _, run, _ = trained
    report = explain_step(run, 1)
    facts = dict(report.facts)
    assert "masked: in no pair" in facts["samples"] and "implicit/margin" in facts["recorded"]
    assert not any("would get another advantage" in note or "not quite" in note for note in report.notes), report.notes
    assert "are a pair: 1 for the better one" in dict(report.group.facts)["advantages"]
    in_loss = [sample for sample in report.group.samples if not sample.fate]
    assert sorted(round(sample.push / abs(sample.push)) for sample in in_loss) == [-1, 1]


def test_the_reference_sees_the_pairs_alone(trained: tuple[RL, Path, list[int]]) -> None:
    config, run, asked = trained
    assert isinstance(config.algo, PairPolicy)
    has_reference = not isinstance(config.algo, OnlineSimPO)
    groups = [load_rollouts(make_rollout_path(run / "rollouts", step)) for step in (1, 2, 3, 4)]
    expected = [sum(bool(s.advantage) for g in step for s in g.samples) for step in groups]
    assert asked == (expected if has_reference else []) and min(expected) >= 2
    with built_job(config) as job:
        # With adapters the model without them is the reference.
        assert (job.learner.reference is not None) == (has_reference and not config.learner.lora.is_on)
        assert isinstance(job.model.decoder, Decoder)


def test_every_metric_of_pairs_is_in_the_table(trained: tuple[RL, Path, list[int]]) -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    usual = re.findall(r"^\| `([^`]+)` \|", page.split("## Metrics")[1].split("\n## ")[0], re.MULTILINE)
    section = page.split("## Pairs from a reward")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    own = {name for row in rows for name in re.findall(r"`([^`]+)`", row) if "/" in name or name == "nll"}
    recorded = {name for _, name, _ in metrics_of(trained[1]) if not name.startswith("eval/")}
    assert own >= {"implicit/margin", "implicit/accuracy", "loss/pairs", "nll"}
    for name in recorded:
        assert name in own or any(re.fullmatch(re.sub(r"[A-Z]{4,}", "[a-z_/]+", known), name) for known in usual), name
    config = trained[0]
    missing = own - recorded
    assert missing <= ({"kl/ref"} if isinstance(config.algo, OnlineSimPO) else {"loss/nll"}), missing


def test_check_finds_nothing_wrong() -> None:
    with keep_torch_settings():
        findings = list(run_checks(make_config(algo=OnlineDPO(nll=0.1)), lambda text: None))
    assert [f for f in findings if f.status == "FAIL"] == []
    assert {f.name for f in findings} >= {"update/special-tokens", "update/unsampled-tokens", "update/ranks"}
