"""From samples to the figures of `saving.json`. Pure: no clock, no files.

tracking_step_ratio = 1 + (hook_s + after_s - stall_s - collective_s + shortest collective) / step_s, where a
later rank's lateness inside the all-reduce does not count: it would be waited for at the next collective
anyway. overhead_ratio = 1 + (stall_s of all ranks + CPU seconds of all our threads) / (train_s x ranks).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.measure.arms import Samples

Array = npt.NDArray[np.float64]
_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95 % interval."""

    value: float
    low: float
    high: float


def tracking_ms(ranks: Sequence[Samples]) -> dict[str, float]:
    """Milliseconds a step that measuring and deciding take, mean over ranks: hooks, all-reduce, the rest."""
    collective_s = [np.asarray(rank.collective_s) for rank in ranks]
    rest_s = [
        np.asarray(rank.after_s) - np.asarray(rank.stall_s) - collective
        for rank, collective in zip(ranks, collective_s, strict=True)
    ]
    parts = {
        "hooks": np.mean([rank.hook_s for rank in ranks]),
        "all_reduce": np.min(collective_s, axis=0).mean(),
        "rest": np.mean(rest_s),
    }
    return {name: 1000 * float(seconds) for name, seconds in parts.items()}


def tracking_step_ratio(ranks: Sequence[Samples]) -> float:
    """What measuring and deciding add to a step, without any copy."""
    return 1 + sum(tracking_ms(ranks).values()) / 1000 / mean_step_s(ranks)


def overhead_ratio(ranks: Sequence[Samples]) -> float:
    """What saving adds: visible stall plus the processor time of our threads, as if no core were idle."""
    stall_s = sum(sum(rank.stall_s) for rank in ranks)
    cpu_s = sum(rank.thread_cpu_s for rank in ranks)
    train_s = float(np.mean([sum(rank.train_s) for rank in ranks]))
    return 1 + (stall_s + cpu_s) / (train_s * len(ranks))


def ab_ratio(
    saving: Sequence[Samples], stock: Sequence[Samples], chosen: Sequence[int] | None = None
) -> Ratio:
    """Step time of one arm over that of another: medians of paired steps, by bootstrap.

    Args:
        saving: samples of each rank.
        stock: those of the other arm.
        chosen: places of the steps that count; None for all.
    """
    picked = slice(None) if chosen is None else list(chosen)
    ours, theirs = step_s(saving)[picked], step_s(stock)[picked]
    generator = np.random.default_rng(1)
    picks = generator.integers(0, len(ours), size=(_RESAMPLES, len(ours)))
    ratios = np.median(ours[picks], axis=1) / np.median(theirs[picks], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(np.median(ours) / np.median(theirs)), float(low), float(high))


def step_s(ranks: Sequence[Samples]) -> Array:
    """Seconds of each step on the slower rank, with whatever saves; shape (steps,)."""
    whole = [
        np.sum([part for part in (rank.train_s, rank.hook_s, rank.after_s) if part], axis=0) for rank in ranks
    ]
    return np.asarray(np.max(whole, axis=0), dtype=np.float64)


def mean_step_s(ranks: Sequence[Samples]) -> float:
    """Mean seconds of a training step."""
    return float(np.mean([rank.train_s for rank in ranks]))


def drift_error_p99(pairs: Sequence[tuple[float, float]]) -> float:
    """99th percentile of |D_est / D_exact - 1| over (D_est, D_exact)."""
    estimated, exact = _matrix(pairs).T
    return float(np.quantile(np.abs(estimated / exact - 1), 0.99))


def _matrix(rows: Sequence[Sequence[float]]) -> Array:
    return np.asarray(rows, dtype=np.float64)
