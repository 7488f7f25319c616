"""Lost progress of a composite: layer by layer, never more than was run."""

import numpy as np
import pytest

from simulations.engines.segments import simulate_segments
from simulations.failures import FailureModel, draw_failures
from simulations.lost import Schedule, expected_lost_steps, lost_steps, schedule_of_writes
from simulations.methods import simple

SCHEDULE = Schedule(
    weights=(0.5, 0.3, 0.2), periods=(10, 7, 12), writes=((0,), (0, 3), (2, 5, 11)), delay_steps=2
)


def by_hand(schedule: Schedule, stretches: list[int], shifts: list[float]) -> list[float]:
    """Step by step: each layer's newest version that counts, and the last recovery."""
    lost, step, resumed = [], 0, 0
    for stretch in stretches:
        step += stretch
        total = 0.0
        for weight, period, writes, shift in zip(
            schedule.weights, schedule.periods, schedule.writes, shifts, strict=True
        ):
            version = step - schedule.delay_steps
            while (version + int(shift * period)) % period not in writes:
                version -= 1
            total += weight * (step - max(version, resumed))
        lost.append(total)
        resumed = step
    return lost


def test_lost_steps_are_those_of_a_walk_step_by_step():
    stretches = np.random.default_rng(5).integers(0, 40, 300)
    shifts = np.random.default_rng([11, 10]).random(3).tolist()
    found = lost_steps(SCHEDULE, stretches.astype(float), seed=11, most=1000)
    assert found.tolist() == pytest.approx(by_hand(SCHEDULE, stretches.tolist(), shifts))


@pytest.mark.parametrize("mtbf_s", [20.0, 200.0, 5000.0])
def test_what_all_failures_lose_is_less_than_what_was_run(mtbf_s):
    """Half an interval times the number of failures would be more than that at the first MTBF."""
    method, schedule = simple("one", 4.0, 0.2, 3.0), Schedule((1.0,), (100,), ((0,),))
    failures = draw_failures(FailureModel(mtbf_s), 400_000.0, 1)
    stretches = simulate_segments(method, failures, 400_000.0).commits[:-1]
    lost = lost_steps(schedule, stretches, seed=1, most=len(stretches))
    assert 0 < lost.sum() <= stretches.sum()
    if mtbf_s == 20.0:
        assert len(stretches) * 50 > stretches.sum()


@pytest.mark.parametrize("mtbf_s", [60.0, 600.0, 6000.0])
def test_the_mean_of_many_failures_is_the_expected_one(mtbf_s):
    method = simple("one", 4.0, 0.5, 15.0)
    found = []
    for seed in range(25):
        failures = draw_failures(FailureModel(mtbf_s), 2e6, seed)
        stretches = simulate_segments(method, failures, 2e6).commits[:-1]
        found.append(lost_steps(SCHEDULE, stretches, seed, most=len(stretches)).mean())
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    expected = expected_lost_steps(SCHEDULE, method.cycle_s, 15.0, mtbf_s)
    assert abs(np.mean(found) - expected) < 4 * error + 1e-9


def test_a_sample_stands_for_all_failures():
    stretches = np.random.default_rng(2).integers(1, 60, 40_000).astype(float)
    whole = lost_steps(SCHEDULE, stretches, seed=3, most=len(stretches))
    sample = lost_steps(SCHEDULE, stretches, seed=3, most=4000)
    assert len(sample) == 4000
    assert sample.mean() == pytest.approx(whole.mean(), abs=4 * whole.std() / np.sqrt(4000))


def test_a_recorded_schedule_begins_with_all_layers_saved():
    written = np.array([[0, 1], [0, 0], [1, 0]], dtype=bool)
    schedule = schedule_of_writes(written, (30, 10), delay_steps=0)
    assert schedule.weights == (0.75, 0.25)
    assert schedule.writes == ((0, 3), (0, 1))
    ages = schedule.ages(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), np.zeros(2))
    assert ages.tolist() == [[0, 1, 2, 0, 0], [0, 0, 1, 2, 0]]
