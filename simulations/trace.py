"""A recorded run as arrays: movement of every layer at every step, learning rates, and what was decided.

Reads storage alone, without torch or Ray. Steps that a later attempt took back are left out, so that each
step is there once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layercheck.commands.store import open_both
from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import ConfigError
from layercheck.layers import LayerMap
from layercheck.report.tables import Columns, LayerWritten, read_parts, read_writes

Floats = npt.NDArray[np.float64]
BYTES_PER_ELEMENT = 12
"""fp32 weight and two moments: what a version holds of an element where none was ever written."""
OF_RHYTHM = ("drift", "age")
"""Reasons of the writes that a mean interval counts (design, section 2): full events and the last save of a
preemption stand aside, and a residual is no version."""
_MOST_MISSING = 0.05
_COLUMNS = ("delta", "age", "nbytes")


@dataclass(frozen=True)
class Trace:
    """What a run recorded; row i belongs to `steps[i]`, columns are the trainable layers in model order.

    Attributes:
        steps: shape (n,), optimizer steps, increasing by 1.
        lr: shape (n,), learning rate of each step.
        delta: shape (n, layers), normalised update of each step.
        age: shape (n, layers), steps since the newest committed version, after the step's decision.
        written: shape (n, layers), the layer was chosen at this step.
        lr_ref: reference rate of the run, None if it noted none.
        undisturbed: last step before the first failure or missing step.
        nbytes: bytes of one version of each layer.
    """

    run: str
    layer_map: LayerMap
    config: LayerCheckConfig
    steps: npt.NDArray[np.int64]
    lr: Floats
    delta: Floats
    age: Floats
    written: npt.NDArray[np.bool_]
    lr_ref: float | None
    undisturbed: int
    nbytes: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable layers."""
        return tuple(layer.name for layer in self.layer_map.trainable)


@dataclass(frozen=True)
class Recorded:
    """The tables of a run as they are in storage: `metrics` and `drift` of the steps that were kept."""

    facts: StoreFacts
    metrics: Columns
    drift: Columns
    writes: list[LayerWritten]
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The trainable layers."""
        return [layer.name for layer in self.facts.run.layer_map.trainable]

    @property
    def version_bytes(self) -> tuple[int, ...]:
        """Bytes of one version of each trainable layer, with its moments."""
        largest: dict[str, int] = {}
        for write in self.writes:
            largest[write.layer] = max(largest.get(write.layer, 0), write.nbytes)
        layers = self.facts.run.layer_map.trainable
        return tuple(largest.get(layer.name) or layer.numel * BYTES_PER_ELEMENT for layer in layers)


def read_recorded(store: str) -> Recorded:
    """Reads a run.

    Args:
        store: the run folder or the `layercheck` folder inside it, local path or URI.

    Raises:
        ConfigError: there is no run.
    """
    opened = open_both(store)
    facts = opened.facts()
    notes = list(facts.notes)
    names = [layer.name for layer in facts.run.layer_map.trainable]
    metrics = read_parts(opened.run, "metrics", ("step", "lr", "step_s", "stall_s"), names, notes)
    drift = read_parts(opened.run, "drift", ("step", "layer", "delta", "age", "nbytes"), names, notes)
    writes = read_writes(opened.layercheck, facts, notes)
    return Recorded(facts, _kept(facts, metrics), _kept(facts, drift), writes, tuple(notes))


def _kept(facts: StoreFacts, rows: Columns) -> Columns:
    limits = {int(a): facts.lineage.rolled_back_to(int(a)) for a in np.unique(rows.attempt)}
    limit = np.array([limits[int(a)] for a in rows.attempt], dtype=np.float64)
    return rows.where(rows["step"] <= limit)


def read_trace(store: str) -> Trace:
    """Reads the drift trace of a run. Steps whose rows died with a worker are filled with the step before.

    Raises:
        ConfigError: there is no run, its trace is empty, too many steps are missing, or one is not finite.
    """
    recorded = read_recorded(store)
    drift, metrics = recorded.drift, recorded.metrics
    if not len(drift) or not len(metrics):
        raise ConfigError(f"trace {store}: the run recorded no drift (its drift/ or metrics/ is empty)")
    known = _complete(drift, metrics, len(recorded.names))
    if not len(known):
        raise ConfigError(f"trace {store}: no step has the movement of all {len(recorded.names)} layers")
    steps = np.arange(known[0], known[-1] + 1)
    source = known[np.searchsorted(known, steps, side="right") - 1] - known[0]
    missing = np.setdiff1d(steps, known)
    if len(missing) > _MOST_MISSING * len(steps):
        raise ConfigError(
            f"trace {store}: {len(missing)} of the steps {steps[0]} to {steps[-1]} are missing, the first "
            f"is {missing[0]}"
        )
    delta, age, nbytes = (_matrix(drift, name, steps, recorded.names)[source] for name in _COLUMNS)
    if not np.all(np.isfinite(delta)):
        layer = recorded.names[int(np.argwhere(~np.isfinite(delta))[0][1])]
        raise ConfigError(f"trace {store}: layer {layer} has steps without a finite movement")
    lr = np.full(len(steps), np.nan)
    inside = metrics.where((metrics["step"] >= steps[0]) & (metrics["step"] <= steps[-1]))
    lr[inside["step"].astype(int) - steps[0]] = inside["lr"]
    settings: dict[str, Any] = recorded.facts.run.config.get("checkpoint", {})
    later = [int(step) for step in drift.where(drift.attempt > drift.attempt.min())["step"]]
    notes = [_missing_in_words(missing)] if len(missing) else []
    return Trace(
        run=recorded.facts.run.name,
        layer_map=recorded.facts.run.layer_map,
        config=parse_config(settings),
        steps=steps,
        lr=lr[source],
        delta=delta,
        age=age,
        written=nbytes > 0,
        lr_ref=_lr_ref(recorded.facts),
        undisturbed=min([*later, *missing.tolist(), int(steps[-1]) + 1]) - 1,
        nbytes=recorded.version_bytes,
        notes=(*recorded.notes, *notes),
    )


def _missing_in_words(missing: npt.NDArray[np.int64]) -> str:
    return (
        f"{len(missing)} steps are missing, the first is {missing[0]}: rows are written every "
        "metrics_flush_s, and those of the last moments die with a worker; the step before stands for them"
    )


def _complete(drift: Columns, metrics: Columns, num_layers: int) -> npt.NDArray[np.int64]:
    """Steps with all their rows: those of the last moments before a death may have stayed in memory."""
    steps, rows = np.unique(drift["step"], return_counts=True)
    return np.intersect1d(steps[rows == num_layers], metrics["step"]).astype(np.int64)


def _matrix(drift: Columns, name: str, steps: npt.NDArray[np.int64], layers: list[str]) -> Floats:
    """One column of the drift table by step and layer; NaN where there is no row."""
    inside = drift.where((drift["step"] >= steps[0]) & (drift["step"] <= steps[-1]))
    matrix = np.full((len(steps), len(layers)), np.nan)
    matrix[inside["step"].astype(int) - steps[0], inside["layer"].astype(int)] = inside[name]
    return matrix


def _lr_ref(facts: StoreFacts) -> float | None:
    """What the run's own ledger used: it rides in the trainer state of the newest progress file or commit."""
    states = [beat.trainer_state for _, beat in sorted(facts.progress.items())]
    states += [commit.trainer_state for commit in facts.commits]
    found = [state.get("layercheck", {}).get("lr_ref") for state in states]
    return next((float(value) for value in found if value is not None), None)
