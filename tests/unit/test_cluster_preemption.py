"""What Ray says of nodes that go, and what a driver does with a signal; no cluster is needed for either."""

import os
import signal
import threading
from dataclasses import dataclass, field

import pytest

from cluster.preemption import Drains, driver_signals
from layercheck.errors import CoordinatorLostError, PreemptedError
from tests.fakes import Clock


@dataclass
class Info:
    """As `ray.train.PreemptionInfo`."""

    deadline_ms: float | None
    preempted_node_ids: list[str] = field(default_factory=lambda: ["n1"])


def _drains(deadline_in_s: float | None, clock: Clock) -> Drains:
    deadline_ms = None if deadline_in_s is None else 1000 * (clock.now + deadline_in_s)
    answers = iter([None, Info(deadline_ms), None])
    return Drains(30, ask=lambda: next(answers), clock=clock)


def test_training_goes_on_until_the_last_save_has_to_begin() -> None:
    clock = Clock()
    drains = _drains(100, clock)
    drains.ask()
    assert not drains.announced
    drains.ask()
    drains.ask()  # an answer is not forgotten
    assert drains.announced
    assert drains.due_s(step_s=2) is None
    clock.now += 65
    assert drains.due_s(step_s=2) is None
    assert drains.due_s(step_s=3) == 35, "a step of 3 s more, and the grace would be cut"
    clock.now += 50
    assert drains.due_s(step_s=2) == 0


def test_a_drain_without_a_deadline_is_due_at_once() -> None:
    drains = _drains(None, Clock())
    drains.ask()
    drains.ask()
    assert drains.due_s(step_s=1) == 30


@pytest.mark.parametrize(("deadline_in_s", "limit_s"), [(40, 100), (None, 180)])
def test_a_worker_that_ray_never_ends_raises_after_a_limit(deadline_in_s: float | None, limit_s: int) -> None:
    clock = Clock()
    drains = _drains(deadline_in_s, clock)
    drains.ask()
    drains.ask()
    begun = clock.now
    with pytest.raises(PreemptedError, match=rf"nodes \['n1'\] go, .* this worker within {limit_s} s"):
        drains.hold(sleep=clock.sleep)
    assert clock.now - begun == limit_s


def test_a_signal_to_the_driver_is_told_once_and_the_handler_before_comes_back() -> None:
    told: list[float] = []
    heard = threading.Event()

    def tell(grace_s: float) -> None:
        told.append(grace_s)
        heard.set()
        raise CoordinatorLostError("a coordinator that is away costs the driver nothing")

    before = signal.getsignal(signal.SIGUSR1)
    with driver_signals(("SIGUSR1",), 7.0, tell):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(10)
    assert told == [7.0]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_without_signals_the_driver_watches_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with driver_signals((), 7.0, lambda _: None):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_does_not_end_in_time_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.preemption._TEARDOWN_S", 0.0)

    def stuck() -> None:
        with driver_signals(("SIGUSR1",), 0.1, lambda _: None):
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Event().wait(10)

    with pytest.raises(KeyboardInterrupt):
        stuck()


def test_a_step_without_word_of_a_drain_looks_at_no_step_before_it() -> None:
    """The median over all steps of a month belongs to the few steps after an announcement."""
    from app.train_loop import _heed

    class Meter:
        asked = 0

        def median_step_s(self) -> float:
            self.asked += 1
            return 2.0

    class Session:
        told: float | None = None

        def preempt(self, grace_s: float) -> None:
            self.told = grace_s

    meter, session, clock = Meter(), Session(), Clock()
    drains = _drains(20, clock)
    for _ in range(3):
        _heed(drains, session, False, meter)
    _heed(drains, session, True, meter)
    assert (meter.asked, session.told) == (0, None)
    _heed(drains, session, True, meter)
    assert (meter.asked, session.told) == (1, 20)
