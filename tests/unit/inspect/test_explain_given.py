"""`cohort explain` of steps on given answers: numbers by hand and by the real learner, words, and hostile text."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.algos.imitation import Imitation
from cohort.algos.preferences import PreferenceLoss
from cohort.cli import explain as command
from cohort.config.imitation import DPO, SFT, Conversations, PairRows
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.errors import ConfigError, RunError
from cohort.inspect.explain.given import compute_gradients
from cohort.inspect.explain.pairs import score_pair
from cohort.inspect.explain.records import Report
from cohort.inspect.explain.report import explain_step
from cohort.inspect.explain.screen import print_report
from cohort.inspect.replay import replay_step
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate, store_update
from cohort.models.catalog import resolve_model
from cohort.run.directory import RunDirectory
from cohort.run.store.rollouts import make_rollout_path, save_rollouts
from cohort.text import Tokenizer
from cohort.types import Group, Provenance, Sample
from tests.helpers.decoders_and_groups import make_group, small_decoder

T, E = Provenance.TARGET, Provenance.ENVIRONMENT
LOSSES: list[PairLoss] = [
    *(Sigmoid(), Sigmoid(label_smoothing=0.2), Sigmoid(length_normalize=True), IPO(), IPO(length_normalize=False)),
    *(Hinge(), Robust(), SimPO(), ORPO(), Sigmoid(nll=0.5)),
]


def given(
    tokens: list[int], logprobs: list[float], ref: list[float] | None = None, marks: list[int] | None = None
) -> Sample:
    """Returns a given answer with recorded log-probabilities."""
    return Sample(
        tokens=tokens,
        provenance=marks or [int(T)] * len(tokens),
        sampler_logprobs=[0.0] * len(tokens),
        old_logprobs=logprobs,
        ref_logprobs=ref,
    )


def two_examples() -> list[Group]:
    """Returns an example of three targets in two turns, and one of a single target."""
    talk = given([10, 11, 12, 13], [-1.0, -3.0, 0.0, -2.0], marks=[T, T, E, T])
    groups = [make_group([5, 6], [talk], id="0"), make_group([7], [given([14], [-0.5])], id="1")]
    groups[0].prompt.row = {"place": "/far/away/rows.jsonl, line 7", "question": "abc"}
    return groups


def two_pairs() -> list[Group]:
    """Returns a pair that is ranked right (its scores are 2 and -1), and one that is ranked wrong (-1 and 0)."""
    right = [given([10, 11], [-1.0, -1.0], [-2.0, -2.0]), given([12], [-4.0], [-3.0])]
    wrong = [given([10], [-3.0], [-2.0]), given([11, 12, 13], [-1.0] * 3, [-1.0] * 3)]
    groups = [make_group([5, 6], right, id="0"), make_group([5], wrong, id="1")]
    groups[0].prompt.row = {"place": "pairs.jsonl, line 1", "question": "abc"}
    return groups


def store(folder: Path, config: SFT | DPO, groups: list[Group], steps: tuple[int, ...] = (2,)) -> Path:
    directory = RunDirectory.create(folder, config, "run")
    for step in steps:
        save_rollouts(make_rollout_path(directory.rollouts, step), groups)
    directory.unlock()
    return directory.path


def explain(folder: Path, config: SFT | DPO, groups: list[Group], group: str = "") -> Report:
    return explain_step(store(folder, config, groups), None, group)


def print_to_text(report: Report) -> str:
    out = io.StringIO()
    print_report(report, out)
    return out.getvalue()


def make_sft(**changes: Any) -> SFT:
    return replace(SFT(steps=5, data=Conversations(path="rows.jsonl"), recipe="sft"), **changes)


def make_dpo(**changes: Any) -> DPO:
    return replace(DPO(steps=5, data=PairRows(path="pairs.jsonl"), recipe="dpo"), **changes)


# ---- examples ----------------------------------------------------------------------------------------------------


def test_examples_by_hand(tmp_path: Path) -> None:
    report = explain(tmp_path, make_sft(), two_examples())
    # Losses: (1 + 3 + 2) / 3 and 0.5; the step has 6.5 over 4 targets.
    assert [(line.value, line.share) for line in report.groups] == [
        ("2, 3 tokens", pytest.approx(6 / 6.5)),
        ("0.500, 1 token", pytest.approx(0.5 / 6.5)),
    ]
    assert dict(report.facts)["examples"] == "2: 4 target tokens of 8"
    assert dict(report.facts)["loss"].startswith("1.6 = mean negative log-probability")
    facts = dict(report.group.facts)
    assert facts["row"] == "/far/away/rows.jsonl, line 7" and facts["trained on"] == "in pass 1 over the data"
    assert facts["targets"] == "3 of 6 tokens, in 2 answers" and facts["loss"].startswith("2, 92.3% of the loss")
    [sample] = report.group.samples
    assert [t.logprob for t in sample.tokens] == [-1.0, -3.0, None, -2.0]
    # The update pushes every target by one over the number of targets.
    assert [t.push for t in sample.tokens] == [0.25, 0.25, 0.0, 0.25] and sample.push == 0.75
    assert [t.colour for t in sample.tokens] == [1.0, 3.0, 0.0, 2.0] and report.group.strongest == 3.0
    assert re.fullmatch(r'"[^"]+" -3\.00 \(p 0\.05\), "[^"]+" -2\.00 \(p 0\.14\), .* -1\.00 .*', facts["surprising"])


def test_examples_on_a_screen(tmp_path: Path) -> None:
    text = print_to_text(explain(tmp_path, make_sft(), two_examples(), "1"))
    assert text.startswith("step 2 of 5 · sft · tiny · conversations\n  examples        2: 4 target tokens of 8\n")
    assert re.search(r"^  0 +92.3%  2, 3 tokens +0 +rows.jsonl, line 7$", text, re.MULTILINE)
    assert "example 1 · 1 · 7.7% of the loss\n" in text and "\nexample · 7.7% of the loss · up +0.250\n" in text
    assert re.search(r"^  target +│ ", text, re.MULTILINE) and "signal" not in text


def test_log_probabilities_are_those_that_each_minibatch_saw(tmp_path: Path) -> None:
    config = make_sft(learner=LearnerConfig(minibatches=2))
    report = explain(tmp_path, config, two_examples())
    assert any("the step had 2 minibatches" in note for note in report.notes)
    # The example is alone in its minibatch.
    assert report.group.samples[0].push == pytest.approx(1.0)


# ---- pairs -------------------------------------------------------------------------------------------------------


def test_pairs_by_hand(tmp_path: Path) -> None:
    config = make_dpo(loss=Sigmoid(beta=0.5))
    report = explain(tmp_path, config, two_pairs(), "0")
    # Scores 2 and -1: rewards 1 and -0.5.
    result = score_pair(config.loss, two_pairs()[0])
    assert result.rewards == (1.0, -0.5) and result.margin == 1.5 and result.ranking == "ranked right"
    assert result.term == pytest.approx(math.log1p(math.exp(-1.5)))
    weight = 1 / (1 + math.exp(1.5))
    assert result.weight == pytest.approx(weight)
    assert [line.value for line in report.groups] == ["+1.5", "-0.500"]
    assert [line.note for line in report.groups] == ["ranked right  pairs.jsonl, line 1", "ranked wrong"]
    assert dict(report.facts)["pairs"] == "2: 1 ranked right, 1 wrong"
    facts = dict(report.group.facts)
    assert facts["margin"] == "+1.5 = +1 - (-0.500), ranked right" and facts["loss term"] == f"{result.term:.4f}"
    assert facts["weight"].startswith(f"{weight:.4f}: ")
    chosen, rejected = report.group.samples
    assert (chosen.title, rejected.title) == ("chosen", "rejected")
    # dL/dlogprob = beta x weight / number of pairs, for every token of the answer.
    assert [t.push for t in chosen.tokens] == pytest.approx([0.5 * weight / 2] * 2)
    assert [t.push for t in rejected.tokens] == pytest.approx([-0.5 * weight / 2])
    assert [t.colour for t in chosen.tokens] == [1.0, 1.0] and [t.colour for t in rejected.tokens] == [-1.0]
    assert dict(chosen.facts)["policy"] == "log-probability -2.000, -1.000 per token of 2"
    assert dict(chosen.facts)["reference"] == "log-probability -4.000, -2.000 per token"
    assert dict(chosen.facts)["score"] == "+2, reward +1" and "+1" in dict(chosen.facts)["moved most"]
    shares = [line.share or 0.0 for line in report.groups]
    assert sum(shares) == pytest.approx(1.0) and shares[1] > shares[0]  # the wrong pair has more to learn


def test_pairs_on_a_screen(tmp_path: Path) -> None:
    text = print_to_text(explain(tmp_path, make_dpo(loss=Hinge(beta=1.0)), two_pairs(), "0"))
    assert text.startswith("step 2 of 5 · dpo · tiny · pairs · hinge\n  pairs           2: 1 ranked right, 1 wrong\n")
    assert "weight          0: this pair has no gradient, its margin is large enough" in text
    assert "a reward is 1 (loss.beta) x the score: log-probability minus that of the reference." in text
    assert "\nchosen · 0.0% of the signal · no push\n" in text and "\nrejected · " in text


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_weights_are_slopes_of_the_loss(loss: PairLoss) -> None:
    """The weight is how much the term falls if the better answer's reward rises."""
    group = two_pairs()[1]
    if not loss.has_reference:
        for sample in group.samples:
            sample.ref_logprobs = None
    result = score_pair(loss, group)
    tiny = 1e-6
    better = group.samples[0]
    moved = replace(better, old_logprobs=[x + tiny / loss.beta for x in better.old_logprobs or []])
    after = score_pair(loss, replace(group, samples=[moved, group.samples[1]]))
    assert after.rewards[0] - result.rewards[0] == pytest.approx(tiny, rel=1e-6)  # the better answer has one token
    assert (result.term - after.term) / tiny == pytest.approx(result.weight, rel=1e-3)
    if isinstance(loss, Sigmoid) and not loss.label_smoothing:
        assert result.weight == pytest.approx(1 / (1 + math.exp(result.margin)))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_the_gradients_are_those_of_the_learner(loss: PairLoss) -> None:
    """The signal of a real update, which the learner measures, follows from what it returns."""
    learner = LocalLearner(
        small_decoder(torch.float64),
        LearnerConfig(),
        OptimConfig(),
        num_updates=2,
        reference=small_decoder(torch.float64),
    )
    groups = [
        make_group([1, 2, 3], [given([4, 5, 6], []), given([7, 8], [])], id="a"),
        make_group([9, 3], [given([4], []), given([5, 6, 7, 8], [])], id="b"),
    ]
    for sample in (s for g in groups for s in g.samples):
        sample.old_logprobs = None
    annotate(learner, groups, {"ref"} if loss.has_reference else set(), T)
    update = learner.update(make_batch(groups, 1, T, whole_groups=True), PreferenceLoss(loss))
    store_update(groups, update)
    batch = make_batch(groups, 1, T, whole_groups=True)
    gradients = compute_gradients(groups, batch, PreferenceLoss(loss))
    signal = math.fsum(abs(x) for group in gradients for row in group for x in row)
    assert signal == pytest.approx(update.metrics["signal"], rel=1e-10)
    terms = [score_pair(loss, group).term for group in groups]
    assert math.fsum(terms) / 2 == pytest.approx(update.metrics["loss/pairs"], rel=1e-10)


def test_an_update_returns_what_each_minibatch_saw() -> None:
    learner = LocalLearner(
        small_decoder(torch.float64), LearnerConfig(minibatches=2), OptimConfig(lr=0.1), num_updates=2
    )
    groups = [make_group([1, 2], [given([3, 4], [])], id=str(n)) for n in range(2)]
    for group in groups:
        group.samples[0].old_logprobs = None
    before = learner.annotate(groups, {"old"}, T).old
    update = learner.update(make_batch(groups, 2, T), Imitation())
    store_update(groups, update)
    assert before is not None
    first, second = (group.samples[0].old_logprobs or [] for group in groups)
    assert first == pytest.approx(before.logprobs[0], abs=1e-12)
    # The same example after an optimizer step is more likely.
    assert sum(second) > sum(first) + 1e-3
    loss = -(math.fsum(first) / 2 + math.fsum(second) / 2) / 2
    assert update.metrics["loss"] == pytest.approx(loss, rel=1e-12)


# ---- files and hostile text


def test_what_cannot_be_explained_is_said_in_one_line(tmp_path: Path) -> None:
    path = store(tmp_path, make_sft(), two_examples(), (2, 3))
    with pytest.raises(RunError, match="has no rollouts of step 9; use --step with one of these: 2-3"):
        explain_step(path, 9)
    with pytest.raises(RunError, match='the step has no group "x"; give --group an index from 0 to 1'):
        explain_step(path, 2, "x")
    with pytest.raises(ConfigError, match="the command cohort replay is for runs of reinforcement learning"):
        replay_step(path, 2, [], lambda text: None, False)
    groups = two_examples()
    groups[0].samples[0].old_logprobs = None
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(RunError, match="has no log-probabilities, so it is damaged"):
        explain(other, make_sft(), groups)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_hostile_text_stays_text(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "<script>alert('x')</script>\x1b[2J\u202e\r\n</pre>"
    tokens = Tokenizer.load(resolve_model("tiny")).encode(hostile)
    values = [-1.0] * len(tokens)
    answer = given(tokens, values, values)
    group = make_group(tokens, [answer] if kind == "sft" else [answer, given(tokens[:-1], values[:-1], values[:-1])])
    group.prompt.row = {"place": hostile, "question": hostile}
    config = make_sft() if kind == "sft" else make_dpo()
    path = store(tmp_path, config, [group])
    text = print_to_text(explain_step(path, 2))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text) and "\\x1b[2J" in text
    file = tmp_path / "out.html"
    command.run([str(path), "--html", str(file)])
    assert capsys.readouterr().out == f"wrote {file}\n"
    page = file.read_text(encoding="utf-8")
    assert "<script" not in page and "\x1b" not in page and "by the reference -1" in page
    assert ("surprising" if kind == "sft" else "more likely than by the reference") in page
