"""The costs of a run of ours, from its own folder: what was measured, simulated, and so recommended.

`layercheck` is measured: the median step without its stall, the mean stall after the warm-up, the intervals
of its layers, and the phases of its recoveries. Two others are derived from the same run by a stated rule,
for comparison: `full_sync`, a full copy that training waits for until it is durable, and `full_async`, one
that training waits for until it is copied, with no second copy before the first is durable. Both recover in
the same phases.

The interval of a layer is that of its versions by drift and age. Full events stand aside, as in the mean
interval everywhere, though a layer is fresh after one; so do residuals, whose stall is in the measured one.
Lost progress is computed from these intervals: with either it is more than the run would have lost.

A run cannot tell what measuring drift adds to a step: that stays in `t_iter_s`, for all methods alike.
"""

import json
from dataclasses import dataclass
from math import ceil
from statistics import fmean, stdev
from typing import Any

import numpy as np

from layercheck.commands.store import open_both
from layercheck.errors import ConfigError, StorageError
from simulations.costs import Costs, LayerCosts, MethodCosts, RecoveryCosts
from simulations.trace import OF_RHYTHM, Recorded, read_recorded


def costs_of_run(store: str) -> Costs:
    """Costs from a run folder.

    Raises:
        ConfigError: there is no run or summary, no step after the warm-up, no recovery, or no full event.
    """
    summary = _summary(store)
    recorded = read_recorded(store)
    warmup = int(recorded.facts.run.config.get("checkpoint", {}).get("warmup_steps", 0))
    rows = recorded.metrics.where(recorded.metrics["step"] > warmup)
    if len(rows) < 2:
        raise ConfigError(f"costs {store}: the run has no steps after its warm-up of {warmup}; train longer")
    steps = int(rows["step"].max()) - warmup
    t_iter_s = float(np.median(rows["step_s"] - rows["stall_s"]))
    recovery, spread = _recovery(summary, t_iter_s, store)
    full = _full_copy(recorded, store)
    return Costs(
        format_version=1,
        title=f"run {summary['run']}",
        t_iter_s=t_iter_s,
        gpus=int(summary["world_size"]),
        model=str(recorded.facts.run.model_config_json.get("model_type", "")),
        full_bytes=sum(recorded.version_bytes),
        methods={
            "layercheck": MethodCosts(
                source="measured",
                commits="every_step",
                stall_s=float(rows["stall_s"].mean()),
                stall_fixed_s=min(float(np.median(rows["stall_s"])), float(rows["stall_s"].mean())),
                layers=_layers(recorded, warmup, steps),
                s_max_steps=int(recorded.facts.run.config.get("checkpoint", {}).get("s_max", 400)),
                full_stall_s=full.copy_s,
                measured={key: float(summary[key]) for key in ("bytes_written", "events", "layer_writes")},
                note=_note(recorded),
                recovery=recovery,
                spread=spread,
            ),
            "full_sync": MethodCosts(
                source="derived",
                commits="interval",
                stall_s=full.copy_s + full.write_s,
                note="stall = copy + durable write of the full event that ended the warm-up",
                recovery=recovery,
                spread=spread,
            ),
            "full_async": MethodCosts(
                source="derived",
                commits="interval",
                stall_s=full.copy_s,
                min_interval_steps=max(1, ceil(full.write_s / t_iter_s)),
                commit_delay_s=full.write_s,
                note="stall = copy of that event; no second one before it is durable",
                recovery=recovery,
                spread=spread,
            ),
        },
    )


def _summary(store: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(open_both(store).run.read("summary.json"))
    except (StorageError, ValueError) as error:
        raise ConfigError(f"costs {store}: no readable summary.json in the run folder ({error})") from None
    return content


def _recovery(summary: dict[str, Any], t_iter_s: float, store: str) -> tuple[RecoveryCosts, dict[str, float]]:
    """Means over all recoveries, and the spread of their sum."""
    found = [_phases(resumed, t_iter_s) for resumed in summary["resumed"]]
    if not found:
        raise ConfigError(
            f"costs {store}: the run recovered from no failure, so what a recovery costs is unknown; take "
            "a run with one, such as runs/quickstart"
        )
    keys = ("detect_s", "restart_s", "load_s", "reconstruct_s")
    totals = [sum(phases.values()) for phases in found]
    spread = {"recovery_s": stdev(totals)} if len(totals) > 1 else {}
    return RecoveryCosts(**{key: fmean(phases[key] for phases in found) for key in keys}), spread


def _phases(resumed: dict[str, Any], t_iter_s: float) -> dict[str, float]:
    seconds = {key: float(resumed.get(key) or 0.0) for key in resumed if key.endswith("_s")}
    return {
        "detect_s": seconds["detect_s"],
        "restart_s": seconds["reschedule_s"],
        "load_s": seconds["plan_s"] + seconds["fetch_s"],
        "reconstruct_s": seconds["install_s"] + max(0.0, seconds["first_step_s"] - t_iter_s),
    }


@dataclass(frozen=True, slots=True)
class _FullCopy:
    """Seconds of one full event on its slowest rank: until training went on, and until it was durable."""

    copy_s: float
    write_s: float


def _full_copy(recorded: Recorded, store: str) -> _FullCopy:
    """The newest full event with moments that is still there: one always is (I5)."""
    for commit in sorted(recorded.facts.commits, key=lambda one: one.event.step, reverse=True):
        rows = [row for row in commit.records if row.reason == "full" and row.step > 0]
        if rows:
            return _FullCopy(max(row.snapshot_s for row in rows), max(row.write_s for row in rows))
    raise ConfigError(f"costs {store}: the run has no full event, so what a full copy costs is unknown")


def _layers(recorded: Recorded, warmup: int, steps: int) -> tuple[LayerCosts, ...]:
    """Steps after the warm-up per version; a layer that was not written is as old as they are many."""
    counts = dict.fromkeys(recorded.names, 0)
    for write in recorded.writes:
        if write.event.step > warmup and write.layer in counts and write.reason in OF_RHYTHM:
            counts[write.layer] += 1
    return tuple(
        LayerCosts(name=layer.name, numel=layer.numel, interval_steps=steps / max(1, counts[layer.name]))
        for layer in recorded.facts.run.layer_map.trainable
    )


def _note(recorded: Recorded) -> str:
    residuals = sum(write.reason == "residual" for write in recorded.writes)
    left = (
        f"; {residuals} residuals are not in the intervals: less is lost than they say" if residuals else ""
    )
    return f"stall: mean over the steps after the warm-up{left}"
