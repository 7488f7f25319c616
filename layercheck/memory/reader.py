"""Reads shard files from the nearest place that has them: this node's memory, another node's, the storage.

The bytes are the same everywhere and so are their checksums, so whoever reads need not know the place. What
turns out damaged in one place is passed over, said out loud, and read from the next one.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from layercheck.errors import DamagedShardError, VaultError
from layercheck.memory import segment
from layercheck.memory.protocol import VaultCalls
from layercheck.persistence.storage import Readable

log = logging.getLogger(__name__)
Tier = Literal["memory", "peer", "storage"]
TIERS: tuple[Tier, ...] = ("memory", "peer", "storage")
"""From the nearest to the farthest."""


class Copy(Protocol):
    """One copy of a file in memory."""

    @property
    def tier(self) -> Tier: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def read_into(self, begin: int, into: Sequence[memoryview]) -> int:
        """Fills memory; returns the bytes there were."""
        ...


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A segment of this node."""

    path: str
    nbytes: int
    tier: Tier = "memory"

    def read_into(self, begin: int, into: Sequence[memoryview]) -> int:  # noqa: D102
        return segment.read_into(self.path, begin, *into)


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """A segment of another node."""

    vault: VaultCalls
    file: str
    nbytes: int
    tier: Tier = "peer"

    def read_into(self, begin: int, into: Sequence[memoryview]) -> int:  # noqa: D102
        views = [view.cast("B") for view in into]
        try:
            data = self.vault.read(self.file, begin, begin + sum(map(len, views)))
        except VaultError as error:
            log.warning("%s", error)
            return 0
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return len(data)


class MemoryFirst:
    """A `Readable` in front of the storage.

    Args:
        storage: has what memory has not.
        copies: file -> where it lies in memory, the nearest first; used up as they turn out damaged.
    """

    def __init__(self, storage: Readable, copies: Mapping[str, list[Copy]]) -> None:
        self._storage = storage
        self._copies = {file: list(found) for file, found in copies.items()}
        self.tiers: dict[str, Tier] = {}
        """File -> the tier that it was read from last."""

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        copy = self._nearest(path)
        return copy.nbytes if copy else self._storage.size(path)

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        copy = self._nearest(path)
        if copy is None:
            return self._storage.read(path, begin, end)
        data = bytearray(max(0, (copy.nbytes if end is None else min(end, copy.nbytes)) - begin))
        done = copy.read_into(begin, [memoryview(data)])
        return bytes(memoryview(data)[:done])

    def read_into(self, path: str, begin: int, *into: memoryview) -> None:
        """See `Storage.read_into`."""
        copy = self._nearest(path)
        if copy is None:
            self._storage.read_into(path, begin, *into)
            return
        wanted = sum(view.nbytes for view in into)
        done = copy.read_into(begin, into) if begin + wanted <= copy.nbytes else 0
        if done < wanted:
            raise DamagedShardError(f"{path} in {copy.tier} ends after {done} of {wanted} bytes", path=path)

    def pass_over(self, path: str) -> bool:
        """The copy in use is damaged or gone; True if there is another one, or the storage, in its place."""
        if not self._copies.get(path):
            return False
        gone = self._copies[path].pop(0)
        rest = self._copies[path][0].tier if self._copies[path] else "storage"
        log.warning("the copy of %s in %s is damaged or gone: reading that in %s", path, gone.tier, rest)
        return True

    def _nearest(self, path: str) -> Copy | None:
        found = self._copies.get(path)
        self.tiers[path] = found[0].tier if found else "storage"
        return found[0] if found else None
