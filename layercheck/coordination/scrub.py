"""Reads live versions again in the background, so that a rotten one is replaced while it is not yet needed.

One thread of the coordinator's process, apart from the training thread and from the coordinator's lock. It
reads one chunk at a time and then waits so long that the whole store takes `scrub_hours`: 3 TB in 24 hours
are 35 MB/s, and a small store is read some bytes a minute. What it reads next is up to `scrub_order`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from layercheck.coordination import audit, scrub_order
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.scrub_order import ShardKey
from layercheck.errors import LayerCheckError, StorageError
from layercheck.manifest import BadShard, ShardRecord
from layercheck.persistence.damage import is_damage
from layercheck.persistence.storage import Storage

log = logging.getLogger(__name__)
_IDLE_S = 60.0
_LOOK_AGAIN_S = 600.0
_CLOSE_S = 5.0


class _Stopped(Exception):  # noqa: N818 - no error: the thread was told to end
    pass


class Manifest(Protocol):
    """What a scrubber needs of a coordinator."""

    def facts(self) -> StoreFacts | None:
        """What the store holds for the current attempt; None if that is fenced or has not begun."""
        ...

    def rotten(self, bad: BadShard) -> None:
        """A shard failed its check twice."""
        ...


class Scrubber:
    """Reads all live shards once in `hours`. `start` makes the thread; `turn` is what it repeats.

    Args:
        storage: the run's folder.
        manifest: the coordinator.
        hours: period, greater than 0.
        clock: monotonic seconds.
        wait: waits that long, or less if the scrubber is closed; True if it is.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        hours: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._storage, self._manifest, self._period_s = storage, manifest, hours * 3600.0
        self._clock = clock
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._read_at: dict[ShardKey, float] = {}
        self._todo: deque[ShardRecord] = deque()
        self._live_bytes, self._look_again_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="layercheck-scrub", daemon=True)

    def start(self) -> None:
        """Begins in the background."""
        self._thread.start()

    def close(self) -> None:
        """Ends after the chunk that is being read."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def turn(self) -> None:
        """Reads the next shard at the pace of the period; reports it if it is bad twice.

        A storage that does not answer is no rot: its shard is left for a later turn.
        """
        if not self._todo or self._clock() >= self._look_again_at:
            self._look_again()
        if not self._todo:
            self._pause(min(_IDLE_S, self._period_s))
            return
        row = self._todo[0]
        error = self._check(row)
        if error is not None and self._is_there(row):
            log.error("%s: %s", row.file, error)
            self._manifest.rotten(
                BadShard(file=row.file, layer=row.layer, step=row.step, attempt=row.attempt, error=error)
            )
        # Only now: what could not be told is found again.
        self._todo.popleft()
        self._read_at[scrub_order.key_of(row)] = self._clock()

    def _look_again(self) -> None:
        """Takes up what was committed meanwhile; not for each shard, of which there may be a million."""
        facts = self._manifest.facts()
        live = scrub_order.live_shards(facts) if facts else ()
        keys = {scrub_order.key_of(row) for row in live}
        self._read_at = {key: at for key, at in self._read_at.items() if key in keys}
        attempt = facts.newest.attempt if facts and facts.newest else 0
        self._todo = deque(scrub_order.in_turn(live, self._read_at, attempt))
        self._live_bytes = sum(row.nbytes for row in live)
        self._look_again_at = self._clock() + min(_LOOK_AGAIN_S, self._period_s)

    def _check(self, row: ShardRecord) -> str | None:
        def pace(nbytes: int) -> None:
            self._pause(scrub_order.pause_s(nbytes, self._live_bytes, self._period_s))

        try:
            audit.check_twice(self._storage, row, {}, pace)
        except StorageError as error:
            pace(row.nbytes)
            return error.message if is_damage(error) else None
        if row.nbytes == 0:
            pace(1)
        return None

    def _is_there(self, row: ShardRecord) -> bool:
        """True if its commit still is: the event was not collected meanwhile, and the storage answers."""
        return self._storage.size(row.event.commit_file) is not None

    def _pause(self, seconds: float) -> None:
        if self._wait(seconds):
            raise _Stopped

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.turn()
            except _Stopped:
                return
            except LayerCheckError as error:
                # Bookkeeping of a storage that may come back: never the end of anything (I9).
                log.warning("scrub: %s", error)
                if self._wait(_IDLE_S):
                    return
