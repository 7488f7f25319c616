"""[pure] Drift and versions of every layer, and the events that are on their way to storage.

The life of one event, as every rank sees it:
1. `take`: its layers are in flight; their D starts again at 0 and what it was is remembered. Movement that it
   holds and that is reported later (lag) is added to what is remembered: see `account`.
2. `commit`: the versions count for the age bound (I1); the memory of D is dropped.
3. Or `lose`: D comes back, as if the event had never been chosen (I9).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from layercheck.layers import LayerMap
from layercheck.manifest import RecoveryPlan

_SMALLEST_STAGGER = 0.05


@dataclass(slots=True)
class LayerState:
    """One layer. Steps are -1 for none; `selected` is the newest version, committed or in flight."""

    drift: float = 0.0
    selected: int = -1
    committed: int = -1
    stagger: float = 1.0
    overdue: bool = False


@dataclass(slots=True)
class Taken:
    """What one layer had when it was selected: given back if the event is lost."""

    drift: float
    stagger: float
    overdue: bool


@dataclass(slots=True)
class _InFlight:
    full: bool
    taken: dict[str, Taken]


@dataclass(slots=True)
class Versions:
    """Layer states in model order, and the events in flight by step."""

    layers: dict[str, LayerState]
    newest_full: int = -1
    committed_full: int = -1
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps of the events that are neither committed nor lost, oldest first."""
        return tuple(sorted(self._in_flight))

    @property
    def layers_in_flight(self) -> frozenset[str]:
        """Layers of these events."""
        return frozenset(name for event in self._in_flight.values() for name in event.taken)

    def account(self, name: str, step: int) -> LayerState | Taken | None:
        """What the movement of this layer in this step counts for.

        The layer itself, or, if its newest version holds that movement already, what comes back should that
        version be lost; None if it cannot be lost any more.
        """
        layer = self.layers[name]
        if step > layer.selected:
            return layer
        event = self._in_flight.get(layer.selected)
        return None if event is None else event.taken[name]

    def take(self, step: int, names: Iterable[str], full: bool) -> None:
        """An event of this step was chosen."""
        taken = {}
        for name in names:
            layer = self.layers[name]
            taken[name] = Taken(layer.drift, layer.stagger, layer.overdue)
            layer.drift, layer.stagger, layer.overdue, layer.selected = 0.0, 1.0, False, step
        self._in_flight[step] = _InFlight(full, taken)
        if full:
            self.newest_full = step

    def commit(self, step: int) -> None:
        """The event of this step exists."""
        event = self._in_flight.pop(step)
        for name in event.taken:
            self.layers[name].committed = step
        if event.full:
            self.committed_full = step

    def demote(self, name: str, step: int) -> bool:
        """The newest version of a layer has rotted, and the one of `step` counts instead (-1: none).

        The layer is due at once, unless a newer version is on its way already. False if nothing changed.
        """
        layer = self.layers[name]
        if step >= layer.committed:
            return False
        layer.committed = step
        if name not in self.layers_in_flight:
            layer.selected, layer.overdue = step, True
        return True

    def lose(self, step: int) -> bool:
        """Gives back what the event took; False for an event that is not (or no longer) in flight."""
        event = self._in_flight.pop(step, None)
        if event is None:
            return False
        for name, taken in event.taken.items():
            self._give_back(name, taken, step)
        if event.full:
            full = [other for other, held in self._in_flight.items() if held.full]
            self.newest_full = max(full, default=self.committed_full)
        return True

    def _give_back(self, name: str, taken: Taken, step: int) -> None:
        others = [other for other in self.in_flight if name in self._in_flight[other].taken]
        newer = next((other for other in others if other > step), None)
        if newer is not None:
            # A newer version of this layer is under way and holds this movement too: had D come back now, the
            # layer would be written once more for nothing. If that one is lost as well, all of it comes back.
            held = self._in_flight[newer].taken[name]
            held.drift += taken.drift
            held.stagger, held.overdue = taken.stagger, held.overdue or taken.overdue
            return
        layer = self.layers[name]
        layer.drift += taken.drift
        layer.stagger, layer.overdue = taken.stagger, layer.overdue or taken.overdue
        layer.selected = others[-1] if others else layer.committed


def first_staggers(layer_map: LayerMap) -> dict[str, float]:
    """Trainable layer -> part of K at which it comes due first after a full event.

    Layers that left together would come due together. With bytes laid out in model order, a layer's phase is
    the part of all bytes up to its middle, so that equal steps see equal bytes.
    """
    layers = layer_map.trainable
    total, before, staggers = sum(layer.numel for layer in layers), 0, {}
    for layer in layers:
        staggers[layer.name] = max(_SMALLEST_STAGGER, (before + layer.numel / 2) / total)
        before += layer.numel
    return staggers


def live_full(plan: RecoveryPlan, trainable: tuple[str, ...], announced: int) -> int:
    """Step of the newest full event that is surely live after a recovery, -1 for none.

    A live full event leaves no trainable layer with an older version. If some layer is older, the full event
    was lost (or is damaged), and the policy owes a new one at once.
    """
    versions = [version for version in plan.layers if version.layer in trainable]
    oldest = min((version.step for version in versions), default=-1)
    steps = [version.step for version in versions if version.reason == "full"]
    return max((step for step in (*steps, announced) if step <= oldest), default=-1)
