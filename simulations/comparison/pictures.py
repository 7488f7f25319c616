"""Bars of a comparison: end-to-end time with its stall (the paper's figure 6), recovery (figure 7)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulations.pictures import draw_stacks

PER_STEP = "time of a step / time of a step without checkpointing"
RECOVERY = "seconds from the death to where the run was"
_PHASES = ("detect_s", "reschedule_s", "load_s", "reconstruct_s", "replay_s", "first_step_s")


def draw(content: Mapping[str, Any], out: Path) -> None:
    """Draws `end-to-end` and `recovery`, as .png and .svg.

    Args:
        content: of `comparison.json`.
        out: folder.
    """
    panels = {name: bars_of_regime(rows) for name, rows in content["regimes"].items()}
    draw_stacks(panels, out / "end-to-end", PER_STEP)
    bars = bars_of_recovery(content)
    if bars:
        title = f"interval of {content['recovery']['matched_interval_steps']} steps"
        draw_stacks({title: bars}, out / "recovery", RECOVERY)


def bars_of_regime(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Method -> the visible stall and the rest of its step, over a step without checkpointing."""
    return {
        method: {
            "step": row["end_to_end_ratio"] * (1 - row["stall_share"]),
            "visible stall": row["end_to_end_ratio"] * row["stall_share"],
        }
        for method, row in rows.items()
    }


def bars_of_recovery(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Method -> seconds by phase; empty if no recovery was timed."""
    return {
        method: {key.removesuffix("_s"): row[key] for key in _PHASES}
        for method, row in content["recovery"].items()
        if isinstance(row, dict)
    }
