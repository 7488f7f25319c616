"""The frontier with the real runs in it, and how far the weights get in some steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulations.pictures import draw_lines


def draw(content: Mapping[str, Any], out: Path) -> None:
    """Draws `frontier` and `movement`, as .png and .svg.

    Args:
        content: of `residuals.json`.
        out: folder.
    """
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in content["frontier"][1:]:
        x, y = lines.setdefault(f"{row['bits']} bits, V = {row['version']}", ([], []))
        x.append(row["bytes_share"])
        y.append(100 * row["distance_share"])
    points = {
        name: ([arm["bytes_ratio"]], [100 * arm["distance_ratio"]])
        for name, arm in content["arms"].items()
        if arm["bytes_residuals"]
    }
    labels = (
        "bytes over those without residuals",
        "distance lost, of that without residuals (%)",
    )
    draw_lines(lines, out / "frontier", labels, log="x", points=points)
    rows = content["movement"]
    lags = [row["lag"] for row in rows]
    first = rows[0]["distance"]
    moved = {
        "distance": (lags, [row["distance"] for row in rows]),
        "path": (lags, [row["path"] for row in rows]),
        "random walk": (lags, [first * lag**0.5 for lag in lags]),
    }
    draw_lines(moved, out / "movement", ("steps", "mean |W(t + steps) - W(t)|"), log="xy")
