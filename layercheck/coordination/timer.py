"""Seconds, as one value: tests put a clock of their own in its place."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timer:
    """Monotonic seconds of this process, and how to let some pass."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]


REAL_TIME = Timer(time.monotonic, time.sleep)
