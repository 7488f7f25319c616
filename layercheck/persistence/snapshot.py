"""Copies the chosen layers into reused host buffers; the visible stall of a save is here and in `hold_back`.

States of one event on one rank:
1. `take` lays the shard file out (training thread).
2. `take` fills block after block, and hands the snapshot to the writer: whole, since its thread would only
   take the processor from this one; or still empty, if it streams (training | writer thread).
3. `take` returns: the bytes are, or will be, those of this step (training thread). The optimizer may step
   again: `Copier.hold_back` is called before each of its updates.
4. the writer releases the blocks when the file is durable or given up (writer thread).

An event that is larger than the whole pool streams through it: blocks go back as they are written, training
waits for them, and the write cannot be tried again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layercheck.decision import LayerWrite, PersistDecision
from layercheck.errors import StorageError
from layercheck.manifest import EventId, TrainerState
from layercheck.partition import ParamSlice
from layercheck.persistence.copier import Copied, Copier
from layercheck.persistence.elements import DTYPE_NAMES
from layercheck.persistence.quantise import Code
from layercheck.persistence.recode import Piece
from layercheck.persistence.shard_file import (
    MASTER,
    RESIDUAL,
    SCALE,
    ResidualMeta,
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
            try:
                copied.wait(timeout_s)
            except StorageError:
                self._break()
                raise
            yield block.view[:nbytes]
            if self.streaming:
                with self._changed:
                    self._filled.pop(position)
                self._pool.give([block])
            else:
                position += 1

    def _break(self) -> None:
        with self._changed:
            if self._state != "released":
                self._state = "broken"

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
    """One event of one rank on its way to the storage. `pieces` are what the stream holds, in order."""

    event: EventId
    writes: tuple[LayerWrite, ...]
    trainer_state: TrainerState
    layout: ShardLayout
    stream: BlockStream
    pieces: tuple[Piece, ...] = ()

    @property
    def staged_bytes(self) -> int:
        """Host memory that it takes, which is more than its file where a residual is coded on the way out."""
        return sum(piece.nbytes for piece in self.pieces)


class SnapshotTaker:
    """Takes snapshots of an engine into one staging pool. Ends with `close`, and its copier with it.

    Args:
        zero3: the engine.
        pool: host buffers, pinned if the copier needs that.
        wait_s: limit of the wait for a free buffer.
        copier: fills them.
        code: of residuals.
    """

    def __init__(
        self,
        zero3: Zero3Engine,
        pool: StagingPool,
        wait_s: float,
        copier: Copier,
        code: Code | None = None,
    ) -> None:
        self._zero3 = zero3
        self._pool = pool
        self._wait_s = wait_s
        self._copier = copier
        self._code = code
        self.take_stall_s = copier.take_stall_s
        self._leave = zero3.on_update(lambda group, lr: copier.hold_back(), lambda group: None)

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
        content = Content(self._zero3, event)
        for write in decision.writes:
            for part in self._zero3.slices[write.layer]:
                content.add(part, write.base_in(event), self._code)
        shard, sources = content.layout(rng), content.sources
        staged_bytes = sum(piece.nbytes for piece in content.pieces)
        stream = BlockStream(self._pool, streaming=staged_bytes > self._pool.capacity_bytes)
        snapshot = Snapshot(event, decision.writes, trainer_state, shard, stream, tuple(content.pieces))
        if stream.streaming:
            submit(snapshot)
        complete = False
        try:
            with self._copier.copying(at_once=stream.streaming):
                self._fill(stream, sources, self._wait_s if wait_s is None else wait_s)
            complete = True
        finally:
            stream.finish(complete)
            if not stream.streaming:
                submit(snapshot)
        return snapshot

    def close(self) -> None:
        """Waits for what is still to be copied: the optimizer may go on without this. Safe twice."""
        self._copier.hold_back()
        self._copier.close()
        self._leave()

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


class Content:
    """What one rank puts into the file of one event; `sources` are the live tensors to be staged for it."""

    def __init__(self, zero3: Zero3Engine, event: EventId) -> None:
        self._zero3, self._event = zero3, event
        self._tensors: list[ShardTensor] = []
        self._slices: list[SliceMeta] = []
        self.sources: list[Tensor] = []
        self.pieces: list[Piece] = []

    def add(self, part: ParamSlice, base: tuple[int, int] | None = None, code: Code | None = None) -> None:
        """Adds a slice as it is now or, with a base, how far it is from there."""
        if base is None:
            self._slices.append(self._meta(part, self._zero3.scalars(part)))
            for state, tensor in self._zero3.tensors(part).items():
                self._tensor(part, state, DTYPE_NAMES[tensor.dtype], part.numel)
                self._stage(part, state, tensor)
            return
        assert code is not None, f"a residual of {part.layer}, and residual.enabled is off"
        about = ResidualMeta(bits=code.bits, block=code.block, base_step=base[0], base_attempt=base[1])
        self._slices.append(self._meta(part, {}, about))
        self._tensor(part, RESIDUAL, code.dtype, code.num_codes(part.numel))
        self._tensor(part, SCALE, "BF16", code.num_scales(part.numel))
        self._stage(part, MASTER, self._zero3.tensors(part)[MASTER], base, code)

    def layout(self, rng: RngState | None = None) -> ShardLayout:
        """Where everything will lie in the file."""
        event = self._event
        about = ShardAbout(
            step=event.step,
            attempt=event.attempt,
            part=event.part,
            rank=self._zero3.rank,
            world_size=self._zero3.world_size,
            rng=rng,
        )
        return layout(self._tensors, self._slices, about)

    def _meta(
        self, part: ParamSlice, state: dict[str, dict[str, Any]], residual: ResidualMeta | None = None
    ) -> SliceMeta:
        return SliceMeta(
            parameter=part.spec.name,
            layer=part.layer,
            step=self._event.step,
            shape=part.spec.shape,
            offset=part.offset,
            numel=part.numel,
            state={key: StateScalar(**value) for key, value in state.items()},
            residual=residual,
        )

    def _tensor(self, part: ParamSlice, state: str, dtype: str, numel: int) -> None:
        self._tensors.append(ShardTensor(part.spec.name, state, part.layer, dtype, numel))

    def _stage(
        self,
        part: ParamSlice,
        state: str,
        tensor: Tensor,
        base: tuple[int, int] | None = None,
        code: Code | None = None,
    ) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.sources.append(tensor)
        self.pieces.append(Piece(part.layer, part.spec.name, state, nbytes, base, code))


def lay_out(zero3: Zero3Engine, event: EventId, parts: list[ParamSlice]) -> tuple[ShardLayout, list[Tensor]]:
    """The file of these slices as they are now, and the live tensors that fill it, in the file's order."""
    content = Content(zero3, event)
    for part in parts:
        content.add(part)
    return content.layout(), content.sources
