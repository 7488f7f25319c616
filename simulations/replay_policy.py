"""The production policy over a recorded trace: the very ledger and rule of training, without a model.

What training learns from its storage, which events are committed, is replayed too: from the ages that the run
recorded, to check that all decisions come out the same; or as a fixed delay, to ask what other settings would
have done. The ages tell of versions alone, so the first cannot be had of a run with residuals.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.drift_report import DriftReport
from layercheck.errors import ConfigError
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.policy import decide
from simulations.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
COMMIT_DELAY_STEPS = 1


@dataclass(frozen=True)
class Replayed:
    """What the policy chose; rows are the steps of the trace, columns its trainable layers.

    Attributes:
        written: shape (n, layers), the layer was chosen.
        committed: shape (n, layers), newest committed version after the step.
        added: shape (n, layers), a residual of the layer was chosen.
        saved: shape (n, layers), newest committed version or residual.
        reasons: reason -> layer writes, over the steps after the warm-up.
        k0: the threshold it came to, None if no layer moved.
    """

    trace: Trace
    config: LayerCheckConfig
    written: npt.NDArray[np.bool_]
    committed: Ints
    added: npt.NDArray[np.bool_]
    saved: Ints
    reasons: dict[str, int] = field(default_factory=dict)
    k0: float | None = None


def replay(trace: Trace, config: LayerCheckConfig, recorded_commits: bool = False) -> Replayed:
    """Runs ledger and policy over the trace.

    Args:
        trace: from step 1 on.
        config: settings; those of the trace, or others.
        recorded_commits: the ledger hears of commits when the run did; else `COMMIT_DELAY_STEPS` later.

    Raises:
        ConfigError: the trace does not begin at step 1, or the settings or the recorded commits need timings
            that it does not hold.
    """
    if trace.steps[0] != 1:
        raise ConfigError(f"trace {trace.run} begins at step {trace.steps[0]}, not 1: the warm-up is missing")
    if config.overhead_budget is not None:
        raise ConfigError("a run with overhead_budget follows its timings, which a trace cannot replay")
    if recorded_commits and (why := incomparable(trace)):
        raise ConfigError(why)
    seen = committed_steps(trace) if recorded_commits else None
    ledger = Ledger.fresh(trace.layer_map, config, trace.lr_ref)
    ledger.observe(DriftReport(0, {}, 0.0))
    ledger.select(decide(ledger.facts(0, 0.0), config))
    ledger.observe(DriftReport(0, {}, 0.0, committed_step=0))
    names, reasons = trace.names, Counter[str]()
    written = np.zeros(trace.delta.shape, dtype=np.bool_)
    committed, added, saved = written.astype(np.int64), written.copy(), written.astype(np.int64)
    events = [0]
    for row, step in enumerate(trace.steps.tolist()):
        lr, delta = float(trace.lr[row]), dict(zip(names, trace.delta[row].tolist(), strict=True))
        newest = _newest(events, step - COMMIT_DELAY_STEPS) if seen is None else int(seen[row])
        ledger.observe(DriftReport(step, delta, lr, committed_step=newest))
        decision = decide(ledger.facts(step, lr), config)
        ledger.select(decision)
        for chosen, writes in ((written, decision.versions), (added, decision.residuals)):
            layers = {write.layer for write in writes}
            chosen[row] = [name in layers for name in names]
        committed[row] = [ledger.versions.layers[name].committed for name in names]
        saved[row] = [ledger.unsaved.layers[name].committed for name in names]
        if decision.writes:
            events.append(step)
        if step > config.warmup_steps:
            reasons.update(write.reason for write in decision.writes)
    return Replayed(trace, config, written, committed, added, saved, dict(reasons), ledger.k0)


def committed_steps(trace: Trace) -> Ints:
    """Newest commit that the run had heard of at each step, from the ages it recorded, those of versions.

    Ages of layers that were not chosen count from committed versions. A layer chosen by itself was not in
    flight, so its newest version was committed, too; a full event takes all layers whatever is in flight.
    Commits come in step order.
    """
    is_full = np.all(trace.written, axis=1, keepdims=True)
    versions = np.where(is_full, -1.0, trace.steps[:, None] - trace.age)
    return np.maximum.accumulate(versions.max(axis=1)).astype(np.int64)


def _newest(events: list[int], step: int) -> int:
    return next((event for event in reversed(events) if event <= step), -1)


# ---------------------------------------------------------------- identical decisions


@dataclass(frozen=True, slots=True)
class Comparison:
    """The run's own decisions beside those of the replay, up to its first failure.

    Attributes:
        steps: steps compared.
        different: steps at which other layers were chosen.
        first: what differs first, in words.
    """

    steps: int
    different: int
    first: str = ""


def incomparable(trace: Trace) -> str:
    """Why the run's own decisions cannot be checked, in words; empty where they can."""
    if not trace.config.residual.enabled:
        return ""
    return (
        f"run {trace.run} has residual.enabled: when it heard that a residual was committed, on which its "
        "later decisions depend, is not recorded"
    )


def compare(trace: Trace) -> Comparison:
    """Replays the run at its own settings and compares decision by decision.

    Raises:
        ConfigError: see `replay`.
    """
    again = replay(trace, trace.config, recorded_commits=True)
    rows = trace.steps <= trace.undisturbed
    wrong = np.flatnonzero((again.written != trace.written).any(axis=1) & rows)
    if not len(wrong):
        return Comparison(int(rows.sum()), 0)
    row, names = int(wrong[0]), np.array(trace.names)
    there, here = names[trace.written[row]].tolist(), names[again.written[row]].tolist()
    text = f"step {trace.steps[row]}: the run wrote {there}, the replay {here}"
    return Comparison(int(rows.sum()), len(wrong), text)


# ---------------------------------------------------------------- figures


def figures(done: Replayed) -> dict[str, Any]:
    """What a choice of settings costs and leaves, over the steps after the warm-up.

    `drift_lost` is the size-weighted drift of the layers since their committed saves, as a failure at a
    random step finds it; `mean_interval_steps` leaves full events aside (design, section 2).
    """
    trace, config = done.trace, done.config
    after = trace.steps > config.warmup_steps
    if not after.any():
        raise ConfigError(f"trace {trace.run} ends with its warm-up of {config.warmup_steps} steps")
    nbytes, numel = np.array(trace.nbytes), np.array([layer.numel for layer in trace.layer_map.trainable])
    weights = numel / numel.sum()
    written = done.written[after]
    selective = written & ~np.all(written, axis=1, keepdims=True)
    event_bytes = selective @ nbytes
    event_bytes = event_bytes[event_bytes > 0]
    ages = trace.steps[after, None] - done.committed[after]
    selected_bytes = float(event_bytes.sum())
    return {
        "selection": config.selection,
        "target_interval": config.target_interval,
        "s_max": config.s_max,
        "k0": done.k0,
        "steps": int(after.sum()),
        "bytes_written": selected_bytes,
        "full_bytes_written": float((written & ~selective).sum(axis=0) @ nbytes),
        "events": len(event_bytes),
        "mean_event_bytes": float(event_bytes.mean()) if len(event_bytes) else 0.0,
        "max_event_bytes": float(event_bytes.max()) if len(event_bytes) else 0.0,
        "layer_writes": int(selective.sum()),
        "writes_by_age": done.reasons.get("age", 0),
        "mean_interval_steps": float(after.sum() * nbytes.sum() / selected_bytes) if selected_bytes else None,
        "weighted_age": float((ages @ weights).mean()),
        "max_weighted_age": float((ages @ weights).max()),
        "max_age": int(ages.max()),
        "drift_lost": float((_lost_drift(done)[after] @ weights).mean()),
    }


def _lost_drift(done: Replayed) -> Floats:
    """Path drift of each layer since its committed save, after each step."""
    lost: Floats = np.cumsum(done.trace.delta, axis=0) - path_at(done.trace, done.saved)
    return lost


def path_at(trace: Trace, steps: Ints) -> Floats:
    """Path of each layer from step 0 to the steps given, shape (n, layers)."""
    total = np.vstack([np.zeros(trace.delta.shape[1]), np.cumsum(trace.delta, axis=0)])
    found: Floats = np.take_along_axis(total, np.maximum(steps, 0), axis=0)
    return found


def with_settings(config: LayerCheckConfig, **changes: object) -> LayerCheckConfig:
    """Other settings, checked; thresholds are calibrated for `target_interval`, not absolute."""
    base = config.model_dump() | {"k0": None, "k0_per_lr": None, "overhead_budget": None}
    return parse_config(base | changes)
