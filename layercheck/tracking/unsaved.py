"""[pure] What a failure now would lose: the movement of each layer since its newest save, in this attempt.

D counts from the newest version through all failures, since the schedule of writes needs that. What a failure
loses starts again at each recovery: what an earlier failure lost can't be lost twice.

`moved` is the path: the sum of the steps' norms. The distance between what was lost and what comes back is
never longer (triangle inequality), so it is a bound; `drift.kind: displacement` measures the distance itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from layercheck.drift_report import DriftReport
from layercheck.layers import LayerMap
from layercheck.lost import DISPLACEMENT, over_all
from layercheck.tracking.policy import ResidualFacts
from layercheck.tracking.versions import first_staggers

Base = tuple[int, int]


@dataclass(slots=True)
class LayerUnsaved:
    """One layer.

    Attributes:
        moved: movement since `since`.
        since: step of the newest save, committed or in flight, or that with which the attempt began.
        committed: the same of the committed ones.
        pending: step of a save in flight -> the movement that is lost with it.
        base: (step, attempt) of the version whose weights the ranks keep for residuals, attempt 0 for this
            one; None where that version is lost or damaged.
        is_path: the newest save is a residual or has rotted: no distance from what comes back is measured.
        stagger: factor of the threshold of the first residual after a recovery, else 1.
    """

    moved: float = 0.0
    since: int = 0
    committed: int = 0
    pending: dict[int, float] = field(default_factory=dict)
    base: Base | None = None
    is_path: bool = False
    stagger: float = 1.0

    @property
    def lost(self) -> float:
        """Movement that no committed save holds."""
        return self.moved + sum(self.pending.values())


@dataclass(slots=True)
class Unsaved:
    """All trainable layers. Fed by the ledger, from the reduced reports alone."""

    measure: str
    numel: dict[str, int]
    layers: dict[str, LayerUnsaved]

    @classmethod
    def since(cls, step: int, layer_map: LayerMap, measure: str) -> Self:
        """An attempt that begins after `step`: nothing has been lost of it.

        All layers count from here, so without a stagger their residuals would come due together.
        """
        numel = {layer.name: layer.numel for layer in layer_map.trainable}
        layers = {
            name: LayerUnsaved(since=step, committed=step, stagger=stagger)
            for name, stagger in first_staggers(layer_map).items()
        }
        return cls(measure, numel, layers)

    def observe(self, report: DriftReport) -> None:
        """Adds the movement of one step. What a save holds already, and a lag reports late, is its own."""
        for name, layer in self.layers.items():
            moved = report.delta.get(name, 0.0)
            if report.step <= layer.since:
                if layer.since in layer.pending:
                    layer.pending[layer.since] += moved
            elif report.displacement is not None and not layer.is_path:
                layer.moved = report.displacement.get(name, 0.0)
            else:
                layer.moved += moved

    def take(self, step: int, names: Iterable[str]) -> None:
        """A version of these layers is on its way."""
        for layer in self._taken(step, names):
            layer.base, layer.is_path = (step, 0), False

    def take_residuals(self, step: int, names: Iterable[str]) -> None:
        """A residual of these layers is on its way."""
        for layer in self._taken(step, names):
            layer.is_path = True

    def _taken(self, step: int, names: Iterable[str]) -> list[LayerUnsaved]:
        taken = [self.layers[name] for name in names if name in self.layers]
        for layer in taken:
            layer.pending[step] = layer.pending.get(step, 0.0) + layer.moved
            layer.moved, layer.since, layer.stagger = 0.0, step, 1.0
        return taken

    def commit(self, step: int) -> None:
        """The saves of this step exist: what they and older ones hold is safe."""
        for layer in self.layers.values():
            if step in layer.pending:
                layer.committed = step
                layer.pending = {other: moved for other, moved in layer.pending.items() if other > step}

    def lose(self, step: int) -> None:
        """The saves of this step will never exist: the next ones hold that movement, if there are any."""
        for layer in self.layers.values():
            moved = layer.pending.pop(step, None)
            if moved is None:
                continue
            if layer.base == (step, 0):
                layer.base = None
            newer = [other for other in layer.pending if other > step]
            if newer:
                layer.pending[min(newer)] += moved
            else:
                layer.moved += moved
                layer.since = max(layer.pending, default=layer.committed)

    def rotted(self, name: str, rotten: int, usable: int, now: int) -> None:
        """The newest committed version of a layer is damaged: what it and its residuals held is lost, too.

        How far the layer moved from `usable`, the step that comes back, to its newest save is not known any
        more: it is taken to have moved as fast as since. A version that is in flight holds all of it, while a
        residual in flight has nothing to be added to.
        """
        layer = self.layers.get(name)
        if layer is None:
            return
        if layer.base is not None and layer.base[0] == rotten:
            layer.base, layer.moved, layer.pending = None, layer.lost, {}
        steps, behind = now - layer.committed, max(0, layer.committed - usable)
        more = layer.lost * behind / steps if steps > 0 else 0.0
        layer.committed -= behind
        if layer.pending:
            layer.pending[min(layer.pending)] += more
        else:
            layer.moved, layer.since, layer.is_path = layer.moved + more, layer.committed, True

    def residual_of(self, name: str) -> ResidualFacts | None:
        """What the policy may know of a layer that can have a residual now: nothing of it is in flight."""
        layer = self.layers[name]
        if layer.base is None or layer.pending:
            return None
        return ResidualFacts(layer.base, layer.moved, layer.since == layer.base[0], layer.stagger)

    def lost_steps(self, step: int) -> float:
        """sum(n_l * lost_l) / sum(n_l), in steps, if the run failed after `step`."""
        lost = [(self.numel[name], float(step - layer.committed)) for name, layer in self.layers.items()]
        return over_all("", lost)

    @property
    def lost_drift(self) -> float:
        """The movement that is lost with them, over all layers, in the measure."""
        lost = [(self.numel[name], layer.lost) for name, layer in self.layers.items()]
        return over_all(self.measure, lost)

    def to_state(self) -> dict[str, Any]:
        """JSON values that ride in the heartbeat; `coordination/lost.py` reads them."""
        is_path = any(layer.is_path for layer in self.layers.values())
        return {
            "measure": self.measure.removeprefix(DISPLACEMENT) if is_path else self.measure,
            "layers": {name: _values(layer) for name, layer in self.layers.items()},
        }


def _values(layer: LayerUnsaved) -> Mapping[str, Any]:
    pending = {str(step): moved for step, moved in layer.pending.items()}
    return {"moved": layer.moved, "since": layer.since, "committed": layer.committed, "pending": pending}
