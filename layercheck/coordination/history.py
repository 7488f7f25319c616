"""The rows of commits whose events are gone: `history/*.parquet`, parts that are only ever added and merged.

A run commits for weeks, so parts are merged now and then: a folder of a hundred thousand small files would
make each listing of it slower than the commit that it follows.
"""

import logging
from collections.abc import Sequence

import pyarrow as pa

from layercheck.coordination import commit_file
from layercheck.errors import StorageError
from layercheck.manifest import ShardRecord
from layercheck.persistence.storage import Storage

log = logging.getLogger(__name__)
MERGED_AT_ONCE = 32
LARGE_BYTES = 4 << 20
"""A part of this size is left as it is."""


def append_history(storage: Storage, attempt: int, records: Sequence[ShardRecord]) -> None:
    """Keeps rows of commits that are about to be deleted, as one more part."""
    own = _parts(storage, attempt)
    number = max(own, default=-1) + 1
    storage.write(_name(attempt, number), [commit_file.encode_history(records)])
    if number % MERGED_AT_ONCE == MERGED_AT_ONCE - 1:
        _merge(storage, attempt, [*own, number])


def read_history(storage: Storage) -> list[ShardRecord]:
    """The rows of all commits that were deleted; a part that cannot be read is left out with a warning.

    A crash may have left rows twice: in a part and its merged one, or beside the event itself.
    """
    rows: list[ShardRecord] = []
    for name in storage.list("history"):
        try:
            rows += commit_file.decode_history(storage.read(f"history/{name}"))
        except (StorageError, pa.ArrowException, ValueError) as error:
            log.warning("history/%s cannot be read: %s", name, error)
    return rows


def _merge(storage: Storage, attempt: int, numbers: list[int]) -> None:
    """Makes one part of the small ones at the end; one that cannot be read stays as it is.

    The old ones go last: a crash leaves rows twice, never not.
    """
    merged: list[tuple[int, bytes]] = []
    for number in sorted(numbers, reverse=True):
        size = storage.size(_name(attempt, number))
        if size is not None and size >= LARGE_BYTES:
            break
        try:
            merged.append((number, storage.read(_name(attempt, number))))
        except StorageError as error:
            log.warning("%s is not merged: %s", _name(attempt, number), error)
    data, kept = commit_file.merge_history([data for _, data in reversed(merged)])
    storage.write(_name(attempt, max(numbers) + 1), [data])
    for (number, _), is_kept in zip(reversed(merged), kept, strict=True):
        if is_kept:
            storage.delete(_name(attempt, number))


def _parts(storage: Storage, attempt: int) -> list[int]:
    prefix = f"attempt-{attempt:03d}-"
    names = [name for name in storage.list("history") if name.startswith(prefix)]
    return [int(name[len(prefix) : -len(".parquet")]) for name in names]


def _name(attempt: int, number: int) -> str:
    return f"history/attempt-{attempt:03d}-{number:05d}.parquet"
