"""Losses, advantages, KL terms, corrections and controllers against verl 0.9.1's and torchrl 0.14.1's own functions.

Random float64 log-probabilities with ragged lengths, masked rows where it applies; equal to 1e-6 in value and gradient.
Where a peer deviates, the test compares what is left after the one named difference:

- verl gspo is the paper's GSPO-token; with one advantage per sample it has GSPO's gradient too: both of ours equal it.
- verl cispo clips the ratio at a lower bound as well (1 - clip_ratio_low); the paper has none. Opened here with 1.0.
- verl sapo and geo_mean ignore the configured aggregation; both are means over samples.
- verl geo_mean takes the geometric mean of a sample's token corrections, ours their mean; equal for sample corrections.
- verl's gpg loss has no ratio; our REINFORCE weights with it once the policy has moved. On-policy they are equal.
- verl's k3 is clipped at 10, without a gradient there; ours is not.
- verl adds another constant to a deviation (1e-6, or 1e-8 to a variance); ours is 1e-4 as TRL's. It is set equal here.
- verl's REINFORCE++ takes the mean and the deviation over tokens, so that long samples weigh more; ours over samples.
  With the KL in the reward its returns are those from each token on, ours the whole sample's.
- verl's pass@k is that of k = group size (arXiv:2503.19595) and by default divides by the deviation. Turned off here.
- torchrl's CISPOLoss has no stopped gradient and no log-probability: it is the clipped ratio without PPO's minimum, so
  clipped tokens lose their gradient, which the paper's objective is there to keep. Equal where nothing is clipped.
- torchrl's KL terms divide by all positions, padding included, whatever the aggregation; ours by those in the loss.

Not compared, since we have no such loss: verl's clip_cov, kl_cov, dppo_tv, dppo_kl, dro.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cohort.algos import build_algorithm
from cohort.algos.advantages import compute_advantages
from cohort.algos.aggregate import Lengths, Totals, token_weights
from cohort.algos.control import KL_GAIN, Coefficients
from cohort.algos.correction import bound_ratios, importance_ratios
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_per_token
from cohort.config.algo_sections import CorrectionConfig, KLConfig
from cohort.config.algos import (
    CISPO,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    DrGRPO,
    GSPOToken,
    PassAtK,
    Policy,
    Reinforce,
    ReinforcePP,
    ReinforcePPBaseline,
)
from cohort.types import Group, Prompt, Provenance, Sample

pytestmark = pytest.mark.peers

ROWS, LONGEST, MAX_TOKENS = 6, 7, 9
LENGTHS = [7, 3, 1, 6, 7, 4]
ADVANTAGES = [1.2, -0.4, 0.0, -0.8, 2.0, -1.5]


def load_verl() -> tuple[Any, Any, Any]:
    """Returns verl's own `core_algos`, `rollout_corr_helper` and `ActorConfig`, imported without Ray.

    Importing `verl` the usual way imports Ray, for its workers, which no function here touches. So three packages get
    an empty `__init__` (their files are still found) and `verl.protocol`, whose `DataProto` is only named in
    annotations and in functions not called here, an empty class. The functions compared are the installed files'.
    """
    root = Path(str(importlib.metadata.distribution("verl").locate_file("verl")))

    def empty(name: str, **names: Any) -> ModuleType:
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.__dict__.update(names)
        sys.modules[name] = module
        return module

    empty("verl")
    profiler = empty("verl.utils.profiler")
    profiler.__dict__["ProfilerConfig"] = importlib.import_module("verl.utils.profiler.config").ProfilerConfig
    config = empty("verl.workers.config")
    actor = importlib.import_module("verl.workers.config.actor").ActorConfig
    config.__dict__["ActorConfig"] = actor
    empty("verl.protocol", DataProto=type("DataProto", (), {}))
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    return core, importlib.import_module("verl.trainer.ppo.rollout_corr_helper"), actor


try:
    core, rollout, ActorConfig = load_verl()
    llm: Any = importlib.import_module("torchrl.objectives.llm")
    from tensordict import TensorDict
# PackageNotFoundError of importlib.metadata is an ImportError too.
except ImportError:
    if os.environ.get("COHORT_REQUIRE_PEERS") == "1":
        raise
    pytest.skip("peers have their own environment: make test-peers", allow_module_level=True)


class Batch:
    """The same numbers as padded rows for the peers and as flat vectors for our losses."""

    def __init__(self, *, old: float = 0.0, masked: tuple[int, ...] = (), lengths: list[int] | None = None) -> None:
        rng = torch.Generator().manual_seed(4)

        def noise(size: float) -> Tensor:
            return size * torch.randn(ROWS, LONGEST, generator=rng, dtype=torch.float64)

        self.mask = torch.tensor([[float(t < n) for t in range(LONGEST)] for n in lengths or LENGTHS]).double()
        self.mask[list(masked)] = 0.0
        self.keep = self.mask.bool()
        self.now = (-1.5 - noise(0.5).abs()).requires_grad_()  # [ROWS, LONGEST]
        self.old = self.now.detach() + noise(old)
        self.ref = self.now.detach() + noise(0.6)
        self.sampler = self.old + noise(0.5)
        self.advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(ROWS, LONGEST)

    @property
    def totals(self) -> Totals:
        return Totals(num_tokens=float(self.mask.sum()), num_samples=ROWS, num_prompts=ROWS / 2)

    @property
    def lengths(self) -> Lengths:
        size = self.mask.sum(1)
        group = size.view(-1, 2).sum(1).repeat_interleave(2)
        return Lengths(sample=self.spread(size), group=self.spread(group))

    def spread(self, of_row: Tensor) -> Tensor:
        return of_row[:, None].expand(ROWS, LONGEST)[self.keep]

    @property
    def segments(self) -> Tensor:
        return self.spread(torch.arange(ROWS))

    def ours(self, config: Policy) -> tuple[Tensor, dict[str, float]]:
        """Returns our loss and its metrics."""
        algo, keep = build_algorithm(config, MAX_TOKENS), self.keep
        loss, tally = algo.loss(
            LossInputs(
                logprobs=self.now[keep],
                entropy=torch.zeros_like(self.now[keep]),
                old_logprobs=self.old[keep],
                ref_logprobs=self.ref[keep],
                sampler_logprobs=self.sampler[keep],
                advantages=self.advantages[keep],
                weights=algo.weigh_tokens(self.lengths, self.totals),
                segments=self.segments,
            )
        )
        return loss, tally.to_metrics()

    def verl(self, name: str, mode: str, weights: Tensor | None = None, **settings: Any) -> Tensor:
        """Returns verl's registered loss. It gets the number of rows of the whole batch, as from verl's trainer."""
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=2,
            ppo_micro_batch_size_per_gpu=ROWS,
            global_batch_info={"global_batch_size": ROWS, "loss_scale_factor": MAX_TOKENS},
            **settings,
        )
        given = {"old_log_prob": self.old, "log_prob": self.now, "advantages": self.advantages}
        loss, _ = core.POLICY_LOSS_REGISTRY[name](
            **given, response_mask=self.mask, loss_agg_mode=mode, config=config, rollout_is_weights=weights
        )
        return loss  # type: ignore[no-any-return]

    def assert_equal(self, theirs: Tensor, mine: Tensor) -> None:
        """Compares the values of two losses, and their gradients on every log-probability."""
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        (their_grad,) = torch.autograd.grad(theirs, self.now)
        (my_grad,) = torch.autograd.grad(mine, self.now)
        largest = float(their_grad.abs().max())
        assert largest > 1e-3
        torch.testing.assert_close(my_grad, their_grad, rtol=0.0, atol=1e-6 * largest)


MODES = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
CASES: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "several epochs": {"old": 0.5},
    "masked rows": {"old": 0.5, "masked": (1, 3)},
}
VERL_CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
CLIP: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.15}
# (verl's name, verl's settings, our config, our settings). Those in ONE_MODE have a fixed aggregation.
LOSSES: dict[str, tuple[str, dict[str, Any], type[Policy], dict[str, Any]]] = {
    "dual clip": ("vanilla", VERL_CLIP | {"clip_ratio_c": 1.4}, GRPO, CLIP | {"dual_clip": 1.4}),
    "dapo": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}, DAPO, {}),
    "gspo": ("gspo", VERL_CLIP, GSPO, CLIP),
    "gspo_token": ("gspo", VERL_CLIP, GSPOToken, CLIP),
    "cispo": ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3}, CISPO, {"clip_high": 1.3}),
    "reinforce, moved": ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9}, Reinforce, {}),
    "sapo": ("sapo", {"tau_pos": 0.9, "tau_neg": 1.3}, SAPO, {"tau_pos": 0.9, "tau_neg": 1.3}),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.35}, GMPO, {"clip_low": 0.4, "clip_high": 0.35}),
}
ONE_MODE = {"sapo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean"}
COMBINATIONS = [(name, mode) for name in LOSSES for mode in MODES if ONE_MODE.get(name, mode) == mode]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "mode"), COMBINATIONS)
def test_loss_and_gradient_equal_verl(name: str, mode: str, case: str) -> None:
    theirs, settings, kind, mine = LOSSES[name]
    batch = Batch(**CASES[case])
    loss, metrics = batch.ours(kind(aggregate=MODES[mode], **mine))  # type: ignore[arg-type]
    batch.assert_equal(batch.verl(theirs, mode, **settings), loss)
    if case == "several epochs" and "clip/high" in metrics:
        assert 0.0 < metrics.get("clip/low", 0.0) + metrics["clip/high"] < 1.0


@pytest.mark.parametrize("mode", MODES)
def test_score_function_equals_verl(mode: str) -> None:
    """GPG's loss and verl's REINFORCE are -A log p; on-policy ours is too."""
    batch = Batch()
    loss, _ = batch.ours(Reinforce(aggregate=MODES[mode]))  # type: ignore[arg-type]
    batch.assert_equal(batch.verl("gpg", mode), loss)


CORRECTIONS: dict[str, tuple[str, str | float, CorrectionConfig]] = {
    "token, truncated": ("token", 1.4, CorrectionConfig(kind="truncate", level="token", bounds=(0.0, 1.4))),
    "token, masked": ("token", "0.6_1.4", CorrectionConfig(kind="mask", level="token", bounds=(0.6, 1.4))),
    "sample, truncated": ("sequence", 1.8, CorrectionConfig(kind="truncate", level="sequence", bounds=(0.0, 1.8))),
    "sample, masked": ("sequence", "0.3_2.5", CorrectionConfig(kind="mask", level="sequence", bounds=(0.3, 2.5))),
}


# Left out: weights that differ within a sample, where verl's GMPO takes their geometric mean and its GSPO has the
# gradient of the token form, which is compared.
NOT_BY_TOKEN = ("gmpo", "gspo")
CORRECTED = [
    (name, mode, correction)
    for name, mode in COMBINATIONS
    for correction, (level, _, _) in CORRECTIONS.items()
    if level == "sequence" or name not in NOT_BY_TOKEN
]


@pytest.mark.parametrize(("name", "mode", "correction"), CORRECTED)
def test_corrected_loss_equals_verl(name: str, mode: str, correction: str) -> None:
    """verl's weights of its rollout correction, in each of its losses."""
    level, threshold, mine = CORRECTIONS[correction]
    theirs, settings, kind, fields = LOSSES[name]
    batch = Batch(old=0.5, masked=(3,))
    weights, _ = rollout.compute_rollout_correction_weights(batch.old - batch.sampler, batch.mask, level, threshold)
    loss, metrics = batch.ours(kind(aggregate=MODES[mode], correction=mine, **fields))  # type: ignore[arg-type]
    batch.assert_equal(batch.verl(theirs, mode, weights, **settings), loss)
    assert 0.0 < metrics["importance/bounded"] < 1.0


@pytest.mark.parametrize(
    ("option", "level"), [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")]
)
def test_rejected_samples_equal_verl(option: str, level: str) -> None:
    """verl bounds the sampler's probability over the learner's, the inverse; it rejects and does not weigh."""
    batch = Batch(old=0.5, masked=(3,))
    kept, _ = rollout.compute_rollout_rejection_mask(batch.old - batch.sampler, batch.mask, option, "0.8_1.25")
    raw = importance_ratios(batch.old[batch.keep], batch.sampler[batch.keep], batch.segments, level)
    mine = bound_ratios(raw, CorrectionConfig(kind="mask", bounds=(1 / 1.25, 1 / 0.8)))
    assert torch.equal(mine != 0.0, kept[batch.keep].bool())
    assert 0 < (mine != 0.0).sum() < len(mine)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_of_microbatches_equals_verl(mode: str) -> None:
    """Two unequal parts that sum to the whole, with the counts of the whole, on either side."""
    batch = Batch(masked=(3,))
    counts = {"batch_num_tokens": batch.mask.sum(), "global_batch_size": ROWS, "loss_scale_factor": MAX_TOKENS}
    parts = (slice(0, 2), slice(2, ROWS))
    theirs = [core.agg_loss(batch.now[p], batch.mask[p], mode, **counts) for p in parts]
    weights = token_weights(batch.lengths, MODES[mode], batch.totals, MAX_TOKENS)  # type: ignore[arg-type]
    batch.assert_equal(torch.stack(theirs).sum(), (weights * batch.now[batch.keep]).sum())


KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KL_NAMES)
def test_kl_in_the_loss_equals_verl(name: str, mode: str) -> None:
    """Each estimator, alone in the loss, with each aggregation: the advantages are zero."""
    batch = Batch(masked=(1,))
    batch.advantages = torch.zeros_like(batch.advantages)
    penalty = core.kl_penalty(batch.now, batch.ref, name)
    counts = {"global_batch_size": ROWS, "loss_scale_factor": MAX_TOKENS}
    theirs = 0.3 * core.agg_loss(penalty, batch.mask, mode, **counts)
    kl = KLConfig(weight=0.3, estimator=KL_NAMES[name])  # type: ignore[arg-type]
    batch.assert_equal(theirs, batch.ours(GRPO(aggregate=MODES[mode], kl=kl))[0])  # type: ignore[arg-type]


def test_large_k3_is_not_clipped() -> None:
    """The named difference: above 10 verl's k3 is constant and has no gradient."""
    now, ref = torch.tensor([-9.0], dtype=torch.float64, requires_grad=True), torch.tensor([-1.0], dtype=torch.float64)
    theirs, mine = core.kl_penalty(now, ref, "low_var_kl"), kl_per_token(now, ref, "k3")
    assert theirs.item() == 10.0 and mine.item() > 1000.0
    assert torch.autograd.grad(theirs, now)[0].item() == 0.0 and torch.autograd.grad(mine, now)[0].item() < -1000.0


def test_adaptive_kl_equals_verl() -> None:
    """Our gain is verl's steps over horizon."""
    config = GRPO(kl=KLConfig(weight=0.05, target=0.02))
    theirs, mine = core.AdaptiveKLController(0.05, 0.02, horizon=1.0), Coefficients.from_config(config)
    for seen in (0.001, 0.019, 0.02, 0.021, 0.5, 0.0235, 0.0, 0.04):
        theirs.update(seen, n_steps=KL_GAIN)
        mine.update(config, {"kl/ref": seen})
        assert mine.kl == pytest.approx(theirs.value, rel=1e-12)


# rewards of three prompts; one of equal ones, one with a tie for the best
REWARDS = [[1.0, 0.0, 0.25, 0.5], [0.5, 0.5, 0.5, 0.5], [2.0, 2.0, -1.0, 0.1]]
GROUPED = np.array([group for group, row in enumerate(REWARDS) for _ in row])
FLAT = torch.tensor([reward for row in REWARDS for reward in row], dtype=torch.float64)
PROMPT = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[3], provenance=[0])


def as_tokens(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(rewards, mask), a sample's reward on its last token."""
    mask = torch.tensor([[float(t < n) for t in range(max(lengths))] for n in lengths]).double()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = FLAT
    return rewards, mask


def graded(config: Policy) -> Tensor:
    def sample(reward: float) -> Sample:
        return Sample(tokens=[3], provenance=[int(Provenance.SAMPLED)], sampler_logprobs=[-1.0], reward=reward)

    groups = [Group(prompt=PROMPT, samples=[sample(r) for r in row]) for row in REWARDS]
    found = build_algorithm(config, MAX_TOKENS).advantages(groups)
    return torch.tensor([s.advantage for g in found for s in g.samples], dtype=torch.float64)


RAGGED = [3, 1, 2, 3, 2, 2, 1, 3, 1, 3, 2, 1]
ADVANTAGE_NAMES: dict[str, tuple[str, dict[str, Any], Policy]] = {
    "grpo": ("grpo", {"epsilon": 1e-4}, GRPO()),
    "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}, DrGRPO()),
    "grpo, vectorized": ("grpo_vectorized", {"epsilon": 1e-4}, GRPO()),
    "rloo": ("rloo", {}, RLOO()),
    "rloo, vectorized": ("rloo_vectorized", {}, RLOO()),
    "pass@k": ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": False}}, PassAtK(k=4)),
}


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_advantages_equal_verl(name: str) -> None:
    theirs, settings, config = ADVANTAGE_NAMES[name]
    rewards, mask = as_tokens(RAGGED)
    found, _ = core.get_adv_estimator_fn(theirs)(rewards, mask, index=GROUPED, **settings)
    torch.testing.assert_close(graded(config)[:, None] * mask, found.double(), rtol=1e-6, atol=1e-6)


@pytest.fixture
def no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl adds 1e-8 to a variance, where we add 1e-4 to a deviation: neither, here."""
    monkeypatch.setattr("cohort.algos.advantages.STD_FLOOR", 0.0)


@pytest.mark.usefixtures("no_floor")
def test_reinforce_pp_equals_verl() -> None:
    """Compared with one token per sample, where a mean over tokens is a mean over samples."""
    rewards, mask = as_tokens([1] * len(RAGGED))
    found, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=core.AlgoConfig(gamma=1.0))
    torch.testing.assert_close(graded(ReinforcePP())[:, None], found, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("no_floor")
def test_reinforce_pp_of_verl_weighs_by_tokens() -> None:
    """Shows that the named difference is the only one: our normalisation, with each sample once per token."""
    rewards, mask = as_tokens(RAGGED)
    found, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=core.AlgoConfig(gamma=1.0))
    # One group suffices, because the baseline is over the batch.
    repeated = FLAT.repeat_interleave(torch.tensor(RAGGED))
    by_token = torch.tensor(compute_advantages([repeated.tolist()], "batch", "batch")[0], dtype=torch.float64)
    # Index of each sample's first token.
    first = torch.tensor([0, *RAGGED[:-1]]).cumsum(0)
    mine = by_token[first]
    torch.testing.assert_close(mine[:, None] * mask, found, rtol=1e-6, atol=1e-6)
    assert (graded(ReinforcePP()) - mine).abs().max() > 1e-3


@pytest.mark.usefixtures("no_floor")
def test_reinforce_pp_baseline_equals_verl() -> None:
    """arXiv:2501.03262: subtract the group's mean, then normalise what is left over the batch."""
    rewards, mask = as_tokens([1] * len(RAGGED))
    found, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index=GROUPED)
    torch.testing.assert_close(graded(ReinforcePPBaseline())[:, None], found, rtol=1e-6, atol=1e-6)


def test_kl_in_the_reward_equals_verl() -> None:
    """Compares the first token's return: later ones lack the KL of earlier tokens, ours is one number per sample."""
    batch = Batch(old=0.3)
    scores = torch.zeros_like(batch.old)
    given = torch.tensor([1.0, 0.0, 0.5, 0.3, -1.0, 2.0], dtype=torch.float64)
    scores[torch.arange(ROWS), torch.tensor(LENGTHS) - 1] = given
    rewards = core.compute_rewards(scores, batch.old, batch.ref, 0.1)
    _, returns = core.compute_reinforce_plus_plus_outcome_advantage(
        rewards, batch.mask, config=core.AlgoConfig(gamma=1.0)
    )
    algo = build_algorithm(ReinforcePP(kl=KLConfig(weight=0.1, estimator="k1", place="reward")), MAX_TOKENS)
    mine = [
        algo.compute_returns(  # type: ignore[attr-defined]
            Sample(
                tokens=[3] * n,
                provenance=[int(Provenance.SAMPLED)] * n,
                sampler_logprobs=[-1.0] * n,
                old_logprobs=batch.old[i, :n].tolist(),
                ref_logprobs=batch.ref[i, :n].tolist(),
                reward=given[i].item(),
            )
        )
        for i, n in enumerate(LENGTHS)
    ]
    torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), returns[:, :1], rtol=1e-6, atol=1e-6)


class FixedPolicy:
    """An actor for torchrl's losses, which use the log-probabilities of its distribution and their mask."""

    def __init__(self, batch: Batch) -> None:
        self.in_keys: list[str] = []
        self.mask, self._logprobs = batch.keep, batch.now

    def get_dist(self, *_: Any, **__: Any) -> FixedPolicy:
        return self

    def log_prob(self, _: Tensor) -> Tensor:
        return self._logprobs


def by_torchrl(batch: Batch, name: str, **settings: Any) -> Any:
    loss = getattr(llm, name)(FixedPolicy(batch), entropy_bonus=False, **settings)
    data = TensorDict(
        {
            "advantage": batch.advantages.unsqueeze(-1).clone(),
            "tokens": {"full": torch.zeros(ROWS, LONGEST, dtype=torch.int64)},
            "log_probs": {"full": batch.old},
            "next": {"ref_log_probs": {"full": batch.ref}},
        },
        batch_size=[ROWS],
    )
    return loss(data)


TORCHRL_MODES = {"token_mean": "token", "prompt_mean": "sequence"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", TORCHRL_MODES)
@pytest.mark.parametrize("name", ["GRPOLoss", "DAPO"])
def test_loss_and_gradient_equal_torchrl(name: str, mode: str, case: str) -> None:
    """Its "prompt_mean" is the mean over samples; it counts masked rows, as ours does."""
    batch = Batch(**CASES[case])
    bounds = (0.1, 0.15) if name == "GRPOLoss" else (0.2, 0.28)
    kind = GRPO(aggregate=TORCHRL_MODES[mode], **CLIP) if name == "GRPOLoss" else DAPO(aggregate=TORCHRL_MODES[mode])  # type: ignore[arg-type]
    theirs = by_torchrl(batch, name, clip_epsilon=bounds, aggregation=mode).loss_objective
    batch.assert_equal(theirs.squeeze(), batch.ours(kind)[0])


@pytest.mark.parametrize("padded", [False, True])
def test_kl_equals_torchrl(padded: bool) -> None:
    """k3 to the reference and to the sampler, which here is the old policy; divided by our count where they pad."""
    batch = Batch(old=0.4, lengths=None if padded else [LONGEST] * ROWS)
    batch.sampler = batch.old
    positions = ROWS * LONGEST / batch.mask.sum()
    assert (positions > 1.1) == padded
    for name, kl in (("ref", KLConfig(weight=0.2)), ("inference", KLConfig(weight=0.2, to="sampler"))):
        out = by_torchrl(batch, "GRPOLoss", clip_epsilon=(0.1, 0.15), **{f"kl_to_{name}_coeff": 0.2})
        theirs = out.loss_objective.squeeze() + positions * getattr(out, f"loss_kl_to_{name}")
        batch.assert_equal(theirs, batch.ours(GRPO(aggregate="token", kl=kl, **CLIP))[0])


@pytest.mark.parametrize("bounds", [(0.9999, 1e6), (0.9999, 0.3)])
def test_cispo_of_torchrl_is_a_clipped_ratio(bounds: tuple[float, float]) -> None:
    """The named difference: gradients are equal while nothing is clipped; a clipped token keeps one only in ours."""
    batch = Batch(old=0.5)
    theirs = by_torchrl(batch, "CISPOLoss", clip_epsilon=bounds).loss_objective.squeeze()
    mine, metrics = batch.ours(CISPO(clip_high=1.0 + bounds[1]))
    their_grad, my_grad = (torch.autograd.grad(loss, batch.now)[0] for loss in (theirs, mine))
    held = ((batch.now - batch.old).exp() > 1.0 + bounds[1]) & batch.keep
    torch.testing.assert_close(my_grad[~held], their_grad[~held], rtol=1e-6, atol=1e-8)
    assert (metrics["clip/high"] > 0.0) == bool(held.any()) == (bounds[1] < 1.0)
    assert not their_grad[held].any()
    assert bool((my_grad[held & (batch.advantages != 0.0)] != 0.0).all())


@pytest.mark.usefixtures("no_floor")
def test_advantages_equal_torchrl() -> None:
    """Its deviation has no constant, but a lower bound of 1e-6."""
    transform = llm.MCAdvantage(grpo_size=4, prompt_key="group", trajectory_return="sum")
    found = []
    for number, row in enumerate(REWARDS):
        for reward in row:
            step = {"reward": torch.tensor([[reward]], dtype=torch.float64), "done": torch.ones(1, 1, dtype=torch.bool)}
            out = transform.inv(TensorDict({"group": torch.tensor([number]), "next": step}, batch_size=[1]))
        found.append(out["advantage"].flatten())
    torch.testing.assert_close(graded(GRPO()), torch.cat(found), rtol=1e-6, atol=1e-6)
