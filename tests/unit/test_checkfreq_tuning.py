"""CheckFreq's interval: the formula, and growth that never turns back."""

import pytest

from app.baselines.checkfreq_tuning import Profile, Tuning, shortest_interval


@pytest.mark.parametrize(
    ("step_s", "snapshot_s", "full_s", "overhead", "k"),
    [
        (1.0, 0.0, 0.5, 0.05, 1),  # all hidden within one step
        (1.0, 0.0, 7.0, 0.05, 7),  # the persist decides
        (1.0, 0.0, 7.1, 0.05, 8),
        (1.0, 0.5, 0.6, 0.05, 10),  # the stall decides: 0.5 s are 5 % of 10 steps
        (1.0, 0.5, 0.6, 0.5, 1),
        (0.5, 2.0, 22.0, 0.05, 80),  # max(40, 80)
    ],
)
def test_the_interval_is_the_shortest_that_hides_the_persist_and_keeps_the_budget(
    step_s: float, snapshot_s: float, full_s: float, overhead: float, k: int
) -> None:
    assert shortest_interval(Profile(step_s, snapshot_s, full_s), overhead) == k


def test_the_interval_grows_by_two_above_the_budget_and_never_shrinks() -> None:
    tuning = Tuning.of(Profile(1.0, 0.0, 4.0), 0.05)
    assert (tuning.interval_steps, tuning.watching) == (4, True)
    over = tuning.after_window(4 * 1.06, 0.05, dynamic=False)
    assert (over.interval_steps, over.watching) == (6, True)
    within = over.after_window(6 * 1.04, 0.05, dynamic=False)
    assert (within.interval_steps, within.watching) == (6, False)
    assert within.after_window(60.0, 0.05, dynamic=False) == within, (
        "the first window within it ends the watch"
    )


def test_a_dynamic_interval_is_watched_to_the_end() -> None:
    tuning = Tuning.of(Profile(1.0, 0.0, 4.0), 0.05).after_window(4.0, 0.05, dynamic=True)
    assert (tuning.interval_steps, tuning.watching) == (4, True)
    assert tuning.after_window(9.0, 0.05, dynamic=True).interval_steps == 6
    assert Tuning(**tuning.to_state()) == tuning
