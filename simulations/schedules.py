"""Schedules: when the layers of a composite method are written, and how old that leaves them.

A composite replays nothing, so its ETTR is silent about what each layer had learnt since its own last copy.
`copies.py` charges it.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from simulations.costs import MethodCosts

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each layer is written, repeated for ever.

    Attributes:
        weights: part of all elements of each layer; they add up to 1.
        periods: steps after which a layer's writes begin anew.
        writes: layer -> steps of its writes in [0, period), increasing, at least one.
        delay_steps: steps until a version counts.
        together: all layers are shifted alike (they come from one recorded run), else each by itself.
    """

    weights: tuple[float, ...]
    periods: tuple[int, ...]
    writes: tuple[tuple[int, ...], ...]
    delay_steps: int = 0
    together: bool = False

    @property
    def per_step(self) -> float:
        """Part of the full state that is written at a step."""
        rows = zip(self.weights, self.periods, self.writes, strict=True)
        return sum(weight * len(writes) / period for weight, period, writes in rows)

    @property
    def kinds(self) -> tuple[tuple[float, int, tuple[int, ...]], ...]:
        """Weight, period and writes of all layers that are written alike."""
        weights: dict[tuple[int, tuple[int, ...]], float] = {}
        for weight, kind in zip(self.weights, zip(self.periods, self.writes, strict=True), strict=True):
            weights[kind] = weights.get(kind, 0.0) + weight
        return tuple((weight, period, writes) for (period, writes), weight in weights.items())

    def ages(self, steps: Floats, shifts: Floats) -> Floats:
        """Steps since the newest version.

        Args:
            steps: shape (n,), steps run at each failure.
            shifts: shape (layers,), in [0, 1), where in its period each layer begins.

        Returns:
            shape (layers, n).
        """
        rows = []
        for period, writes, shift in zip(self.periods, self.writes, shifts, strict=True):
            place = np.mod(steps - self.delay_steps + np.floor(shift * period), period)
            known = np.array([writes[-1] - period, *writes], dtype=np.float64)
            rows.append(place - known[np.searchsorted(known, place, side="right") - 1] + self.delay_steps)
        return np.array(rows)


def schedule_of(cost: MethodCosts, t_iter_s: float, factor: float = 1.0) -> Schedule | None:
    """The schedule of measured intervals, all stretched by `factor` up to s_max; None for an exact method."""
    if not cost.layers:
        return None
    total = sum(layer.numel for layer in cost.layers)
    limit = cost.s_max_steps or float("inf")
    return Schedule(
        weights=tuple(layer.numel / total for layer in cost.layers),
        periods=tuple(max(1, round(min(limit, layer.interval_steps * factor))) for layer in cost.layers),
        writes=((0,),) * len(cost.layers),
        delay_steps=round(cost.commit_delay_s / (t_iter_s + cost.stall_s)),
    )


@lru_cache(maxsize=4096)
def age_survival(period: int, writes: tuple[int, ...], delay_steps: int) -> Floats:
    """P(age >= k) for k = 1, 2, ... over all places in the period."""
    known = np.array([writes[-1] - period, *writes])
    places = np.arange(period)
    ages = places - known[np.searchsorted(known, places, side="right") - 1] + delay_steps
    at_least = np.cumsum(np.bincount(ages)[::-1])[::-1]
    survival: Floats = at_least[1:] / period
    return survival


def schedule_of_writes(
    written: npt.NDArray[np.bool_], numel: tuple[int, ...], delay_steps: int = 1
) -> Schedule:
    """The schedule of a recorded or replayed run, which begins with all layers saved and repeats for ever.

    Args:
        written: shape (steps, layers), after the warm-up.
        numel: elements of each layer.
        delay_steps: steps until a version counts.
    """
    period = len(written) + 1
    return Schedule(
        weights=tuple(n / sum(numel) for n in numel),
        periods=(period,) * len(numel),
        writes=tuple((0, *(np.flatnonzero(column) + 1).tolist()) for column in written.T),
        delay_steps=delay_steps,
        together=True,
    )
