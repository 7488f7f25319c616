"""Tokenised once, memory-mapped ever after: the data of a run as random access to packed sequences."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import xxhash

from app.config import Config
from app.packing import Packed, pack, positions_and_documents
from app.sources import check_source, conversations, source_fingerprint
from app.tokens import IGNORED, Counts, documents, load_tokenizer, tokenizer_fingerprint
from layercheck.errors import ConfigError, LayerCheckError, StorageError

_VERSION = 1
_ROWS_PER_BATCH = 512
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank; every tensor has the shape (micro_batch, seq_len)."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    documents: torch.Tensor

    def pinned(self) -> "Batch":
        """The same in pinned memory."""
        parts = (self.input_ids, self.labels, self.position_ids, self.documents)
        return Batch(*(part.pin_memory() for part in parts))


@dataclass(frozen=True)
class Dataset:
    """Packed sequences in a memory-mapped Arrow file."""

    table: pa.Table
    seq_len: int
    num_labels: np.ndarray
    """Tokens with loss, per sequence."""
    counts: dict[str, int]
    tokenizer: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def batch(self, indices: list[int]) -> Batch:
        """The sequences of these numbers, in this order."""
        rows = self.table.take(pa.array(indices))
        layout = [positions_and_documents(lengths, self.seq_len) for lengths in rows["lengths"].to_pylist()]
        return Batch(
            self._matrix(rows, "input_ids"),
            self._matrix(rows, "labels"),
            torch.from_numpy(np.stack([positions for positions, _ in layout])),
            torch.from_numpy(np.stack([numbers for _, numbers in layout])),
        )

    def label_count(self, indices: list[int]) -> int:
        """Tokens with loss in these sequences; every rank can count those of the global batch."""
        return int(self.num_labels[indices].sum())

    def _matrix(self, rows: pa.Table, column: str) -> torch.Tensor:
        flat = rows[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return torch.from_numpy(flat.astype(np.int64).reshape(-1, self.seq_len))


def open_dataset(config: Config, rank: int = 0) -> Dataset:
    """The data of a run; rank 0 builds what is missing, the others wait up to `data.wait_s`.

    Raises:
        ConfigError: the source or the tokenizer cannot be used; the same error on every rank.
    """
    path, tokenizer_folder = from_rank_0(lambda: _prepare(config), rank, config.data.wait_s)
    tokenizer = load_tokenizer(config, tokenizer_folder)
    return _open(path, tokenizer, config)


def from_rank_0(make: Callable[[], T], rank: int, wait_s: float) -> T:
    """The result of `make` on rank 0, on all ranks. An error of `make` is raised on all ranks too.

    Without that the others would wait for a rank that has already left.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    answer: list[Any] = [None, None]
    if rank == 0:
        try:
            answer[0] = make()
        except (LayerCheckError, OSError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0, group=_short_lived_group(wait_s))
    if answer[1] is not None:
        raise answer[1]
    return answer[0]  # type: ignore[no-any-return]


def from_every_rank(mine: T, wait_s: float) -> list[T]:
    """What each rank has, in rank order, on all ranks. A collective."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=_short_lived_group(wait_s))
    return every


def _short_lived_group(wait_s: float) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))


def data_folder(config: Config) -> Path:
    """The folder of tokenised data and of the bundled tokenizer, made if it is missing.

    Raises:
        StorageError: it cannot be made.
    """
    folder = config.data_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write the data folder {folder}: {error}", path=str(folder)) from error
    return folder


def _prepare(config: Config) -> tuple[Path, Path]:
    check_source(config.data)
    folder = data_folder(config)
    tokenizer = load_tokenizer(config, folder)
    path = folder / f"packed-{_key(config, tokenizer)}.arrow"
    if not path.exists():
        _build(path, config, tokenizer)
    return path, folder


def _key(config: Config, tokenizer: Any) -> str:
    data = config.data
    parts = [source_fingerprint(data), tokenizer_fingerprint(tokenizer), data.schema_, data.max_rows]
    parts += [data.system, data.seq_len, data.packing, _VERSION]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())


def _build(path: Path, config: Config, tokenizer: Any) -> None:
    data = config.data
    counts = Counts()
    kept = documents(conversations(data), tokenizer, data.seq_len, counts)
    sequences = pack(kept, data.seq_len, packing=data.packing)
    first = next(sequences, None)
    if first is None:
        raise ConfigError(
            f"data.source={data.source!r}: none of {counts.documents} conversations has an answer within "
            f"data.seq_len={data.seq_len} tokens ({counts.truncated} were cut off), so no token would have a "
            "loss: raise data.seq_len, or see whether model.chat_template writes answers behind its prompt"
        )
    # A crash while it is written leaves the temporary file; the name appears only with a complete one.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    _write(temporary, chain([first], sequences), data.seq_len, tokenizer.pad_token_id, counts)
    temporary.rename(path)


def in_memory(sequences: list[Packed], seq_len: int, tokenizer: Any) -> Dataset:
    """A few packed sequences as a data set of their own."""
    schema = _schema(seq_len)
    batches = _record_batches(iter(sequences), schema, seq_len, tokenizer.pad_token_id)
    table = pa.Table.from_batches(batches, schema)
    return Dataset(table, seq_len, table["num_labels"].to_numpy(), {}, tokenizer)


def _schema(seq_len: int) -> pa.Schema:
    tokens = pa.list_(pa.int32(), seq_len)
    return pa.schema(
        {"input_ids": tokens, "labels": tokens, "lengths": pa.list_(pa.int32()), "num_labels": pa.int32()}
    )


def _write(path: Path, sequences: Iterator[Packed], seq_len: int, pad_id: int, counts: Counts) -> None:
    schema = _schema(seq_len)
    with path.open("wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in _record_batches(sequences, schema, seq_len, pad_id):
                writer.write(batch)
            # The counts are complete only now, after the last sequence.
            writer.write_batch(pa.RecordBatch.from_pylist([], schema), {"counts": json.dumps(asdict(counts))})
        file.flush()
        os.fsync(file.fileno())


def _record_batches(
    sequences: Iterator[Packed], schema: pa.Schema, seq_len: int, pad_id: int
) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, Any]] = []
    for packed in sequences:
        whole = packed.padded(seq_len, pad_id)
        rows.append(
            {
                "input_ids": whole.input_ids,
                "labels": whole.labels,
                "lengths": whole.lengths,
                "num_labels": sum(label != IGNORED for label in whole.labels),
            }
        )
        if len(rows) == _ROWS_PER_BATCH:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)


def _open(path: Path, tokenizer: Any, config: Config) -> Dataset:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        table = reader.read_all()
        _, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"cannot read {path}: {error}; every rank must see it", path=str(path)) from error
    counts = json.loads(metadata[b"counts"])
    return Dataset(table, config.data.seq_len, table["num_labels"].to_numpy(), counts, tokenizer)
