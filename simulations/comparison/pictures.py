"""Bars of a comparison: end-to-end time with its stall (the paper's figure 6), recovery (figure 7)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulations.pictures import draw_stacks

_PHASES = ("detect_s", "reschedule_s", "load_s", "reconstruct_s", "replay_s", "first_step_s")


def draw(content: Mapping[str, Any], out: Path) -> None:
    """Draws `end-to-end` and `recovery`, as .png and .svg.

    Args:
        content: of `comparison.json`.
        out: folder.
    """
    panels = {name: _end_to_end(rows) for name, rows in content["regimes"].items()}
    draw_stacks(panels, out / "end-to-end", "time of a step / time of a step without checkpointing")
    timed = {method: row for method, row in content["recovery"].items() if isinstance(row, dict)}
    if timed:
        phases = {
            method: {key.removesuffix("_s"): row[key] for key in _PHASES} for method, row in timed.items()
        }
        title = f"interval of {content['recovery']['matched_interval_steps']} steps"
        draw_stacks({title: phases}, out / "recovery", "seconds from the death to where the run was")


def _end_to_end(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each bar split into the visible stall and the rest of the step."""
    return {
        method: {
            "step": row["end_to_end_ratio"] * (1 - row["stall_share"]),
            "visible stall": row["end_to_end_ratio"] * row["stall_share"],
        }
        for method, row in rows.items()
    }
