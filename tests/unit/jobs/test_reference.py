"""Stored log-probabilities of a reference: computed once, read from files, and never taken from a wrong one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cohort.config.imitation import DPO, PairsConfig, SumPairs
from cohort.config.schema import LearnerConfig, LoraConfig, OptimConfig, SaveConfig
from cohort.jobs import build, reference
from cohort.jobs.dpo import DPOJob
from cohort.jobs.imitation import build_dpo_job
from cohort.jobs.reference import FILE_NAME
from cohort.learner.local import LocalLearner
from cohort.models.decoder import Decoder
from cohort.recipes.tiny import tiny_dpo
from cohort.run.store.reader import Reader
from cohort.types import Group, Provenance
from tests.helpers.small_runs import keep_torch_settings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "references"


def small(**changes: object) -> DPO:
    values: dict[str, object] = {
        "steps": 2,
        "threads": 1,
        "reference": "stored",
        "data": SumPairs(rows=6, held_out_rows=3),
        "batch": PairsConfig(pairs=3),
        "optim": OptimConfig(lr=1e-3),
        "learner": LearnerConfig(token_budget=512),
        "save": SaveConfig(every=1),
    }
    return replace(tiny_dpo(), **{**values, **changes})  # type: ignore[arg-type]


@contextmanager
def prepared(run: Path, config: DPO | None = None) -> Iterator[tuple[DPOJob, str]]:
    """Yields a job that is prepared in the directory `run`, and what it told the user."""
    run.mkdir(exist_ok=True)
    with keep_torch_settings():
        job = build_dpo_job(config or small())
        yield job, " | ".join(text for _, text in job.prepare(run))


def values_of(groups: list[Group]) -> list[list[float]]:
    return [list(sample.ref_logprobs or ()) for group in groups for sample in group.samples]


def all_values(job: DPOJob) -> list[list[float]]:
    return values_of([*job.encoded.groups, *job.held_out])


@pytest.fixture
def forbid_computing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def act() -> None:
        def refuse(*args: object) -> None:
            raise AssertionError("the reference is computed a second time")

        monkeypatch.setattr(reference, "compute_reference", refuse)

    return act


def test_files_hold_what_the_reference_says(tmp_path: Path, cache: Path, forbid_computing: Callable[[], None]) -> None:
    with prepared(tmp_path / "a") as (job, told):
        assert "of 9 pairs were computed" in told
        expected = all_values(job)
        found = job.learner.annotate(job.held_out, {"old"}, Provenance.TARGET).old
        assert found is not None
        # Held-out pairs have the ids of training pairs, and yet their own numbers.
        by_id = found.by_id()
        assert [by_id[id] for g in job.held_out for id in g.ids()] == values_of(job.held_out)
        assert set(by_id) == {id for g in job.encoded.groups[:3] for id in g.ids()}
        assert all(any(row) for row in expected)
    forbid_computing()
    with prepared(tmp_path / "a") as (job, told):
        assert f"read from {tmp_path / 'a' / FILE_NAME}" in told and all_values(job) == expected
    # Another run gets them from the cache, and keeps them too: the cache may be emptied before it is resumed.
    with prepared(tmp_path / "b") as (job, told):
        assert f"read from {cache}" in told and all_values(job) == expected
    assert (tmp_path / "b" / FILE_NAME).read_bytes() == (tmp_path / "a" / FILE_NAME).read_bytes()
    for file in cache.iterdir():
        file.unlink()
    with prepared(tmp_path / "b") as (job, _):
        assert all_values(job) == expected


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "foreign", "folder"])
def test_a_wrong_file_is_reported_and_computed_again(damage: str, tmp_path: Path, cache: Path) -> None:
    with prepared(tmp_path / "a") as (job, _):
        expected = all_values(job)
    files = [tmp_path / "a" / FILE_NAME, *cache.iterdir()]
    with prepared(tmp_path / "other", small(data=SumPairs(rows=7, held_out_rows=3))):
        foreign = (tmp_path / "other" / FILE_NAME).read_bytes()
    for file in files:
        data = file.read_bytes()
        changed = {"cut": data[:-9], "bit": data[:-9] + b"x" + data[-8:], "empty": b"", "foreign": foreign}
        if damage == "folder":
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(changed[damage])
    if damage == "folder":
        files[0].rmdir()
    with prepared(tmp_path / "a") as (job, told):
        num = 1 if damage == "folder" else 2
        assert told.count("is not used: ") == num and "were computed" in told and all_values(job) == expected
        words = {"foreign": "of another model, of other pairs or of other settings", "folder": "directory"}
        assert told.count(words.get(damage, "it is damaged")) >= num
    with prepared(tmp_path / "a") as (_, told):
        assert "not used" not in told and "read from" in told


def test_what_decides_the_numbers_is_in_the_digest(tmp_path: Path, cache: Path) -> None:
    lora = LearnerConfig(token_budget=512, lora=LoraConfig(rank=2))
    cases = [
        small(),
        small(data=SumPairs(rows=6, held_out_rows=2)),
        small(learner=LearnerConfig(token_budget=512, dtype="float64")),
        small(learner=lora),
        small(system="Be brief."),
        # Only the last bits depend on these: a file of the run is right, one of the cache is not.
        small(learner=LearnerConfig(token_budget=600)),
        small(threads=2),
    ]
    for number, config in enumerate(cases):
        with prepared(tmp_path / str(number), config) as (_, told):
            assert "were computed" in told, number
        assert len(list(cache.iterdir())) == number + 1
    with prepared(tmp_path / "0", cases[-1]) as (_, told):
        assert "read from" in told
    with prepared(tmp_path / "0", cases[1]) as (_, told):
        assert "is not used" in told


def test_float64_keeps_every_bit(tmp_path: Path) -> None:
    config = small(learner=LearnerConfig(token_budget=512, dtype="float64"))
    with prepared(tmp_path / "a", config) as (job, _):
        expected = all_values(job)
    assert any(value != torch.tensor(value).item() for row in expected for value in row)
    with prepared(tmp_path / "a", config) as (job, _):
        assert all_values(job) == expected


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    with prepared(tmp_path / "a") as (_, told):
        assert "were computed" in told
    with prepared(tmp_path / "a") as (_, told):
        assert "not used" not in told and "read from" in told


def test_progress_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(reference, "_CHUNK", 2)
    monkeypatch.setattr(reference, "_NOTE_SECONDS", 0.0)
    with prepared(tmp_path / "a"):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", about")[0] for line in lines] == [
        f"log-probabilities of the reference: {done} of 9 pairs" for done in (2, 4, 6, 8)
    ]


@pytest.mark.parametrize("lora", [0, 2])
def test_no_second_model_is_in_memory(lora: int, tmp_path: Path) -> None:
    learner = LearnerConfig(token_budget=512, lora=LoraConfig(rank=lora)) if lora else LearnerConfig(token_budget=512)
    gc.collect()
    before = sum(type(x) is Decoder for x in gc.get_objects())
    for config, num in ((small(learner=learner), 1), (small(learner=learner, reference="copy"), 1 if lora else 2)):
        with prepared(tmp_path / "a", config) as (job, _):
            gc.collect()
            assert sum(type(x) is Decoder for x in gc.get_objects()) - before == num
            assert (job.learner.reference is None) == (num == 1)
        del job


@pytest.mark.parametrize("lora", [0, 2])
def test_a_resume_computes_nothing_of_the_reference(
    lora: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    learner = LearnerConfig(token_budget=512, lora=LoraConfig(rank=lora)) if lora else LearnerConfig(token_budget=512)
    asked: list[tuple[int, set[str]]] = []
    annotate = LocalLearner.annotate

    def watch(self: LocalLearner, groups: list[Group], needs: set[str], *args: object) -> object:
        if needs:
            asked.append((len(groups), set(needs)))
        return annotate(self, groups, needs, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalLearner, "annotate", watch)
    with keep_torch_settings():
        whole = build.train(small(learner=learner, steps=4), tmp_path, "plain", name="whole")
        policy = "ref" if lora else "old"
        # The pairs, once; then the held-out pairs by the policy, before and after training.
        assert asked == [(6, {policy}), (3, {policy}), (3, {"old"}), (3, {"old"})]
        for file in cache.iterdir():
            file.unlink()
        run = build.train(small(learner=learner), tmp_path, "plain", name="part")
        asked.clear()
        for file in cache.iterdir():
            file.unlink()
        build.resume(run, 4, "plain")
    assert asked == [(3, {"old"})] and not list(cache.iterdir())
    curves = []
    for path in (whole, run):
        with Reader(path / "run.db") as reader:
            curves.append([reader.read_series(name) for name in ("loss", "reward/margin", "kl/ref")])
    assert len(curves[0][0]) == 4 and curves[0] == curves[1]
