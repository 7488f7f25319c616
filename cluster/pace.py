"""How fast a run goes and how much of its time was useful, from its heartbeats alone."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_KEPT = 101


@dataclass(frozen=True, slots=True)
class Figures:
    """`step_s`: median seconds of a step. `ettr`: median step x steps kept / elapsed, as in summary.json."""

    step_s: float
    ettr: float


class Pace:
    """Call with each step that is complete. Counts from the first one that it sees.

    A step that is told late makes the next one short, so seconds are spread over the steps between two calls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._step_s: deque[float] = deque(maxlen=_KEPT)

    def saw(self, step: int, new_attempt: bool = False) -> Figures | None:
        """The figures so far; None before there are two steps.

        Args:
            step: last complete step; smaller than before after a roll-back.
            new_attempt: the time since the last call was a restart, not a step.
        """
        now = self._clock()
        if self._first is None:
            self._first = self._last = (step, now)
            return None
        last_step, last_s = self._last
        if step > last_step and not new_attempt:
            self._step_s.append((now - last_s) / (step - last_step))
        if step != last_step or new_attempt:
            self._last = (step, now)
        first_step, first_s = self._first
        if not self._step_s or now <= first_s:
            return None
        step_s = statistics.median(self._step_s)
        return Figures(step_s, min(1.0, step_s * max(0, step - first_step) / (now - first_s)))
