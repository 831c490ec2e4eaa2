"""Checks against faults that are put into the real code and into tasks: each fault fails its check, sound code none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohort.algos import surrogates
from cohort.cli.check import _to_json
from cohort.config.algo_sections import CorrectionConfig
from cohort.config.algos import GSPO, PassAtK, ReinforcePP
from cohort.config.schema import GRPO, LearnerConfig, LoraConfig, SamplingConfig
from cohort.config.scoring import ScoringConfig
from cohort.data import pack as packing
from cohort.fates import Fate
from cohort.inspect.check.cases import advise_on_failure
from cohort.inspect.check.findings import Finding, fail, ok, quote, warn
from cohort.inspect.check.plan import check_memory, check_ranks, check_step_time
from cohort.inspect.check.reward import check_reward
from cohort.inspect.check.source import check_overlap
from cohort.inspect.check.trial import Trial, compare_gradients, give_distinct_rewards, sample_trial
from cohort.inspect.check.update import check_update
from cohort.jobs.build import RLJob
from cohort.learner.backend import FusedBackend
from cohort.learner.base import Annotations, TokenLogprobs
from cohort.learner.local import LocalLearner
from cohort.learner.optim import WholeOptimizer
from cohort.rollout.episode import Episode
from cohort.tasks.code.task import Code
from cohort.tasks.stream import SharedRows
from cohort.text import Tokenizer
from cohort.types import Provenance
from tests.helpers.faulty_task import Faulty
from tests.helpers.small_runs import built_job, small_run

Plant = Callable[[pytest.MonkeyPatch, RLJob], None]


def get_failed_names(findings: list[Finding]) -> set[str]:
    return {f.name for f in findings if f.status == "FAIL"}


def make_trial(job: RLJob) -> Trial:
    trial = sample_trial(job, 3, 3)
    give_distinct_rewards(trial)
    return trial


@pytest.fixture(scope="module")
def job() -> Iterator[RLJob]:
    with built_job(small_run()) as made:
        yield made


# ---- the update ----------------------------------------------------------------------------------------------


def inverted_ratio(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    patch.setattr(surrogates.Tokens, "log_ratio", property(lambda t: t.old_logprobs - t.logprobs))


def shifted_logprobs(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    whole = FusedBackend._compute_hidden

    def shifted(self, decoder, micro, embedded):
        later = (micro.source + 1).clamp(max=len(micro.tokens) - 1)
        return whole(self, decoder, replace(micro, source=later), embedded)

    patch.setattr(FusedBackend, "_compute_hidden", shifted)


def targets_where(patch: pytest.MonkeyPatch, keep: Callable[[Any, np.ndarray], np.ndarray]) -> None:
    chosen = packing._find_targets
    patch.setattr(packing, "_find_targets", lambda s, loss_on: keep(s, chosen(s, loss_on)))


def mask_from_pad(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    pad = Tokenizer.load(job.model.folder).get_token_id("<|endoftext|>")
    targets_where(patch, lambda s, at: at[np.array(s.tokens)[at] != pad])


def mask_from_end(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    ends = job.producer.settings.sampling.stop_ids
    targets_where(patch, lambda s, at: at[~np.isin(np.array(s.tokens)[at], ends)])


def end_dropped(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    """The packer leaves out the last token of a sample that ended."""
    ends = job.producer.settings.sampling.stop_ids
    targets_where(patch, lambda s, at: at[:-1] if s.tokens[-1] in ends else at)


def end_dropped_by_the_rollout(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    add = Episode.add_outcome

    def trimmed(episode, outcome):
        s = episode.sample
        if s.tokens[-1] in episode.settings.sampling.stop_ids:
            for row in (s.tokens, s.provenance, s.sampler_logprobs):
                del row[-1]
        add(episode, outcome)

    patch.setattr(Episode, "add_outcome", trimmed)


def wrong_sibling_context(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    """The first token of a sample is predicted from the last token of the sample before it in the pack."""
    whole = packing._make_microbatch

    def misplaced(*args):
        micro = whole(*args)
        source = micro.source.clone()
        first = torch.nonzero(micro.segments[1:] != micro.segments[:-1])[:, 0] + 1
        source[first] = micro.source[first - 1]
        return replace(micro, source=source)

    patch.setattr(packing, "_make_microbatch", misplaced)


def scaled_by_ranks(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    """Gradients are averaged over ranks, as DistributedDataParallel does, where a sum is right."""
    whole = WholeOptimizer.reduce

    def averaged(self, world):
        whole(self, world)
        for g in self.grads():
            g.div_(world.size)

    patch.setattr(WholeOptimizer, "reduce", averaged)


def mean_of_microbatches(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    weigh = job.algo.weigh_tokens

    def own(*args, **kwargs):
        weights = weigh(*args, **kwargs)
        return weights / weights.sum()

    patch.setattr(job.algo, "weigh_tokens", own)


def retokenised(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    """The text of a sample is tokenised again into other ids than were drawn: the same text with more tokens."""
    add, tokenizer = Episode.add_outcome, Tokenizer.load(job.model.folder)

    def again(episode, outcome):
        s = episode.sample
        pieces = [tokenizer.decode([t], skip_special=False) for t in s.tokens[:-1]]
        s.tokens = [i for piece in pieces for c in piece for i in tokenizer.encode(c)] + s.tokens[-1:]
        s.provenance = [int(Provenance.SAMPLED)] * len(s.tokens)
        s.sampler_logprobs = [-1.0] * len(s.tokens)
        add(episode, outcome)

    patch.setattr(Episode, "add_outcome", again)


def everything_trained(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    patch.setattr(packing, "_find_targets", lambda s, loss_on: np.arange(len(s.tokens)))


def noise_in_constant_groups(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    whole = job.algo.advantages

    def noisy(groups):
        whole(groups)
        for g in groups:
            g.excluded = Fate.TRAINED
            for n, s in enumerate(g.samples):
                s.advantage += 1e-9 * (-1) ** n
        return groups

    patch.setattr(job.algo, "advantages", noisy)


def ratio_to_the_sampler(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    def of_sampler(self, groups, needs, loss_on):
        rows = [(id, list(s.sampler_logprobs)) for g in groups for id, s in zip(g.ids(), g.samples, strict=True)]
        return Annotations(old=TokenLogprobs(ids=[id for id, _ in rows], logprobs=[row for _, row in rows]))

    patch.setattr(LocalLearner, "annotate", of_sampler)


def other_temperature(patch: pytest.MonkeyPatch, job: RLJob) -> None:
    patch.setattr(job.learner, "temperature", 0.7)


FAULTS: list[tuple[Plant, str]] = [
    (inverted_ratio, "update/direction"),
    (shifted_logprobs, "update/log-probs"),
    (mask_from_pad, "update/special-tokens"),
    (mask_from_end, "update/end-token"),
    (end_dropped, "update/end-token"),
    (end_dropped_by_the_rollout, "update/end-token"),
    (wrong_sibling_context, "update/sibling-context"),
    (scaled_by_ranks, "update/ranks"),
    (mean_of_microbatches, "update/microbatches"),
    (retokenised, "update/sampled-tokens"),
    (everything_trained, "update/unsampled-tokens"),
    (noise_in_constant_groups, "update/constant-rewards"),
    (ratio_to_the_sampler, "update/ratio"),
    (other_temperature, "update/sampler-gap"),
]


@pytest.mark.parametrize(("plant", "name"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_fault_of_the_update_is_named(job: RLJob, monkeypatch: pytest.MonkeyPatch, plant: Plant, name: str) -> None:
    plant(monkeypatch, job)
    assert name in get_failed_names(list(check_update(make_trial(job))))


@pytest.mark.parametrize("plant", [inverted_ratio, mask_from_pad, scaled_by_ranks, noise_in_constant_groups])
def test_a_fault_that_touches_one_thing_fails_one_check(job: RLJob, monkeypatch: pytest.MonkeyPatch, plant) -> None:
    plant(monkeypatch, job)
    assert get_failed_names(list(check_update(make_trial(job)))) == {dict(FAULTS)[plant]}


LORA = LearnerConfig(token_budget=512, lora=LoraConfig(rank=4), epochs=2, minibatches=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algo": GSPO(), "learner": LORA},
        {"algo": ReinforcePP(entropy=0.01)},
        {"algo": PassAtK()},
        {"algo": GRPO(correction=CorrectionConfig(kind="mask", level="geometric", bounds=(0.5, 2.0)))},
        {"algo": GRPO(truncated="mask"), "sampling": SamplingConfig(max_tokens=4)},
        {"learner": LearnerConfig(token_budget=512, dtype="float64", prefix_sharing=False)},
    ],
    ids=[
        "plain",
        "sequence ratio, adapters, updates",
        "batch baseline, entropy",
        "best of k",
        "mask",
        "all cut",
        "float64",
    ],
)
def test_a_sound_update_passes_every_check(changes: dict[str, Any]) -> None:
    with built_job(small_run(**changes)) as made:
        findings = list(check_update(make_trial(made)))
    assert [f for f in findings if f.status == "FAIL"] == []
    assert len(findings) == len({f.name for f in findings}) == 15
    warned = {f.name for f in findings if f.status == "warn"}
    assert warned == ({"update/end-token"} if "sampling" in changes else set())


def test_float64_is_held_to_the_bound_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient wrong in its eighth digit passes in fp32 and not here."""
    with built_job(small_run(learner=LearnerConfig(token_budget=512, dtype="float64"))) as made:
        whole = made.algo.weigh_tokens
        monkeypatch.setattr(
            made.algo, "weigh_tokens", lambda lengths, totals: whole(lengths, totals) * (1 + 1e-8 * len(lengths.sample))
        )
        assert "update/microbatches" in get_failed_names(list(check_update(make_trial(made))))


def test_gradients_are_compared_relative_to_the_largest_entry_and_nan_is_not_equal() -> None:
    a, b = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([2.0, 0.1])}
    assert compare_gradients(b, a) == pytest.approx((0.025, 0.05))
    assert compare_gradients(a, a) == (0.0, 0.0)
    assert (
        compare_gradients({}, a)[1] == 1.0 and compare_gradients(a, {})[1] == 2.0
    )  # a gradient that is missing is one of zeros
    assert np.isnan(compare_gradients({"w": torch.tensor([2.0, float("nan")])}, a)[1])


# ---- the reward ----------------------------------------------------------------------------------------------


def run_reward_checks(fault: str, seconds: float = 10.0, reward: dict[str, float] | None = None) -> list[Finding]:
    config = small_run(task=Faulty(fault=fault), reward=reward or {})
    with built_job(config) as made:
        return list(check_reward(sample_trial(made, 2, 2), seconds))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("constant", "reward/varies"),
        ("crashing", "reward/failures"),
        ("echo", "reward/echo"),
        ("random", "reward/repeatable"),
        ("order", "reward/order"),
        ("skeleton", "reward/cheapest"),
        ("empty", "reward/empty"),
        ("counting", "reward/repetition"),
        ("wrong", "reward/gold"),
        ("nan", "reward/contract"),
    ],
)
def test_a_fault_of_the_reward_is_named(fault: str, name: str) -> None:
    assert name in get_failed_names(run_reward_checks(fault, seconds=3.0))


def test_nothing_is_ok_or_said_of_a_grader_that_always_raises() -> None:
    findings = run_reward_checks("raising")
    assert [(f.status, f.name) for f in findings] == [("FAIL", "reward/failures"), ("warn", "reward/verdicts")]


def test_a_grader_that_raises_on_samples_of_the_model_fails_with_the_exception() -> None:
    [signal] = [f for f in run_reward_checks("raising on samples") if f.status == "FAIL"]
    assert signal.name == "reward/signal" and "4 of 4 samples of the model could not be scored" in signal.text
    assert "ValueError: a sample (faulty_task.py, line " in signal.text and "easier" not in signal.text


def test_right_answers_of_all_rows_are_tried_where_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right answer that is wrong in one row of 26 is found; without time for it, the finding says "of 26"."""
    assert "reward/gold" in get_failed_names(run_reward_checks("one wrong"))
    [gold] = [f for f in run_reward_checks("") if f.name == "reward/gold"]
    assert gold.text == "the right answers of 26 of 26 rows have correct = 1, the accuracy"
    monkeypatch.setattr("cohort.inspect.check.reward.GOLD_SECONDS", 0.0)
    [gold] = [f for f in run_reward_checks("") if f.name == "reward/gold"]
    assert gold.text.startswith("the right answers of 16 of 26 rows")


def test_a_check_without_scores_is_not_ok() -> None:
    """The grader scores answers without a number in them, and no others: all right answers have one."""
    findings = {f.name: f for f in run_reward_checks("raising on numbers")}
    assert findings["reward/failures"].status == "FAIL"
    for name in ("gold", "repetition", "other", "echo"):
        found = findings[f"reward/{name}"]
        assert found.status == "warn" and found.text.startswith("not checked: no "), found
    assert "gold(row)" not in " ".join(f.text for f in findings.values())
    assert findings["reward/empty"].status == "ok" and not findings["reward/empty"].text.endswith("in 0 rows")


def test_the_speed_of_a_grader_does_not_count_failures() -> None:
    [speed] = [f for f in run_reward_checks("slow to raise", seconds=3.0) if f.name == "reward/speed"]
    assert speed.status == "ok", speed


@pytest.mark.parametrize(("num", "status"), [(0, "ok"), (1, "warn"), (10, "warn"), (11, "FAIL")])
def test_held_out_rows_that_are_trained_on_are_a_finding(num: int, status: str) -> None:
    overlap = SharedRows(split="test", num_shared=num, num_rows=20, first=("test-3", "train-5"))
    found = check_overlap(overlap)
    assert (found.status, found.name) == (status, "task/overlap")
    assert (f"{num} of 20 test rows" in found.text and '"test-3" as "train-5"' in found.text) == (num > 0)


def test_half_an_answer_is_not_called_accepted_where_nothing_is_paid() -> None:
    [found] = [f for f in run_reward_checks("constant") if f.name == "reward/truncated"]
    assert found.status == "ok" and "accepted in 0 of" in found.text


def test_what_the_model_says_counts_where_made_up_answers_earn_the_same() -> None:
    """The reward is the number of tokens that were sampled, and made-up answers have none."""
    findings = {f.name: f for f in run_reward_checks("tokens")}
    assert findings["reward/signal"].status == "ok" and "2 of 2" in findings["reward/signal"].text
    assert findings["reward/varies"].status == "ok", findings["reward/varies"]


def test_the_failure_of_a_service_has_its_own_advice_alone() -> None:
    failure = "scoring failed: ServiceError: the variable KEY is not set. Set it."
    assert advise_on_failure(failure) == "." and "score 0" in advise_on_failure("the grader raised ValueError: no")


def test_a_slow_reward_is_named_and_the_rehearsal_stays_short() -> None:
    findings = run_reward_checks("slow", seconds=1.0)
    assert get_failed_names(findings) == set()
    [speed] = [f for f in findings if f.name == "reward/speed"]
    assert speed.status == "warn" and speed.details["seconds"] > 0.6 and "--scoring.workers" in speed.text
    [failures] = [f for f in findings if f.name == "reward/failures"]
    assert failures.details["answers"] < 5


@pytest.mark.parametrize(
    ("fault", "name"), [("lenient", "reward/other"), ("paid tags", "reward/cheapest"), ("no gold", "reward/gold")]
)
def test_what_may_be_intended_is_only_a_warning(fault: str, name: str) -> None:
    findings = run_reward_checks(fault)
    assert get_failed_names(findings) == set()
    assert name in {f.name for f in findings if f.status == "warn"}


def test_a_sound_reward_passes_every_check() -> None:
    findings = run_reward_checks("")
    assert {f.name for f in findings if f.status != "ok"} <= {"reward/signal"}  # the model need not know sums
    assert len(findings) == 13


def test_a_coefficient_decides_what_format_alone_is_worth() -> None:
    [found] = [
        f for f in run_reward_checks("paid tags", reward={"correct": 1.0, "tags": 0.1}) if f.name == "reward/cheapest"
    ]
    assert found.status == "ok" and '"<answer></answer>": 0.06 of 1.06' in found.text


def test_foreign_text_is_shown_escaped_and_short() -> None:
    assert quote("\x1b[2J" + "x" * 500).startswith('"\\x1b[2Jxxx')
    assert len(quote("x" * 500)) < 140


# ---- the plan ------------------------------------------------------------------------------------------------


def test_the_plan_says_bytes_and_seconds_and_is_refused_where_memory_is_short(job: RLJob, monkeypatch) -> None:
    trial = make_trial(job)
    found = check_memory(trial)
    params = sum(p.numel() for p in job.model.decoder.parameters())
    assert found.status == "ok" and found.details["bytes"] > 12 * params  # weights and two moments, and more
    each = check_ranks(trial, 2)
    assert each.status == "ok" and each.text.startswith("each of 2 ranks needs")
    assert found.details["bytes"] > each.details["none_bytes"] > each.details["optimizer_bytes"]
    real = __import__("os").sysconf
    for share, status in ((1.1, "warn"), (0.9, "FAIL")):
        there = int(found.details["bytes"] * share)
        monkeypatch.setattr(
            "os.sysconf",
            lambda n, there=there: 1 if n == "SC_PAGE_SIZE" else there if n == "SC_PHYS_PAGES" else real(n),
        )
        assert check_memory(trial).status == status


def test_a_step_is_measured_whole_or_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    with built_job(small_run()) as made:
        trial = make_trial(made)
        before = made.model.decoder.embed.detach().clone()
        whole = check_step_time(trial, 12.0)
        assert whole.status == "ok" and "of 24 samples" in whole.text and "scaled" not in whole.text
        assert 12 < whole.details["step_seconds"] < 24 and whole.text.endswith("; scoring 12 s")
        assert check_step_time(trial, None).text.endswith("; scoring, which was not measured, comes on top")
        assert not torch.equal(before, made.model.decoder.embed)
        monkeypatch.setattr("cohort.inspect.check.plan.MAX_SAMPLING_SECONDS", 0.0)
        scaled = check_step_time(trial, 0.0)
        assert "of 9 samples, scaled to 24" in scaled.text and scaled.details["step_seconds"] < 12


def test_the_time_of_programs_is_that_of_solutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without solutions nothing was run, and no time is promised. A wrong solution is named with its place."""
    # A busy machine must not leave out the row that is wrong.
    monkeypatch.setattr("cohort.inspect.check.reward.GOLD_SECONDS", 60.0)
    rows = [{"id": str(n), "prompt": f"Write f{n}(x).", "tests": [f"assert f{n}(1) == 1"]} for n in range(8)]
    programs = [row | {"solution": f"def f{row['id']}(x):\n    return x"} for row in rows]
    programs[3]["solution"] = "def f3(x):\n    return 7"
    for name, given in (("without", rows), ("with", programs)):
        for split in ("train", "test"):
            chosen = given[:6] if split == "train" else given[6:]
            (tmp_path / f"{name}_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    found = {}
    for name in ("without", "with"):
        task = Code(data=str(tmp_path / f"{name}_{{split}}.jsonl"))
        with built_job(small_run(task=task, scoring=ScoringConfig(sandbox="none"))) as made:
            findings = {f.name: f for f in check_reward(sample_trial(made, 2, 2), 60.0)}
        gold = findings["reward/gold"]
        found[name] = findings["reward/speed"]
    assert "programs were not run" in found["without"].text and "step" not in found["without"].details
    assert found["with"].details["seconds"] > 0.005  # an interpreter has started
    assert 'row "3" (column "solution" of' in gold.text and "with_train.jsonl, line 4)" in gold.text
    assert gold.status == "FAIL" and gold.text.endswith("Correct that column or the tests of the row.")


def test_the_measured_part_of_a_batch_grows_while_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine samples take as long as 24: scaled to 24 they would seem too slow to be measured."""
    sizes = []

    def sample_in_a_second(job: RLJob, num_prompts: int, num_samples: int) -> Trial:
        found = sample_trial(job, num_prompts, num_samples)
        sizes.append((len(found.sampled), len(found.sampled[0].samples)))
        found.sampling_seconds = 1.0
        return found

    monkeypatch.setattr("cohort.inspect.check.plan.sample_trial", sample_in_a_second)
    monkeypatch.setattr("cohort.inspect.check.plan.MAX_SAMPLING_SECONDS", 2.5)  # 24 / 9 = 2.7 s would be too long
    with built_job(small_run()) as made:
        found = check_step_time(make_trial(made), 0.0)
    assert sizes == [(3, 3), (3, 4), (6, 4)] and "scaled" not in found.text


def test_findings_are_lines() -> None:
    assert str(ok("a", "fine")).split() == ["ok", "a", "fine"]
    assert [f.status for f in (warn("a", "b"), fail("a", "b", n=1))] == ["warn", "FAIL"]
    broken = fail("a", "b", n=1, most=float("nan"))
    assert _to_json(broken) == {"name": "a", "status": "FAIL", "text": "b", "details": {"n": 1, "most": "nan"}}
