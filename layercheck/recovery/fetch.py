"""Reads the versions of a plan from the storage: every byte checked, then cut to what this rank needs.

A shard whose checksum is wrong is read once more; if it is wrong again it is reported as bad, and the caller
gets a plan with an older version of that layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from layercheck.errors import DamagedShardError, StorageError
from layercheck.layers import ParamSpec
from layercheck.manifest import BadShard, LayerPlan, ShardRecord
from layercheck.persistence.shard_file import DTYPE_BYTES, ShardHeader, TensorRange, read_header
from layercheck.persistence.storage import Storage

Array = npt.NDArray[np.uint8]


class Wanted(Protocol):
    """A slice that this rank wants: elements [offset, offset + numel) of the flattened parameter."""

    @property
    def spec(self) -> ParamSpec: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def numel(self) -> int: ...  # noqa: D102


@dataclass(slots=True)
class FetchedSlice:
    """One parameter's part as bytes: `tensors[key]` holds `numel` elements of `dtypes[key]`."""

    tensors: dict[str, Array] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchedLayer:
    """One layer of the plan, cut for this rank. Keys are parameter names."""

    layer: str
    step: int
    slices: dict[str, FetchedSlice]


class Fetcher:
    """Fetches layers for one rank; keeps file headers, which several layers of an event share."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._headers: dict[str, _IndexedHeader] = {}
        self.nbytes = 0

    def fetch(
        self, plans: Iterable[LayerPlan], wanted: Mapping[str, Sequence[Wanted]]
    ) -> tuple[dict[str, FetchedLayer], list[BadShard]]:
        """Reads the layers of a plan.

        Args:
            plans: the layers to read.
            wanted: layer -> this rank's slices.

        Returns:
            The layers that are whole, and the bad shards of the others.
        """
        layers: dict[str, FetchedLayer] = {}
        bad: list[BadShard] = []
        for plan in plans:
            try:
                layers[plan.layer] = self._layer(plan, wanted[plan.layer])
            except _BadShardError as error:
                bad.append(error.shard)
        return layers, bad

    def _layer(self, plan: LayerPlan, wanted: Sequence[Wanted]) -> FetchedLayer:
        slices = {want.spec.name: FetchedSlice() for want in wanted}
        missing = {want.spec.name: want.numel for want in wanted}
        for shard in plan.shards:
            if not _overlaps(shard, wanted):
                continue
            header, data = self._checked(shard)
            for want in wanted:
                missing[want.spec.name] -= _copy(header, data, shard, want, slices[want.spec.name])
        short = [name for name, count in missing.items() if count]
        if short:
            raise _BadShardError(plan.shards[0], f"the shards do not cover parameter {short[0]}")
        return FetchedLayer(plan.layer, plan.step, slices)

    def _checked(self, shard: ShardRecord) -> tuple["_IndexedHeader", Array]:
        try:
            return self._read(shard)
        except StorageError:
            self._headers.pop(shard.file, None)
        try:
            return self._read(shard)
        except StorageError as error:
            raise _BadShardError(shard, str(error)) from error

    def _read(self, shard: ShardRecord) -> tuple["_IndexedHeader", Array]:
        header = self._headers.get(shard.file)
        if header is None:
            header = _IndexedHeader(read_header(self._storage, shard.file))
            _check_identity(header, shard)
            self._headers[shard.file] = header
        data = np.empty(shard.nbytes, dtype=np.uint8)
        self._storage.read_into(shard.file, shard.begin, data.data)
        digest = xxhash.xxh3_128_hexdigest(data.data)
        if digest != shard.xxh3_128:
            raise DamagedShardError(
                f"{shard.file}: checksum of layer {shard.layer} is {digest}, not {shard.xxh3_128}"
            )
        self.nbytes += shard.nbytes
        return header, data


class _IndexedHeader:
    """A shard file's header with its tensors by parameter."""

    def __init__(self, header: ShardHeader) -> None:
        self.about = header.about
        self.slices = header.slices
        self.of_parameter: dict[str, list[TensorRange]] = {name: [] for name in header.slices}
        for tensor in header.tensors:
            self.of_parameter[tensor.parameter].append(tensor)


class _BadShardError(Exception):
    def __init__(self, shard: ShardRecord, error: str) -> None:
        super().__init__(error)
        self.shard = BadShard(
            file=shard.file, layer=shard.layer, step=shard.step, attempt=shard.attempt, error=error
        )


def part_of(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """ZeRO-3's cut: (first element, count) of a rank's part of a flattened parameter, padding left out."""
    part = -(-numel // world_size)
    begin = min(rank * part, numel)
    return begin, min(part, numel - begin)


def _check_identity(header: "_IndexedHeader", shard: ShardRecord) -> None:
    about = header.about
    found = (about.step, about.attempt, about.part, about.rank, about.world_size)
    wanted = (shard.step, shard.attempt, shard.part, shard.rank, shard.world_size)
    if found != wanted:
        raise DamagedShardError(
            f"{shard.file} holds (step, attempt, part, rank, world) {found}, not {wanted}"
        )


def _overlaps(shard: ShardRecord, wanted: Sequence[Wanted]) -> bool:
    for want in wanted:
        begin, count = part_of(want.spec.numel, shard.rank, shard.world_size)
        if max(begin, want.offset) < min(begin + count, want.offset + want.numel):
            return True
    return not any(want.numel for want in wanted) and shard.rank == 0


def _copy(header: "_IndexedHeader", data: Array, shard: ShardRecord, want: Wanted, into: FetchedSlice) -> int:
    """Copies what a shard holds of a wanted slice; returns the number of elements."""
    held = header.slices.get(want.spec.name)
    if held is None or held.shape != want.spec.shape:
        raise _BadShardError(shard, f"{shard.file} has no parameter {want.spec.name} of {want.spec.shape}")
    into.scalars = {key: scalar.model_dump() for key, scalar in held.state.items()}
    begin = max(held.offset, want.offset)
    count = min(held.offset + held.numel, want.offset + want.numel) - begin
    for tensor in header.of_parameter[want.spec.name]:
        key, size = tensor.state, DTYPE_BYTES[tensor.dtype]
        if key not in into.tensors:
            into.tensors[key] = np.empty(want.numel * size, dtype=np.uint8)
            into.dtypes[key] = tensor.dtype
        if count > 0:
            source = tensor.begin - shard.begin + (begin - held.offset) * size
            target = (begin - want.offset) * size
            into.tensors[key][target : target + count * size] = data[source : source + count * size]
    return max(count, 0)
