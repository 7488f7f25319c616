"""[pure] The conditions, the grid of the frontier, which of its points are run, and when runs are killed."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from app.measure.residuals.spec import KilledRun

CHECKPOINT: dict[str, Any] = {
    "warmup_steps": 100,
    "warmup_full_every": 50,
    "target_interval": 100,
    "s_max": 1000,
    "full_every": 0,
    "embedding_factor": 1,
    "failure_aware": False,
    "metrics_flush_s": 5,
}
"""One interval for all layers. `failure_aware` would write more often after a failure."""
SEED = 3
BLOCK = 64
MARGIN = 0.99
"""A point is taken up to this part of its limit of bytes: real runs, which have failures, have written up to
2 % more than their replay, which has none (2026-11-30, thirty failures each)."""
BYTES, MORE_BYTES = 1.15, 1.5
"""Limits of bytes over those of the run without residuals."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How long the runs are, and how fine the grid.

    Attributes:
        checkpoint: settings of the run without residuals.
        kills: of each run. More in one run would leave the run without residuals less to lose.
        kill_seeds: of the steps of the kills; one run of each point for each.
        versions: intervals of versions in steps, V; `residuals` those of residuals, r.
    """

    base_steps: int
    steps: int
    kills: int
    kill_seeds: tuple[int, ...]
    checkpoint: Mapping[str, Any]
    versions: tuple[int, ...]
    residuals: tuple[float, ...]

    @property
    def warmup_steps(self) -> int:
        """The base is taken at the end of these."""
        return int(self.checkpoint["warmup_steps"])

    @property
    def interval(self) -> float:
        """That of the run without residuals."""
        return float(self.checkpoint["target_interval"])


FULL = Extent(
    base_steps=1000,
    steps=1500,
    kills=10,
    kill_seeds=(3, 4, 5),
    checkpoint=CHECKPOINT,
    versions=(150, 200, 300, 400, 600, 800, 900),
    residuals=(2, 3, 4, 5, 5.5, 5.75, 6, 6.5, 7, 8, 9, 10, 12, 16, 24),
)
QUICK = Extent(
    base_steps=60,
    steps=260,
    kills=4,
    kill_seeds=(3,),
    checkpoint=CHECKPOINT
    | {"warmup_steps": 20, "warmup_full_every": 10, "target_interval": 20, "s_max": 200},
    versions=(40, 80),
    residuals=(3, 6),
)


def kill_steps(extent: Extent, seed: int) -> tuple[int, ...]:
    """One in each of equal parts of the run from one interval after the base on, in its first three quarters.

    So the next kill leaves the run time to save what it had lost.
    """
    first = extent.warmup_steps + extent.interval
    part = (extent.steps - first) / extent.kills
    draw = random.Random(seed)
    return tuple(round(first + (number + 0.75 * draw.random()) * part) for number in range(extent.kills))


def residual(bits: int, version: int, interval: float) -> dict[str, Any]:
    """Settings that save a version every `version` steps and a residual every `interval` steps."""
    section = {"enabled": True, "bits": bits, "block": BLOCK, "k_ratio": interval / version}
    return {"target_interval": version, "residual": section}


def grid(extent: Extent) -> Iterator[tuple[int, int, float]]:
    """(bits, V, r) of all points."""
    points = product((8, 4), extent.versions, extent.residuals)
    return (point for point in points if point[2] < point[1])


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the frontier that is run.

    Attributes:
        name: of the run.
        settings: beyond those of the run without residuals.
    """

    name: str
    settings: Mapping[str, Any]


def chosen(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The best of either limit of bytes, and at the lower limit the best with the other number of bits.

    Args:
        rows: of the frontier, see `frontier.py`.
    """
    first = best(rows, BYTES * MARGIN)
    second = best(rows, MORE_BYTES * MARGIN)
    third = best([row for row in rows if row["bits"] != first["bits"]], BYTES * MARGIN)
    unlike = {(row["bits"], row["version"], row["residual"]): row for row in (first, second, third)}
    return [_point(row) for row in unlike.values()]


def best(rows: Sequence[Mapping[str, Any]], most_bytes: float) -> Mapping[str, Any]:
    """The point that loses least at no more bytes; if all take more, the one that takes fewest."""
    cheap = [row for row in rows if row["bytes_share"] <= most_bytes]
    if not cheap:
        return min(rows, key=lambda row: float(row["bytes_share"]))
    return min(cheap, key=lambda row: float(row["distance_share"]))


def _point(row: Mapping[str, Any]) -> Point:
    name = f"bits-{row['bits']}-V-{row['version']}-r-{row['residual']:g}"
    return Point(name, residual(row["bits"], row["version"], row["residual"]))


def trace_run(extent: Extent) -> KilledRun:
    """The run without a failure, from which the frontier is computed."""
    return KilledRun(
        name="trace",
        seed=SEED,
        base_steps=extent.base_steps,
        steps=extent.steps,
        checkpoint=dict(extent.checkpoint),
        sampled=True,
    )


def killed_runs(extent: Extent, point: Point) -> list[KilledRun]:
    """The runs at one point, with the kills that those of every point have."""
    return [
        KilledRun(
            name=f"{point.name}-kills-{seed}",
            seed=SEED,
            base_steps=extent.base_steps,
            steps=extent.steps,
            checkpoint={**extent.checkpoint, **point.settings},
            kills=kill_steps(extent, seed),
        )
        for seed in extent.kill_seeds
    ]


WITHOUT = Point("without", {})
