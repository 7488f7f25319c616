"""Budget mode moves K so that saving costs its part of the step time, and neither more nor far less."""

import random
from copy import deepcopy
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layercheck.tracking.budget import MAX_FACTOR, MIN_FACTOR, PERIOD_STEPS, BudgetController


def run(budget: float, steps: int, *, write_s: float, slower: float = 0.0, seed: int = 0, start: float = 1.0):
    """A run whose layers are written `1 / factor` times a step, each write a stall of `write_s` seconds.

    Writes take effect with the delay of one interval, as layers count on with the K they had. Returns the
    controller and the true cost of each step as part of a step of 1 s.
    """
    draw, controller = random.Random(seed), BudgetController(budget, factor=start)
    for _ in range(50):  # the warm-up, when little is written
        controller.watch(draw.uniform(0.95, 1.05), False)
    costs, owed, rate = [], 0.0, 1 / start
    for _ in range(steps):
        rate += (1 / controller.factor - rate) / 60
        owed += rate
        writes, owed = int(owed), owed - int(owed)
        busy = writes > 0
        stall_s = writes * write_s
        step_s = (1.0 + (slower if busy else 0.0)) * draw.uniform(0.95, 1.05)
        controller.observe(step_s, stall_s, busy)
        costs.append(stall_s + (slower if busy else 0.0))
    return controller, costs


@pytest.mark.parametrize("write_s", [0.0005, 0.02, 0.3])
@pytest.mark.parametrize("start", [0.1, 1.0, 20.0])
def test_the_cost_settles_inside_the_budget_and_near_it(write_s: float, start: float) -> None:
    _, costs = run(0.02, 12000, write_s=write_s, start=start)
    settled = sum(costs[6000:]) / 6000
    assert 0.5 * 0.02 <= settled <= 0.02


def test_steps_that_writes_slow_down_count_as_cost() -> None:
    stalls_alone, _ = run(0.02, 8000, write_s=0.005)
    with_slow_steps, costs = run(0.02, 8000, write_s=0.005, slower=0.1)
    assert with_slow_steps.factor > 2 * stalls_alone.factor
    assert sum(costs[4000:]) / 4000 <= 0.025


def cost_with(controller: BudgetController, step_s: float) -> float:
    """Cost of a period that a quiet step of this length will end: the step moves the medians too."""
    twin = deepcopy(controller)
    twin.watch(step_s, False)
    twin._num_steps += 1
    return twin.cost


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@example(91)
def test_whatever_is_measured_the_factor_stays_in_bounds_and_moves_the_right_way(seed: int) -> None:
    draw = random.Random(seed)
    controller = BudgetController(draw.choice([1e-3, 0.02, 0.5]), factor=draw.uniform(MIN_FACTOR, MAX_FACTOR))
    for _ in range(20):
        before = controller.factor
        scale = 10 ** draw.uniform(-4, 2)
        for _ in range(PERIOD_STEPS - 1):
            controller.observe(draw.uniform(0.0, 2.0), scale * draw.random(), draw.random() < 0.5)
        last_s = median(controller._quiet)
        cost = cost_with(controller, last_s)
        controller.observe(last_s, 0.0, False)
        assert MIN_FACTOR <= controller.factor <= MAX_FACTOR
        if cost > 2 * controller.budget:
            assert controller.factor > before or before == MAX_FACTOR
        if cost < controller.budget / 4:
            assert controller.factor < before or before == MIN_FACTOR


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_i3_equal_measurements_give_equal_factors_on_every_rank(seed: int) -> None:
    first, second = BudgetController(0.02), BudgetController(0.02)
    draw = random.Random(seed)
    for _ in range(3 * PERIOD_STEPS):
        seen = (draw.uniform(0.5, 2), draw.random(), draw.random() < 0.3)
        first.observe(*seen)
        second.observe(*seen)
    assert first.factor == second.factor != 1.0


def test_a_dearer_save_never_gives_a_smaller_factor() -> None:
    factors = [run(0.02, 2000, write_s=write_s)[0].factor for write_s in (0.0, 0.001, 0.01, 0.1, 1.0)]
    assert factors == sorted(factors)
    assert factors[0] < 0.1
    assert factors[-1] > 10


def test_a_run_that_was_never_measured_has_no_cost() -> None:
    assert BudgetController(0.02).cost == 0.0
