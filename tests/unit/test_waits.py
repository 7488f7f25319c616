"""Waits for a run: as often as asked, no longer than allowed, not beyond its driver."""

from typing import Any

import pytest

from app.measure import waits
from layercheck.errors import LayerCheckError


class Run:
    name = "r"

    def __init__(self, code: int | None = None) -> None:
        self.code = code

    def driver_ended(self) -> int | None:
        return self.code

    def last_words(self) -> str:
        return "the last words"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause; the clock runs by these alone."""
    pauses: list[float] = []
    monkeypatch.setattr(waits.time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(waits.time, "sleep", pauses.append)
    return pauses


def test_it_looks_as_often_as_asked(slept: list[float]) -> None:
    run: Any = Run()
    waits.wait_for(run, lambda: len(slept) == 3, "three looks", look_s=0.02)
    assert slept == [0.02] * 3


def test_it_ends_with_its_limit_or_with_the_driver(slept: list[float]) -> None:
    run: Any = Run()
    with pytest.raises(
        LayerCheckError, match=r"run r: waited 5 s in vain for a step; its log ends: the last"
    ):
        waits.wait_for(run, lambda: False, "a step", 5.0)
    assert sum(slept) == pytest.approx(5.0, abs=0.2)
    run.code = 3
    with pytest.raises(
        LayerCheckError, match="run r ended with code 3 while a step was waited for: the last"
    ):
        waits.wait_for(run, lambda: False, "a step")


def test_the_end_is_waited_for_and_an_error_is_told(slept: list[float]) -> None:
    run: Any = Run()
    with pytest.raises(
        LayerCheckError, match="run r was not complete within 5 s; its log ends: the last words"
    ):
        waits.wait_for_end(run, 5.0)
    run.code = 0
    waits.wait_for_end(run, 5.0)
    run.code = 1
    with pytest.raises(LayerCheckError, match="run r ended with code 1: the last words"):
        waits.wait_for_end(run, 5.0)
