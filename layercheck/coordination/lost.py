"""What of a layer's movement comes back with no save, from what the failed attempt journaled. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from layercheck.manifest import Progress, TrainerState


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
    moved = known["moved"] + sum(part for step, part in known["pending"].items() if int(step) > saved)
    steps = progress.step - max(known["committed"], min(saved, known["since"]))
    return float(moved * lost / steps) if steps > 0 else None
