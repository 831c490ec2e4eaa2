"""Checks of runs on given answers, against faults that are put into the real code and into rows."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohort.algos import preferences
from cohort.algos.imitation import Imitation
from cohort.algos.tally import Tally
from cohort.config.imitation import DPO, SFT, Conversations, ExamplesConfig, PairRows, PairsConfig
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from cohort.config.schema import LearnerConfig, LoraConfig
from cohort.data import pack as packing
from cohort.inspect.check import plan
from cohort.inspect.check.findings import Finding
from cohort.inspect.check.given import GivenTrial, PairTrial, check_given_update, find_turns, make_given_trial
from cohort.inspect.check.plan import check_example_time, check_memory
from cohort.inspect.check.rows import check_rows, check_template
from cohort.jobs import build
from cohort.jobs.dpo import DPOJob
from cohort.jobs.sft import SFTJob
from cohort.learner.backend import FusedBackend
from cohort.learner.base import Update
from cohort.learner.local import LocalLearner
from cohort.learner.optim import WholeOptimizer
from cohort.text import Tokenizer
from cohort.types import Provenance
from tests.helpers.small_runs import keep_torch_settings

Job = SFTJob | DPOJob
Plant = Callable[[pytest.MonkeyPatch, Any], None]
# A template that opens a thought for the model to write, and does not write it in finished answers.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def write_rows(folder: Path) -> None:
    """Writes conversations of two turns, and pairs of which one answer is longer."""
    talks, pairs = [], []
    for a in range(10, 20):
        for b in (13, 27):
            question, right = f"What is {a}+{b}?", f"<answer>{a + b}</answer>"
            more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": f"Yes: {right}"}]
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": right}, *more]
            talks.append({"messages": turns[: 2 if b == 13 else 4]})
            pairs.append({"prompt": question, "chosen": right, "rejected": f"I think <answer>{a + b + 1}</answer>"})
    for name, rows in (("talks.jsonl", talks), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_sft(folder: Path, **changes: Any) -> SFT:
    data = Conversations(path=str(folder / "talks.jsonl"), held_out=0.2)
    return replace(SFT(steps=4, threads=1, data=data, batch=ExamplesConfig(examples=6)), **changes)


def make_dpo(folder: Path, **changes: Any) -> DPO:
    data = PairRows(path=str(folder / "pairs.jsonl"), held_out=0.2)
    return replace(DPO(steps=4, threads=1, data=data, batch=PairsConfig(pairs=6)), **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows")
    write_rows(path)
    return path


def build_given(config: SFT | DPO) -> Job:
    job = build.build_job(config)
    assert isinstance(job, SFTJob | DPOJob)
    return job


@pytest.fixture(scope="module", autouse=True)
def settings_kept() -> Iterator[None]:
    with keep_torch_settings():
        yield


@pytest.fixture(scope="module")
def sft(folder: Path) -> Job:
    return build_given(make_sft(folder))


@pytest.fixture(scope="module")
def dpo(folder: Path) -> Job:
    return build_given(make_dpo(folder))


def list_all(job: Job) -> list[Finding]:
    trial = make_given_trial(job)
    return [*check_rows(trial), *check_template(trial), *check_given_update(trial)]


def by_status(findings: list[Finding], status: str) -> set[str]:
    return {f.name for f in findings if f.status == status}


# ---- sound code --------------------------------------------------------------------------------------------------


def test_sound_conversations_pass_every_check(sft: Job) -> None:
    findings = list_all(sft)
    assert {f.status for f in findings} == {"ok"}, findings
    texts = {f.name: f.text for f in findings}
    # 20 rows, of which those with the questions of 2 are held out.
    assert texts["data/rows"] == f"{len(sft.encoded.groups)} rows to train on, {len(sft.encoded.groups)} examples, " + (
        "none left out"
    )
    assert '; then after "\\n<|im_start|>assistant\\n" comes "Yes: <answer>' in texts["template/turns"]
    assert texts["template/turns"].endswith('</answer><|im_end|>"')
    assert "update/prefix-sharing" not in texts and "pairs/start" not in texts


LOSSES = [
    *(Sigmoid(label_smoothing=0.1, nll=0.3), Sigmoid(length_normalize=True)),
    *(IPO(), Hinge(), Robust(), SimPO(), ORPO()),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_sound_pairs_pass_every_check(loss: PairLoss, folder: Path) -> None:
    findings = list_all(build_given(make_dpo(folder, loss=loss)))
    assert {f.status for f in findings} == {"ok"}, findings
    assert {"pairs/start", "pairs/symmetry", "update/prefix-sharing", "update/loss"} <= by_status(findings, "ok")


@pytest.mark.parametrize("reference", ["copy", "stored"])
def test_adapters_and_stored_references_pass(reference: Any, folder: Path) -> None:
    learner = LearnerConfig(lora=LoraConfig(rank=2)) if reference == "copy" else LearnerConfig()
    findings = list_all(build_given(make_dpo(folder, reference=reference, learner=learner)))
    assert {f.status for f in findings} == {"ok"}, findings


@pytest.mark.parametrize("changes", [{"template": "text"}, {"loss": "all"}, {}], ids=["plain", "all", "documents"])
def test_plain_text_and_other_targets_pass(changes: dict[str, Any], tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(6)]
    if not changes:
        rows = [{"text": f"Plain words {n}."} for n in range(6)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Conversations(path=str(file), held_out=0.3)
    findings = list_all(build_given(make_sft(tmp_path, data=data, batch=ExamplesConfig(examples=3), **changes)))
    assert {f.status for f in findings} == {"ok"}, findings


def test_the_known_start_of_each_loss(folder: Path) -> None:
    starts = {Sigmoid: 0.693147, IPO: 25.0, Hinge: 1.0, Robust: 0.693147}
    for loss, value in starts.items():
        trial = make_given_trial(build_given(make_dpo(folder, loss=loss())))
        [start] = [f for f in check_given_update(trial) if f.name == "pairs/start"]
        assert start.details["loss"] == pytest.approx(value, rel=1e-5) and start.details["gap"] == 0.0, loss


def test_a_trial_has_a_short_example_and_one_of_several_turns(sft: Job) -> None:
    trial = make_given_trial(sft)
    turns = [len(find_turns(group.samples[0])) for group in trial.groups]
    assert len(trial.groups) == 3 and max(turns) == 2 and trial.batch_size == 6
    # The run's own groups stay as they are.
    assert all(sample.old_logprobs is None for group in sft.encoded.groups for sample in group.samples)


# ---- faults of the code ------------------------------------------------------------------------------------------


def targets_where(patch: pytest.MonkeyPatch, keep: Callable[[Any, np.ndarray], np.ndarray]) -> None:
    chosen = packing._find_targets
    patch.setattr(packing, "_find_targets", lambda s, loss_on: keep(s, chosen(s, loss_on)))


def all_trained(patch: pytest.MonkeyPatch, job: Job) -> None:
    """Everything after the first target is trained, messages of the user too."""
    targets_where(patch, lambda s, at: np.arange(len(s.tokens)))


def end_dropped(patch: pytest.MonkeyPatch, job: Job) -> None:
    targets_where(patch, lambda s, at: at[:-1])


def shifted_logprobs(patch: pytest.MonkeyPatch, job: Job) -> None:
    whole = FusedBackend._compute_hidden

    def shifted(self, decoder, micro, embedded):
        later = (micro.source + 1).clamp(max=len(micro.tokens) - 1)
        return whole(self, decoder, replace(micro, source=later), embedded)

    patch.setattr(FusedBackend, "_compute_hidden", shifted)


def wrong_sibling_context(patch: pytest.MonkeyPatch, job: Job) -> None:
    """The first token of an answer is predicted from the last token of the answer before it in the pack."""
    whole = packing._make_microbatch

    def misplaced(*args):
        micro = whole(*args)
        source = micro.source.clone()
        first = torch.nonzero(micro.segments[1:] != micro.segments[:-1])[:, 0] + 1
        source[first] = micro.source[first - 1]
        return replace(micro, source=source)

    patch.setattr(packing, "_make_microbatch", misplaced)


def positions_from_zero(patch: pytest.MonkeyPatch, job: Job) -> None:
    """Answers that share a prompt are placed as if there were none."""
    add = packing._PackedStream.add
    patch.setattr(
        packing._PackedStream,
        "add",
        lambda self, tokens, position, prompt=None: add(self, tokens, 0 if prompt else position, prompt),
    )


def scaled_by_ranks(patch: pytest.MonkeyPatch, job: Job) -> None:
    whole = WholeOptimizer.reduce

    def averaged(self, world):
        whole(self, world)
        for g in self.grads():
            g.div_(world.size)

    patch.setattr(WholeOptimizer, "reduce", averaged)


def last_microbatch_only(patch: pytest.MonkeyPatch, job: Job) -> None:
    """The gradients of earlier microbatches are lost."""
    whole = FusedBackend.backward

    def forgetful(self, *args):
        self.optimizer.zero_grad()
        return whole(self, *args)

    patch.setattr(FusedBackend, "backward", forgetful)


def mean_of_microbatches(patch: pytest.MonkeyPatch, job: Job) -> None:
    weigh = Imitation.weigh_tokens

    def own(self, *args):
        weights = weigh(self, *args)
        return weights / weights.sum()

    patch.setattr(Imitation, "weigh_tokens", own)


def wrong_denominator(patch: pytest.MonkeyPatch, job: Job) -> None:
    """The loss is divided by half of the tokens. Its gradient would only look like a higher learning rate."""
    whole = Imitation.loss

    def doubled(self, inputs):
        loss, _ = whole(self, inputs)
        return 2 * loss, Tally().add_mean("loss", -2 * inputs.logprobs)

    patch.setattr(Imitation, "loss", doubled)


def unlearning(patch: pytest.MonkeyPatch, job: Job) -> None:
    whole = Imitation.loss

    def turned(self, inputs):
        loss, tally = whole(self, inputs)
        return -loss, tally

    patch.setattr(Imitation, "loss", turned)


UPDATE_FAULTS: dict[Plant, set[str]] = {
    all_trained: {"update/targets", "update/what-follows"},
    end_dropped: {"update/targets", "update/loss"},
    shifted_logprobs: {"update/loss", "update/log-probs", "update/sibling-context"},
    scaled_by_ranks: {"update/ranks"},
    last_microbatch_only: {"update/microbatches", "update/accumulation-order"},
    mean_of_microbatches: {"update/microbatches", "update/ranks"},
    wrong_denominator: {"update/loss"},
    unlearning: {"update/direction"},
}


@pytest.mark.parametrize("plant", UPDATE_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_update_fails_its_check(plant: Plant, sft: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_given_trial(sft)
    plant(monkeypatch, sft)
    failed = by_status(list(check_given_update(trial)), "FAIL")
    assert failed >= UPDATE_FAULTS[plant], failed


# ---- faults of losses on pairs


def lost_beta(patch: pytest.MonkeyPatch, job: Job) -> None:
    """The term has the score in place of the reward. At the start both are 0."""
    terms = preferences.compute_terms
    patch.setattr(preferences, "compute_terms", lambda config, margins: terms(config, margins / config.beta))


def wrong_start(patch: pytest.MonkeyPatch, job: Job) -> None:
    terms = preferences.compute_terms
    patch.setattr(preferences, "compute_terms", lambda config, margins: 2 * terms(config, margins))


def unequal_scores(patch: pytest.MonkeyPatch, job: Job) -> None:
    """The worse answer alone is scored per token."""
    whole = preferences.Pairs.compute_scores

    def uneven(self, mean):
        scores = whole(self, mean)
        return torch.stack([scores[:, 0], scores[:, 1] / self.lengths[:, 1]], 1)

    patch.setattr(preferences.Pairs, "compute_scores", uneven)


def swapped_sides(patch: pytest.MonkeyPatch, job: Job) -> None:
    whole = preferences.Pairs.compute_scores
    patch.setattr(preferences.Pairs, "compute_scores", lambda self, mean: whole(self, mean).flip(1))


def moved_reference(patch: pytest.MonkeyPatch, job: Any) -> None:
    other = copy.deepcopy(job.learner.reference)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.05)
    patch.setattr(job.learner, "reference", other)


def mean_over_microbatches_of_pairs(patch: pytest.MonkeyPatch, job: Job) -> None:
    whole = preferences.PreferenceLoss.loss

    def own(self, inputs):
        assert inputs.totals is not None
        totals = replace(inputs.totals, num_prompts=inputs.num_samples / 2)
        return whole(self, replace(inputs, totals=totals))

    patch.setattr(preferences.PreferenceLoss, "loss", own)


PAIR_FAULTS: dict[Plant, set[str]] = {
    lost_beta: {"update/loss"},
    wrong_start: {"pairs/start", "update/loss"},
    unequal_scores: {"pairs/symmetry", "update/loss"},
    swapped_sides: {"update/direction", "update/loss"},
    moved_reference: {"pairs/start"},
    mean_over_microbatches_of_pairs: {"update/microbatches"},
    wrong_sibling_context: {"update/sibling-context"},
    positions_from_zero: {"update/prefix-sharing"},
    all_trained: {"update/targets", "update/what-follows"},
}


@pytest.mark.parametrize("plant", PAIR_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_pairs_fails_its_check(plant: Plant, dpo: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, dpo)
    trial = make_given_trial(dpo)
    assert isinstance(trial, PairTrial)
    if plant is all_trained:
        # What the reference says of further tokens is not known, and not needed for this check.
        for sample in (s for g in trial.groups for s in g.samples):
            sample.tokens += sample.tokens[-1:]
            sample.provenance += [int(Provenance.ENVIRONMENT)]
            sample.sampler_logprobs += [0.0]
            sample.ref_logprobs = [*(sample.ref_logprobs or []), 0.0]
    failed = by_status(list(check_given_update(trial)), "FAIL")
    assert failed >= PAIR_FAULTS[plant], failed


# ---- faults of rows and templates --------------------------------------------------------------------------------


def change_examples(trial: GivenTrial, change: Callable[[Any], None]) -> None:
    """Applies `change` to copies of the samples of all training groups."""
    groups = copy.deepcopy(trial.job.encoded.groups)
    for group in groups:
        for sample in group.samples:
            change(sample)
    trial.job = replace(trial.job, encoded=replace(trial.job.encoded, groups=groups))


def drop_targets(sample: Any) -> None:
    sample.provenance = [int(Provenance.ENVIRONMENT)] * len(sample.tokens)


def drop_end(sample: Any) -> None:
    sample.provenance[-1] = int(Provenance.ENVIRONMENT)


def lengthen(sample: Any) -> None:
    sample.tokens *= 300
    sample.provenance *= 300


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        (drop_targets, "data/targets", "have no target token, so nothing is learned from them"),
        (lengthen, "data/lengths", "limit 1024: set --data.too-long skip or cut"),
        (drop_end, "template/end-token", "turns are trained without their end token"),
    ],
)
def test_a_fault_of_examples_fails_its_check(change: Callable[[Any], None], name: str, text: str, sft: Job) -> None:
    trial = make_given_trial(sft)
    change_examples(trial, change)
    [finding] = [f for f in (*check_rows(trial), *check_template(trial)) if f.name == name]
    assert finding.status == "FAIL" and text in finding.text


def test_held_out_questions_that_are_trained_on_fail(dpo: Job) -> None:
    trial = make_given_trial(dpo)
    trial.job = replace(dpo, held_out=[*dpo.held_out, *dpo.encoded.groups[:2]])
    [finding] = [f for f in check_rows(trial) if f.name == "data/shared-questions"]
    assert finding.status == "FAIL" and finding.text.startswith("2 of the training rows ask what is held out too")
    trial.job = replace(dpo, held_out=[])
    assert by_status(list(check_rows(trial)), "warn") == {"data/held-out"}


def test_rows_left_out_and_cut_are_counted_with_their_reasons(folder: Path) -> None:
    data = Conversations(path=str(folder / "talks.jsonl"), held_out=0.0, max_tokens=40, too_long="skip")
    trial = make_given_trial(build_given(make_sft(folder, data=data)))
    [finding] = [f for f in check_rows(trial) if f.name == "data/rows"]
    assert (finding.status, finding.details) == ("warn", {"rows": 20, "left_out": 10, "cut": 0})
    assert "because they have more than 40 tokens: 10 of 20" in finding.text
    trial = make_given_trial(build_given(make_sft(folder, data=replace(data, too_long="cut"))))
    findings = [*check_rows(trial), *check_template(trial)]
    assert {"data/rows", "template/end-token"} <= by_status(findings, "warn") and not by_status(findings, "FAIL")
    lengths = next(f for f in findings if f.name == "data/lengths")
    assert lengths.details == {"median": 31.0, "longest": 40, "limit": 40}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_text_of_special_tokens_that_becomes_special_fails(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_given_trial(request.getfixturevalue(kind))
    monkeypatch.setattr(Tokenizer, "_guard_message", lambda self, message, guard: message)
    [finding] = [f for f in check_template(trial) if f.name == "template/special-text"]
    assert finding.status == "FAIL" and "a row could end turns or begin new ones" in finding.text


def test_a_template_that_writes_finished_answers_otherwise_is_reported(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "thinking.jinja"
    file.write_text(THINKING)
    trial = make_given_trial(build_given(make_dpo(folder, template=str(file))))
    findings = list(check_template(trial))
    assert by_status(findings, "warn") == {"template/whole"} and not by_status(findings, "FAIL")


def test_a_prompt_that_a_sampler_would_not_get_is_reported(sft: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_given_trial(sft)
    whole = Tokenizer.render

    def render_twice(self, messages, tools):
        return whole(self, [*messages, *messages[-1:]], tools)

    monkeypatch.setattr(Tokenizer, "render", render_twice)
    assert by_status(list(check_template(trial)), "warn") == {"template/prompt"}


# ---- memory and time


def test_memory_and_time_are_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_given_trial(build_given(make_dpo(folder)))
    memory = check_memory(trial)
    assert memory.status == "ok" and "KV" not in memory.text
    monkeypatch.setattr(plan, "find_memory_size", lambda: 1000)
    assert check_memory(trial).status == "FAIL"
    found = check_example_time(trial)
    assert found.status == "ok" and "from an update of 6 pairs with" in found.text and "for 4 steps" in found.text
    assert found.details["run_seconds"] == pytest.approx(4 * found.details["step_seconds"])
    # With more work than the time allows, a part is measured and scaled.
    monkeypatch.setattr(plan, "MAX_SAMPLING_SECONDS", 0.0)
    scaled = check_example_time(trial)
    assert "at most about" in scaled.text and "an update of 3 pairs" in scaled.text
    assert "scaled to 6 with" in scaled.text


def test_an_update_that_moves_nothing_fails(sft: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_given_trial(sft)
    still = Update(old=None, metrics={"updates/no_signal": 1.0})  # type: ignore[arg-type]
    monkeypatch.setattr(LocalLearner, "update", lambda self, batch, algo: still)
    assert check_example_time(trial).status == "FAIL"
