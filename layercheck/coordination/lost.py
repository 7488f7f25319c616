"""What of a layer's movement comes back with no save, from what the failed attempt journaled. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layercheck.lost import DISPLACEMENT
from layercheck.manifest import LayerPlan, Progress, TrainerState


def journaled(progress: Progress | None) -> Mapping[str, Any]:
    """What `tracking/unsaved.py` said in the newest heartbeat, empty for an attempt that said nothing."""
    state = progress.trainer_state.get("layercheck") if progress else None
    found: Mapping[str, Any] = (state or {}).get("unsaved") or {}
    return found


def steps_on_their_way(trainer_state: TrainerState) -> Iterator[int]:
    """Steps of the events that a heartbeat's ranks have taken: newest versions, and whatever is in flight."""
    state = trainer_state.get("layercheck") or {}
    yield from state.get("selected", {}).values()
    for layer in (state.get("unsaved") or {}).get("layers", {}).values():
        yield from map(int, layer["pending"])


def lost_drift(progress: Progress | None, layer: str, saved: int, lost: int) -> float | None:
    """Movement of one layer over its lost steps, in the journaled measure.

    The journal may know of fewer steps than were lost: the last ones were not journaled yet, or the save that
    recovery falls back to is older than the newest one. Then the rest is taken to move as fast.

    Args:
        progress: newest of the attempt that failed.
        layer: its name.
        saved: step of the save that comes back.
        lost: its lost steps.

    Returns:
        None if nothing is known of any of these steps.
    """
    if lost == 0:
        return 0.0
    known = journaled(progress).get("layers", {}).get(layer)
    if progress is None or known is None:
        return None
    moved = known["moved"] + sum(part for _, part in _uncommitted(known, saved))
    steps = _known_steps(known, progress, saved)
    return float(moved * lost / steps) if steps > 0 else None


def measure_of(progress: Progress | None, t_fail: int, layers: Iterable[LayerPlan]) -> str:
    """The measure of what a plan loses: distances only where each of them was measured as it is."""
    measure: str = journaled(progress).get("measure", "")
    lost = [(layer.layer, layer.lost) for layer in layers if layer.lost and layer.lost_drift is not None]
    is_measured = all(_is_measured(progress, name, t_fail - steps, steps) for name, steps in lost)
    return measure if is_measured else measure.removeprefix(DISPLACEMENT)


def _is_measured(progress: Progress | None, layer: str, saved: int, lost: int) -> bool:
    """False for a sum with what a save in flight holds, and for steps of which the journal does not know."""
    known = journaled(progress)["layers"][layer]
    assert progress is not None, "something is known of the layer"
    return not _uncommitted(known, saved) and _known_steps(known, progress, saved) == lost


def _uncommitted(known: Mapping[str, Any], saved: int) -> list[tuple[str, float]]:
    return [(step, part) for step, part in known["pending"].items() if int(step) > saved]


def _known_steps(known: Mapping[str, Any], progress: Progress, saved: int) -> int:
    return int(progress.step - max(known["committed"], min(saved, known["since"])))
