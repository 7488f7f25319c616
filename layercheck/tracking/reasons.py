"""[pure] Why layers were written of late: if age decides nearly everything, the threshold decides nothing."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from layercheck.decision import LayerWrite

REASON_WINDOW = 500
"""Steps over which the reasons of layer writes are counted."""


@dataclass(slots=True)
class Reasons:
    """The selective layer writes of the last `REASON_WINDOW` steps, as (step, by age)."""

    _writes: deque[tuple[int, bool]] = field(default_factory=deque)

    def count(self, step: int, writes: Iterable[LayerWrite]) -> None:
        """Layers were chosen after this step."""
        self._writes.extend((step, write.reason == "age") for write in writes)
        while self._writes and self._writes[0][0] <= step - REASON_WINDOW:
            self._writes.popleft()

    @property
    def age_dominates(self) -> bool:
        """True when the age limit caused more than half of them.

        Then K does nothing: the threshold is too high for this model, or `s_max` too low.
        """
        return 2 * sum(by_age for _, by_age in self._writes) > len(self._writes)
