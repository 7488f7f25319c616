"""A recorded run as arrays: movement of every layer at every step, learning rates, and what was decided.

Reads storage alone, without torch or Ray. Steps that a later attempt took back are left out, so that each step
is there once.
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
        undisturbed: last step before the first failure (all steps without one).
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
    """Reads the drift trace of a run.

    Raises:
        ConfigError: there is no run, or its trace is empty or has a gap (its ends are named).
    """
    recorded = read_recorded(store)
    drift, metrics = recorded.drift, recorded.metrics
    if not len(drift) or not len(metrics):
        raise ConfigError(f"trace {store}: the run recorded no drift (its drift/ or metrics/ is empty)")
    steps = np.unique(drift["step"]).astype(np.int64)
    missing = np.setdiff1d(np.arange(steps[0], steps[-1] + 1), steps)
    if len(missing):
        raise ConfigError(
            f"trace {store}: {len(missing)} steps between {steps[0]} and {steps[-1]} are missing, "
            f"the first is {missing[0]}"
        )
    shape = (len(steps), len(recorded.names))
    row, column = (drift["step"] - steps[0]).astype(int), drift["layer"].astype(int)
    delta, age, nbytes = np.full(shape, np.nan), np.zeros(shape), np.zeros(shape)
    delta[row, column], age[row, column], nbytes[row, column] = drift["delta"], drift["age"], drift["nbytes"]
    if not np.all(np.isfinite(delta)):
        layer = recorded.names[int(np.argwhere(~np.isfinite(delta))[0][1])]
        raise ConfigError(f"trace {store}: layer {layer} has steps without a finite movement")
    settings: dict[str, Any] = recorded.facts.run.config.get("checkpoint", {})
    return Trace(
        run=recorded.facts.run.name,
        layer_map=recorded.facts.run.layer_map,
        config=parse_config(settings),
        steps=steps,
        lr=_lr(metrics, steps, store),
        delta=delta,
        age=age,
        written=nbytes > 0,
        lr_ref=_lr_ref(recorded.facts),
        undisturbed=int(steps[drift.attempt[np.argsort(drift["step"], kind="stable")][:: shape[1]] == 1][-1]),
        nbytes=recorded.version_bytes,
    )


def _lr(metrics: Columns, steps: npt.NDArray[np.int64], store: str) -> Floats:
    known = dict(zip(metrics["step"].astype(int).tolist(), metrics["lr"].tolist(), strict=True))
    try:
        return np.array([known[int(step)] for step in steps])
    except KeyError as error:
        raise ConfigError(f"trace {store}: metrics/ has no row of step {error.args[0]}") from None


def _lr_ref(facts: StoreFacts) -> float | None:
    """What the run's own ledger used: it rides in the trainer state of the newest progress file or commit."""
    states = [beat.trainer_state for _, beat in sorted(facts.progress.items())]
    states += [commit.trainer_state for commit in facts.commits]
    found = [state.get("layercheck", {}).get("lr_ref") for state in states]
    return next((float(value) for value in found if value is not None), None)
