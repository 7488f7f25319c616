"""Residuals over a recorded run: bytes against lost progress, over bits, version interval and `k_ratio`.

A residual gives back its weights rounded. The rounding is a part of the distance from the version, which is
taken as its path: an upper bound, as is `drift_lost`.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from math import nan
from typing import Any

import numpy as np

from layercheck.persistence.quantise import Code, dequantise, quantise
from simulations.replay_policy import Replayed, figures, path_at, replay, with_settings
from simulations.trace import Trace

_SAMPLE = 1 << 16


@cache
def rounding(code: Code) -> float:
    """Mean |error| / mean |value| of a code, for values of a normal distribution."""
    values = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    back = dequantise(*quantise(values, code), values.size, code)
    return float(np.abs(back - values).mean() / np.abs(values).mean())


def residual_figures(done: Replayed) -> dict[str, Any]:
    """`figures`, with what residuals cost and give back.

    `lost` is what a failure at a random step finds lost, size-weighted: the drift since the newest save and
    the rounding of that save. `all_bytes` are those of selective versions and of residuals.
    """
    trace, config = done.trace, done.config
    found, after = figures(done), done.trace.steps > config.warmup_steps
    numel = np.array([layer.numel for layer in trace.layer_map.trainable])
    nbytes = np.array([config.residual.nbytes(int(one)) for one in numel])
    way = path_at(trace, done.saved) - path_at(trace, np.minimum(done.committed, done.saved))
    rounded = rounding(Code(config.residual.bits, config.residual.block)) * way[after] @ (numel / numel.sum())
    residual_bytes = float((done.added[after] @ nbytes).sum())
    writes = int(done.added[after].sum())
    return found | {
        "bits": config.residual.bits if config.residual.enabled else 0,
        "k_ratio": config.residual.k_ratio if config.residual.enabled else 0.0,
        "residual_writes": writes,
        "residual_interval_steps": float(after.sum() * numel.size / writes) if writes else None,
        "residual_bytes": residual_bytes,
        "all_bytes": found["bytes_written"] + residual_bytes,
        "rounding_lost": float(rounded.mean()),
        "lost": found["drift_lost"] + float(rounded.mean()),
    }


def frontier(
    trace: Trace, targets: Sequence[float], bits: Sequence[int], ratios: Sequence[float]
) -> list[dict[str, Any]]:
    """The run's own settings without residuals, then all combinations, each beside it.

    The age limit is raised to twice the largest target, so that it does not decide.
    """
    s_max = max(trace.config.s_max, round(2 * max(targets)))
    block = trace.config.residual.block
    base = residual_figures(replay(trace, with_settings(trace.config, residual={})))
    rows = [base]
    for one, target, ratio in product(bits, targets, ratios):
        residual = {"enabled": True, "bits": one, "block": block, "k_ratio": ratio}
        settings = with_settings(trace.config, target_interval=target, s_max=s_max, residual=residual)
        rows.append(residual_figures(replay(trace, settings)))
    return [
        row
        | {
            "bytes_share": _share(row["all_bytes"], base["all_bytes"]),
            "lost_share": _share(row["lost"], base["lost"]),
        }
        for row in rows
    ]


def _share(value: float, of: float) -> float:
    return value / of if of > 0 else nan


def describe(trace: Trace, rows: list[dict[str, Any]]) -> str:
    """A table; the last two columns are shares of the first row, the run's own settings without residuals."""
    lines = [
        f"run {trace.run}: residuals over {len(trace.steps)} steps, {len(trace.names)} layers",
        f"  {'bits':>4}{'k_ratio':>9}{'target':>8}{'interval':>10}{'residuals':>11}{'of steps':>10}"
        f"{'drift lost':>12}{'rounding':>11}{'bytes':>8}{'lost':>8}",
    ]
    for row in rows:
        lines.append(
            f"  {row['bits']:>4}{row['k_ratio']:>9.3g}{row['target_interval']:>8.4g}"
            f"{row['mean_interval_steps'] or nan:>10.1f}{row['residual_writes']:>11}"
            f"{row['residual_interval_steps'] or nan:>10.1f}{row['drift_lost']:>12.3e}"
            f"{row['rounding_lost']:>11.3e}{row['bytes_share']:>8.3f}{row['lost_share']:>8.3f}"
        )
    return "\n".join(lines)
