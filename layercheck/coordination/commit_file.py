"""`commit.parquet`: the record that makes an event exist, to bytes and back.

Parquet's own checksums do not cover its footer, and a flipped bit there can yield another table without a
word. So a digest over everything that is meant (rows, trainer state, lineage, event) lies beside them, and
bytes that do not carry their own digest are no commit.
"""

import io
import json
from collections.abc import Iterable, Sequence
from operator import sub
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_128_hexdigest

from layercheck.coordination.rows import columns_of
from layercheck.manifest import FORMAT_VERSION, Commit, EventId, LineageLink, ShardRecord

SCHEMA = pa.schema(
    [
        ("layer", pa.string()),
        ("step", pa.int64()),
        ("attempt", pa.int32()),
        ("rank", pa.int32()),
        ("world_size", pa.int32()),
        ("file", pa.string()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("nbytes", pa.int64()),
        ("xxh3_128", pa.string()),
        ("drift", pa.float64()),
        ("threshold", pa.float64()),
        ("age", pa.int64()),
        ("reason", pa.string()),
        ("snapshot_s", pa.float64()),
        ("write_s", pa.float64()),
    ]
)
"""The columns of `commit.parquet`; `history/*.parquet` has `part` beside them."""
RESIDUAL_COLUMNS = (("kind", pa.string()), ("base_step", pa.int64()), ("base_attempt", pa.int32()))
"""Further ones, only where one of the rows is a residual: a run without them writes what it always wrote."""

_RESIDUAL_NAMES = frozenset(name for name, _ in RESIDUAL_COLUMNS)
_MAX_THRIFT_BYTES = 256 * 1024 * 1024


class DamagedCommitError(ValueError):
    """These bytes are not a commit that was written here."""


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def text_of(rows: Sequence[ShardRecord]) -> bytes:
    """The canonical text of some rows, as it stands inside that of a whole commit."""
    return canonical([_facts(row) for row in rows])[1:-1]


def _facts(row: ShardRecord) -> dict[str, Any]:
    """A version has no more keys than before there were residuals: old digests hold."""
    facts = row.__dict__
    return facts if row.kind == "residual" else {k: v for k, v in facts.items() if k not in _RESIDUAL_NAMES}


def encode(commit: Commit, texts: Iterable[bytes] | None = None) -> bytes:
    """The whole file.

    Args:
        commit: what it says.
        texts: `text_of` the rows, in their order, any number at a time: whoever made them while they came in
            has a large event committed sooner.
    """
    metadata = _texts_beside_rows(commit)
    digest = _digest(metadata, [text_of(commit.records)] if texts is None else texts)
    metadata |= {"format": canonical(FORMAT_VERSION), "digest": digest.encode()}
    return _parquet(_table(commit.records), metadata)


def encode_history(records: Sequence[ShardRecord]) -> bytes:
    """Rows of past commits, for `history/*.parquet`."""
    return _parquet(_table(records, (("part", pa.int32()),)), {})


def decode_history(data: bytes) -> tuple[ShardRecord, ...]:
    """The rows of one part of the history.

    Raises:
        pyarrow.ArrowException, ValueError: the part is damaged.
    """
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    known = ({key: value for key, value in row.items() if value is not None} for row in rows)
    return tuple(_record(row, row.pop("part")) for row in known)


def merge_history(parts: Sequence[bytes]) -> tuple[bytes, list[bool]]:
    """One part with the rows of all, and which of them could be read; a column that one lacks is null."""
    tables: list[pa.Table | None] = []
    for data in parts:
        try:
            tables.append(pq.read_table(pa.BufferReader(data)))
        except (pa.ArrowException, ValueError, OSError):
            tables.append(None)
    readable = [table for table in tables if table is not None]
    return _parquet(pa.concat_tables(readable, promote_options="default"), {}), [
        table is not None for table in tables
    ]


def decode(data: bytes, event: EventId) -> Commit:
    """The commit of an event from its file.

    Raises:
        DamagedCommitError: not readable, of another event, or not what its digest was made of.
    """
    try:
        commit, digest = _parse(data, event)
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        MemoryError,
        RecursionError,
    ) as error:
        raise DamagedCommitError(f"not readable: {type(error).__name__}: {error}") from error
    if digest != _digest(_texts_beside_rows(commit), [text_of(commit.records)]):
        raise DamagedCommitError("its digest does not match its content")
    if commit.event != event:
        raise DamagedCommitError(f"it belongs to {commit.event.folder}")
    return commit


def _parse(data: bytes, event: EventId) -> tuple[Commit, str]:
    file = pq.ParquetFile(
        pa.BufferReader(data),
        thrift_string_size_limit=_MAX_THRIFT_BYTES,
        thrift_container_size_limit=_MAX_THRIFT_BYTES,
        page_checksum_verification=True,
    )
    metadata = file.metadata.metadata or {}
    if json.loads(metadata[b"format"]) != FORMAT_VERSION:
        raise ValueError(f"format {metadata[b'format']!r} is not {FORMAT_VERSION}")
    rows = file.read().to_pylist()
    commit = Commit(
        event=EventId.model_validate(json.loads(metadata[b"event"])),
        records=tuple(_record(row, event.part) for row in rows),
        trainer_state=json.loads(metadata[b"trainer_state"]),
        lineage=tuple(LineageLink.model_validate(link) for link in json.loads(metadata[b"lineage"])),
    )
    return commit, metadata[b"digest"].decode()


def _record(row: dict[str, Any], part: int) -> ShardRecord:
    nbytes = row.pop("nbytes")
    record = ShardRecord.model_validate(row | {"part": part})
    if nbytes != record.nbytes:
        raise ValueError(f"{nbytes} bytes in a range of {record.nbytes}")
    return record


def _texts_beside_rows(commit: Commit) -> dict[str, bytes]:
    """JSON mode of `model_dump` would turn an infinity in the trainer state into null."""
    return {key: canonical(value) for key, value in commit.model_dump(exclude={"records"}).items()}


def _digest(beside: dict[str, bytes], texts: Iterable[bytes]) -> str:
    """Of the canonical text of the whole commit, put together from the texts of its parts."""
    parts = beside | {"records": b"[" + b",".join(texts) + b"]"}
    members = [b'"' + key.encode() + b'":' + parts[key] for key in sorted(parts)]
    return xxh3_128_hexdigest(b"{" + b",".join(members) + b"}")


def _table(records: Sequence[ShardRecord], more: tuple[tuple[str, pa.DataType], ...] = ()) -> pa.Table:
    """Column by column: a dict for every row takes ten times as long."""
    columns = columns_of(records)
    more += RESIDUAL_COLUMNS if "residual" in columns["kind"] else ()
    schema = pa.schema([*SCHEMA, *(pa.field(*column) for column in more)])
    columns = columns | {"nbytes": tuple(map(sub, columns["end"], columns["begin"]))}
    return pa.Table.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


def _parquet(table: pa.Table, metadata: dict[str, bytes]) -> bytes:
    """One file in memory. A stored Arrow schema would hold the metadata once more: two copies may differ."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer,
        table.schema,
        compression="NONE",
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return buffer.getvalue()
