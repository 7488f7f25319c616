"""A rank that makes no step ends itself; one that is slow for a known reason, or was suspended, does not."""

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from layercheck import watchdog
from layercheck.watchdog import EXIT_CODE, Watchdog

HANG_S = 10.0


class Counted(Watchdog):
    """Without its thread: `pass_time` is what the thread would count."""

    def start(self, since: int = 0) -> None:
        self._step = since

    def pass_time(self, seconds: float) -> str | None:
        return self._count(seconds)


def armed(hang_s: float = HANG_S) -> Counted:
    dog = Counted(hang_s)
    dog.start(4)
    dog.beat(5)
    return dog


def test_the_first_step_may_take_as_long_as_it_likes():
    dog = Counted(HANG_S)
    dog.start(4)
    dog.beat(4)  # waiting for the commit of the state before the first step
    assert dog.pass_time(1000 * HANG_S) is None


def test_the_message_names_the_step_and_the_knob():
    message = armed().pass_time(HANG_S + 1)
    assert message is not None
    assert "hang_s=10 s after step 5" in message


def test_every_step_starts_the_count_anew():
    dog = armed()
    for step in range(6, 9):
        assert dog.pass_time(0.9 * HANG_S) is None
        dog.beat(step)
    assert dog.pass_time(0.9 * HANG_S) is None
    assert dog.pass_time(0.2 * HANG_S) is not None


def test_ranks_that_wait_together_after_a_step_do_not_hang():
    dog = armed()
    for _ in range(5):
        assert dog.pass_time(0.9 * HANG_S) is None
        dog.beat(5)


def test_a_phase_adds_its_limit_and_is_named():
    dog = armed()
    with dog.phase("evaluation", 50), dog.phase("reading data", 5):
        assert dog.pass_time(HANG_S + 54) is None
        message = dog.pass_time(2)
    assert message is not None
    assert "in evaluation (up to 50 s more), reading data (up to 5 s more)" in message


def test_after_a_phase_the_count_starts_anew_and_without_its_limit():
    dog = armed()
    with suppress(ValueError), dog.phase("export", 50):
        assert dog.pass_time(HANG_S + 49) is None
        raise ValueError("from inside")
    assert dog.pass_time(0.9 * HANG_S) is None
    assert dog.pass_time(0.2 * HANG_S) is not None


LIFE = """
import sys, time
from layercheck.watchdog import Watchdog
dog = Watchdog(float(sys.argv[1]))
dog.start(0)
dog.beat(1)
print("armed", flush=True)
if sys.argv[2] == "close":
    dog.close()
time.sleep(float(sys.argv[3]))
print("alive", flush=True)
"""


def life(hang_s: float, what: str = "", sleep_s: float = 60) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", LIFE, str(hang_s), what, str(sleep_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_hangs_ends_with_the_stacks_of_its_threads():
    output, errors = (process := life(0.3)).communicate(timeout=60)
    assert (process.returncode, output) == (EXIT_CODE, "armed\n")
    assert "hang_s=0.3 s after step 1" in errors
    assert "most recent call first" in errors


@pytest.mark.parametrize(("hang_s", "what"), [(0, ""), (0.2, "close")])
def test_switched_off_or_closed_it_ends_nothing(hang_s: float, what: str):
    output, _ = (process := life(hang_s, what, sleep_s=0.8)).communicate(timeout=60)
    assert (process.returncode, output) == (0, "armed\nalive\n")


class Gaps:
    """Stands for the event that the thread waits on; each wait takes the next gap of a scripted clock."""

    def __init__(self, gaps: list[float]) -> None:
        self.gaps, self.now_s = list(gaps), 0.0

    def wait(self, tick_s: float) -> bool:
        if not self.gaps:
            return True
        self.now_s += self.gaps.pop(0)
        return False


@pytest.mark.parametrize(
    ("gaps", "ends"),
    [([1000.0, 1.0, 1.0], False), ([1.0] * 9, False), ([1.0] * 11, True)],
    ids=["suspended", "slow", "hanging"],
)
def test_a_group_that_was_suspended_as_a_whole_goes_on(gaps, ends, monkeypatch):
    told: list[str] = []
    dog = Watchdog(HANG_S, end=told.append)
    script = Gaps(gaps)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: script.now_s)
    dog._closed = script
    dog.beat(1)
    dog._watch()
    assert bool(told) == ends
