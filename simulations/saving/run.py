"""Runs all measurements of saving and writes `saving.json`."""

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from app.measure.arms import ARMS, measure_arms
from app.measure.drift_error import DriftPairs, measure_drift
from app.measure.grouping import grouping_ms, scalar_all_reduce_ms
from app.measure.ranks import run_on_ranks
from app.measure.raw_write import write_rate_ratio
from app.measure.regime import CHECKPOINT, FULL, QUICK, WORLD_SIZE, Regime
from simulations.saving import figures
from simulations.saving.written import Written, written_in

LIMIT_S = 2400.0
BLOCK_COUNTS = (28, 80)


def measure_saving(out: Path, quick: bool) -> dict[str, Any]:
    """Measures, writes `<out>/saving.json`, and returns its content."""
    regime = QUICK if quick else FULL
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="saving-", dir=out) as folder:
        # What is short comes first: an error in it must not cost the long part.
        grouping = run_on_ranks(WORLD_SIZE, LIMIT_S, grouping_ms, folder, BLOCK_COUNTS)[0]
        all_reduce_ms = run_on_ranks(WORLD_SIZE, LIMIT_S, scalar_all_reduce_ms)[0]
        drift = run_on_ranks(WORLD_SIZE, LIMIT_S, measure_drift, folder, regime)[0]
        arms = run_on_ranks(WORLD_SIZE, LIMIT_S, measure_arms, folder, regime)
        written = {
            name: written_in(f"{folder}/{name}/run", regime.last_step) for name in ARMS if name != "stock"
        }
        rate = write_rate_ratio(Path(folder), written["saving"].median_shard_bytes, regime.num_write_pairs)
    result = _figures(arms, written, drift, regime) | {
        "grouping_ms": grouping,
        "scalar_all_reduce_ms": all_reduce_ms,
        "write_rate_ratio": rate,
    }
    (out / "saving.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _figures(
    arms: list[dict[str, Any]], written: dict[str, Written], drift: DriftPairs, regime: Regime
) -> dict[str, Any]:
    ranks = {name: [rank[name] for rank in arms] for name in ARMS}
    ab = figures.ab_ratio(ranks["saving"], ranks["stock"])
    saving = written["saving"]
    return {
        "tracking_step_ratio": figures.tracking_step_ratio(ranks["saving"]),
        "tracking_ms": figures.tracking_ms(ranks["saving"]),
        "overhead_ratio": figures.overhead_ratio(ranks["saving"]),
        "ab_ratio": ab.value,
        "ab_ci95": [ab.low, ab.high],
        "throttled_overhead_ratio": figures.overhead_ratio(ranks["throttled"]),
        "throttled_max_age": max(rank.max_age for rank in ranks["throttled"]),
        "bytes_ratio": saving.full_bytes * regime.num_steps / saving.nbytes,
        "drift_error_p99": figures.drift_error_p99(drift.path),
        "drift_error_p99_embeddings": figures.drift_error_p99(drift.embeddings),
        "drift_error_p99_displacement": figures.drift_error_p99(drift.displacement),
        "min_writes_per_layer": min(saving.writes_by_layer.values()),
        "writes_by_reason": saving.writes_by_reason,
        "conditions": {
            "world_size": WORLD_SIZE,
            "measured_steps": regime.num_steps,
            "parameters": saving.full_bytes // 12,
            "step_s": figures.mean_step_s(ranks["stock"]),
            "s_max": CHECKPOINT["s_max"],
            "max_age": max(rank.max_age for rank in ranks["saving"]),
            "checkpoint": CHECKPOINT,
            "machine": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
        },
    }
