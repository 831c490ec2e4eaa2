"""`cohort explain`: numbers computed by hand and by the real learner, the texts of the report, and hostile text."""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.cli import explain as command
from cohort.config.algo_sections import CorrectionConfig, CreditConfig, KLConfig
from cohort.config.algos import DAPO, GMPO, GRPO, GSPO, DrGRPO, PassAtK, Reinforce, ReinforcePP
from cohort.config.schema import LearnerConfig, OptimConfig, SamplingConfig, ThinkAgain
from cohort.errors import CohortError, ConfigError, RunError
from cohort.fates import Fate
from cohort.inspect.explain import group as group_module
from cohort.inspect.explain.effect import CLIPPED, CORRECTED, NO_ADVANTAGE, NOT_FINITE, compute_step_effect
from cohort.inspect.explain.group import describe_pushes
from cohort.inspect.explain.page import render_page
from cohort.inspect.explain.records import GroupLine, ReportPhrases, ShownToken
from cohort.inspect.explain.report import explain_no_signal, explain_step, make_report
from cohort.inspect.explain.screen import _render_overview, print_report
from cohort.inspect.explain.step import count_changed_samples, load_step
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.catalog import resolve_model
from cohort.run.directory import RunDirectory
from cohort.run.store.rollouts import make_rollout_path, save_rollouts
from cohort.text import Tokenizer
from cohort.types import Finish, Group, Provenance
from tests.helpers.decoders_and_groups import make_group, make_sample, pack_groups, random_groups, small_decoder
from tests.helpers.pretend_run import small_run

S, E, F = Provenance.SAMPLED, Provenance.ENVIRONMENT, Provenance.FORCED
PLAIN = GRPO(scale="none")  # advantages are rewards minus their mean


def answer(num: int, reward: float | None, **values):
    """Returns a sample of `num` tokens with a log-probability of -1 each."""
    values = {"sampler_logprobs": [-1.0] * num, "old_logprobs": [-1.0] * num, **values}
    return make_sample(list(range(3, 3 + num)), reward=reward, **values)


def two_groups() -> list[Group]:
    """Returns a group whose rewards differ, with samples of 2 and 4 tokens, and a group of equal rewards."""
    return [
        make_group([1, 2], [answer(2, 1.0), answer(4, 0.0)], id="differs"),
        make_group([1], [answer(3, 1.0), answer(1, 1.0)], id="same"),
    ]


BY_TURN = GRPO(scale="none", credit=CreditConfig(per="turn", discount=0.5))


def conversations():
    """Returns samples of two, two, three and one turns. Their returns are 1 0, 1 2, 1 1 1 and 0, with BY_TURN."""
    return [
        answer(4, 1.0, provenance=[S, E, S, S], turn_rewards=[1.0, 0.0]),
        answer(3, 2.0, provenance=[S, E, S], turn_rewards=[0.0, 2.0]),
        answer(5, 2.0, provenance=[S, E, S, E, S], turn_rewards=[0.5, 0.5, 1.0]),
        answer(2, 0.0, turn_rewards=[0.0]),
    ]


def compute_advantages(groups, config=PLAIN, max_tokens=8):
    algo = build_algorithm(config, max_tokens)
    return algo.advantages(groups), algo


# ---- numbers by hand -------------------------------------------------------------------------------------------


def test_the_gradient_is_weight_times_advantage_and_shares_add_up():
    groups, algo = compute_advantages(two_groups())
    effect = compute_step_effect(groups, algo)
    # four samples count: 1 / (4 x 2) a token with A = 0.5, 1 / (4 x 4) with A = -0.5
    assert [e.gradient for e in effect.groups[0]] == [[-0.0625] * 2, [0.03125] * 4]
    assert [e.gradient for e in effect.groups[1]] == [[0.0] * 3, [0.0]]
    assert effect.group_signals == [0.25, 0.0] and effect.signal == 0.25
    assert [effect.compute_share(e.signal) for e in effect.groups[0]] == [0.5, 0.5]
    assert [e.is_in_loss for g in effect.groups for e in g] == [True, True, False, False]
    assert effect.has_exact_ratios and effect.groups[0][0].metrics["ratio/max"] == 1.0


def test_with_a_token_mean_long_samples_have_the_larger_share():
    groups, algo = compute_advantages(two_groups(), GRPO(scale="none", aggregate="token"))
    effect = compute_step_effect(groups, algo)
    assert [e.signal for e in effect.groups[0]] == pytest.approx([0.5 * 2 / 10, 0.5 * 4 / 10], abs=1e-15)


def test_only_sampled_tokens_have_an_effect():
    mixed = answer(4, 0.0, provenance=[S, E, S, F])
    groups, algo = compute_advantages([make_group([1], [answer(1, 1.0), mixed])])
    assert compute_step_effect(groups, algo).groups[0][1].gradient == [0.125, 0.0, 0.125, 0.0]


def test_masked_and_failed_samples_have_none_and_change_the_others_as_they_should():
    cut, lost = answer(2, 0.0, finish=Finish.LENGTH), answer(2, None, failure="worker died")
    groups, algo = compute_advantages(
        [make_group([1], [answer(2, 1.0), cut, lost])], GRPO(scale="none", truncated="mask")
    )
    first, *others = compute_step_effect(groups, algo).groups[0]
    assert first.gradient == [-0.5 / (2 * 2)] * 2  # the masked one counts as a sample, the failed one does not
    assert [e.signal for e in others] == [0.0, 0.0] and not any(e.is_in_loss for e in others)


def test_a_ratio_out_of_the_clip_range_on_the_side_of_the_advantage_is_clipped():
    groups, algo = compute_advantages([make_group([1], [answer(2, 1.0), answer(2, 0.0)])])
    up, down = groups[0].samples
    moved = {
        id(up): [-1.0 + math.log(1.5), -1.0 + math.log(0.5)],
        id(down): [-1.0 + math.log(1.5), -1.0 + math.log(0.5)],
    }
    effect = compute_step_effect(groups, algo, policy=lambda s: moved[id(s)])
    weight = 0.5 / (2 * 2)
    assert effect.groups[0][0].gradient == pytest.approx([0.0, -0.5 * weight], abs=1e-15)
    assert effect.groups[0][1].gradient == pytest.approx([1.5 * weight, 0.0], abs=1e-15)
    assert [e.zero_reasons for e in effect.groups[0]] == [[CLIPPED, ""], ["", CLIPPED]]
    assert [e.metrics["clip/high"] for e in effect.groups[0]] == [0.5, 0.0]
    assert [e.metrics["clip/low"] for e in effect.groups[0]] == [0.0, 0.5]


def test_tokens_the_correction_masks_are_told_from_clipped_ones():
    config = GRPO(scale="none", correction=CorrectionConfig(kind="mask", bounds=(0.5, 2.0)))
    strange = answer(3, 1.0, sampler_logprobs=[-1.0, -2.0, -0.5])  # importance 1, e, e^-0.5
    groups, algo = compute_advantages([make_group([1], [strange, answer(1, 0.0)])], config)
    found = compute_step_effect(groups, algo).groups[0][0]
    assert found.zero_reasons == ["", CORRECTED, ""]
    assert found.gradient == pytest.approx([-0.5 / 6, 0.0, -0.5 * math.exp(-0.5) / 6], abs=1e-15)
    # A policy that agrees with the sampler by now. It has left the clip range on the side that this advantage allows.
    moved = compute_step_effect(groups, algo, policy=lambda s: s.sampler_logprobs).groups[0][0]
    assert moved.zero_reasons == ["", CORRECTED, CLIPPED]


def test_a_sample_at_the_mean_is_said_to_have_no_advantage():
    groups, algo = compute_advantages([make_group([1], [answer(1, 0.0), answer(2, 1.0), answer(1, 2.0)])])
    assert compute_step_effect(groups, algo).groups[0][1].zero_reasons == [NO_ADVANTAGE] * 2


def test_a_gradient_that_is_not_finite_is_named_and_not_added():
    groups, algo = compute_advantages(
        [make_group([1], [answer(2, 1.0, old_logprobs=[math.nan, -1.0]), answer(1, 0.0)])]
    )
    effect = compute_step_effect(groups, algo)
    assert effect.groups[0][0].zero_reasons == [NOT_FINITE, ""] and effect.signal == 0.125 + 0.25


def test_without_stored_logprobs_ratios_are_taken_as_one():
    known, algo = compute_advantages(two_groups())
    expected = compute_step_effect(known, algo)
    for sample in known[0].samples[1:]:  # one is enough: a file from before, or half of one
        sample.old_logprobs = None
    effect = compute_step_effect(known, algo)
    assert not effect.has_exact_ratios and effect.group_signals == expected.group_signals
    assert known[0].samples[0].old_logprobs == [-1.0, -1.0]  # what was handed in stays


def test_minibatches_have_their_own_denominators():
    groups, algo = compute_advantages([make_group([1], [answer(1, 1.0), answer(1, 0.0)]) for _ in range(2)])
    assert (
        compute_step_effect(groups, algo, minibatches=2).signal
        == 2 * compute_step_effect(groups, algo).signal
        == 2 * 0.5
    )


# ---- against the learner -----------------------------------------------------------------------------------------


class RecordingAlgorithm:
    """An algorithm whose loss records the log-probabilities and |dL/dlogprob| of each sample in each epoch."""

    def __init__(self, algo, num_tokens: int) -> None:
        self.algo = algo
        self.per_token = algo.per_token
        self.has_ratio = algo.has_ratio
        self.weigh_tokens = algo.weigh_tokens
        self.num_tokens = num_tokens
        self.seen = 0  # tokens of all calls so far: one epoch has `num_tokens`
        self.epochs = [(defaultdict(list), defaultdict(float)) for _ in range(2)]

    def loss(self, inputs):
        loss, tally = self.algo.loss(inputs)
        (gradient,) = torch.autograd.grad(loss, [inputs.logprobs], retain_graph=True)
        logprobs, sizes = self.epochs[self.seen // self.num_tokens]
        for segment, value, size in zip(
            inputs.segments.tolist(), inputs.logprobs.tolist(), gradient.abs().tolist(), strict=True
        ):
            logprobs[segment].append(value)
            sizes[segment] += size
        self.seen += len(gradient)
        return loss, tally


@pytest.mark.parametrize(
    "config",
    [
        GRPO(),
        DrGRPO(kl=KLConfig(weight=0.1), entropy=0.01),
        DAPO(),
        GSPO(clip_low=0.1, clip_high=0.1),
        GMPO(),
        ReinforcePP(kl=KLConfig()),
        GRPO(aggregate="prompt", correction=CorrectionConfig(kind="mask", level="geometric", bounds=(0.2, 3.0))),
    ],
    ids=lambda config: type(config).__name__,
)
def test_effects_are_what_the_learners_own_loss_calls_saw(config):
    algo = build_algorithm(config, 16)
    groups = random_groups(num_groups=4)
    for n, sample in enumerate(s for g in groups for s in g.samples):
        sample.reward, sample.sampler_logprobs = float(n % 3 == 0), [-3.0 - 0.3 * (n % 4)] * len(sample.tokens)
    for sample in groups[2].samples:
        sample.reward = 1.0
    learner = LocalLearner(
        small_decoder(torch.float64, std=0.15),
        LearnerConfig(token_budget=40, epochs=2),
        OptimConfig(lr=0.05),
        num_updates=10,
        reference=small_decoder(torch.float64, seed=1, std=0.15),
    )
    annotate(learner, groups, algo.needs() | {"old"})
    groups = algo.advantages(groups)
    batch = pack_groups(groups, 40)
    watched = RecordingAlgorithm(algo, sum(len(m.targets) for m in batch.minibatches[0].microbatches))
    learner.update(batch.batch, watched)
    samples = [s for g in groups for s in g.samples]
    ids = [sample_id for g in groups for sample_id in g.ids()]
    place = [ids.index(sample_id) for sample_id in batch.batch.ids]  # by number in the batch
    later = {id(samples[place[number]]): values for number, values in watched.epochs[1][0].items()}
    effects = [compute_step_effect(groups, algo), compute_step_effect(groups, algo, policy=lambda s: later[id(s)])]
    assert effects[0].has_exact_ratios
    for (_, sizes), effect in zip(watched.epochs, effects, strict=True):
        found = [e.signal for g in effect.groups for e in g]
        seen = dict.fromkeys(range(len(samples)), 0.0) | {place[number]: size for number, size in sizes.items()}
        assert found == pytest.approx([seen[i] for i in range(len(samples))], abs=1e-9)
        assert effect.signal > 0.01
    ratios = [e.metrics["ratio/max"] for g in effects[1].groups for e in g if e.is_in_loss]
    assert max(ratios) > 1.05  # the second epoch is another policy


# ---- words -------------------------------------------------------------------------------------------------------


def test_why_a_loss_is_zero_is_said_in_words():
    same = make_group([1], [answer(1, 1.0), answer(1, 1.0)])
    lonely = make_group([1], [answer(1, 1.0), answer(1, None, failure="worker died")])
    groups, algo = compute_advantages([same, lonely])
    words = explain_no_signal(groups, compute_step_effect(groups, algo))
    assert words.startswith(
        "loss is 0 because 1 group left out (constant reward: all samples of a group got the same reward"
    )
    assert "1 group left out (too few scored samples: a baseline or a pair needs at least two)" in words
    cut = make_group([1], [answer(1, r, finish=Finish.LENGTH) for r in (0.0, 1.0)])
    groups, algo = compute_advantages([cut], GRPO(truncated="mask"))
    assert "2 samples masked: truncated: it was cut at max_tokens" in explain_no_signal(
        groups, compute_step_effect(groups, algo)
    )


def test_where_the_entropy_bonus_acts_the_loss_is_not_said_to_be_zero(tmp_path):
    same = make_group([1], [answer(1, 1.0), answer(1, 1.0)])
    config = GRPO(scale="none", entropy=0.1)
    text = print_to_text(explain_step(store_run(tmp_path, compute_advantages([same], config)[0], algo=config), 2))
    assert "no log-probability is pushed because 2 tokens without a gradient (advantage is 0" in text
    assert "loss is 0" not in text


def test_a_stored_advantage_that_the_algorithm_would_not_give_is_counted():
    groups, algo = compute_advantages(two_groups())
    assert count_changed_samples(groups, algo) == 0
    groups[0].samples[1].advantage = -0.4
    assert count_changed_samples(groups, algo) == 1 and groups[0].samples[1].advantage == -0.4


def test_a_stored_advantage_of_one_turn_that_the_algorithm_would_not_give_is_counted():
    groups, algo = compute_advantages([make_group([1], conversations())], BY_TURN)
    assert count_changed_samples(groups, algo) == 0
    first = groups[0].samples[0]
    # The advantage of the sample is that of its second turn, which stays.
    assert first.token_advantages == [0.25, 0.0, -1.0, -1.0] and first.advantage == -1.0
    first.token_advantages[0] = 0.3
    assert count_changed_samples(groups, algo) == 1
    first.token_advantages = None
    assert count_changed_samples(groups, algo) == 1


def store_run(folder: Path, groups: list[Group], steps=(2,), **changes) -> Path:
    """Makes a run directory that has these groups as the rollouts of its steps, and returns it."""
    values = {"sampling": SamplingConfig(max_tokens=8), "algo": PLAIN, **changes}
    directory = RunDirectory.create(folder, small_run(**values), "run")
    for step in steps:
        save_rollouts(make_rollout_path(directory.rollouts, step), groups)
    directory.unlock()
    return directory.path


def print_to_text(made) -> str:
    out = io.StringIO()
    print_report(made, out)
    return out.getvalue()


def test_the_report_names_rewards_baseline_shares_and_what_is_left_out(tmp_path):
    groups = two_groups()
    groups[0].samples[0].parts, groups[0].samples[0].reason = {"correct": 1.0, "format": 0.5}, "well done"
    groups[0].samples.append(answer(1, None, failure="worker died"))
    path = store_run(tmp_path, compute_advantages(groups)[0], reward={"format": 0.0})
    text = print_to_text(explain_step(path, 2))
    for line in (
        "groups          2: 1 in the loss, 1 left out: constant reward",
        "samples         5: 2 in the loss, 1 failed, 2 in a group left out: constant reward",
        "group 0 · differs · 100.0% of the signal",
        "returns         mean 0.500, std 0.707 of 2 scored samples",
        "left out        1 sample failed: worker died",
        "sample 0 · 50.0% of the signal · up +0.125",
        "reward          1 from correct 1, format 0.500 (only logged)",
        "reason          well done",
        "sample 1 · 50.0% of the signal · down -0.125",
        "push            -0.031 on each of 4 tokens",
        "sample 2 · 0.0% of the signal · out of the loss: failed",
        "out of the loss failed: the grader failed, so there is no reward (worker died)",
        "ratio           min 1.0000, mean 1.0000, max 1.0000",
    ):
        assert line in text.replace("\n  ", "\n"), line
    assert "not known" not in text


def test_rewards_returns_and_advantages_of_turns_are_shown(tmp_path):
    groups, _ = compute_advantages([make_group([1], conversations())], BY_TURN)
    text = print_to_text(explain_step(store_run(tmp_path, groups, algo=BY_TURN, turns=ThinkAgain()), 2))
    for line in (
        "returns         turn 1: mean 0.750, std 0.500 of 4 scored samples",
        "returns         turn 2: mean 1, std 1 of 3 scored samples",
        "returns         turn 3: mean 1, std 0 of 1 scored sample: too few for a baseline, so no advantage",
        "advantages      baseline = mean, scale = none, credit per turn with discount 0.5, aggregate = sequence",
        "turn 1          reward 1, return 1, advantage +0.250",
        "turn 2          reward 0, return 0, advantage -1",
        "turn 2          reward 2, return 2, advantage +1",
        "turn 3          reward 1, return 1, advantage 0",
        "advantage       -0.750",
    ):
        assert line in text.replace("\n  ", "\n"), line
    assert text.count("advantage       ") == 1 and "the baseline uses" not in text and "today" not in text


def test_returns_of_turns_are_shown_for_the_batch_too(tmp_path):
    algo = Reinforce(credit=CreditConfig(per="turn"))
    groups = [make_group([1], conversations()), make_group([2], [answer(1, 3.0)], id="other")]
    text = print_to_text(explain_step(store_run(tmp_path, compute_advantages(groups, algo)[0], algo=algo), 2, "0"))
    assert "returns         turn 3: mean 1, std 0 of 1 scored sample\n" in text
    assert "of the batch    turn 1: mean 1.6, std 1.1\n" in text and "of the batch    turn 3: mean 1, std 0\n" in text


def test_a_group_that_was_never_annotated_is_shown_with_the_reward_of_its_task(tmp_path):
    """With a KL in the reward, a dead group is replaced before its KL is computed."""
    algo = ReinforcePP(kl=KLConfig(weight=0.1, estimator="k1", place="reward"))
    groups = two_groups()
    for s in groups[0].samples:
        s.old_logprobs, s.ref_logprobs = [-1.0] * len(s.tokens), [-1.5] * len(s.tokens)
    for s in groups[1].samples:
        s.old_logprobs = None
    groups[1].excluded = Fate.NOT_ACCEPTED
    build_algorithm(algo, 8).advantages(groups)
    path = store_run(tmp_path, groups, algo=algo)
    text = print_to_text(explain_step(path, 2, "1"))
    assert "out of the loss not accepted" in text and "reward          1" in text
    text = print_to_text(explain_step(path, 2, "0"))
    assert "of the batch    mean 0.350, std 0.778" in text  # 1 - 0.1 and 0 - 0.2, without the other group


def test_pushes_of_both_signs_are_not_said_to_be_equal():
    """The strongest and the weakest push are equal here, but one between them has the other sign."""
    tokens = [ShownToken(text=t, id=1, provenance=0, push=p) for t, p in (("a", 0.5), ("b", -0.5), ("c", 0.5))]
    [(_, text)] = describe_pushes(tokens)
    assert text == 'on 3 tokens, most on "a" +0.500, "b" -0.500, "c" +0.500'
    [(_, text)] = describe_pushes(tokens[:1] * 3)
    assert text == "+0.500 on each of 3 tokens"


def test_a_batch_without_any_return_has_no_mean(tmp_path):
    groups = [make_group([1], [answer(2, None, failure="worker died"), answer(2, None, failure="worker died")])]
    algo = Reinforce()
    build_algorithm(algo, 8).advantages(groups)
    text = print_to_text(explain_step(store_run(tmp_path, groups, algo=algo), 2))
    assert "of the batch    none" in text


def test_a_batch_baseline_counts_groups_with_one_scored_sample(tmp_path):
    groups = [
        make_group([1], [answer(2, 1.0), answer(2, None, failure="worker died")], id="one"),
        make_group([1], [answer(2, 0.0), answer(2, 0.0)], id="two"),
    ]
    algo = Reinforce()
    build_algorithm(algo, 8).advantages(groups)
    assert groups[1].samples[0].advantage == pytest.approx(-1 / 3)  # the mean is that of all three
    text = print_to_text(explain_step(store_run(tmp_path, groups, algo=algo), 2))
    assert "of the batch    mean 0.333" in text


def test_the_best_of_k_is_named_for_what_it_is(tmp_path):
    groups = build_algorithm(PassAtK(k=2), 8).advantages(two_groups())
    text = print_to_text(explain_step(store_run(tmp_path, groups, algo=PassAtK(k=2)), 2))
    assert "advantages      what each adds to the best of 2, aggregate = constant" in text and "baseline =" not in text


def test_clipped_and_corrected_tokens_are_said_with_their_bounds(tmp_path):
    config = GRPO(scale="none", correction=CorrectionConfig(kind="mask", bounds=(0.5, 2.0)))
    strange = answer(3, 1.0, sampler_logprobs=[-1.0, -2.0, -0.5])
    path = store_run(tmp_path, compute_advantages([make_group([1], [strange, answer(2, 0.0)])], config)[0], algo=config)
    text = print_to_text(explain_step(path, 2))
    assert "correction      1 token outside 0.5 to 2.0: mask (importance weight 0.6065 to 2.7183)" in text
    assert "no gradient     1 token: sampler correction: the learner and the sampler disagree too much" in text
    step = load_step(path, 2)
    low = compute_step_effect(step.groups, step.algo, policy=lambda s: [-2.0] * len(s.tokens))
    text = print_to_text(make_report(replace(step, effect=low)))
    assert (
        "clipped         2 tokens: ratio below the clip range (algo.clip_low = 0.2), with a negative advantage" in text
    )


def test_what_is_not_known_or_not_the_same_any_more_is_said(tmp_path):
    groups, _ = compute_advantages(two_groups())
    for sample in groups[0].samples:
        sample.old_logprobs, sample.advantage = None, 2 * sample.advantage
    path = store_run(
        tmp_path, groups, model="no-such-model", learner=LearnerConfig(epochs=3), algo=GRPO(scale="none", entropy=0.1)
    )
    text = print_to_text(explain_step(path, 2))
    for words in (
        "ratios are not known",
        "ratio           not known, taken as 1",
        "4 samples would get another advantage or fate today",  # with a bonus no group is left out
        "the step had 3 updates",
        "the entropy bonus is not shown",
        "tokenizer was not found: tokens are shown as ids",
        "⟨3⟩⟨4⟩",
    ):
        assert words in text, words


def test_a_group_is_found_by_index_then_by_prompt_id_and_by_its_share(tmp_path):
    groups, _ = compute_advantages(two_groups()[::-1])
    groups[0].prompt.id = "1"
    path = store_run(tmp_path, groups)
    found = {wanted: explain_step(path, None, wanted).group.line.prompt_id for wanted in ("", "0", "1", "differs")}
    assert found == {"": "differs", "0": "1", "1": "differs", "differs": "differs"}


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        (["run", "--step", "5"], RunError, "has no rollouts of step 5; use --step with one of these: 1-3, 7"),
        (
            ["run", "--step", "7", "--group", "9"],
            RunError,
            'no group "9"; give --group an index from 0 to 1 or a prompt id',
        ),
        (["run", "--group", "diffars"], RunError, 'Did you mean "differs"?'),
        (["nowhere"], RunError, "there is no run"),
        (["run", "--html", "missing/x.html"], ConfigError, 'there is no folder "missing"'),
        (["run", "--html", "run"], ConfigError, "--html run is a folder"),
        (["run", "--steps", "5"], ConfigError, "Did you mean --step?"),
    ],
)
def test_a_mistake_is_one_clear_line(args, kind, words, tmp_path, monkeypatch):
    store_run(tmp_path, compute_advantages(two_groups())[0], steps=(1, 2, 3, 7))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CohortError) as caught:
        command.run(args)
    assert isinstance(caught.value, kind) and words in str(caught.value) and "\n" not in str(caught.value)


def test_the_rollouts_are_enough(tmp_path):
    path = store_run(tmp_path, compute_advantages(two_groups())[0])
    before = print_to_text(explain_step(path, 2))
    (path / "run.db").unlink()
    after = print_to_text(explain_step(path, 2))
    assert "not shown: run.db does not have them; `cohort resume" in before and "signal          0.250 = " in before
    assert "not shown: there is no file" in after and "rebuild it from the other files of the run with" in after
    assert after.partition("  group  share")[1:] == before.partition("  group  share")[1:]


def test_a_run_without_rollouts_says_so(tmp_path):
    with pytest.raises(RunError, match="keeps no rollouts"):
        explain_step(store_run(tmp_path, [], steps=()), None)


# ---- hostile text ------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>alert('x')</script>\x1b[2J\u202e\r\n</pre><img src=x onerror=y>\n  sampled         │ \"fake\" & [red]"
)


@pytest.fixture
def hostile(tmp_path) -> Path:
    tokenizer = Tokenizer.load(resolve_model("tiny"))
    prompt, said = tokenizer.encode(HOSTILE), tokenizer.encode(HOSTILE)
    samples = [
        make_sample(said, [*([S] * (len(said) - 3)), E, F, S], reward=1.0, reason=HOSTILE, parts={HOSTILE: 1.0}),
        make_sample(said, reward=0.0),
        make_sample(said, failure=HOSTILE, reward=None),
    ]
    for sample in samples:
        sample.sampler_logprobs = sample.old_logprobs = [-1.0] * len(said)
    group = make_group(prompt, samples, id=HOSTILE)
    return store_run(tmp_path, compute_advantages([group])[0], recipe=f"own.py:{HOSTILE}")


def test_a_pipe_gets_no_control_codes_and_whole_lines(hostile):
    text = print_to_text(explain_step(hostile, 2))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "\\x1b[2J" in text and "[red]" in text
    # a line of the text begins behind the margin: what imitates a label cannot stand where labels stand
    # (its bar is three tokens: those that complete no character are shown as ids)
    fakes = re.findall(r'^(.*)"fake" & \[red\]$', text, re.MULTILINE)
    assert fakes.count(" " * 18 + "│   sampled         ⟨167⟩⟨251⟩│ ") == 3  # of the prompt and two samples
    longest = max(len(line) for line in text.splitlines())
    assert longest > 150  # nothing is folded at the width of a terminal that is not there


def test_a_terminal_gets_colours_and_nothing_else(hostile, monkeypatch):
    plain = print_to_text(explain_step(hostile, 2))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    coloured = print_to_text(explain_step(hostile, 2))
    assert "\x1b[38;2;0;0;0;48;2;76;175;80m" in coloured and "\x1b[38;2;0;0;0;48;2;239;83;80m" in coloured
    text = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    legend = "  colours: prompt, environment, forced, pushed up a little pushed down a little no gradient\n"
    assert text.count(legend) == 1 and text.replace(legend, "") == plain


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def test_a_page_holds_hostile_text_as_text(hostile, tmp_path, capsys):
    file = tmp_path / "out.html"
    command.run([str(hostile), "--step", "2", "--html", str(file)])
    assert capsys.readouterr().out == f"wrote {file}\n"
    text = file.read_text(encoding="utf-8")
    ours = r"!doctype|html|head|meta|title|style|body|h\d|table|tr|th|td|div|pre|span|p"
    assert not re.search(rf"<(?!/?({ours})[ >])", text)  # a token may be a single <, which no parser minds
    seen = Tags()
    seen.feed(text)
    expected = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "table", "tr", "th", "td"}
    assert seen.tags == expected | {"div", "pre", "span", "p"}
    assert seen.attributes <= {"lang", "charset", "http-equiv", "content", "class", "style", "title"}
    assert "<script>alert('x')</script>\\x1b[2J\\u202e\\r" in seen.text and "</pre><img src=x onerror=y>" in seen.text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", seen.text)


def test_a_page_colours_by_sign_and_strength_and_by_provenance(hostile):
    text = render_page(explain_step(hostile, 2))
    strengths = {float(a) for a in re.findall(r"rgba\(46,160,67,([\d.]+)\)\" title", text)}
    assert strengths == {1.0} and "rgba(248,81,73," in text
    assert re.search(r'<span class="environment" title="id \d+ · environment">', text)
    assert re.search(r'<span class="forced" title="id \d+ · forced">', text)
    assert "http:" not in text and "https:" not in text


def test_a_further_attempt_and_its_cost_are_named():
    sample = make_sample([5, 6, 7, 8], reward=-0.1)
    sample.provenance = [int(p) for p in (Provenance.SAMPLED, Provenance.ENVIRONMENT, *[Provenance.SAMPLED] * 2)]
    sample.parts = {"correct": 0.0}
    algo = SimpleNamespace(config=SimpleNamespace())
    step = SimpleNamespace(config=SimpleNamespace(reward={}, turns=ThinkAgain(cost=0.1)), algo=algo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "_get_returns", lambda algo, sample: [sample.reward])
        assert group_module._describe_reward(step, sample) == "-0.100 from correct 0, 1 further attempt at -0.100"


def test_shares_that_are_not_known_are_not_added_up():
    def tell_rest(share):
        lines = [GroupLine(index=n, prompt_id=str(n), value="1", share=share, note="") for n in range(32)]
        return [text.plain for text in _render_overview(lines, 0, ReportPhrases())][-1]

    assert tell_rest(None) == "  and 12 more"
    assert tell_rest(1 / 32) == "  and 12 more with 37.5% together"
