"""[pure] The rows of commits, kept in memory for weeks: as columns, not as one object for each row.

At 1,024 ranks a coordinator holds some hundred thousand rows. As objects each of them is walked over by every
full collection of Python's cyclic garbage, which then stops all commits for 0.15 s. Tuples of plain values
are left out of that walk.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, overload

from layercheck.manifest import Commit, ShardRecord

_FIELDS = tuple(ShardRecord.model_fields)
_values = attrgetter(*_FIELDS)
Columns = dict[str, tuple[Any, ...]]
"""Field of `ShardRecord` -> its values, row by row."""


class PackedRows(Sequence[ShardRecord]):
    """Rows that become objects when somebody looks at them, and only for as long."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Columns, index: Sequence[int]) -> None:
        self._columns, self._index = columns, index

    @classmethod
    def of(cls, rows: Iterable[ShardRecord]) -> "PackedRows":
        """Packs rows; equal values are kept once."""
        columns = columns_of(list(rows))
        size = len(columns["layer"])
        return cls({name: _shared(column) for name, column in columns.items()}, range(size))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._index)

    @overload
    def __getitem__(self, at: int) -> ShardRecord: ...
    @overload
    def __getitem__(self, at: slice) -> "PackedRows": ...
    def __getitem__(self, at: int | slice) -> "ShardRecord | PackedRows":
        """One row, or some of them still packed."""
        if isinstance(at, slice):
            return PackedRows(self._columns, self._index[at])
        row = self._index[at]
        return ShardRecord.model_construct(**{name: column[row] for name, column in self._columns.items()})

    def __iter__(self) -> Iterator[ShardRecord]:
        """The rows in order."""
        return (self[at] for at in range(len(self)))

    @property
    def columns(self) -> Columns:
        """The values of these rows."""
        if isinstance(self._index, range) and len(self._index) == len(self._columns["layer"]):
            return self._columns
        return {name: tuple(column[row] for row in self._index) for name, column in self._columns.items()}

    def by_layer(self) -> dict[str, "PackedRows"]:
        """Layer -> its rows, in rank order."""
        layers, ranks = self._columns["layer"], self._columns["rank"]
        found: dict[str, list[int]] = {}
        for row in sorted(self._index, key=ranks.__getitem__):
            found.setdefault(layers[row], []).append(row)
        return {layer: PackedRows(self._columns, tuple(rows)) for layer, rows in found.items()}


class PackedCommit(Commit):
    """A commit with `PackedRows`, made by `packed`."""

    @cached_property
    def by_layer(self) -> dict[str, Sequence[ShardRecord]]:
        """See `Commit.by_layer`."""
        assert isinstance(self.records, PackedRows)
        return dict(self.records.by_layer())

    @cached_property
    def whole_layers(self) -> tuple[str, ...]:
        """See `Commit.whole_layers`."""
        ranks = tuple(range(self.records[0].world_size)) if self.records else ()
        return tuple(name for name, rows in self.by_layer.items() if columns_of(rows)["rank"] == ranks)


def packed(commit: Commit) -> Commit:
    """The same commit in less memory."""
    if isinstance(commit, PackedCommit):
        return commit
    return PackedCommit.model_construct(
        event=commit.event,
        records=PackedRows.of(commit.records),
        trainer_state=commit.trainer_state,
        lineage=commit.lineage,
    )


def columns_of(rows: Sequence[ShardRecord]) -> Columns:
    """The values of rows, packed or not."""
    if isinstance(rows, PackedRows):
        return rows.columns
    columns = zip(*map(_values, rows), strict=True) if rows else ((),) * len(_FIELDS)
    return dict(zip(_FIELDS, columns, strict=True))


def joined(parts: Iterable[Sequence[ShardRecord]]) -> PackedRows:
    """The rows of several commits as one sequence."""
    every = [columns_of(part) for part in parts]
    columns: Columns = {name: tuple(chain.from_iterable(part[name] for part in every)) for name in _FIELDS}
    return PackedRows(columns, range(len(columns["layer"])))


def nbytes_of(rows: Sequence[ShardRecord]) -> int:
    """Bytes of all shards."""
    if isinstance(rows, PackedRows):
        columns = rows.columns
        return sum(columns["end"]) - sum(columns["begin"])
    return sum(row.nbytes for row in rows)


def _shared(column: tuple[Any, ...]) -> tuple[Any, ...]:
    # As keys 1 and 1.0 are one; a column has values of one type.
    seen: dict[Any, Any] = {}
    return tuple(map(seen.setdefault, column, column))
