"""An algorithm of a user's own: its loss is checked, and it shares everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.algos.segments import segment_mean
from cohort.algos.surrogates import Surrogate
from cohort.config.algos import ALGOS, GRPO, PassAtK, Policy, algorithm
from cohort.errors import ConfigError, UserCodeError
from tests.unit.algos.test_families import evaluate_loss, inputs


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that registers a class with this policy loss for one test, and returns it."""

    def register(loss: Any, base: type = Policy, **attributes: Any) -> Any:
        before = dict(ALGOS)
        methods = {} if loss is None else {"policy_loss": loss}
        made = algorithm("own_loss")(type("OwnLoss", (base,), {"__module__": __name__, **methods, **attributes}))
        monkeypatch.setattr(ALGOS, "own_loss", made, raising=False)
        request.append(lambda: [ALGOS.pop(name) for name in set(ALGOS) - set(before)])
        return made

    request: list[Any] = []
    yield register
    for undo in request:
        undo()


def test_bare_terms_and_a_surrogate_give_the_same(own: Any) -> None:
    bare = own(lambda self, tokens: -tokens.ratio * tokens.advantages)
    value, slope, _ = evaluate_loss(bare(), inputs([1.0, 2.0], [1.0, 1.0]))
    assert value == pytest.approx(-3.0) and slope == pytest.approx([-1.0, -2.0])
    assert build_algorithm(bare(), 8).per_token
    ALGOS.pop("own_loss")
    full = own(lambda self, tokens: Surrogate(terms=-tokens.ratio * tokens.advantages, ratio=tokens.ratio.detach()))
    assert evaluate_loss(full(), inputs([1.0, 2.0], [1.0, 1.0]))[0] == pytest.approx(-3.0)


def test_a_term_may_depend_on_other_tokens_of_its_sample(own: Any) -> None:
    cls = own(
        lambda self, tokens: -segment_mean(tokens.log_ratio, tokens.segments).exp() * tokens.advantages,
        per_token=False,
    )
    assert not build_algorithm(cls(), 8).per_token


def test_without_a_loss_of_its_own_a_class_has_that_of_the_one_it_inherits(own: Any) -> None:
    cls = own(None, base=GRPO, __annotations__={"clip_high": float}, clip_high=0.5)
    x = inputs([1.0, 1.4, 1.6], [1.0, 1.0, 1.0])
    assert evaluate_loss(cls(), x)[0] == evaluate_loss(GRPO(clip_high=0.5), x)[0]
    ALGOS.pop("own_loss")
    best_of_k = own(None, base=PassAtK)
    assert build_algorithm(best_of_k(k=2), 8).advantage_description == "what each adds to the best of 2"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda self, tokens: (-tokens.ratio * tokens.advantages).mean(), r"returned a tensor of shape \[\]; it must"),
        (
            lambda self, tokens: None,
            r"returned None \(is `return` missing\? .*algorithm.py, line \d+\); it must return one loss term per token",
        ),
        (lambda self, tokens: tokens.ratio.to(torch.complex64), "returned terms of type complex64; they must be real"),
        (lambda self, tokens: tokens.ratio.long(), "returned terms of type int64; they must be real"),
        (
            lambda self, tokens: tokens.advantages * 1.0,
            "returned terms without a gradient, so nothing would",
        ),
    ],
)
def test_a_result_that_is_no_loss_is_refused(own: Any, loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"the method policy_loss of OwnLoss {message}"):
        evaluate_loss(own(loss)(), inputs([1.0, 2.0], [1.0, 1.0]))


def raise_no_memory(self: Any, tokens: Any) -> Any:
    raise torch.OutOfMemoryError("too many tokens at once")


def raise_own_bug(self: Any, tokens: Any) -> Any:
    return tokens.advantage


def test_an_exception_is_the_users_and_lack_of_memory_is_the_learners(own: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        evaluate_loss(own(raise_no_memory)(), inputs([1.0], [1.0]))
    ALGOS.pop("own_loss")
    with pytest.raises(UserCodeError) as caught:
        evaluate_loss(own(raise_own_bug)(), inputs([1.0], [1.0]))
    assert "the method policy_loss of OwnLoss raised AttributeError" in str(caught.value)
    assert caught.value.place[1].strip() == "return tokens.advantage"
