"""Vaults in a folder of the test, ranks that stage into them, and whoever is told of it."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layercheck.coordination import journal
from layercheck.manifest import MEMORY_PART, AttemptRecord, EventId, LineageLink, ShardRecord
from layercheck.memory.copies import FindPeer
from layercheck.memory.staging import About, MemorySink
from layercheck.memory.vault import Vault
from layercheck.persistence.hashed import HashedBytes
from layercheck.persistence.shard_file import ShardLayout
from layercheck.persistence.storage import LocalStorage
from tests.fakes import FaultyStorage

RUN, TOKEN, NEXT = "run", "11" * 16, "22" * 16
HEADER = b"the header"
LAYERS = ("a", "b", "c")


@dataclass
class Told:
    """Who is told of files: what a coordinator would have heard."""

    recorded: dict[tuple[EventId, int], tuple[ShardRecord, ...]] = field(default_factory=dict)
    lost_events: list[EventId] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def record(self, event: EventId, rank: int, records: Any, trainer_state: Any) -> None:
        with self.lock:
            self.recorded[event, rank] = records

    def lost(self, event: EventId, rank: int, reason: str) -> None:
        with self.lock:
            self.lost_events.append(event)


def claim(storage: LocalStorage, attempt: int = 1, token: str = TOKEN) -> None:
    """The store knows this attempt."""
    links = tuple(
        LineageLink(attempt=n, r_b=0, predecessor=n - 1, saw_step=-1) for n in range(1, attempt + 1)
    )
    record = AttemptRecord(
        attempt=attempt, token=token, submission="s", world_size=1, mode="composite", r_b=0,
        trainer_state={"step": 0}, lineage=links,
    )  # fmt: skip
    assert journal.claim_attempt(storage, record)


def make_vault(
    tmp: Path,
    storage: LocalStorage,
    told: Told,
    budget: int = 10**7,
    node: str = "n0",
    retries: int = 0,
    find_peer: FindPeer | None = None,
) -> Vault:
    place = tmp / "shm"
    place.mkdir(exist_ok=True)
    return Vault(
        RUN,
        node,
        storage,
        told,
        budget_bytes=budget,
        retries=retries,
        place=str(place),
        find_peer=find_peer,
    )


def die(vault: Vault) -> None:
    """As after a SIGKILL: the lock is free, nothing was put away."""
    vault._stop()
    vault._ownership.release()


def memory_event(step: int, attempt: int = 1) -> EventId:
    return EventId(step=step, attempt=attempt, part=MEMORY_PART)


def content(layers: Iterable[str], step: int, nbytes: int = 100) -> tuple[ShardLayout, bytes]:
    """A file of these layers; no safetensors, which nobody here looks into."""
    ranges, data = {}, b""
    for layer in layers:
        begin = len(HEADER) + len(data)
        data += (f"{layer} at {step};".encode() * nbytes)[:nbytes]
        ranges[layer] = (begin, begin + nbytes)
    return ShardLayout(HEADER, ranges, len(HEADER) + len(data)), data


@dataclass
class Rank:
    """The writer of one rank."""

    sink: MemorySink
    rank: int
    world_size: int = 1

    def write(self, event: EventId, layers: Iterable[str], nbytes: int = 100) -> tuple[ShardRecord, ...]:
        """Fills a segment and does not seal it yet."""
        layers = tuple(layers)
        layout, data = content(layers, event.step, nbytes)
        hashed = HashedBytes(layout, [memoryview(data)])
        self.sink.write(event.shard_file(self.rank), hashed)
        return tuple(
            ShardRecord(
                layer=layer, step=event.step, attempt=event.attempt, part=event.part, rank=self.rank,
                world_size=self.world_size, file=event.shard_file(self.rank), begin=begin, end=end,
                xxh3_128=hashed.digests[layer], drift=1.0, threshold=0.5, age=1, reason="drift",
                snapshot_s=0.0, write_s=0.0,
            )
            for layer, (begin, end) in layout.layers.items()
        )  # fmt: skip

    def stage(self, event: EventId, layers: Iterable[str], nbytes: int = 100) -> None:
        """Fills and seals."""
        rows = self.write(event, layers, nbytes)
        self.sink.record(event, self.rank, rows, {"step": event.step})


def rank_of(
    vault: Any, storage: LocalStorage, told: Told, rank: int = 0, world_size: int = 1, token: str = TOKEN
) -> Rank:
    sink = MemorySink(vault, storage, told, About(RUN, vault._node, rank, world_size, token), wait_s=5.0)
    return Rank(sink, rank, world_size)


def event(step: int, attempt: int = 1) -> EventId:
    return EventId(step=step, attempt=attempt)


class Node:
    """A vault with a store and whoever is told."""

    def __init__(self, tmp: Path, budget: int = 10**7) -> None:
        self.tmp, self.budget = tmp, budget
        self.storage, self.told = FaultyStorage(str(tmp / "store")), Told()
        claim(self.storage)
        self.vault = make_vault(tmp, self.storage, self.told, budget)
        self.rank = rank_of(self.vault, self.storage, self.told)

    def restart(self) -> None:
        die(self.vault)
        self.vault = make_vault(self.tmp, self.storage, self.told, self.budget)
        self.rank = rank_of(self.vault, self.storage, self.told)

    @property
    def left(self) -> list[str]:
        return os.listdir(self.tmp / "shm")


def whole(step: int, layers: tuple[str, ...] = LAYERS) -> bytes:
    return HEADER + content(layers, step)[1]
