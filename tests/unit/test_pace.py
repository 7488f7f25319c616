"""Seconds of a step and ETTR so far, from steps and a clock."""

import pytest

from cluster.pace import Figures, Pace
from tests.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_before_two_steps_there_is_nothing_to_say(clock: Clock) -> None:
    pace = Pace(clock)
    assert pace.saw(5) is None
    clock.sleep(1)
    assert pace.saw(5) is None


def test_an_undisturbed_run_is_useful_all_the_time(clock: Clock) -> None:
    pace = Pace(clock)
    for step in range(10, 21):
        pace.saw(step)
        clock.sleep(2)
    clock.sleep(-2)
    assert pace.saw(20) == Figures(step_s=2, ettr=1.0)


def test_a_restart_is_no_step_and_lowers_the_share(clock: Clock) -> None:
    pace = Pace(clock)
    for step in range(11):
        pace.saw(step)
        clock.sleep(1)
    clock.sleep(9)  # ten seconds from step 10 to the first step of the new attempt
    assert pace.saw(11, new_attempt=True) == Figures(step_s=1, ettr=11 / 20)


def test_the_time_of_a_restart_is_in_no_step(clock: Clock) -> None:
    pace = Pace(clock)
    pace.saw(0)
    clock.sleep(1)
    pace.saw(1)
    clock.sleep(9)
    assert pace.saw(2, new_attempt=True) == Figures(step_s=1, ettr=0.2)


def test_steps_that_were_rolled_back_are_not_kept(clock: Clock) -> None:
    pace = Pace(clock)
    for step in range(11):
        pace.saw(step)
        clock.sleep(1)
    clock.sleep(9)
    assert pace.saw(6, new_attempt=True) == Figures(step_s=1, ettr=6 / 20)


def test_heartbeats_that_skip_steps_share_their_time(clock: Clock) -> None:
    pace = Pace(clock)
    pace.saw(0)
    for step in (4, 8, 12):
        clock.sleep(4)
        pace.saw(step)
    assert pace.saw(12) == Figures(step_s=1, ettr=1.0)
