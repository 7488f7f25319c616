from pathlib import Path

import pytest

from layercheck.coordination.coordinator import Coordinator
from layercheck.errors import (
    RunIsLiveError,
)
from tests.fakes import Clock, FaultyStorage
from tests.runs import Group, config, coordinator, start, with_base


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(str(tmp_path / "layercheck"))


def test_a_moving_run_is_refused_with_its_step(storage: FaultyStorage) -> None:
    clock = Clock()
    living = start(storage, coordinator(storage, clock))
    living.save(0)
    beats = iter(range(1, 99))

    def sleep(seconds: float) -> None:
        clock.now += seconds
        living.beat(next(beats))

    rival = Coordinator(storage, config(), clock, sleep)
    with pytest.raises(
        RunIsLiveError, match=r"run r1 is live \(step \d+, moving\); end it or pass --takeover"
    ):
        rival.begin_attempt("t2", "s2", 2, "composite")
    assert not living.beat(50).fenced


def test_a_run_that_does_not_move_is_taken_over_with_a_progress_line(storage: FaultyStorage) -> None:
    clock, said = Clock(), []
    group = with_base(storage)
    rival = Coordinator(storage, config(takeover_s=12), clock, clock.sleep, said.append)
    begun = clock.now
    assert rival.begin_attempt("t2", "s2", 2, "composite").attempt == 2
    assert clock.now - begun >= 12
    assert any("watched" in line and "takeover_s=12 s" in line for line in said)
    clock.now += 1
    assert group.grant.attempt == 1


def test_a_rest_too_short_for_the_clock_does_not_make_the_watch_endless(storage: FaultyStorage) -> None:
    clock, naps = Clock(), 0
    clock.now = 1018.093  # twelve naps of a second end 1.1e-13 s early, and that is no time at 1018 s

    def sleep(seconds: float) -> None:
        nonlocal naps
        naps += 1
        assert naps < 20
        clock.now += seconds

    with_base(storage)
    rival = Coordinator(storage, config(takeover_s=12), clock, sleep)
    assert rival.begin_attempt("t2", "s2", 2, "composite").attempt == 2


def test_the_grant_says_how_long_was_waited_also_when_it_is_asked_for_again(storage: FaultyStorage) -> None:
    clock = Clock()
    with_base(storage)
    rival = Coordinator(storage, config(takeover_s=12), clock, clock.sleep)
    grant = rival.begin_attempt("t2", "s2", 2, "composite")
    assert (grant.wait_s, grant.detect_s, grant.reschedule_s) == (12.0, None, None)
    assert rival.begin_attempt("t2", "s2", 2, "composite").wait_s == 12.0, "its answer was lost"
    assert rival.amend(2, ()).wait_s == 12.0
    clock.now += 5
    assert rival.begin_attempt("t3", "s2", 2, "composite").wait_s == 0.0, "a restart of the same submission"


def test_a_run_that_ends_while_it_is_watched_was_waited_for_until_then(storage: FaultyStorage) -> None:
    clock = Clock()
    group = with_base(storage)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now == 1003.0:
            group.coordinator.end_attempt(1, "failed", "boom")

    rival = Coordinator(storage, config(takeover_s=12), clock, sleep)
    assert rival.begin_attempt("t2", "s2", 2, "composite").wait_s == 3.0


def test_takeover_does_not_watch(storage: FaultyStorage) -> None:
    clock = Clock()
    with_base(storage)
    rival = Coordinator(storage, config(), clock, clock.sleep)
    grant = rival.begin_attempt("t2", "s2", 2, "composite", takeover=True)
    assert (grant.attempt, grant.wait_s) == (2, 0.0)
    assert clock.now == 1000.0


def test_a_run_that_ended_is_not_watched(storage: FaultyStorage) -> None:
    clock = Clock()
    group = with_base(storage)
    group.coordinator.end_attempt(1, "failed", "boom")
    rival = Coordinator(storage, config(), clock, clock.sleep)
    assert rival.begin_attempt("t2", "s2", 2, "composite").attempt == 2
    assert clock.now == 1000.0


def test_two_claimants_get_two_numbers_and_the_newer_one_fences_the_older(storage: FaultyStorage) -> None:
    with_base(storage)
    one, two = coordinator(storage), coordinator(storage)
    first = Group(one, storage, one.begin_attempt("t2", "s1", 2, "composite"))
    second = Group(two, storage, two.begin_attempt("t3", "s1", 2, "composite"))
    assert (first.attempt, second.attempt) == (2, 3)
    assert first.beat(5).fenced
    assert not second.beat(5).fenced
