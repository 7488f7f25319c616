"""Reads the versions of a plan from the storage: every byte checked, then cut to what this rank needs.

A shard of a version is read block by block, straight to where its elements belong, and hashed there. So
nothing is copied, and only one block is held beside the slices, however large the shard and whatever world
size wrote it. The place may be live memory: until `fetch` returns the layer it then holds unchecked bytes,
which nobody may use before. A shard whose checksum is wrong is read once more; if it is wrong again it is
reported as bad, and the caller gets a plan with an older version of that layer, which is fetched over it.

A residual is added to the weights once the version and all of the residual have been checked. Until then
the bytes of one of its shards are held too, and the distances in fp32, as large as the weights of the slices.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash

from layercheck.errors import DamagedShardError, StorageError
from layercheck.layers import ParamSpec
from layercheck.manifest import BadShard, LayerPlan, PlannedSave, ShardRecord
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.damage import is_damage
from layercheck.persistence.quantise import Floats
from layercheck.persistence.shard_file import (
    DTYPE_BYTES,
    MASTER,
    ShardHeader,
    SliceMeta,
    TensorRange,
    read_header,
)
from layercheck.persistence.storage import Readable
from layercheck.recovery.residual import distance
from layercheck.recovery.scatter import Array, Run, blocks, in_order

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOKS = 2
_TRIES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
BLOCK_BYTES = 8 << 20
"""One read of the storage: large enough for an object store, small enough to be bounded memory."""


class Wanted(Protocol):
    """A slice that this rank wants: elements [offset, offset + numel) of the flattened parameter."""

    @property
    def spec(self) -> ParamSpec: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def numel(self) -> int: ...  # noqa: D102


Room = Callable[[Any, str, str], Array | None]
"""(one of the wanted, key, safetensors dtype) -> the live memory that its bytes go to, or None for memory of
the fetcher's own. Asked once for each tensor of a fetch."""


@dataclass(slots=True)
class FetchedSlice:
    """One parameter's part as bytes: `tensors[key]` holds `numel` elements of `dtypes[key]`.

    `placed` names the keys whose bytes lie in live memory already.
    """

    tensors: dict[str, Array] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class FetchedLayer:
    """One layer of the plan, cut for this rank. Keys are parameter names."""

    layer: str
    step: int
    slices: dict[str, FetchedSlice]


def _no_room(_want: Any, _key: str, _dtype: str) -> None:
    """All bytes go to memory of the fetcher's own."""


class Fetcher:
    """Fetches layers for one rank; keeps file headers, which several layers of an event share.

    Args:
        storage: the run's `layercheck` folder, or memory in front of it.
        keys: which tensors of a parameter are wanted (`fp32`, `exp_avg`, ...); None means all.
        sleep: lets seconds pass while the storage does not answer.
        bases: get the weights of every version, before a residual is added.
        pass_over: told of a damaged file; True if it can now be read from somewhere else.
    """

    def __init__(
        self,
        storage: Readable,
        keys: frozenset[str] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        bases: BaseCopies | None = None,
        pass_over: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._storage, self._sleep, self._bases = storage, sleep, bases
        self._pass_over = pass_over
        self._keys = keys
        self._headers: dict[str, _IndexedHeader] = {}
        self._spare: Array = np.empty(BLOCK_BYTES, dtype=np.uint8)
        self.nbytes = 0

    def fetch(
        self, plan: LayerPlan, wanted: Sequence[Wanted], room: Room = _no_room
    ) -> FetchedLayer | BadShard:
        """Reads one layer of a plan: this rank's slices, or the shard for which it cannot be had.

        Args:
            plan: the layer's version.
            wanted: slices, each with elements of its own.
            room: where bytes go; what it gave holds anything if the answer is no layer.

        Raises:
            StorageError: the storage does not answer; nothing is said of what it holds.
        """
        try:
            return self._layer(plan.loaded, wanted, room)
        except _BadShardError as error:
            return error.shard

    def _layer(self, plan: LayerPlan, wanted: Sequence[Wanted], room: Room) -> FetchedLayer:
        slices = {want.spec.name: FetchedSlice() for want in wanted}
        missing = {want.spec.name: want.numel for want in wanted}
        for shard in plan.shards:
            if not _overlaps(shard, wanted):
                continue
            found = self._checked(shard, partial(self._read, shard, wanted, slices, room))
            for name, count in found.items():
                missing[name] -= count
        short = [name for name, count in missing.items() if count]
        if short:
            raise _BadShardError(plan.shards[0], f"the shards do not cover parameter {short[0]}")
        if self._bases is not None:
            self._bases.keep(plan.layer, (plan.step, plan.attempt), _weights(slices))
        if plan.residual is not None and (weights := _weights(slices)):
            self._add_residual(plan, plan.residual, wanted, weights)
        return FetchedLayer(plan.layer, plan.step, slices)

    def _add_residual(
        self,
        plan: LayerPlan,
        residual: PlannedSave,
        wanted: Sequence[Wanted],
        weights: dict[str, Floats],
    ) -> None:
        """Nothing is added before all of it has been read and checked."""
        added = {name: np.zeros_like(values) for name, values in weights.items()}
        missing = {want.spec.name: want.numel for want in wanted if want.spec.name in weights}
        for shard in residual.shards:
            if not _overlaps(shard, wanted):
                continue
            held = self._checked(shard, partial(self._distances, plan, shard, wanted))
            for name, at, values in held:
                added[name][at : at + values.size] = values
                missing[name] -= values.size
        short = [name for name, count in missing.items() if count]
        if short:
            raise _BadShardError(residual.shards[0], f"the residual does not cover parameter {short[0]}")
        for name, values in weights.items():
            values += added[name]

    def _distances(
        self, plan: LayerPlan, shard: ShardRecord, wanted: Sequence[Wanted]
    ) -> list[tuple[str, int, Floats]]:
        """What a shard of a residual holds of the wanted slices: (parameter, place in the slice, values)."""
        header = self._header(shard)
        raw = np.empty(shard.nbytes, dtype=np.uint8)
        self._storage.read_into(shard.file, shard.begin, raw.data)
        _check_digest(shard, xxhash.xxh3_128_hexdigest(raw.data))
        self.nbytes += shard.nbytes
        found = []
        for want in wanted:
            held = self._held(header, shard, want)
            begin = max(held.offset, want.offset)
            count = min(held.offset + held.numel, want.offset + want.numel) - begin
            if count > 0:
                tensors = {tensor.state: tensor for tensor in header.of_parameter[want.spec.name]}
                values = distance(plan, held, tensors, raw, shard.begin)
                first = begin - held.offset
                found.append((want.spec.name, begin - want.offset, values[first : first + count]))
        return found

    def _checked(self, shard: ShardRecord, read: Callable[[], T]) -> T:
        """Damage is looked at twice; a storage that does not answer is asked for a while.

        Raises:
            StorageError: it still does not: the version is not given up, this attempt is.
        """
        failed, pause_s = 0, _FIRST_PAUSE_S
        while True:
            try:
                return read()
            except StorageError as error:
                self._headers.pop(shard.file, None)
                if is_damage(error) and self._pass_over(shard.file):
                    continue
                failed += 1
                if is_damage(error):
                    if failed >= _LOOKS:
                        raise _BadShardError(shard, str(error)) from error
                    continue
                if failed > _TRIES:
                    raise
                log.warning("%s; asking again in %g s", error.message, pause_s)
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(
        self, shard: ShardRecord, wanted: Sequence[Wanted], slices: dict[str, FetchedSlice], room: Room
    ) -> dict[str, int]:
        """Fills what a shard holds of the slices; returns the elements by parameter.

        The slices hold unchecked bytes until the last block was hashed: nobody looks at them before.
        """
        header = self._header(shard)
        counts: dict[str, int] = {}
        runs: list[Run] = []
        for want in wanted:
            counts[want.spec.name], found = self._runs(header, shard, want, slices[want.spec.name], room)
            runs += found
        digest = xxhash.xxh3_128()
        for begin, memory in self._blocks(shard, runs):
            self._storage.read_into(shard.file, begin, *(part.data for part in memory))
            for part in memory:
                digest.update(part.data)
        _check_digest(shard, digest.hexdigest())
        self.nbytes += shard.nbytes
        return counts

    def _header(self, shard: ShardRecord) -> "_IndexedHeader":
        header = self._headers.get(shard.file)
        if header is None:
            header = _IndexedHeader(read_header(self._storage, shard.file))
            _check_identity(header, shard)
            self._headers[shard.file] = header
        return header

    def _held(self, header: "_IndexedHeader", shard: ShardRecord, want: Wanted) -> SliceMeta:
        held = header.slices.get(want.spec.name)
        if held is None or held.shape != want.spec.shape:
            raise _BadShardError(
                shard, f"{shard.file} has no parameter {want.spec.name} of {want.spec.shape}"
            )
        return held

    def _blocks(self, shard: ShardRecord, runs: list[Run]) -> Iterator[tuple[int, list[Array]]]:
        """The layer's bytes in the file, in order, and where they go; the spare memory is used again."""
        try:
            ordered = in_order(runs, shard.begin, shard.end)
        except ValueError as error:
            raise _BadShardError(shard, f"{shard.file}: layer {shard.layer}: {error}") from error
        return blocks(ordered, shard.begin, shard.end, BLOCK_BYTES, self._spare)

    def _runs(
        self, header: "_IndexedHeader", shard: ShardRecord, want: Wanted, into: FetchedSlice, room: Room
    ) -> tuple[int, list[Run]]:
        """Where a shard's bytes of one wanted slice go; (elements, runs). Makes room in `into`."""
        held = self._held(header, shard, want)
        into.scalars = {key: scalar.model_dump() for key, scalar in held.state.items()}
        begin = max(held.offset, want.offset)
        count = max(0, min(held.offset + held.numel, want.offset + want.numel) - begin)
        runs = []
        for tensor in header.of_parameter[want.spec.name]:
            key, size = tensor.state, DTYPE_BYTES[tensor.dtype]
            if self._keys is not None and key not in self._keys:
                continue
            if key not in into.tensors:
                _make_room(want, key, tensor.dtype, into, room)
            if into.dtypes[key] != tensor.dtype:
                raise _BadShardError(
                    shard,
                    f"{shard.file}: {want.spec.name}/{key} is {tensor.dtype}, elsewhere {into.dtypes[key]}",
                )
            if count:
                target = (begin - want.offset) * size
                memory = into.tensors[key][target : target + count * size]
                runs.append(Run(tensor.begin + (begin - held.offset) * size, memory))
        return count, runs


def _make_room(want: Wanted, key: str, dtype: str, into: FetchedSlice, room: Room) -> None:
    memory = room(want, key, dtype)
    if memory is not None:
        into.placed.add(key)
    nbytes = want.numel * DTYPE_BYTES[dtype]
    into.tensors[key] = np.empty(nbytes, dtype=np.uint8) if memory is None else memory
    into.dtypes[key] = dtype
    assert into.tensors[key].size == nbytes, f"{into.tensors[key].size} bytes for {want.spec.name}/{key}"


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


def _weights(slices: dict[str, FetchedSlice]) -> dict[str, Floats]:
    """The fp32 weights by parameter, as far as they were wanted."""
    return {n: part.tensors[MASTER].view(np.float32) for n, part in slices.items() if MASTER in part.tensors}


def _check_digest(shard: ShardRecord, digest: str) -> None:
    if digest != shard.xxh3_128:
        raise DamagedShardError(
            f"{shard.file}: checksum of layer {shard.layer} is {digest}, not {shard.xxh3_128}"
        )


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
