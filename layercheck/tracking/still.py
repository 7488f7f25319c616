"""[pure] Trainable layers that do not move at all: most likely the hooks do not see their updates.

Such a layer would be written by the age limit alone, and nobody would know that its drift is not measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_STEPS = 61
"""Steps before the alarm, for a measurement that looks at every element in fewer than these."""


@dataclass(slots=True)
class StillLayers:
    """Counts, per layer, the steps in a row whose measured movement was exactly zero."""

    rotation: int = LEAST_STEPS
    _counts: dict[str, int] = field(default_factory=dict)

    def observe(self, delta: Mapping[str, float], lr: float) -> tuple[str, ...]:
        """Takes in one step; at learning rate 0 nothing moves, and that says nothing.

        Returns:
            The layers that have now been still for exactly one rotation: to be told once.
        """
        if lr <= 0:
            return ()
        for layer, moved in delta.items():
            self._counts[layer] = 0 if moved != 0 else self._counts.get(layer, 0) + 1
        return tuple(layer for layer in delta if self._counts[layer] == self.rotation)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have been still for a rotation or longer."""
        return tuple(layer for layer, count in self._counts.items() if count >= self.rotation)
