"""Bulk bytes between ranks: gloo point to point on a group of its own, chunk by chunk.

The same way serves two hosts and two raylets of one machine. One thread at a time uses an exchange, and it is
never the training thread while a round runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from app.baselines.gemini.box import Box, as_tensor, pieces
from app.baselines.gemini.records import RECORD_BYTES, SlotRecord


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot of this rank's own box whose bytes are whole."""

    box: Box
    slot: int
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slot of a box that is to take the replica of `shard`."""

    shard: int
    box: Box
    slot: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes to or from one rank, as views in order."""

    peer: int
    views: tuple[Tensor, ...]
    sends: bool


class Exchange:
    """Point to point transfers of one rank. Made on all ranks at once.

    Args:
        chunk_bytes: one chunk in flight for each peer and direction.
        wait_s: limit of each transfer; then the peer counts as gone.
    """

    def __init__(self, chunk_bytes: int, wait_s: float) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        self.chunk_bytes = chunk_bytes
        self.sent_bytes, self.received_bytes = 0, 0

    def swap(self, own: Filled, keeper: int | None, wanted: Sequence[Wanted]) -> bool:
        """One round: sends the own copy to its keeper, takes in those that this rank keeps.

        Returns:
            True if every copy taken in is that of the same step and attempt, with the right checksum; only
            such a copy gets its record.

        Raises:
            RuntimeError: a peer is gone (gloo).
        """
        headers = {want.shard: torch.empty(RECORD_BYTES, dtype=torch.uint8) for want in wanted}
        receives = [Stream(want.shard, (headers[want.shard],), sends=False) for want in wanted]
        if keeper is not None:
            receives.append(Stream(keeper, (as_tensor(own.record.pack()),), sends=True))
        self.transfer(receives)
        records = {shard: _record_from(shard, header) for shard, header in headers.items()}
        streams = [
            Stream(want.shard, self._views(want.box, want.slot, records[want.shard]), sends=False)
            for want in wanted
        ]
        if keeper is not None:
            streams.append(Stream(keeper, self._views(own.box, own.slot, own.record), sends=True))
        self.transfer(streams)
        return all(_seal(want, records[want.shard], own.record) for want in wanted)

    def transfer(self, streams: Sequence[Stream]) -> None:
        """Moves all streams at once, one view of each after the other.

        Nobody waits before it has posted its own part of a turn, so rings cannot block.
        """
        for turn in zip_longest(*(stream.views for stream in streams)):
            works = [
                self._post(stream, view)
                for stream, view in zip(streams, turn, strict=True)
                if view is not None
            ]
            for work in works:
                work.wait()

    def all_say(self, good: bool) -> bool:
        """True if all ranks say so. A collective."""
        vote = torch.tensor([int(good)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.group)
        return bool(vote.item())

    def _views(self, box: Box, slot: int, record: SlotRecord) -> tuple[Tensor, ...]:
        parts = (box.meta(slot, record.meta_bytes), box.data(slot, record.data_bytes))
        return tuple(piece for part in parts for piece in pieces(part, self.chunk_bytes))

    def _post(self, stream: Stream, view: Tensor) -> dist.Work:
        if stream.sends:
            self.sent_bytes += view.numel()
        else:
            self.received_bytes += view.numel()
        post = dist.isend if stream.sends else dist.irecv
        work = post(view, stream.peer, group=self.group)
        assert work is not None  # every rank is in the group
        return work


def _record_from(rank: int, header: Tensor) -> SlotRecord:
    record = SlotRecord.parse(header.numpy().tobytes())
    if record is None:
        raise RuntimeError(f"rank {rank} sent a record that cannot be read")
    return record


def _seal(want: Wanted, record: SlotRecord, own: SlotRecord) -> bool:
    if (record.step, record.attempt) != (own.step, own.attempt):
        return False
    if want.box.digest(want.slot, record.meta_bytes, record.data_bytes) != record.digest:
        return False
    want.box.seal(want.slot, record)
    return True
