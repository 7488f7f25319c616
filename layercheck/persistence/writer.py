"""Writes snapshots in the background, one after the other, and tells the coordinator. No collectives here.

A failed write is tried again with growing pauses; an event that still fails is reported as lost, its drift
comes back by the coordinator's notice, an alert is raised, and training goes on (I9). Nothing that happens in
this thread is raised in the training thread: one rank that left its loop alone would hang all the others.

With a lag (on an accelerator) an event is taken before anybody knows whether its state is finite. Its shards
are written meanwhile, but the coordinator hears of them only after the report of that step was clean (I13):
without the word of every rank there is no commit, and a crash in between leaves shards that nobody reads.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from layercheck.errors import FencedError, LayerCheckError
from layercheck.manifest import ShardRecord
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.hashed import HashedBytes
from layercheck.persistence.recode import recoded
from layercheck.persistence.retries import try_often
from layercheck.persistence.sink import FileSink, Listener
from layercheck.persistence.snapshot import Snapshot
from layercheck.tracking.pending import PendingReport

log = logging.getLogger(__name__)


class ShardWriter:
    """One background thread per rank. `submit` never waits; `backlog_bytes` is what is not yet written."""

    def __init__(
        self,
        storage: FileSink,
        coordinator: Listener,
        rank: int,
        world_size: int,
        *,
        retries: int,
        timeout_s: float,
        bases: BaseCopies | None = None,
    ) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._rank = rank
        self._world_size = world_size
        self._retries = retries
        self._timeout_s = timeout_s
        self._bases = bases
        self._jobs: queue.SimpleQueue[tuple[Snapshot, PendingReport | None] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._backlog_bytes = 0
        self._alerts: list[str] = []
        self.failed_saves = 0
        self.bytes_written = 0
        self._thread = threading.Thread(target=self._run, name="layercheck-writer", daemon=True)
        self._thread.start()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were submitted and are neither durable nor given up."""
        return self._backlog_bytes

    def submit(self, snapshot: Snapshot, pending: PendingReport | None = None) -> None:
        """Queues one snapshot; never waits. `pending` is the report of its step, if it is not known yet."""
        with self._lock:
            self._backlog_bytes += snapshot.layout.total
        self._jobs.put((snapshot, pending))

    def take_alerts(self) -> list[str]:
        """What went wrong since the last call, in words."""
        with self._lock:
            alerts, self._alerts = self._alerts, []
        return alerts

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything submitted is durable or given up; False if the limit came first."""
        with self._lock:
            return self._lock.wait_for(lambda: self._backlog_bytes == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drains, then ends the thread; False if the limit came first."""
        drained = self.drain(timeout_s)
        self._jobs.put(None)
        self._thread.join(timeout_s if drained else 0.0)
        return drained

    # ------------------------------------------------------------------ writer thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            snapshot, pending = job
            try:
                self._save(snapshot, pending)
            except BaseException as error:
                # A bug here costs this event. If the thread ended with it, every later one would be lost too.
                log.exception("the writer failed in a way that it does not know")
                self._give_up(snapshot, error)
            finally:
                snapshot.stream.release()
                with self._lock:
                    self._backlog_bytes -= snapshot.layout.total
                    self._lock.notify_all()

    def _save(self, snapshot: Snapshot, pending: PendingReport | None) -> None:
        records: list[ShardRecord] = []
        # A copy in memory that cannot be had now is not waited for: the next one will be better.
        tries = 1 if snapshot.stream.streaming or snapshot.event.in_memory else self._retries + 1
        error = self._try(snapshot, tries, lambda: records.extend(self._write(snapshot)))
        if error is None:
            # Durable: the memory is free for the next event, however long the coordinator takes to answer.
            snapshot.stream.release()
            if pending is not None and not self._is_clean(snapshot, pending):
                return
            error = self._try(snapshot, self._retries + 1, lambda: self._report(snapshot, tuple(records)))
        if error is not None:
            self._give_up(snapshot, error)

    def _is_clean(self, snapshot: Snapshot, pending: PendingReport) -> bool:
        """Waits for the report of the event's step. If it is bad the attempt ends: nobody has to be told."""
        try:
            if pending.result(self._timeout_s).is_clean:
                return True
            reason = "its state is not finite"
        except RuntimeError as error:  # the report never came: another rank is gone
            reason = str(error)
        log.error("event %s is dropped: %s", snapshot.event.folder, reason)
        return False

    def _give_up(self, snapshot: Snapshot, error: BaseException) -> None:
        if snapshot.event.in_memory:
            log.warning("%s is left out: %s", snapshot.event.folder, error)  # nobody counts on it
            self._coordinator.lost(snapshot.event, self._rank, str(error))  # the sink of the memory tier
            return
        self.failed_saves += 1
        alert = (
            f"event {snapshot.event.folder} of rank {self._rank} could not be written and is lost "
            f"(training goes on): {error or type(error).__name__}"
        )
        log.error("%s", alert)
        with self._lock:
            self._alerts.append(alert)
        try:
            self._coordinator.lost(snapshot.event, self._rank, str(error))
        except FencedError:
            log.warning("event %s belongs to an attempt that was fenced off", snapshot.event.folder)
        except LayerCheckError as lost:
            # The coordinator declares the event lost by itself after event_timeout_s.
            log.error("event %s could not be reported: %s", snapshot.event.folder, lost)

    def _try(self, snapshot: Snapshot, tries: int, act: Callable[[], None]) -> Exception | None:
        what = f"event {snapshot.event.folder}"
        return try_often(act, tries, what, lambda: snapshot.stream.is_broken)

    def _write(self, snapshot: Snapshot) -> list[ShardRecord]:
        started = time.monotonic()
        content = HashedBytes(snapshot.layout, self._data(snapshot))
        file = snapshot.event.shard_file(self._rank)
        self._storage.write(file, content)
        finished = time.monotonic()
        self.bytes_written += snapshot.layout.total
        return [
            ShardRecord(
                layer=write.layer,
                step=snapshot.event.step,
                attempt=snapshot.event.attempt,
                part=snapshot.event.part,
                rank=self._rank,
                world_size=self._world_size,
                file=file,
                begin=snapshot.layout.layers[write.layer][0],
                end=snapshot.layout.layers[write.layer][1],
                xxh3_128=content.digests[write.layer],
                drift=write.drift,
                threshold=write.threshold,
                age=write.age,
                reason=write.reason,
                snapshot_s=snapshot.stream.copy_s,
                write_s=finished - started,
                **_kind(write.base_in(snapshot.event)),
            )
            for write in snapshot.writes
        ]

    def _data(self, snapshot: Snapshot) -> Iterator[memoryview]:
        """What was staged, as it stands in the file."""
        chunks = snapshot.stream.chunks(self._timeout_s)
        if self._bases is None or snapshot.event.in_memory:  # residuals count from what the storage has
            return chunks
        event = snapshot.event
        return recoded(snapshot.pieces, chunks, self._bases, (event.step, event.attempt))

    def _report(self, snapshot: Snapshot, records: tuple[ShardRecord, ...]) -> None:
        self._coordinator.record(snapshot.event, self._rank, records, snapshot.trainer_state)


def _kind(base: tuple[int, int] | None) -> dict[str, Any]:
    """What only the row of a residual has."""
    return {} if base is None else {"kind": "residual", "base_step": base[0], "base_attempt": base[1]}
