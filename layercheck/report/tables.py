"""Reads the tables of a run: `metrics/`, `drift/`, and the rows of all commits, past ones included.

A part that is damaged or vanished costs its rows and leaves a note; a page about a run that went wrong must
not go wrong with it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from layercheck.coordination.commit_file import decode_history
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import StorageError
from layercheck.manifest import EventId, Reason, ShardRecord
from layercheck.persistence.storage import Storage

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_PART = re.compile(r"attempt-(\d{3,})-\d{5,}\.parquet")


@dataclass(frozen=True)
class Columns:
    """Equal columns of a table, with the attempt that wrote each row. Nulls are NaN."""

    attempt: Ints
    values: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.attempt)

    def __getitem__(self, name: str) -> Floats:
        return self.values[name]

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Columns":
        """The rows for which `chosen` is true."""
        return Columns(self.attempt[chosen], {name: column[chosen] for name, column in self.values.items()})


def read_parts(
    run: Storage, folder: str, names: Iterable[str], layers: list[str], notes: list[str]
) -> Columns:
    """All rows of a folder of Parquet parts, attempts in order.

    Args:
        run: the folder of the run.
        folder: `metrics` or `drift`.
        names: the columns wanted; `layer` becomes its index in `layers`.
        layers: layer names; rows of others are left out.
        notes: gets a line for each part that cannot be read.
    """
    names = list(names)
    attempts: list[Ints] = []
    columns: dict[str, list[Floats]] = {name: [] for name in names}
    for attempt, path in _parts(run, folder):
        try:
            found = pq.read_table(pa.BufferReader(run.read(path)), columns=names)
        except (StorageError, pa.ArrowException, OSError, ValueError) as error:
            notes.append(f"{path} is left out: {error}")
            continue
        attempts.append(np.full(found.num_rows, attempt, dtype=np.int64))
        for name in names:
            columns[name].append(_floats(found.column(name), layers))
    joined = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in columns.items()}
    return Columns(np.concatenate(attempts) if attempts else np.empty(0, dtype=np.int64), joined)


def _parts(run: Storage, folder: str) -> list[tuple[int, str]]:
    matches = [_PART.fullmatch(name) for name in run.list(folder)]
    return sorted((int(match[1]), f"{folder}/{match[0]}") for match in matches if match)


def _floats(column: Any, layers: list[str]) -> Floats:
    if pa.types.is_string(column.type):
        column = pc.index_in(column, value_set=pa.array(layers))
    values: Floats = np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    return values


# ---------------------------------------------------------------- versions ever written


@dataclass(frozen=True, slots=True)
class LayerWritten:
    """One committed version of one layer, all ranks; its event may be collected since."""

    layer: str
    event: EventId
    reason: Reason
    nbytes: int


def read_writes(storage: Storage, facts: StoreFacts, notes: list[str]) -> list[LayerWritten]:
    """Every version ever committed, in step order: those of `history/` and those that are still there."""
    rows = [row for commit in facts.commits for row in commit.records]
    for name in storage.list("history"):
        rows += _history(storage, f"history/{name}", notes)
    # A crash may leave a row in the history beside its event: each shard counts once.
    ranks = {(row.layer, row.event, row.reason, row.rank): row.nbytes for row in rows}
    versions: dict[tuple[str, EventId, Reason], int] = {}
    for (layer, event, reason, _), nbytes in ranks.items():
        versions[layer, event, reason] = versions.get((layer, event, reason), 0) + nbytes
    written = [LayerWritten(layer, event, reason, n) for (layer, event, reason), n in versions.items()]
    return sorted(written, key=lambda w: (w.event.step, w.event.attempt, w.event.part))


def _history(storage: Storage, path: str, notes: list[str]) -> tuple[ShardRecord, ...]:
    if not path.endswith(".parquet"):
        return ()
    try:
        return decode_history(storage.read(path))
    except (StorageError, pa.ArrowException, ValueError) as error:
        notes.append(f"{path} is left out: {error}")
        return ()
