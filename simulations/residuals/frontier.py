"""From a recorded run to the frontier: the production policy by replay, and true distances between weights.

`replay_residuals.py` bounds what is lost by the path. Here samples of the weights after every step are at
hand: what a failure would have lost is their distance from what would have come back, rounding and all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from app.measure.residuals.notes import Samples
from layercheck.persistence.quantise import Code, Floats, dequantise, quantise
from simulations.replay_policy import Ints, Replayed, replay, with_settings
from simulations.replay_residuals import residual_figures
from simulations.residuals.arms import Extent, grid, residual
from simulations.trace import Trace

IN_FLIGHT = 0.2
"""Part of a step after which its saves are committed."""
LAGS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 400, 600)
_STARTS = 200


def with_own_saves(done: Replayed) -> Replayed:
    """The same with the saves of each step committed before it is over, as most failures find them."""
    steps = done.trace.steps[:, None]
    return replace(
        done,
        committed=np.where(done.written, steps, done.committed),
        saved=np.where(done.written | done.added, steps, done.saved),
    )


def lost_distance(done: Replayed, samples: Samples) -> Floats:
    """Mean |weights - what would come back| over all parameters, if the run failed after each step.

    Args:
        done: a replay of the run; says which saves are committed then.
        samples: of the same run.

    Returns:
        Shape (n,); NaN where nothing of the run was saved yet.
    """
    settings = done.config.residual
    code = Code(settings.bits, settings.block)
    lost = np.zeros(len(done.trace.steps), dtype=np.float32)
    for at, name in enumerate(done.trace.names):
        columns = samples.layers[name]
        weights, share = samples.weights[:, columns], samples.share[columns].astype(np.float32)
        for rows, version, saved in _stretches(done.committed[:, at], done.saved[:, at]):
            if version < 1:
                lost[rows] = np.nan
            else:
                back = _restored(weights[version - 1], weights[max(version, saved) - 1], code)
                lost[rows] += np.abs(weights[rows] - back) @ share
    return lost


def _stretches(committed: Ints, saved: Ints) -> Iterator[tuple[slice, int, int]]:
    """Rows with the same version and residual."""
    changes = np.flatnonzero((np.diff(committed) != 0) | (np.diff(saved) != 0)) + 1
    ends = [0, *changes.tolist(), len(committed)]
    for begin, end in pairwise(ends):
        yield slice(begin, end), int(committed[begin]), int(saved[begin])


def _restored(version: Floats, newer: Floats, code: Code) -> Floats:
    return version + dequantise(*quantise(newer - version, code), version.size, code)


def frontier(
    trace: Trace, samples: Samples, extent: Extent, shown: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """The run's own settings without residuals, then all points of the grid, each beside it.

    `version` and `residual` are the intervals asked for, `bytes_share` and `distance_share` over the first
    row; `lost_share` is the bound by the path, of `replay_residuals.py`.
    """
    points = list(grid(extent))
    base = _row(trace, samples, {}, (0, round(extent.interval), 0))
    rows = [base]
    for number, point in enumerate(points, start=1):
        rows.append(_row(trace, samples, residual(*point), point))
        shown(number, len(points))
    return [
        row
        | {
            "bytes_share": row["all_bytes"] / base["all_bytes"],
            "distance_share": row["distance"] / base["distance"],
            "lost_share": row["lost"] / base["lost"],
        }
        for row in rows
    ]


def _row(
    trace: Trace, samples: Samples, settings: dict[str, Any], point: tuple[int, int, float]
) -> dict[str, Any]:
    done = replay(trace, with_settings(trace.config, **settings))
    found = residual_figures(done)
    after = trace.steps > trace.config.warmup_steps
    moments = ((done, IN_FLIGHT), (with_own_saves(done), 1 - IN_FLIGHT))
    numel = np.array([layer.numel for layer in trace.layer_map.trainable], dtype=float)
    steps = [
        part * ((trace.steps[:, None] - at.saved)[after] @ (numel / numel.sum())).mean()
        for at, part in moments
    ]
    lost = [part * lost_distance(at, samples)[after].mean() for at, part in moments]
    return {
        "bits": point[0],
        "version": point[1],
        "residual": point[2],
        "k_ratio": found["k_ratio"],
        "distance": float(sum(lost)),
        "lost_steps": float(sum(steps)),
        "residual_interval_steps": _interval(done, int(after.sum()), found["residual_bytes"]),
        **{name: found[name] for name in _TAKEN},
    }


def _interval(done: Replayed, steps: int, residual_bytes: float) -> float | None:
    """Mean steps between two residuals, by bytes as the mean interval of versions is."""
    whole = sum(done.config.residual.nbytes(layer.numel) for layer in done.trace.layer_map.trainable)
    return steps * whole / residual_bytes if residual_bytes else None


_TAKEN = (
    "mean_interval_steps",
    "bytes_written",
    "residual_bytes",
    "all_bytes",
    "lost",
    "max_age",
)


def movement(trace: Trace, samples: Samples, lags: Sequence[int] = LAGS) -> list[dict[str, float]]:
    """How far the weights get in some steps: mean |W(t + lag) - W(t)|, t evenly over the run after the base.

    `path` is the sum of the single steps, likewise; `exponent` the slope of log distance over log lag since
    the row before: 1 for a straight way, 1/2 for a random walk.
    """
    first, last = trace.config.warmup_steps, len(samples.weights)
    single = np.abs(np.diff(samples.weights[first:], axis=0)) @ samples.share
    rows: list[dict[str, float]] = []
    for lag in lags:
        if first + 2 * lag >= last:
            break
        starts = np.unique(np.linspace(first, last - 1 - lag, _STARTS).astype(int))
        apart = np.abs(samples.weights[starts + lag] - samples.weights[starts]) @ samples.share
        row = {"lag": lag, "distance": float(apart.mean()), "path": lag * float(single.mean())}
        before = rows[-1] if rows else None
        row["exponent"] = (
            float(np.log(row["distance"] / before["distance"]) / np.log(lag / before["lag"]))
            if before
            else 1.0
        )
        rows.append(row)
    return rows
