"""Writes sealed segments to the storage in a thread of the vault, as the writer of their rank would.

The bytes are checked on the way: what has changed in memory since it was sealed does not reach the storage.
The files of one rank go in the order in which it sealed them, since the coordinator takes its word that what
was left out will not come.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from layercheck.coordination import journal
from layercheck.errors import DamagedShardError, LayerCheckError
from layercheck.manifest import ShardRecord
from layercheck.memory import segment
from layercheck.memory.background import InOrder
from layercheck.memory.held import Held
from layercheck.persistence.hashed import HashedBytes
from layercheck.persistence.retries import try_often
from layercheck.persistence.shard_file import ShardLayout
from layercheck.persistence.sink import Listener
from layercheck.persistence.storage import Storage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upload:
    """A sealed segment on its way to the storage."""

    held: Held
    path: str


class Uploads(InOrder[Upload]):
    """One background thread. `put` never waits.

    Args:
        storage: the run's `layercheck` folder.
        coordinator: is told of each file, as by its rank.
        retries: tries after the first.
        done: called when a file is written or given up.
    """

    def __init__(
        self, storage: Storage, coordinator: Listener, retries: int, done: Callable[[str], None]
    ) -> None:
        self._storage, self._coordinator = storage, coordinator
        self._retries, self._done = retries, done
        self._tokens: set[tuple[int, str]] = set()
        super().__init__("layercheck-vault")

    # ------------------------------------------------------------------ upload thread

    def _act(self, upload: Upload) -> None:
        try:
            self._upload(upload)
        except Exception as error:
            # A bug here costs this event. If the thread ended with it, every later one would be lost too.
            log.exception("the vault failed in a way that it does not know")
            self._give_up(upload.held, error)
        self._done(upload.held.file)

    def _upload(self, upload: Upload) -> None:
        held = upload.held
        if not self._is_of_this_store(held):
            log.warning("%s is of an attempt that the store does not know: not written", held.file)
            return
        if self._storage.size(held.event.commit_file) is not None:
            return  # an earlier vault did it, or that of a node which is gone
        rows: list[ShardRecord] = []
        what = f"event {held.event.folder} of rank {held.rank}"
        is_gone = partial(_is_gone, upload.path)
        error = try_often(lambda: rows.extend(self._write(upload)), self._retries + 1, what, is_gone)
        if error is None:
            error = try_often(
                lambda: self._coordinator.record(held.event, held.rank, tuple(rows), held.trainer_state),
                self._retries + 1,
                what,
            )
        if error is not None:
            self._give_up(held, error)

    def _give_up(self, held: Held, error: Exception) -> None:
        log.error("%s could not be written from memory and is lost: %s", held.file, error)
        try:
            self._coordinator.lost(held.event, held.rank, str(error))
        except LayerCheckError as lost:
            # The coordinator declares the event lost by itself after event_timeout_s.
            log.error("%s could not be reported: %s", held.file, lost)

    def _is_of_this_store(self, held: Held) -> bool:
        """False for what was left of a store that was deleted since, or of a claim that was lost."""
        claim = (held.event.attempt, held.token)
        if claim not in self._tokens:
            record = journal.read_attempt(self._storage, held.event.attempt)
            if record is None or record.token != held.token:
                return False
            self._tokens.add(claim)
        return True

    def _write(self, upload: Upload) -> list[ShardRecord]:
        started, held = time.monotonic(), upload.held
        self._storage.write(held.file, checked_bytes(held, upload.path))
        write_s = time.monotonic() - started
        return [row.model_copy(update={"write_s": write_s}) for row in held.records]


def _is_gone(path: str) -> bool:
    """True for a segment that a later attempt had dropped while it was being written."""
    return not os.path.exists(path)


def checked_bytes(held: Held, path: str) -> Iterator[bytes | memoryview]:
    """The shard file in a segment.

    Raises:
        DamagedShardError: at its end, before a storage has given it its name: it is not what was sealed.
        VaultError: the segment is gone.
    """
    begin = min(row.begin for row in held.records)
    header = b"".join(segment.chunks(path, 0, begin))
    shard = ShardLayout(header, {row.layer: (row.begin, row.end) for row in held.records}, held.nbytes)
    content = HashedBytes(shard, segment.chunks(path, begin, held.nbytes))
    yield from content
    wrong = [row.layer for row in held.records if content.digests[row.layer] != row.xxh3_128]
    if wrong:
        raise DamagedShardError(f"layer {wrong[0]} of {held.file} has changed in memory", path=held.file)
