"""The table of metrics in docs/algorithms.md names exactly the metrics that runs record."""

from __future__ import annotations

import re
from pathlib import Path

from cohort.config.algo_sections import CorrectionConfig, KLConfig
from cohort.config.algos import GRPO
from cohort.config.schema import BatchConfig, EvalConfig, OptimConfig, ReplayConfig, SamplingConfig
from cohort.jobs import build
from cohort.run.store.reader import Reader
from tests.helpers.small_runs import keep_torch_settings, small_run

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
# Metrics that a healthy run never records.
RARE = {
    "updates/bad",
    "updates/no_signal",
    "samples/empty",
    "samples/failed",
    "time/scoring/retries",
    "turns/mean",
    "calls/mean",
    "calls/OUTCOME",
    # Only several ranks have it: tests/integration/test_rank_runs.py.
    "pack/evenness",
    # Only a mixture of tasks has these: tests/integration/test_mixture.py.
    "reward/mean/TASK",
    "reward/correct/TASK",
    "groups/dead/TASK",
    "length/mean/TASK",
    "samples/of/TASK",
}


def documented() -> list[str]:
    """Returns the names in the first column of the table. A word in capitals stands for any name."""
    table = DOCUMENT.read_text(encoding="utf-8").split("## Metrics")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def pattern(name: str) -> str:
    """Returns a regular expression for a name of the table."""
    return re.sub(r"[A-Z]{4,}", r"[a-z_/]+", name)


def test_every_recorded_metric_is_documented_and_every_documented_one_is_recorded(tmp_path):
    algo = GRPO(
        kl=KLConfig(weight=0.05, target=0.01),
        entropy=0.001,
        entropy_target=0.5,
        truncated="mask",
        correction=CorrectionConfig(kind="truncate"),
    )
    config = small_run(
        steps=3,
        algo=algo,
        replay=ReplayConfig(prompts=2, steps=2),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=12, top_p=0.99, allow_truncation=True),
        eval=EvalConfig(problems=4),
    )
    with keep_torch_settings():
        path = build.train(config, tmp_path, "plain")
    with Reader(path / "run.db") as reader:
        recorded = {row.name for row in reader.read_metrics() if not row.name.startswith("eval/")}
    names = documented()
    assert len(names) > 60
    for name in recorded:
        assert any(re.fullmatch(pattern(known), name) for known in names), f"{name} is in no table"
    for known in names:
        seen = any(re.fullmatch(pattern(known), name) for name in recorded)
        assert seen or known in RARE, f"{known} is documented and never recorded"
