"""The arithmetic of `saving.json`, on samples whose figures are known by hand."""

import pytest

from app.measure.arms import Samples
from simulations.saving import figures


def _rank(**seconds: float) -> Samples:
    """Four equal steps."""
    rows = {name: [value] * 4 for name, value in seconds.items()}
    return Samples(**{"hook_s": [0.0] * 4, "collective_s": [0.0] * 4, **rows})  # type: ignore[arg-type]


def test_the_wait_for_a_later_rank_is_not_tracking() -> None:
    early = _rank(train_s=1.0, hook_s=0.002, after_s=0.113, stall_s=0.010, collective_s=0.101)
    late = _rank(train_s=1.0, hook_s=0.002, after_s=0.013, stall_s=0.010, collective_s=0.001)
    # Of each rank: 2 ms in the hooks, 2 ms in `after_step`, 1 ms for the shortest all-reduce.
    assert figures.tracking_step_ratio([early, late]) == pytest.approx(1.005)


def test_the_stall_is_overhead_and_so_is_every_thread() -> None:
    ranks = [_rank(train_s=1.0, stall_s=0.02), _rank(train_s=1.0, stall_s=0.0)]
    ranks[0].thread_cpu_s = 0.04
    ranks[1].thread_cpu_s = 0.08
    # 0.08 s of stall and 0.12 s of threads in four seconds of two ranks.
    assert figures.overhead_ratio(ranks) == pytest.approx(1 + 0.2 / 8)


def test_the_arms_are_compared_by_the_slower_rank_of_each_step() -> None:
    saving = [_rank(train_s=1.0, after_s=0.1), _rank(train_s=1.1, after_s=0.1)]
    stock = [_rank(train_s=0.5), _rank(train_s=1.0)]
    ratio = figures.ab_ratio(saving, stock)
    assert ratio.value == pytest.approx(1.2)
    assert ratio.low == pytest.approx(ratio.high) == pytest.approx(1.2)


def test_the_drift_error_is_relative_and_counts_both_signs() -> None:
    pairs = [(1.0, 1.0)] * 99 + [(0.9, 1.0)]
    assert figures.drift_error_p99(pairs) <= 0.1
    assert figures.drift_error_p99([(0.9, 1.0)]) == pytest.approx(0.1)
    assert figures.drift_error_p99([(1.1, 1.0)]) == pytest.approx(0.1)
