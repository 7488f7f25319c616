"""What a run has left in storage, read for its summary: attempts, receipts, metrics, committed writes."""

import io
import json
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.runfiles import RunFiles
from layercheck.manifest import EventId


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the worker group. `reached` is its last journaled step, `ended` None if it was cut off.

    `costs` are what a baseline says of itself at its end.
    """

    number: int
    submission: str
    world_size: int
    r_b: int
    reached: int
    ended: str | None
    receipt: dict[str, Any] | None
    costs: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of `metrics/`."""

    attempt: int
    step: int
    loss: float | None
    step_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Write:
    """One committed version of one layer, all ranks."""

    layer: str
    event: EventId
    reason: str
    nbytes: int


def read_attempts(files: RunFiles, method: str = "layercheck") -> list[Attempt]:
    """All attempts whose record can be read, in order. Every method's folder has them in the same form."""
    folder = f"{method}/attempts"
    numbers = [re.fullmatch(rf"{folder}/a(\d+)\.json", path) for path in files.paths(folder)]
    found = [_attempt(files, folder, int(match[1])) for match in numbers if match]
    return sorted((attempt for attempt in found if attempt), key=lambda attempt: attempt.number)


def _attempt(files: RunFiles, folder: str, number: int) -> Attempt | None:
    name = f"{folder}/a{number:03d}"
    record = _json(files, f"{name}.json")
    if record is None:
        return None
    progress = _json(files, f"{name}.progress.json") or {}
    return Attempt(
        number=number,
        submission=record["submission"],
        world_size=record["world_size"],
        r_b=record["r_b"],
        reached=max(record["r_b"], progress.get("step", 0)),
        ended=progress.get("ended"),
        receipt=_json(files, f"{name}.receipt.json"),
        costs=progress.get("costs", {}),
    )


def _json(files: RunFiles, path: str) -> dict[str, Any] | None:
    try:
        value = json.loads(files.read(path))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_steps(files: RunFiles) -> list[StepRow]:
    """The steps of `metrics/` in order; of a step that ran twice, the later run. Unflushed rows are gone."""
    rows: dict[int, StepRow] = {}
    for path in files.paths("metrics"):
        match = re.search(r"attempt-(\d+)-\d+\.parquet$", path)
        table = _table(files, path, ["step", "loss", "step_s", "stall_s"]) if match else None
        for row in table.to_pylist() if match and table is not None else []:
            new = StepRow(attempt=int(match[1]), **row)
            if new.step not in rows or rows[new.step].attempt <= new.attempt:
                rows[new.step] = new
    return [rows[step] for step in sorted(rows)]


def read_writes(files: RunFiles) -> list[Write]:
    """All versions ever committed: those of `history/` and those whose events still exist."""
    nbytes: dict[tuple[str, EventId, str], dict[int, int]] = {}
    for row in _rows(files):
        event = EventId(step=row["step"], attempt=row["attempt"], part=row["part"])
        ranks = nbytes.setdefault((row["layer"], event, row["reason"]), {})
        ranks[row["rank"]] = row["nbytes"]
    return [
        Write(layer, event, reason, sum(ranks.values())) for (layer, event, reason), ranks in nbytes.items()
    ]


_COLUMNS = ["layer", "step", "attempt", "rank", "nbytes", "reason"]


def _rows(files: RunFiles) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in files.paths("layercheck/history"):
        table = _table(files, path, [*_COLUMNS, "part"])
        rows += table.to_pylist() if table is not None else []
    for folder in files.paths("layercheck/events"):
        event = EventId.parse(folder.removeprefix("layercheck/"))
        table = _table(files, f"{folder}/commit.parquet", _COLUMNS) if event else None
        if event is not None and table is not None:
            rows += [row | {"part": event.part} for row in table.to_pylist()]
    return rows


def _table(files: RunFiles, path: str, columns: list[str]) -> pa.Table | None:
    """None for a file that is missing or damaged: whoever recovers has announced it, a summary goes on."""
    try:
        return pq.read_table(io.BytesIO(files.read(path)), columns=columns)
    except (FileNotFoundError, pa.ArrowInvalid):
        return None
