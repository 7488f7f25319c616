"""[pure] Budget mode: moves K so that saving costs a given part of the step time.

The cost of a step is the stall that training waited for, plus what writes in the background add to the steps
they overlap: the part of steps with writes in flight times (their median - the median of the others). Without
that weight the second term would not depend on K, which moves how often we write, not how much a write hurts.
Full events are left out: K does not move their schedule.

K x 2 halves the bytes, so the controller works on the logarithm of K. It answers to a period's cost by less
than proportion: a changed K shows only when the layers that count with it come due, some periods later.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

PERIOD_STEPS = 50
MIN_FACTOR, MAX_FACTOR = 0.01, 100.0
_AIM = 0.85
"""Part of the budget that is aimed at, so that noise around it stays inside."""
_GAIN = 0.3
_LARGEST_RATIO = 4.0
_STEPS_KEPT = 200


@dataclass(slots=True)
class BudgetController:
    """Holds `factor`, by which all thresholds are multiplied. Equal inputs on all ranks, equal factors.

    Args:
        budget: part of the step time that saving may cost.
        factor: where to begin.
    """

    budget: float
    factor: float = 1.0
    _quiet: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _busy: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _num_steps: int = 0
    _num_busy: int = 0
    _stall_s: float = 0.0

    def observe(self, step_s: float, stall_s: float, is_busy: bool) -> None:
        """Takes in one step after the warm-up that no full event touched.

        Args:
            step_s: seconds of the step itself.
            stall_s: seconds that training waited for a save before it.
            is_busy: writes were in flight.
        """
        self.watch(step_s, is_busy)
        self._num_steps += 1
        self._num_busy += is_busy
        self._stall_s += stall_s
        if self._num_steps == PERIOD_STEPS:
            self._adjust()

    def watch(self, step_s: float, is_busy: bool) -> None:
        """Takes in the length of a step alone, to know quiet steps from the warm-up on."""
        (self._busy if is_busy else self._quiet).append(step_s)

    @property
    def cost(self) -> float:
        """Part of the step time that saving cost in this period so far."""
        if not self._num_steps:
            return 0.0
        slower_s = 0.0
        if self._quiet and self._busy:
            slower_s = max(0.0, median(self._busy) - median(self._quiet))
        cost_s = (self._stall_s + self._num_busy * slower_s) / self._num_steps
        step_s = median(self._quiet or self._busy)
        return cost_s / step_s if step_s > 0 else 0.0

    def _adjust(self) -> None:
        ratio = self.cost / (_AIM * self.budget)
        ratio = min(_LARGEST_RATIO, max(1 / _LARGEST_RATIO, ratio))
        self.factor = min(MAX_FACTOR, max(MIN_FACTOR, self.factor * ratio**_GAIN))
        self._num_steps = self._num_busy = 0
        self._stall_s = 0.0
