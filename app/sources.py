"""Where rows come from: the bundled text, a JSONL or Parquet file, or a data set of the hub."""

import glob
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from app import bundled
from app.config import DataConfig
from app.schemas import READERS, Message, RowError, choose_schema, place_system
from layercheck.errors import ConfigError

_BLOCK_BYTES = 1 << 22
_BEGIN_BYTES = 1 << 16
T = TypeVar("T")


def conversations(data: DataConfig) -> Iterator[list[Message]]:
    """All conversations in file order, at most `max_rows`.

    Raises:
        ConfigError: the source is missing, empty, lacks a column, or a row does not follow the schema; names
            the source, and the columns or the row.
    """
    return read_rows(data, reader_of(data))


def read_rows(data: DataConfig, read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """What `read` makes of each row, in file order, at most `max_rows`.

    Raises:
        ConfigError: a row does not follow the schema; names the source and the row.
    """
    for number, row in enumerate(islice(_rows(data), data.max_rows), start=1):
        yield read_row(data, read, number, row)


def reader_of(data: DataConfig) -> Callable[[dict[str, Any]], list[Message]]:
    """What makes a conversation of a row.

    Raises:
        ConfigError: see `check_source`.
    """
    read = READERS[check_source(data)]
    return lambda row: place_system(read(row), data.system)


def read_row(data: DataConfig, read: Callable[[dict[str, Any]], T], number: int, row: dict[str, Any]) -> T:
    """What `read` makes of one row.

    Raises:
        ConfigError: the row does not follow the schema; names the source and the row's number.
    """
    try:
        return read(row)
    except (RowError, KeyError) as error:
        raise ConfigError(
            f"data.source={data.source!r}, row {number}: {error}; see data.schema={data.schema_!r}"
        ) from None


def iterable_rows(data: DataConfig) -> Any:
    """The rows as an IterableDataset of `datasets`: read as they come, and it can say where it is.

    Raises:
        ConfigError: there is no such source.
    """
    if not _is_file(data):
        return _hub(data)
    from datasets import load_dataset

    kind = "parquet" if data.source.endswith(".parquet") else "json"
    place = glob.escape(str(Path(data.source).absolute()))  # what it gets is a pattern
    return load_dataset(kind, data_files=place, split="train", streaming=True)


def check_source(data: DataConfig) -> str:
    """Reads just enough to know that training can start; returns the schema."""
    return choose_schema(_columns(data), data.schema_, data.source)


def source_fingerprint(data: DataConfig) -> str:
    """Changes when the rows do. A file counts by its bytes, wherever it lies; a hub id by its name."""
    if data.source == "bundled":
        return bundled.fingerprint()
    if not _is_file(data):
        return xxhash.xxh3_64_hexdigest(f"{data.source}@{data.split}".encode())
    digest = xxhash.xxh3_64()
    with Path(data.source).open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def stream_fingerprint(data: DataConfig) -> str:
    """Where it differs a place in the rows means nothing: another hub id, a file that begins otherwise."""
    if not _is_file(data):
        return source_fingerprint(data)
    with Path(data.source).open("rb") as file:
        return xxhash.xxh3_64_hexdigest(file.read(_BEGIN_BYTES))


def seen_of_stream(data: DataConfig) -> str:
    """What this process sees of the source of a stream, in words: equal where the rows are.

    A file counts by its size and its beginning, a data set of the hub by its revision.
    """
    try:
        if _is_file(data):
            return f"a file of {Path(data.source).stat().st_size} bytes, beginning {stream_fingerprint(data)}"
        from datasets import load_dataset_builder

        return f"the revision {load_dataset_builder(data.source).hash}"
    except Exception as error:  # of many libraries: what it was is the answer
        return f"nothing ({type(error).__name__}: {error})"


def _is_file(data: DataConfig) -> bool:
    return data.source.endswith((".jsonl", ".json", ".parquet")) or data.source.startswith(("/", "."))


def _columns(data: DataConfig) -> list[str]:
    if data.source == "bundled":
        return list(bundled.rows()[0])
    if _is_file(data):
        return _file_columns(data.source)
    rows = _hub(data)
    return list(rows.column_names or next(iter(rows), {}))


def _file_columns(source: str) -> list[str]:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"data.source={source!r} is not a file", path=source)
    if path.suffix == ".parquet":
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"data.source={source!r} is not a Parquet file: {error}", path=source) from None
        columns, empty = file.schema_arrow.names, file.metadata.num_rows == 0
    else:
        first = next(_json_lines(path), None)
        columns, empty = list(first or {}), first is None
    if empty:
        raise ConfigError(f"data.source={source!r} holds no row (columns {columns})", path=source)
    return columns


def _rows(data: DataConfig) -> Iterator[dict[str, Any]]:
    if data.source == "bundled":
        return iter(bundled.rows())
    if not _is_file(data):
        return iter(_hub(data))
    path = Path(data.source)
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"data.source='{path}', line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"data.source='{path}', line {number} is not an object")
            yield row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()


def _hub(data: DataConfig) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    if Path(data.source).is_dir():
        raise ConfigError(
            f"data.source={data.source!r} is a folder in {Path.cwd()}, which `datasets` would read in place "
            "of the hub's data set: start from elsewhere, or name a .jsonl or .parquet file in it",
            path=data.source,
        )
    try:
        return load_dataset(data.source, split=data.split, streaming=data.streaming)
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"data.source={data.source!r} is neither `bundled`, nor a .jsonl or .parquet file, nor a "
            f"data set of the hub with the split {data.split!r}: {error}"
        ) from None
