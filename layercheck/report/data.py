"""What the page shows, as values: gathered from storage, binned to at most `MAX_COLUMNS` columns of steps.

Steps that a later attempt took back are left out of everything drawn over the steps; they count where costs
are summed, since they were paid for.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.status import summarize
from layercheck.errors import StorageError
from layercheck.manifest import EventId
from layercheck.persistence.storage import Storage
from layercheck.report.lives import AttemptRow, lives_of
from layercheck.report.seconds import Seconds, book
from layercheck.report.tables import Columns, Floats, Ints, LayerWritten, read_parts, read_writes

MAX_COLUMNS = 240
LARGEST_RATIO = 99.0
"""Stands for larger ones, and for a layer that was carried as due: its D is infinite."""
REASONS = ("drift", "age", "full", "preemption", "residual")
_METRICS = ("step", "loss", "step_s", "stall_s", "max_age", "weighted_age")
_DRIFT = ("step", "layer", "drift", "threshold", "nbytes")


@dataclass(frozen=True)
class Curves:
    """One value for each column of steps; NaN where no row was kept.

    Attributes:
        first: first step of each column.
        width: steps of a column.
        ratio: [layer, column] largest D/K; NaN without a row or before K is calibrated.
        written: [layer, column] a version of the layer was taken there.
        max_age: largest age in steps; `weighted_age` is the mean of the size-weighted ages.
        stall_share: visible stall / step time.
        nbytes: reason -> bytes committed.
        events: events committed.
    """

    first: Ints
    width: int
    ratio: Floats
    written: npt.NDArray[np.bool_]
    loss: Floats
    max_age: Floats
    weighted_age: Floats
    stall_share: Floats
    nbytes: dict[str, Floats]
    events: Ints

    def column(self, step: int) -> int:
        """The column of a step."""
        return min(max(0, step - 1) // self.width, len(self.first) - 1)

    def last(self, column: int) -> int:
        """Last step of a column."""
        return int(self.first[column]) + self.width - 1


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: how often it was written, and its newest version. `writes`, `by_reason`: of versions."""

    name: str
    numel: int
    trainable: bool
    writes: int
    residuals: int
    by_reason: dict[str, int]
    nbytes: int
    step: int | None
    attempt: int | None
    age: int | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole run.

    Attributes:
        layer_writes, by_reason: of versions.
        mean_interval: steps x bytes of the full state / bytes of drift and age writes; None without any.
        interval_after_warmup: the same over the steps after the warm-up; in it there are no such writes.
        ettr: as the application's `summary.json` says, None without one.
    """

    steps: int
    steps_with_rows: int
    taken_back: int
    attempts: int
    failures: int
    recoveries: int
    events: int
    layer_writes: int
    residual_writes: int
    by_reason: dict[str, int]
    nbytes: int
    full_bytes: int
    mean_interval: float | None
    interval_after_warmup: float | None
    train_s: float
    stall_s: float
    max_age: int | None
    max_weighted_age: float | None
    mean_weighted_age: float | None
    lost_steps: float
    ettr: float | None

    @property
    def stall_share(self) -> float | None:
        """Visible stall / train time."""
        return self.stall_s / self.train_s if self.train_s > 0 else None


@dataclass(frozen=True)
class RunReport:
    """Everything on the page."""

    run: str
    optimizer: str
    settings: dict[str, Any]
    status: dict[str, Any]
    totals: Totals
    seconds: Seconds
    curves: Curves
    layers: tuple[LayerRow, ...]
    attempts: tuple[AttemptRow, ...]
    notes: tuple[str, ...]

    @property
    def drifting(self) -> tuple[str, ...]:
        """Names of the rows of `curves.ratio`."""
        return tuple(layer.name for layer in self.layers if layer.trainable)


def gather(storage: Storage, run: Storage, facts: StoreFacts, span: int = 0) -> RunReport:
    """Reads a run.

    Args:
        storage: its `layercheck` folder.
        run: the folder around it.
        facts: what `storage` holds.
        span: steps that the curves are to cover at least; beyond the run they are unknown.
    """
    notes = list(facts.notes)
    names = [layer.name for layer in facts.run.layer_map.trainable]
    metrics = read_parts(run, "metrics", _METRICS, names, notes)
    drift = read_parts(run, "drift", _DRIFT, names, notes)
    writes = read_writes(storage, facts, notes)
    status, summary = summarize(facts), _summary(run)
    kept = _in_lineage(facts, metrics)
    steps = max([status["step"], *(w.event.step for w in writes if _is_live(facts, w.event))])
    attempts = lives_of(facts)
    return RunReport(
        run=facts.run.name,
        optimizer=facts.run.optimizer,
        settings=facts.run.config.get("checkpoint", {}),
        status=status,
        totals=_totals(facts, status, steps, metrics, kept, writes, attempts, summary),
        seconds=book(attempts, metrics, kept, _limits(facts), _wall_s(facts, summary)),
        curves=_curves(facts, max(steps, span), kept, _in_lineage(facts, drift), writes),
        layers=tuple(_layers(facts, status, writes)),
        attempts=attempts,
        notes=tuple(notes),
    )


def _in_lineage(facts: StoreFacts, rows: Columns) -> Columns:
    """The rows of steps that no later attempt took back: at most one for each step."""
    limits = {int(a): facts.lineage.rolled_back_to(int(a)) for a in np.unique(rows.attempt)}
    limit = np.array([limits[int(a)] for a in rows.attempt], dtype=np.float64)
    return rows.where(rows["step"] <= limit)


def _limits(facts: StoreFacts) -> dict[int, int]:
    """Attempt -> newest step of it that counts."""
    return {number: facts.lineage.rolled_back_to(number) for number in facts.attempts}


def _wall_s(facts: StoreFacts, summary: dict[str, Any]) -> float | None:
    """Seconds of the whole run: a summary knows those of its own submission, so there must be no other."""
    wall_s = summary.get("wall_s")
    alone = len({record.submission for record in facts.attempts.values()}) == 1
    return float(wall_s) if alone and isinstance(wall_s, int | float) else None


def _versions(writes: list[LayerWritten]) -> list[LayerWritten]:
    return [write for write in writes if write.reason != "residual"]


def _is_live(facts: StoreFacts, event: EventId) -> bool:
    return facts.lineage.is_live(event.step, event.attempt)


# ---------------------------------------------------------------- sums


def _totals(
    facts: StoreFacts,
    status: dict[str, Any],
    steps: int,
    metrics: Columns,
    kept: Columns,
    writes: list[LayerWritten],
    attempts: tuple[AttemptRow, ...],
    summary: dict[str, Any],
) -> Totals:
    full_bytes = _full_bytes(facts, status)
    selective = sum(w.nbytes for w in writes if w.reason in ("drift", "age"))
    trained = max(0, steps - facts.run.config.get("checkpoint", {}).get("warmup_steps", 0))
    receipts = [attempt.receipt for attempt in attempts if attempt.receipt is not None]
    return Totals(
        steps=steps,
        steps_with_rows=len(kept),
        taken_back=len(metrics) - len(kept),
        attempts=len(attempts),
        failures=sum(attempt.failed for attempt in attempts),
        recoveries=len(receipts),
        events=len({w.event for w in writes}),
        layer_writes=len(_versions(writes)),
        residual_writes=len(writes) - len(_versions(writes)),
        by_reason=dict(Counter(w.reason for w in _versions(writes))),
        nbytes=sum(w.nbytes for w in writes),
        full_bytes=full_bytes,
        mean_interval=steps * full_bytes / selective if selective else None,
        interval_after_warmup=trained * full_bytes / selective if selective else None,
        train_s=float(np.nansum(metrics["step_s"])),
        stall_s=float(np.nansum(metrics["stall_s"])),
        max_age=int(np.nanmax(kept["max_age"])) if len(kept) else None,
        max_weighted_age=float(np.nanmax(kept["weighted_age"])) if len(kept) else None,
        mean_weighted_age=float(np.nanmean(kept["weighted_age"])) if len(kept) else None,
        lost_steps=sum(float(receipt.get("lost_steps") or 0.0) for receipt in receipts),
        ettr=summary.get("ettr"),
    )


def _full_bytes(facts: StoreFacts, status: dict[str, Any]) -> int:
    """One version of every layer that trains, with its moments: a version of step 0 has none yet."""
    trainable = {layer.name for layer in facts.run.layer_map.trainable}
    return sum(layer["nbytes"] for layer in status["layers"] if layer["name"] in trainable)


def _summary(run: Storage) -> dict[str, Any]:
    """What the application wrote about the run, empty without."""
    try:
        found = json.loads(run.read("summary.json"))
    except (StorageError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _layers(facts: StoreFacts, status: dict[str, Any], writes: list[LayerWritten]) -> list[LayerRow]:
    newest = {layer["name"]: layer for layer in status["layers"]}
    rows = []
    for spec in facts.run.layer_map.layers:
        own = [w for w in writes if w.layer == spec.name]
        last = newest.get(spec.name, {})
        rows.append(
            LayerRow(
                name=spec.name,
                numel=spec.numel,
                trainable=spec.trainable,
                writes=len(_versions(own)),
                residuals=len(own) - len(_versions(own)),
                by_reason=dict(Counter(w.reason for w in _versions(own))),
                nbytes=sum(w.nbytes for w in own),
                step=last.get("step"),
                attempt=last.get("attempt"),
                age=last.get("age"),
            )
        )
    return rows


# ---------------------------------------------------------------- columns of steps


def _curves(
    facts: StoreFacts, steps: int, metrics: Columns, drift: Columns, writes: list[LayerWritten]
) -> Curves:
    width = max(1, math.ceil(steps / MAX_COLUMNS))
    count = max(1, math.ceil(steps / width))
    place = _columns_of(metrics["step"], width, count)
    ratio, written = _heat(len(facts.run.layer_map.trainable), drift, width, count)
    seconds = _sums(place, metrics["step_s"], count)
    live = [w for w in writes if _is_live(facts, w.event)]
    nbytes = {reason: np.zeros(count) for reason in REASONS}
    for write in live:
        nbytes[write.reason][_columns_of(np.array([write.event.step]), width, count)[0]] += write.nbytes
    event_steps = np.array([event.step for event in {w.event for w in live}], dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(seconds > 0, _sums(place, metrics["stall_s"], count) / seconds, np.nan)
    return Curves(
        first=1 + width * np.arange(count, dtype=np.int64),
        width=width,
        ratio=ratio,
        written=written,
        loss=_means(place, metrics["loss"], count),
        max_age=_largest(place, metrics["max_age"], count),
        weighted_age=_means(place, metrics["weighted_age"], count),
        stall_share=share,
        nbytes=nbytes,
        events=np.bincount(_columns_of(event_steps, width, count), minlength=count),
    )


def _columns_of(steps: Any, width: int, count: int) -> Ints:
    """Step 1 begins the first column; what belongs to step 0 is shown there, too."""
    columns: Ints = np.clip((np.asarray(steps, dtype=np.int64) - 1) // width, 0, count - 1)
    return columns


def _heat(layers: int, drift: Columns, width: int, count: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    drift = drift.where(~np.isnan(drift["layer"]))
    place, layer = _columns_of(drift["step"], width, count), drift["layer"].astype(np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.where(drift["threshold"] > 0, drift["drift"] / drift["threshold"], np.nan)
    value = np.minimum(value, LARGEST_RATIO)
    known = np.isfinite(value)
    ratio = np.full((layers, count), -np.inf)
    np.maximum.at(ratio, (layer[known], place[known]), value[known])
    written = np.zeros((layers, count), dtype=np.bool_)
    chosen = drift["nbytes"] > 0
    written[layer[chosen], place[chosen]] = True
    return np.where(np.isfinite(ratio), ratio, np.nan), written


def _sums(place: Ints, values: Floats, count: int) -> Floats:
    known = ~np.isnan(values)
    return np.bincount(place[known], weights=values[known], minlength=count).astype(np.float64)


def _means(place: Ints, values: Floats, count: int) -> Floats:
    known = np.isfinite(values)
    number = np.bincount(place[known], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = np.where(
            number > 0, np.bincount(place[known], weights=values[known], minlength=count) / number, np.nan
        )
    return means


def _largest(place: Ints, values: Floats, count: int) -> Floats:
    largest = np.full(count, -np.inf)
    known = np.isfinite(values)
    np.maximum.at(largest, place[known], values[known])
    return np.where(np.isfinite(largest), largest, np.nan)
