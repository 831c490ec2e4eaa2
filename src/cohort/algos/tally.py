"""Metrics that add up over microbatches, minibatches and ranks, in any order, to the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.world import World

_INFINITY = float("inf")


class Tally:
    """Named means, sums, minima and maxima, stored in a form that can be merged: sums, counts and extremes.

    Values stay 0-d float64 tensors on their device until `to_metrics`, so that counting never waits for a GPU.

    >>> a = Tally().add_mean("reward", torch.tensor([1.0, 0.0])).add_maximum("ratio/max", torch.tensor([1.1]))
    >>> b = Tally().add_mean("reward", torch.tensor([1.0])).add_maximum("ratio/max", torch.tensor([1.3]))
    >>> {name: round(value, 4) for name, value in a.merge(b).to_metrics().items()}
    {'ratio/max': 1.3, 'reward': 0.6667}
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (sum, count)
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor | float) -> Tally:
        """Lets every entry of `values` count in the mean called `name`. Changes this tally and returns it."""
        values = torch.as_tensor(values)
        # `new_full`, because `torch.tensor` on a GPU would wait for it.
        count = values.new_full((), float(values.numel()), dtype=torch.float64)
        old_sum, old_count = self._means.get(name, (0.0, 0.0))
        self._means[name] = (_sum(values) + old_sum, count + old_count)
        return self

    def add_sum(self, name: str, values: Tensor | float) -> Tally:
        """Adds every entry of `values` to the sum called `name`. Changes this tally and returns it."""
        self._sums[name] = _sum(torch.as_tensor(values)) + self._sums.get(name, 0.0)
        return self

    def add_maximum(self, name: str, values: Tensor | float) -> Tally:
        """Raises the maximum called `name` to the largest entry of `values`, if that is larger.

        An empty tensor leaves it unchanged. Changes this tally and returns it.
        """
        self._maxima[name] = _larger(self._maxima.get(name), _max(values))
        return self

    def add_minimum(self, name: str, values: Tensor | float) -> Tally:
        """Lowers the minimum called `name` to the smallest entry of `values`, if that is smaller.

        An empty tensor leaves it unchanged. Changes this tally and returns it.
        """
        self._minima[name] = -_larger(_negate(self._minima.get(name)), _max(-torch.as_tensor(values)))
        return self

    def merge(self, other: Tally) -> Tally:
        """Adds the values of another tally to this one, as if they had been counted here.

        Sums and means add up; the larger maximum and the smaller minimum stay. Changes this tally and returns it;
        `other` stays unchanged.
        """
        for name, (total, count) in other._means.items():
            old_sum, old_count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (total + old_sum, count + old_count)
        for name, value in other._sums.items():
            self._sums[name] = value + self._sums.get(name, 0.0)
        for name, value in other._maxima.items():
            self._maxima[name] = _larger(self._maxima.get(name), value)
        for name, value in other._minima.items():
            self._minima[name] = -_larger(_negate(self._minima.get(name)), -value)
        return self

    def merge_ranks(self, world: World) -> Tally:
        """Returns one tally with the values of all ranks: a new one, or this one where there is only one rank.

        Every rank must call it. Ranks need not have counted the same names. This tally stays unchanged.
        """
        if world.size == 1:
            return self
        whole = Tally()
        for names, sums, maxima in world.gather(self._to_lists()):
            values = (torch.tensor(x, dtype=torch.float64) for x in (sums, maxima))
            whole.merge(_make_empty_tally(names).with_values(*values))
        return whole

    def _to_lists(self) -> tuple[list[list[str]], list[float], list[float]]:
        """Returns (names, sums, maxima) as lists that can be sent to other ranks.

        `names` are four sorted lists: those of means, sums, maxima and minima. The numbers are those of `state`.
        """
        sums, maxima = self.state()
        names = [sorted(table) for table in (self._means, self._sums, self._maxima, self._minima)]
        return names, sums.tolist(), maxima.tolist()

    def state(self) -> tuple[Tensor, Tensor]:
        """Returns all values as two float64 vectors (sums, maxima), without the names, in name order within each kind.

        `sums` has a sum and a count per mean, then the sums. `maxima` has the maxima, then the negated minima.
        """
        sums = [part for name in sorted(self._means) for part in self._means[name]]
        sums += [self._sums[name] for name in sorted(self._sums)]
        maxima = [self._maxima[name] for name in sorted(self._maxima)]
        maxima += [-self._minima[name] for name in sorted(self._minima)]
        return _stack(sums), _stack(maxima)

    def with_values(self, sums: Tensor, maxima: Tensor) -> Tally:
        """Returns a new tally with the names of this one and these values, ordered as in the vectors of `state`."""
        new = Tally()
        num_means = len(self._means)
        num_maxima = len(self._maxima)
        for i, name in enumerate(sorted(self._means)):
            new._means[name] = (sums[2 * i], sums[2 * i + 1])
        for i, name in enumerate(sorted(self._sums)):
            new._sums[name] = sums[2 * num_means + i]
        for i, name in enumerate(sorted(self._maxima)):
            new._maxima[name] = maxima[i]
        for i, name in enumerate(sorted(self._minima)):
            new._minima[name] = -maxima[num_maxima + i]
        return new

    def to_metrics(self) -> dict[str, float]:
        """Returns one number per name, in name order. A mean, minimum or maximum over no entries is left out.

        A sum over no entries is 0. Waits for the GPU if values are there.
        """
        # Two vectors, so that values on a GPU take two transfers in all.
        sums, maxima = (vector.tolist() for vector in self.state())
        metrics: dict[str, float] = {}
        for i, name in enumerate(sorted(self._means)):
            if sums[2 * i + 1]:
                metrics[name] = sums[2 * i] / sums[2 * i + 1]
        for name, value in zip(sorted(self._sums), sums[2 * len(self._means) :], strict=True):
            metrics[name] = value
        signs = [(name, 1.0) for name in sorted(self._maxima)]
        signs += [(name, -1.0) for name in sorted(self._minima)]
        for (name, sign), value in zip(signs, maxima, strict=True):
            # Minus infinity is the maximum of no entries.
            if value != -_INFINITY:
                metrics[name] = sign * value
        return dict(sorted(metrics.items()))


def _make_empty_tally(names: list[list[str]]) -> Tally:
    """Returns a tally that has these names, with zeros as placeholders for values.

    `names` are four lists: those of means, sums, maxima and minima.
    """
    tally, zero = Tally(), torch.zeros((), dtype=torch.float64)
    means, sums, maxima, minima = names
    tally._means = dict.fromkeys(means, (zero, zero))
    tally._sums, tally._maxima, tally._minima = (dict.fromkeys(n, zero) for n in (sums, maxima, minima))
    return tally


def _sum(values: Tensor) -> Tensor:
    """Returns the sum of all entries in float64 (0-d), without gradient."""
    return values.detach().sum(dtype=torch.float64)


def _max(values: Tensor | float) -> Tensor:
    """Returns the largest entry in float64 (0-d), without gradient.

    It is minus infinity for an empty tensor, so that every microbatch has every name.
    """
    values = torch.as_tensor(values).detach().double()
    return values.max() if values.numel() else values.new_full((), -_INFINITY)


def _larger(a: Tensor | None, b: Tensor) -> Tensor:
    """Returns the larger of two values, and `b` where `a` is None."""
    return b if a is None else torch.maximum(a, b)


def _negate(a: Tensor | None) -> Tensor | None:
    """Returns -a, and None for None."""
    return None if a is None else -a


def _stack(values: list[Tensor]) -> Tensor:
    """Returns 0-d tensors as one vector, on the GPU if any of them is there. An empty list gives an empty vector."""
    if not values:
        return torch.zeros(0, dtype=torch.float64)
    device = next((v.device for v in values if v.device.type != "cpu"), values[0].device)
    return torch.stack([v.to(device) for v in values])
