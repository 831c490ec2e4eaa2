"""The optimizer against AdamW written out, the schedule by hand, clipping, and updates without a usable gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cohort.algos.algorithm import build_algorithm
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.errors import RunError, TrainingStopped
from cohort.learner import local
from cohort.learner.local import LocalLearner
from cohort.learner.optim import WholeOptimizer, global_norm, learning_rate
from cohort.models.functions import linear
from tests.helpers.decoders_and_groups import pack_groups, random_groups, small_decoder

SETTINGS = OptimConfig(lr=0.1, beta1=0.7, beta2=0.8, eps=1e-2, weight_decay=0.3)
ALGO = build_algorithm(GRPO(), 16)


class MatrixAndVector(nn.Module):
    """A matrix, which decays, and a vector, which does not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(4, generator=generator).to(dtype))


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Returns the random gradients of step number `step`, by parameter name."""
    generator = torch.Generator().manual_seed(10 + step)
    return {"matrix": torch.randn(3, 2, generator=generator), "vector": torch.randn(4, generator=generator)}


def advance(module: MatrixAndVector, optimizer: WholeOptimizer, step: int, lr: float, scale: float) -> None:
    """Makes one optimizer step with the gradients of step number `step`."""
    optimizer.zero_grad()
    for name, g in gradients(step).items():
        p = getattr(module, name)
        p.grad = g.to(p.dtype)
    optimizer.collect_grads()
    optimizer.step(lr, scale)


def by_hand(steps: list[tuple[float, float]]) -> dict[str, torch.Tensor]:
    """Returns the parameters after these steps (learning rate, scale), by AdamW on plain tensors in float64."""
    s, start = SETTINGS, MatrixAndVector(torch.float64)
    p = {n: q.detach().clone() for n, q in start.named_parameters()}
    m, v = ({n: torch.zeros_like(q) for n, q in p.items()} for _ in range(2))
    for t, (lr, scale) in enumerate(steps, start=1):
        for name, g in gradients(t - 1).items():
            g = g.double() * scale
            if name == "matrix":
                p[name] *= 1 - lr * s.weight_decay
            m[name] = s.beta1 * m[name] + (1 - s.beta1) * g
            v[name] = s.beta2 * v[name] + (1 - s.beta2) * g * g
            centred = (v[name] / (1 - s.beta2**t)).sqrt() + s.eps
            p[name] -= lr * m[name] / (1 - s.beta1**t) / centred
    return p


# Each step is (learning rate, scale of the gradients).
STEPS = [(0.1, 1.0), (0.05, 0.5), (0.2, 1.0)]


@pytest.mark.parametrize("restart", [False, True])
def test_updates_equal_adamw_written_out(restart):
    module = MatrixAndVector(torch.float64)
    optimizer = WholeOptimizer(module, SETTINGS)
    for step, (lr, scale) in enumerate(STEPS):
        if restart and step == 2:
            saved = {k: entry.read().clone() for k, entry in optimizer.state().items()}
            optimizer = WholeOptimizer(module, SETTINGS)
            optimizer.load_state(saved, num_steps=2)
        advance(module, optimizer, step, lr, scale)
    assert optimizer.num_steps == 3
    for name, expected in by_hand(STEPS).items():
        torch.testing.assert_close(getattr(module, name).detach(), expected, rtol=0, atol=1e-12)


def test_a_bf16_parameter_follows_its_fp32_master():
    module = MatrixAndVector(torch.bfloat16)
    optimizer = WholeOptimizer(module, SETTINGS)
    before = {n: m.detach().clone() for n, m in optimizer.masters.items()}
    for step, (lr, scale) in enumerate(STEPS):
        advance(module, optimizer, step, lr * 1e-3, scale)
    for name, p in module.named_parameters():
        master = optimizer.masters[name]
        assert master.dtype == torch.float32 and not torch.equal(master, before[name])
        assert torch.equal(p, master.to(torch.bfloat16))
        # The master has more digits than the parameter.
        assert not torch.equal(p.float(), master)
    saved = {k: entry.read().clone() for k, entry in optimizer.state().items()}
    other = MatrixAndVector(torch.bfloat16)
    resumed = WholeOptimizer(other, SETTINGS)
    other.load_state_dict(module.state_dict())
    resumed.load_state(saved, num_steps=3)
    advance(module, optimizer, 3, 1e-4, 1.0)
    advance(other, resumed, 3, 1e-4, 1.0)
    assert all(torch.equal(resumed.masters[n], m) for n, m in optimizer.masters.items())


def test_microbatches_of_a_bf16_parameter_add_up_in_fp32():
    module = MatrixAndVector(torch.bfloat16)
    optimizer = WholeOptimizer(module, SETTINGS)
    # Added in bf16, the second and third value would vanish.
    for value in (1.0, 2.0**-10, 2.0**-10):
        module.vector.grad = torch.full((4,), value, dtype=torch.bfloat16)
        optimizer.collect_grads()
        assert module.vector.grad is None
    assert optimizer.masters["vector"].grad.tolist() == [1.0 + 2.0**-9] * 4


def test_collectors_add_gradients_of_low_precision_matrices_to_the_master():
    """The sum is exact (256 + 1 is 256 in bf16), and the parameter itself has no gradient."""
    module = MatrixAndVector(torch.bfloat16)
    optimizer = WholeOptimizer(module, SETTINGS)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    for value in (256.0, 1.0):
        collect = optimizer.collectors()["matrix"]
        linear(x, module.matrix, collect=collect).backward(torch.full((1, 3), value, dtype=torch.bfloat16))
        assert module.matrix.grad is None
        optimizer.collect_grads()
    assert torch.equal(optimizer.masters["matrix"].grad, torch.full((3, 2), 257.0))
    linear(x, module.matrix).backward(torch.ones(1, 3, dtype=torch.bfloat16))  # outside, as usual
    assert module.matrix.grad is not None


def test_gradients_of_fp32_matrices_are_autograds():
    module = MatrixAndVector(torch.float32)
    assert WholeOptimizer(module, SETTINGS).collectors() == {}
    linear(torch.ones(1, 2), module.matrix).sum().backward()
    assert torch.equal(module.matrix.grad, torch.ones(3, 2))


def test_a_checkpoint_without_a_moment_is_refused():
    module = MatrixAndVector(torch.float32)
    optimizer = WholeOptimizer(module, SETTINGS)
    advance(module, optimizer, 0, 0.1, 1.0)
    saved = {k: entry.read() for k, entry in optimizer.state().items()}
    del saved["exp_avg/vector"]
    with pytest.raises(RunError, match="exp_avg/vector"):
        WholeOptimizer(MatrixAndVector(torch.float32), SETTINGS).load_state(saved, num_steps=1)


def test_schedules_by_hand():
    linear = OptimConfig(lr=2.0, warmup=2, schedule="linear", lr_floor=0.5)
    assert [learning_rate(linear, i, 6) for i in range(8)] == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    cosine = OptimConfig(lr=2.0, schedule="cosine", lr_floor=0.1)
    # halfway the cosine is 0: floor + (1 - floor) / 2 = 0.55 of lr; a quarter: 0.1 + 0.9 (1 + sqrt 0.5) / 2
    quarter = 2.0 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert [learning_rate(cosine, i, 4) for i in (0, 1, 2, 4)] == pytest.approx([2.0, quarter, 1.1, 0.2])
    constant = OptimConfig(lr=2.0, warmup=4)
    assert [learning_rate(constant, i, 6) for i in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    # The run ends before the warm-up does: the rate is still rising.
    assert learning_rate(OptimConfig(lr=2.0, warmup=9), 2, 3) == pytest.approx(2 / 3)


def test_the_norm_is_over_all_entries():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])]
    assert global_norm(tensors) == pytest.approx(13.0)
    assert global_norm([]) == 0.0


def learner_for(decoder=None, **optim) -> LocalLearner:
    config = OptimConfig(**{"lr": 1e-3, **optim})
    return LocalLearner(decoder or small_decoder(), LearnerConfig(), config, num_updates=8)


@pytest.mark.parametrize("clip", [0.0, 1e9])
def test_a_gradient_below_the_limit_is_left_alone(clip):
    learner = learner_for(clip_norm=clip)
    learner.forward_backward(pack_groups(random_groups(), 1000).minibatches[0], ALGO)
    before = [g.clone() for g in learner.optimizer.grads()]
    metrics = learner.optim_step()
    assert metrics["updates/clipped"] == 0.0 and metrics["grad_norm"] == pytest.approx(global_norm(before))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.optimizer.grads(), strict=True))


def damaged_batch():
    """Returns a batch whose gradient is not finite."""
    groups = random_groups()
    groups[0].samples[0].advantage = float("nan")
    return make_batch(groups)


def test_bad_updates_must_come_in_a_row_to_stop_the_run(monkeypatch):
    monkeypatch.setattr(local, "MAX_BAD_UPDATES", 2)
    learner, good = learner_for(), make_batch(random_groups())
    for _ in range(3):
        assert learner.update(damaged_batch(), ALGO).metrics["updates/bad"] == 1.0
        assert learner.num_bad == 1
        assert learner.update(good, ALGO).metrics["updates/done"] == 1.0
        assert learner.num_bad == 0
    learner.update(damaged_batch(), ALGO)
    with pytest.raises(TrainingStopped, match="2 updates in a row"):
        learner.update(damaged_batch(), ALGO)


def test_updates_without_a_signal_do_not_hide_bad_ones(monkeypatch):
    monkeypatch.setattr(local, "MAX_BAD_UPDATES", 2)
    learner, empty = learner_for(), random_groups()
    for sample in (s for g in empty for s in g.samples):
        sample.advantage = 0.0
    learner.update(damaged_batch(), ALGO)
    assert learner.update(make_batch(empty), ALGO).metrics["updates/no_signal"] == 1.0
    with pytest.raises(TrainingStopped, match=r"2 updates in a row had non-finite gradients .* were skipped"):
        learner.update(damaged_batch(), ALGO)


def test_updates_that_move_nothing_advance_the_schedule():
    """Otherwise a run with dead steps would end in the middle of its schedule."""
    learner = learner_for(lr=1.0, warmup=8)
    dead = random_groups()
    for s in (s for g in dead for s in g.samples):
        s.advantage = 0.0
    batches = (make_batch(dead), damaged_batch(), make_batch(random_groups()))
    rates = [learner.update(batch, ALGO).metrics["lr"] for batch in batches]
    assert rates == [1 / 8, 2 / 8, 3 / 8]
    assert (learner.update_index, learner.optimizer.num_steps) == (3, 1)
