"""Finds the state to go on from in the memory of the hosts, and brings each rank its shard, checked.

On all ranks, in the training thread, over the exchange's group:
1. rank 0 asks the living stores what they hold and tells all.
2. every rank makes the same decision (`decision.py`).
3. each rank opens the copies that it reads or sends, and fetches its shard.
4. all tell each other which copies were bad or out of reach; without these, again from 2.

Nothing is written to the engine here.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from app.baselines.gemini.actors import Hosts
from app.baselines.gemini.box import Box, digest_of, pieces
from app.baselines.gemini.decision import Copy, Decision, Source, decide
from app.baselines.gemini.exchange import Exchange, Stream
from app.baselines.gemini.memory import HostMemoryError
from app.baselines.gemini.records import BoxShape

log = logging.getLogger("app")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fetched:
    """One shard: uint8 tensors whose checksum was right. They may lie in the host's box itself."""

    meta: Tensor
    data: Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """What the memory of the hosts gave. `shard` is None where `decision` is `remote` or `fresh`."""

    decision: Decision
    shard: Fetched | None = None


class Finder:
    """Looks into the memory of all hosts. Made on all ranks at once, after each has entered its store.

    Args:
        hosts: as this rank sees them.
        exchange: for shards that come from ranks of other hosts.
        run_id: whose copies count.
    """

    def __init__(self, hosts: Hosts, exchange: Exchange, run_id: str) -> None:
        self._hosts, self._exchange = hosts, exchange
        self._rank = dist.get_rank()
        self.places: list[str] = self._gather(hosts.here)
        self._copies = set(self._tell(self._ask(run_id) if self._rank == 0 else None))

    def find(self, remote_step: int | None) -> Found:
        """The newest whole state, if it is at least as new as the remote checkpoint. A collective."""
        while True:
            decision = decide(self.places, self._copies, remote_step)
            if not decision.sources:
                return Found(decision)
            shard, bad = self._fetch(decision)
            lost = {copy for copies in self._gather(bad) for copy in copies}
            if not lost:
                return Found(decision, shard)
            for copy in sorted(lost, key=lambda copy: (copy.key, copy.slot)):
                log.warning(
                    "the copy of shard %d at step %d on host %s is lost or damaged and passed over",
                    copy.record.shard,
                    copy.record.step,
                    copy.host,
                )
            self._copies -= lost

    def _ask(self, run_id: str) -> tuple[Copy, ...]:
        found: list[Copy] = []
        for host, store in self._hosts.living().items():
            try:
                found += store.copies(run_id)
            except HostMemoryError as error:
                log.warning("host %s is passed over: %s", host, error)
        return tuple(found)

    # ------------------------------------------------------------------ one shard for each rank

    def _fetch(self, decision: Decision) -> tuple[Fetched | None, list[Copy]]:
        """This rank's shard, and the copies that it could not open, read or believe."""
        sources = decision.sources
        mine = sources[self._rank]
        to_open = {source.copy: rank for rank, source in enumerate(sources) if source.sender == self._rank}
        if mine.how == "own":
            to_open[mine.copy] = self._rank
        opened, bad = self._open(to_open)
        if any(self._gather(bad)):  # nobody begins a transfer that its sender cannot serve
            return None, bad
        streams = [
            Stream(rank, self._views(_view(opened[copy], copy)), sends=True)
            for copy, rank in to_open.items()
            if rank != self._rank
        ]
        shard = _view(opened[mine.copy], mine.copy) if mine.how == "own" else _empty(mine.copy)
        if mine.sender is not None:
            streams.append(Stream(mine.sender, self._views(shard), sends=False))
        self._exchange.transfer(streams)
        good = self._read_from_host(mine, shard) if mine.how == "host" else True
        if not good or digest_of(shard.meta, shard.data) != mine.copy.record.digest:
            return None, [mine.copy]
        return shard, []

    def _open(self, copies: Collection[Copy]) -> tuple[dict[Copy, Box], list[Copy]]:
        opened, bad = {}, []
        for copy in copies:
            try:
                opened[copy] = Box(*self._hosts.own().region(copy.key))
            except (HostMemoryError, KeyError) as error:
                log.warning("%s", error)
                bad.append(copy)
        return opened, bad

    def _read_from_host(self, source: Source, shard: Fetched) -> bool:
        """From a host without ranks, by calls to its store: slow, and said so."""
        copy = source.copy
        log.warning("shard %d comes by calls to host %s, which has no rank now", copy.record.shard, copy.host)
        try:
            store = self._hosts.living()[copy.host]
            shape, _ = store.region(copy.key)
            for begin, target in self._places_in(shape, copy.slot, shard):
                raw = store.read(copy.key, begin, begin + target.numel())
                target.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        except (HostMemoryError, KeyError) as error:
            log.warning("host %s: %s", copy.host, error)
            return False
        return True

    def _places_in(self, shape: BoxShape, slot: int, shard: Fetched) -> Iterator[tuple[int, Tensor]]:
        for begin, whole in ((shape.meta_at(slot), shard.meta), (shape.data_at(slot), shard.data)):
            for piece in pieces(whole, self._exchange.chunk_bytes):
                yield begin, piece
                begin += piece.numel()

    def _views(self, shard: Fetched) -> tuple[Tensor, ...]:
        return tuple(
            piece for part in (shard.meta, shard.data) for piece in pieces(part, self._exchange.chunk_bytes)
        )

    # ------------------------------------------------------------------ small agreements

    def _gather(self, mine: T) -> list[T]:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine, group=self._exchange.group)
        return told

    def _tell(self, value: T | None) -> T:
        told: list[Any] = [value]
        dist.broadcast_object_list(told, src=0, group=self._exchange.group)
        found: T = told[0]
        return found


def _view(box: Box, copy: Copy) -> Fetched:
    return Fetched(box.meta(copy.slot, copy.record.meta_bytes), box.data(copy.slot, copy.record.data_bytes))


def _empty(copy: Copy) -> Fetched:
    record = copy.record
    return Fetched(
        torch.empty(record.meta_bytes, dtype=torch.uint8), torch.empty(record.data_bytes, dtype=torch.uint8)
    )
