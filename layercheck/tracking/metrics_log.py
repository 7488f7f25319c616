"""Rows of a run's metrics and drift, collected in memory and written as Parquet parts.

A part is written by a background thread, never by the training thread: a slow or broken storage costs memory
up to a bound and then the oldest rows, but no step. No collectives in this thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from layercheck.errors import StorageError

log = logging.getLogger(__name__)

METRICS = pa.schema(
    [
        ("step", pa.int64()),
        ("loss", pa.float64()),
        ("lr", pa.float64()),
        ("step_s", pa.float64()),
        ("stall_s", pa.float64()),
        ("layers_written", pa.int64()),
        ("bytes_written", pa.int64()),
        ("max_age", pa.int64()),
        ("weighted_age", pa.float64()),
    ]
)
"""One row a step; `stall_s` is the visible stall, ages are steps against committed versions."""

DRIFT = pa.schema(
    [
        ("step", pa.int64()),
        ("layer", pa.string()),
        ("delta", pa.float64()),
        ("drift", pa.float64()),
        ("threshold", pa.float64()),
        ("age", pa.int64()),
        ("numel", pa.int64()),
        ("nbytes", pa.int64()),
    ]
)
"""One row a step and trainable layer."""

_MAX_ROWS = 200_000


class PartStore(Protocol):
    """The one call of a storage that parts need: the whole file or nothing."""

    def write(self, path: str, chunks: Iterable[bytes]) -> Any:
        """Writes one file; raises `StorageError` or `OSError`."""
        ...


class PartWriter:
    """One table of a run. `add` returns at once; a part is written when `flush_s` have passed, and at close.

    Args:
        storage: where parts go.
        folder: path of the table below the storage's root, such as `metrics`.
        attempt: number of this attempt, part of every file name: attempts never write over each other.
        flush_s: seconds between parts.
        schema: `METRICS` or `DRIFT`. Every part has the same columns, or a reader of the folder would fail.
        clock: seconds, never going back.
        max_rows: rows kept while the storage fails; the oldest go first, and that is reported.
    """

    def __init__(
        self,
        storage: PartStore,
        folder: str,
        attempt: int,
        flush_s: float,
        schema: pa.Schema,
        clock: Callable[[], float] = time.monotonic,
        max_rows: int = _MAX_ROWS,
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._attempt = attempt
        self._flush_s = flush_s
        self._schema = schema
        self._columns = frozenset(schema.names)  # pyarrow makes this list anew in each call
        self._clock = clock
        self._rows: deque[dict[str, Any]] = deque(maxlen=max_rows)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._asked = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._last_flush = clock()
        self._part = 0
        self.dropped = 0
        self.problem: str | None = None
        """Why the last part could not be written; None when it could."""

    def add(self, row: dict[str, Any]) -> None:
        """Takes one row; a column left out is null.

        Raises:
            ValueError: the row has a column that the table does not have.
        """
        unknown = row.keys() - self._columns
        if unknown:
            raise ValueError(
                f"{self._folder}: unknown column {sorted(unknown)[0]!r}; has {self._schema.names}"
            )
        with self._lock:
            self.dropped += len(self._rows) == self._rows.maxlen
            self._rows.append(row)
        if self._clock() - self._last_flush >= self._flush_s:
            self._ask_for_flush()

    def flush(self) -> bool:
        """Writes what was collected as one part, in the calling thread; False if the storage failed.

        The rows of a failed part are kept for the next one. Two threads never write the same part.
        """
        with self._flushing:
            self._last_flush = self._clock()
            with self._lock:
                rows, dropped = list(self._rows), self.dropped
            if not rows:
                return True
            path = f"{self._folder}/attempt-{self._attempt:03d}-{self._part:05d}.parquet"
            try:
                self._storage.write(path, [_encode(rows, self._schema)])
            except (StorageError, OSError, pa.ArrowException) as error:
                self.problem = f"{path}: {error}"
                log.warning("metrics not written, %d rows kept: %s", len(rows), self.problem)
                return False
            self._part += 1
            self.problem = None
            self._forget(len(rows), dropped)
            return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Writes the rest, in at most `timeout_s`; False if rows were left behind."""
        self._closing = True
        if self._rows or self._thread is not None:
            self._ask_for_flush().join(timeout_s)
        return not self._rows

    def _forget(self, written: int, dropped_before: int) -> None:
        """Removes the rows of a part; those pushed out by newer ones meanwhile are gone already."""
        with self._lock:
            pushed_out = self.dropped - dropped_before
            for _ in range(max(0, written - pushed_out)):
                self._rows.popleft()

    def _ask_for_flush(self) -> threading.Thread:
        """Wakes the thread. Starting one for each part would hold up training until it had a core."""
        self._asked.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"parts-{self._folder}", daemon=True)
            self._thread.start()
        return self._thread

    def _run(self) -> None:
        closing = False
        while not closing:
            self._asked.wait()
            self._asked.clear()
            closing = self._closing
            self.flush()


def _encode(rows: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    columns = [pa.array([row.get(item.name) for row in rows], type=item.type) for item in schema]
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())
