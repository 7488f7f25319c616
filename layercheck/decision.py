"""[pure] What to save after a step: what the policy decides, and the copying carries out."""

from dataclasses import dataclass

from layercheck.manifest import EventId, Reason


@dataclass(frozen=True, slots=True)
class LayerWrite:
    """One chosen layer and why. `age` counts steps from its newest version, committed or in flight.

    `base` makes it a residual: (step, attempt) of the version that it adds to, attempt 0 for this one. Its
    drift and threshold are those since the newest save of any kind.
    """

    layer: str
    reason: Reason
    drift: float
    threshold: float
    age: int
    base: tuple[int, int] | None = None

    def base_in(self, event: EventId) -> tuple[int, int] | None:
        """The base as seen in the event of this write."""
        return None if self.base is None else (self.base[0], self.base[1] or event.attempt)


@dataclass(frozen=True, slots=True)
class PersistDecision:
    """What to save after one step; empty `writes` means nothing. Identical on every rank (I3)."""

    step: int
    writes: tuple[LayerWrite, ...] = ()
    must_wait: bool = False
    """True when a layer reached s_max against committed versions: block until the storage catches up (I1)."""

    @property
    def versions(self) -> tuple[LayerWrite, ...]:
        """The writes without residuals."""
        return tuple(write for write in self.writes if write.base is None)

    @property
    def residuals(self) -> tuple[LayerWrite, ...]:
        """The other ones."""
        return tuple(write for write in self.writes if write.base is not None)
