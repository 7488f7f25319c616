"""Copies the chosen layers into reused host buffers; the visible stall of a save ends here.

States of one event on one rank:
1. `take` lays the shard file out and hands the snapshot to the writer, still empty (training thread).
2. `take` fills block after block; the writer may already write the first ones (training | writer thread).
3. `take` returns: the bytes are, or on an accelerator will be, those of this step (training thread). The
   optimizer may step again: `Copier.hold_back` is called before each of its updates.
4. the writer releases the blocks when the file is durable or given up (writer thread).

An event that is larger than the whole pool streams through it: blocks go back as they are written, training
waits for them, and the write cannot be tried again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layercheck.errors import StorageError
from layercheck.manifest import EventId, LayerWrite, PersistDecision, TrainerState
from layercheck.partition import ParamSlice
from layercheck.persistence.copier import Copied, Copier
from layercheck.persistence.elements import DTYPE_NAMES
from layercheck.persistence.shard_file import (
    RngState,
    ShardAbout,
    ShardLayout,
    ShardTensor,
    SliceMeta,
    StateScalar,
    layout,
)
from layercheck.zero3 import Zero3Engine

BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK = 4096
_FEWEST_BLOCKS = 64
_PIECE_BLOCKS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One reused host buffer, seen by torch and by the writer."""

    tensor: Tensor
    view: memoryview


class StagingPool:
    """A fixed number of host buffers. `take` waits for one; `give` returns one. Thread-safe.

    Args:
        capacity_bytes: rounded up to whole blocks, at least two. Events share it block by block, so a
            small pool has small blocks.
        pin: page-lock the memory, for copies from an accelerator.
    """

    def __init__(self, capacity_bytes: int, pin: bool = False) -> None:
        block_bytes = max(_SMALLEST_BLOCK, min(BLOCK_BYTES, -(-capacity_bytes // _FEWEST_BLOCKS)))
        count = max(2, -(-capacity_bytes // block_bytes))
        # In pieces: torch rounds each request for pinned memory up to a power of two.
        pieces = [min(_PIECE_BLOCKS, count - begin) for begin in range(0, count, _PIECE_BLOCKS)]
        memory = [torch.empty(n, block_bytes, dtype=torch.uint8, pin_memory=pin) for n in pieces]
        self.block_bytes = block_bytes
        self.capacity_bytes = count * block_bytes
        self._free = [Block(row, memoryview(row.numpy())) for piece in memory for row in piece]
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Block:
        """Returns a free block.

        Raises:
            StorageError: none became free within `timeout_s`: the storage does not keep up.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                raise StorageError(
                    f"no staging memory became free in {timeout_s:g} s (storage_wait_s, or what is left of a "
                    "preemption's grace): the storage is too slow"
                )
            return self._free.pop()

    def give(self, blocks: list[Block]) -> None:
        """Returns blocks to the pool."""
        with self._changed:
            self._free.extend(blocks)
            self._changed.notify_all()


class BlockStream:
    """The bytes of one snapshot, filled by one thread and read by another, in order."""

    def __init__(self, pool: StagingPool, streaming: bool) -> None:
        self.streaming = streaming
        self.copy_s = 0.0
        self._started = time.monotonic()
        self._pool = pool
        self._filled: list[tuple[Block, int, Copied]] = []
        self._state: str = "filling"
        self._changed = threading.Condition()

    def append(self, block: Block, nbytes: int, copied: Copied) -> None:
        """Adds one block that is filled, or will be; after `release` it goes straight back."""
        with self._changed:
            if self._state == "released":
                self._pool.give([block])
                return
            self._filled.append((block, nbytes, copied))
            self._changed.notify_all()

    def finish(self, complete: bool) -> None:
        """Says that no block follows. An incomplete stream makes its reader fail."""
        with self._changed:
            self.copy_s = time.monotonic() - self._started
            if self._state == "filling":
                self._state = "complete" if complete else "broken"
            self._changed.notify_all()

    @property
    def is_broken(self) -> bool:
        """True if its bytes will never be complete: reading it again cannot help."""
        return self._state == "broken"

    def chunks(self, timeout_s: float) -> Iterator[memoryview]:
        """The bytes, block by block. May be read again from the start unless `streaming`."""
        position = 0
        while True:
            with self._changed:
                moved = self._changed.wait_for(partial(self._has, position), timeout_s)
                if not moved or self._state == "broken":
                    raise StorageError("the snapshot was given up before all its bytes were copied")
                if len(self._filled) <= position:
                    return
                block, nbytes, copied = self._filled[position]
            copied.wait(timeout_s)
            yield block.view[:nbytes]
            if self.streaming:
                with self._changed:
                    self._filled.pop(position)
                self._pool.give([block])
            else:
                position += 1

    def _has(self, position: int) -> bool:
        return len(self._filled) > position or self._state != "filling"

    def release(self) -> None:
        """Gives all blocks back; later ones go back as they come."""
        with self._changed:
            self._state = "released"
            blocks = [block for block, *_ in self._filled]
            self._filled.clear()
            self._changed.notify_all()
        self._pool.give(blocks)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One event of one rank on its way to the storage."""

    event: EventId
    writes: tuple[LayerWrite, ...]
    trainer_state: TrainerState
    layout: ShardLayout
    stream: BlockStream


class SnapshotTaker:
    """Takes snapshots of an engine into one staging pool. Ends with `close`.

    Args:
        zero3: the engine.
        pool: host buffers, pinned if the copier needs that.
        wait_s: limit of the wait for a free buffer.
        copier: fills them.
    """

    def __init__(self, zero3: Zero3Engine, pool: StagingPool, wait_s: float, copier: Copier) -> None:
        self._zero3 = zero3
        self._pool = pool
        self._wait_s = wait_s
        self._copier = copier
        self.take_stall_s = copier.take_stall_s
        self.close = zero3.on_update(lambda group, lr: copier.hold_back(), lambda group: None)

    def take(
        self,
        event: EventId,
        decision: PersistDecision,
        trainer_state: TrainerState,
        submit: Callable[[Snapshot], None],
        rng: RngState | None = None,
        wait_s: float | None = None,
    ) -> Snapshot:
        """Copies the chosen layers; at return the optimizer may step.

        `rng` rides in the file's header. `wait_s` limits the wait for staging memory in place of the usual.

        Raises:
            StorageError: no staging memory became free in time; the event is then lost, training may go on.
        """
        parts = [part for write in decision.writes for part in self._zero3.slices[write.layer]]
        shard, sources = lay_out(self._zero3, event, parts, rng)
        data_bytes = shard.total - len(shard.header)
        stream = BlockStream(self._pool, streaming=data_bytes > self._pool.capacity_bytes)
        snapshot = Snapshot(event, decision.writes, trainer_state, shard, stream)
        submit(snapshot)
        complete = False
        try:
            with self._copier.copying():
                self._fill(stream, sources, self._wait_s if wait_s is None else wait_s)
            complete = True
        finally:
            stream.finish(complete)
        return snapshot

    def _fill(self, stream: BlockStream, sources: list[Tensor], wait_s: float) -> None:
        block, used = self._pool.take(wait_s), 0
        size = self._pool.block_bytes
        for source in sources:
            raw, done = source.view(torch.uint8), 0
            while done < raw.numel():
                if used == size:
                    stream.append(block, used, self._copier.mark())
                    block, used = self._pool.take(wait_s), 0
                count = min(size - used, raw.numel() - done)
                self._copier.copy(block.tensor[used : used + count], raw[done : done + count])
                used, done = used + count, done + count
        stream.append(block, used, self._copier.mark())


def lay_out(
    zero3: Zero3Engine, event: EventId, parts: list[ParamSlice], rng: RngState | None = None
) -> tuple[ShardLayout, list[Tensor]]:
    """The file of these slices as they are now, and the live tensors that fill it, in the file's order."""
    tensors: list[ShardTensor] = []
    slices: list[SliceMeta] = []
    sources: list[Tensor] = []
    for part in parts:
        name = part.spec.name
        slices.append(
            SliceMeta(
                parameter=name,
                layer=part.layer,
                step=event.step,
                shape=part.spec.shape,
                offset=part.offset,
                numel=part.numel,
                state={k: StateScalar(**v) for k, v in zero3.scalars(part).items()},
            )
        )
        for state, tensor in zero3.tensors(part).items():
            tensors.append(ShardTensor(name, state, part.layer, DTYPE_NAMES[tensor.dtype], part.numel))
            sources.append(tensor)
    about = ShardAbout(
        step=event.step,
        attempt=event.attempt,
        part=event.part,
        rank=zero3.rank,
        world_size=zero3.world_size,
        rng=rng,
    )
    return layout(tensors, slices, about), sources
