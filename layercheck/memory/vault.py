"""One node's vault: which segments there are, what may go, and what is still to be written. A plain class.

It touches bytes only to write them to the storage or to lend them to another node: ranks of its node fill and
read the segments themselves. Memory is the truth: a vault that is made anew finds in its folder what its
predecessor had.

The life of a segment: open (a rank fills it) -> sealed -> stored, unless it is for memory alone. When a rank
opens one, others of that rank may go: torn ones; and those that are sealed and stored, and of each of whose
layers there is a newer version, of a step before. A rank takes an event for memory alone only after all ranks
have sealed what they had before; so what goes then is of no use to anybody. For other events older copies go
only if room is needed.
"""

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from layercheck.config import LayerCheckConfig
from layercheck.errors import FencedError, VaultError
from layercheck.manifest import EventId
from layercheck.memory import folders, segment
from layercheck.memory.copies import Copies, FindPeer
from layercheck.memory.held import Held
from layercheck.memory.uploads import Upload, Uploads
from layercheck.persistence.sink import Listener
from layercheck.persistence.storage import Storage

_LEAVE_S = 5.0


@dataclass(slots=True)
class Kept:
    """One segment.

    Attributes:
        token: of the attempt that opened it; empty if nobody knows any more.
        held: None until it is sealed.
        is_queued: it is, or was, on its way to the storage.
        is_stored: the storage needs it no more.
        is_copy: its rank lives on another node, whose vault writes it while that lives.
    """

    event: EventId
    rank: int
    path: str
    nbytes: int
    token: str
    held: Held | None = None
    is_queued: bool = False
    is_stored: bool = False
    is_copy: bool = False


class Vault:
    """Implements `VaultCalls`. May be called from several threads.

    Args:
        run: key of the run (`folders.run_key`).
        node: name of the node.
        storage: the run's `layercheck` folder.
        coordinator: is told of what is written.
        budget_bytes: most memory that all segments of this node may take; None: half of what is free.
        retries: tries of a write after the first.
        place: where shared memory lies.
        find_peer: the vault of another node that is to have a copy of everything; None for no copies.
    """

    def __init__(
        self,
        run: str,
        node: str,
        storage: Storage,
        coordinator: Listener,
        *,
        budget_bytes: int | None = None,
        retries: int = 8,
        place: str = folders.PLACE,
        find_peer: FindPeer | None = None,
    ) -> None:
        self._run, self._node, self._place = run, node, place
        self.folder = folders.folder_of(run, node, place)
        self._ownership = folders.take(self.folder)
        self._lock = threading.RLock()
        self._kept: dict[str, Kept] = {}
        self._token = ""
        self._ranks: set[int] = set()
        self._ended: set[int | None] = set()
        self._uploads = Uploads(storage, coordinator, retries, self._is_uploaded)
        self._copies = Copies(find_peer, self._path_of) if find_peer is not None else None
        self.budget_bytes = _half_of_free(place) if budget_bytes is None else budget_bytes
        self._scan()

    # ------------------------------------------------------------ calls of this node's ranks

    def open(self, event: EventId, rank: int, token: str, nbytes: int) -> str:
        """See `VaultCalls.open`."""
        with self._lock:
            self._ranks.add(rank)
            return self._open(event, rank, token, nbytes).path

    def sealed(self, file: str) -> None:
        """See `VaultCalls.sealed`."""
        with self._lock:
            kept = self._kept.get(file)
            if kept is None or kept.held is not None:
                return  # fenced, or found by a scan
            kept.held = self._read(kept.path)
            if kept.held is None:
                raise VaultError(f"{file} was said to be sealed and is torn", path=kept.path)
            self._queue(kept, kept.held)
            if self._copies is not None:
                self._copies.put(kept.held)

    def drain(self, rank: int, limit_s: float) -> bool:
        """See `VaultCalls.drain`."""
        return self._uploads.drain(limit_s, lambda upload: upload.held.rank == rank)

    # ------------------------------------------------------------ calls of another node's vault

    def copy_begin(self, held: Held) -> None:
        """See `VaultCalls.copy_begin`."""
        with self._lock:
            if not self._is_mine(held.file):
                kept = self._open(held.event, held.rank, held.token, held.nbytes)
                kept.is_copy = kept.is_stored = True

    def copy_put(self, file: str, begin: int, data: bytes) -> None:
        """See `VaultCalls.copy_put`."""
        path = self._path_of(file)
        if path is not None and not self._is_mine(file):
            segment.put(path, begin, data)

    def copy_end(self, held: Held) -> None:
        """See `VaultCalls.copy_end`."""
        with self._lock:
            kept = self._kept.get(held.file)
            if kept is not None and kept.is_copy and kept.held is None:
                segment.seal(kept.path, held)
                kept.held = self._read(kept.path)

    # ------------------------------------------------------------ calls of a recovery

    def settle(self, token: str, limit_s: float) -> tuple[Held, ...]:
        """See `VaultCalls.settle`."""
        with self._lock:
            self._scan()  # copies too: the node that was to write them may be gone
        self._uploads.drain(limit_s)
        with self._lock:
            found = []
            for kept in self._kept.values():
                if kept.held is not None and (told := self._offer(kept, token)):
                    kept.held = told
                    found.append(told)
            return tuple(found)

    def began(self, token: str, keep: Collection[str]) -> None:
        """See `VaultCalls.began`."""
        with self._lock:
            if self._token == token:
                return
            self._token = token
            self._ranks, self._ended = set(), set()
            older = [file for file, kept in self._kept.items() if kept.token != token]
            self._uploads.forget(lambda upload: upload.held.file in older)
            self._drop([file for file in older if file not in keep])
            for kept in self._kept.values():
                kept.is_stored = kept.is_stored or kept.token != token  # it can't be committed any more

    def read(self, file: str, begin: int, end: int) -> bytes:
        """See `VaultCalls.read`."""
        with self._lock:
            kept = self._kept.get(file)
        if kept is None:
            return b""
        data = bytearray(max(0, min(end, kept.nbytes) - begin))
        done = segment.read_into(kept.path, begin, memoryview(data))
        return bytes(memoryview(data)[:done])

    # ------------------------------------------------------------ the end

    def end(self, rank: int | None) -> None:
        """See `VaultCalls.end`. Also what dead nodes of this machine left of the run."""
        with self._lock:
            self._ended.add(rank)
            if rank is not None and not self._ranks <= self._ended:
                return
        self._stop()
        with self._lock:
            self._drop(list(self._kept))
            self._ownership.release()
        folders.sweep(self._place, run=self._run)

    def close(self) -> None:
        """This process ends, and what it holds stays."""
        self._stop()
        self._ownership.release()

    # ------------------------------------------------------------ readings

    @property
    def is_over(self) -> bool:
        """It has ended, or was closed."""
        return self._ownership.is_over

    @property
    def used_bytes(self) -> int:
        """Memory of all segments, open ones included."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    @property
    def files(self) -> frozenset[str]:
        """Sealed files."""
        with self._lock:
            return frozenset(file for file, kept in self._kept.items() if kept.held is not None)

    # ------------------------------------------------------------ internal

    def _open(self, event: EventId, rank: int, token: str, nbytes: int) -> Kept:
        if self._token not in ("", token):
            raise FencedError(f"attempt {event.attempt} is fenced off", attempt=event.attempt)
        file = event.shard_file(rank)
        self._drop([f for f, kept in self._kept.items() if f == file or _is_torn(kept, event, rank)])
        spares: list[Kept] = []
        if event.in_memory or nbytes > self.budget_bytes - self.used_bytes:
            old = [f for f, kept in self._kept.items() if self._is_superseded(kept, event, rank)]
            spares = sorted(map(self._kept.pop, old), key=lambda kept: kept.nbytes)
        spare = spares.pop() if spares else None
        _delete(spares)
        free = self.budget_bytes - self.used_bytes
        if nbytes > free:
            _delete([spare] if spare else [])
            raise VaultError(
                f"no room for a segment of {nbytes} bytes on node {self._node}: {max(free, 0)} of "
                f"memory.budget_gb={self.budget_bytes / 1e9:.3g} are free; raise it, or memory.k_ratio",
                need=nbytes,
            )
        path = os.path.join(self.folder, folders.segment_name(event, rank))
        segment.create(path, nbytes, spare.path if spare else None)
        self._kept[file] = Kept(event, rank, path, nbytes, token)
        return self._kept[file]

    def _scan(self) -> None:
        """Finds what was sealed without a word, or by ranks of an earlier vault."""
        for name in folders.segments(self.folder):
            path = os.path.join(self.folder, name)
            held, place = self._read(path), folders.parse_name(name)
            if place is None or (held is not None and (held.event, held.rank) != place):
                with suppress(OSError):
                    os.unlink(path)  # foreign: nothing of ours has such a name
                continue
            event, rank = place
            nbytes = held.nbytes if held else max(0, _size(path) - segment.DATA_AT)
            kept = self._kept.setdefault(event.shard_file(rank), Kept(event, rank, path, nbytes, ""))
            if held is not None and kept.held is None:
                kept.held, kept.token, kept.is_copy = held, held.token, held.home != self._node
                self._ranks |= set() if kept.is_copy else {rank}
        for kept in sorted(self._kept.values(), key=lambda kept: _order(kept.event)):
            if kept.held is not None:
                self._queue(kept, kept.held)

    def _read(self, path: str) -> Held | None:
        held = segment.read_held(path)
        if held is None or held.run != self._run:
            return None
        return held.model_copy(update={"node": self._node})

    def _queue(self, kept: Kept, held: Held) -> None:
        if held.event.in_memory:
            kept.is_stored = True
        elif not kept.is_queued:
            kept.is_queued = True
            self._uploads.put(Upload(held, kept.path))

    def _offer(self, kept: Kept, token: str) -> Held | None:
        held = kept.held
        assert held is not None
        if token not in held.offered:
            try:
                segment.offer(kept.path, token)
            except (VaultError, ValueError):
                return None
            held = held.model_copy(update={"offered": (*held.offered, token)})
        return held

    def _is_uploaded(self, file: str) -> None:
        with self._lock:
            if file in self._kept:
                self._kept[file].is_stored = True  # or given up: nobody waits for it any more

    def _is_superseded(self, kept: Kept, event: EventId, rank: int) -> bool:
        if kept.held is None or kept.rank != rank or not kept.is_stored:
            return False
        since = (event.attempt, event.step, 0)
        newer = [
            other.held.layers
            for other in self._kept.values()
            if other.held is not None and other.rank == rank and kept.held.order < other.held.order < since
        ]
        return kept.held.layers <= frozenset().union(*newer)

    def _drop(self, files: Collection[str]) -> None:
        _delete([self._kept.pop(file) for file in files])

    def _path_of(self, file: str) -> str | None:
        with self._lock:
            return self._kept[file].path if file in self._kept else None

    def _is_mine(self, file: str) -> bool:
        """True for a segment that a rank of this node has made, or that an earlier vault had whole."""
        with self._lock:
            kept = self._kept.get(file)
            return kept is not None and not kept.is_copy and bool(kept.token)

    def _stop(self) -> None:
        self._uploads.close(_LEAVE_S)
        if self._copies is not None:
            self._copies.close(_LEAVE_S)


def open_vault(
    run: str,
    node: str,
    storage: Storage,
    coordinator: Listener,
    config: LayerCheckConfig,
    find_peer: FindPeer | None = None,
) -> Vault:
    """The vault of a node with the settings of a run; `run` is a `folders.run_key`."""
    peer = find_peer if config.memory.replicas else None
    budget_gb = config.memory.budget_gb
    budget_bytes = None if budget_gb is None else int(budget_gb * 1e9)
    return Vault(
        run,
        node,
        storage,
        coordinator,
        budget_bytes=budget_bytes,
        retries=config.write_retries,
        find_peer=peer,
    )


def _delete(gone: Collection[Kept]) -> None:
    for kept in gone:
        segment.delete(kept.path)


def _is_torn(kept: Kept, event: EventId, rank: int) -> bool:
    """A rank has one writer, which opens this event now: what it left unsealed before, it has given up."""
    return kept.held is None and kept.rank == rank and _order(kept.event) <= _order(event)


def _order(event: EventId) -> tuple[int, int, int]:
    return event.attempt, event.step, event.part


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _half_of_free(place: str) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize // 2
