"""Metrics that add up: over microbatches, minibatches and ranks, in any order, to the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.world import World

_INFINITY = float("inf")


class Tally:
    """Named means, sums, minima and maxima, kept as what can be merged: sums, counts and extremes.

    Values stay 0-d float64 tensors on their device until `to_metrics`: counting never waits for a GPU.

    >>> a = Tally().mean("reward", torch.tensor([1.0, 0.0])).maximum("ratio/max", torch.tensor([1.1]))
    >>> b = Tally().mean("reward", torch.tensor([1.0])).maximum("ratio/max", torch.tensor([1.3]))
    >>> {name: round(value, 4) for name, value in a.merge(b).to_metrics().items()}
    {'ratio/max': 1.3, 'reward': 0.6667}
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (sum, count)
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor | float) -> Tally:
        """Count every entry of `values` in the mean `name`."""
        values = torch.as_tensor(values)
        count = values.new_full((), float(values.numel()), dtype=torch.float64)  # `torch.tensor` would wait for a GPU
        old_sum, old_count = self._means.get(name, (0.0, 0.0))
        self._means[name] = (_sum(values) + old_sum, count + old_count)
        return self

    def sum(self, name: str, values: Tensor | float) -> Tally:
        """Add every entry of `values` to the sum `name`."""
        self._sums[name] = _sum(torch.as_tensor(values)) + self._sums.get(name, 0.0)
        return self

    def maximum(self, name: str, values: Tensor | float) -> Tally:
        """Raise the maximum `name` to the largest entry of `values`, if there is one."""
        self._maxima[name] = _larger(self._maxima.get(name), _max(values))
        return self

    def minimum(self, name: str, values: Tensor | float) -> Tally:
        """Lower the minimum `name` to the smallest entry of `values`, if there is one."""
        self._minima[name] = -_larger(_negated(self._minima.get(name)), _max(-torch.as_tensor(values)))
        return self

    def merge(self, other: Tally) -> Tally:
        """Take another tally's counts into this one. Returns itself."""
        for name, (total, count) in other._means.items():
            old_sum, old_count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (total + old_sum, count + old_count)
        for name, value in other._sums.items():
            self._sums[name] = value + self._sums.get(name, 0.0)
        for name, value in other._maxima.items():
            self._maxima[name] = _larger(self._maxima.get(name), value)
        for name, value in other._minima.items():
            self._minima[name] = -_larger(_negated(self._minima.get(name)), -value)
        return self

    def over(self, world: World) -> Tally:
        """The tally over all ranks. A rank may have counted other names than this one, or none."""
        if world.size == 1:
            return self
        whole = Tally()
        for names, sums, maxima in world.gather(self._plain()):
            whole.merge(_named(names).with_state(*(torch.tensor(x, dtype=torch.float64) for x in (sums, maxima))))
        return whole

    def _plain(self) -> tuple[list[list[str]], list[float], list[float]]:
        """Names (of means, sums, maxima and minima) and values, to be sent."""
        sums, maxima = self.state()
        names = [sorted(table) for table in (self._means, self._sums, self._maxima, self._minima)]
        return names, sums.tolist(), maxima.tolist()

    def state(self) -> tuple[Tensor, Tensor]:
        """(sums, maxima): two flat float64 vectors in name order; minima are negated maxima."""
        sums = [part for name in sorted(self._means) for part in self._means[name]]
        sums += [self._sums[name] for name in sorted(self._sums)]
        maxima = [self._maxima[name] for name in sorted(self._maxima)]
        maxima += [-self._minima[name] for name in sorted(self._minima)]
        return _stack(sums), _stack(maxima)

    def with_state(self, sums: Tensor, maxima: Tensor) -> Tally:
        """A tally with this one's names and the values of a `state`."""
        new, num_means, num_maxima = Tally(), len(self._means), len(self._maxima)
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
        """Name -> number, in name order. A mean, minimum or maximum of nothing is left out."""
        sums, maxima = (vector.tolist() for vector in self.state())  # one transfer each
        metrics: dict[str, float] = {}
        for i, name in enumerate(sorted(self._means)):
            if sums[2 * i + 1]:
                metrics[name] = sums[2 * i] / sums[2 * i + 1]
        for name, value in zip(sorted(self._sums), sums[2 * len(self._means) :], strict=True):
            metrics[name] = value
        signs = [(name, 1.0) for name in sorted(self._maxima)]
        signs += [(name, -1.0) for name in sorted(self._minima)]
        for (name, sign), value in zip(signs, maxima, strict=True):
            if value != -_INFINITY:
                metrics[name] = sign * value
        return dict(sorted(metrics.items()))


def _named(names: list[list[str]]) -> Tally:
    """A tally with these names and no values yet."""
    tally, zero = Tally(), torch.zeros((), dtype=torch.float64)
    means, sums, maxima, minima = names
    tally._means = dict.fromkeys(means, (zero, zero))
    tally._sums, tally._maxima, tally._minima = (dict.fromkeys(n, zero) for n in (sums, maxima, minima))
    return tally


def _sum(values: Tensor) -> Tensor:
    return values.detach().sum(dtype=torch.float64)


def _max(values: Tensor | float) -> Tensor:
    """Largest entry; minus infinity of nothing, so that every microbatch has every name."""
    values = torch.as_tensor(values).detach().double()
    return values.max() if values.numel() else values.new_full((), -_INFINITY)


def _larger(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.maximum(a, b)


def _negated(a: Tensor | None) -> Tensor | None:
    return None if a is None else -a


def _stack(values: list[Tensor]) -> Tensor:
    """Numbers counted on the host join those of the device."""
    if not values:
        return torch.zeros(0, dtype=torch.float64)
    device = next((v.device for v in values if v.device.type != "cpu"), values[0].device)
    return torch.stack([v.to(device) for v in values])
