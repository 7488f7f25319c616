"""Differentials on their way from the trainer to the storage: copied, collected, written.

States of one step's differential:
1. `hand_over` queues its copy into reused host memory, inside the optimizer step (training thread).
2. `release`, before the next backward overwrites the gradient: on a CPU the host waits for the copy, on an
   accelerator the device does (training thread).
3. `add` completes it with how it was consumed; a full batch goes to the writer, and training waits where
   `pending` batches wait there already (training thread).
4. the batch is written: durable and checked by itself, no other rank is asked (writer thread).
5. its memory goes back (writer thread).
A crash loses what is between 1 and 4: at most batch - 1 steps and the batches at the writer.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.baselines.lowdiff.batch_file import BatchHeader, Consumed, Span, StepData
from app.baselines.lowdiff.diff_store import DiffStore
from layercheck.errors import StorageError
from layercheck.manifest import TrainerState
from layercheck.persistence.copier import Copied, Copier

log = logging.getLogger("app")
_PAUSES_S = (0.2, 0.4, 0.8)
"""Between the tries of a write."""


@dataclass(frozen=True, slots=True)
class _Handed:
    """A copy on its way; `pieces` keep its source alive."""

    memory: Tensor
    copied: Copied
    pieces: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    consumed: Callable[[], Consumed] | None
    state: TrainerState
    handed: _Handed | None


@dataclass(frozen=True, slots=True)
class Written:
    """What became durable since the last question.

    Attributes:
        batches: number of files; `updates` in them, skipped steps aside; `nbytes` of this rank.
        alerts: batches that were lost.
    """

    batches: int = 0
    updates: int = 0
    nbytes: int = 0
    alerts: tuple[str, ...] = ()


class Outbox:
    """See the module. Ends with `close`.

    Args:
        store: where the batches go.
        header: of every batch.
        copier: fills the host memory.
        pin: page-lock that memory, for copies from an accelerator.
        pending: batches that may wait for the writer.
        wait_s: limit of each wait for it.
    """

    def __init__(
        self, store: DiffStore, header: BatchHeader, copier: Copier, pin: bool, pending: int, wait_s: float
    ) -> None:
        self._store, self._header, self._copier = store, header, copier
        self._pin, self._wait_s = pin, wait_s
        self._free: list[Tensor] = []
        self._handed: _Handed | None = None
        self._batch: list[_Step] = []
        self._jobs: queue.Queue[list[_Step] | None] = queue.Queue(pending)
        self._changed = threading.Condition()
        self._unwritten = 0
        self._written = Written()
        self._durable: list[Span] = []
        self._thread = threading.Thread(target=self._run, name="lowdiff-writer", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ training thread

    def hand_over(self, pieces: Sequence[Tensor]) -> None:
        """Queues the copy of one differential: 1-D tensors, stored one after the other."""
        raw = [piece.view(torch.uint8) for piece in pieces if piece.numel()]
        memory = self._memory(sum(each.numel() for each in raw))
        position = 0
        with self._copier.copying():
            for each in raw:
                self._copier.copy(memory[position : position + each.numel()], each)
                position += each.numel()
            self._handed = _Handed(memory, self._copier.mark(), tuple(pieces))

    def _memory(self, nbytes: int) -> Tensor:
        # Every differential of a run has the same size, so any free one fits.
        with self._changed:
            if self._free:
                return self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)

    def release(self) -> None:
        """After this the gradient may be overwritten."""
        self._copier.hold_back()

    def add(self, step: int, consumed: Callable[[], Consumed] | None, state: TrainerState) -> None:
        """The optimizer has taken the step; `consumed` is None if it was skipped."""
        handed, self._handed = self._handed, None
        if consumed is None and handed is not None:
            # Its copy may still run; the next one into this memory comes after it.
            self._give(handed.memory)
            handed = None
        assert consumed is None or handed is not None, f"step {step} was updated from no gradient"
        self._batch.append(_Step(step, consumed, state, handed))

    @property
    def collected(self) -> int:
        """Steps in the batch that is not full yet."""
        return len(self._batch)

    def flush(self) -> None:
        """Hands the batch to the writer, however many steps are in it; lost if none is taken for `wait_s`."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        with self._changed:
            self._unwritten += 1
        try:
            self._jobs.put(batch, timeout=self._wait_s)
        except queue.Full:
            slow = f"the storage took no batch for {self._wait_s:g} s (storage_wait_s)"
            self._lost(batch, StorageError(slow))
            self._done(batch)

    def drain(self) -> bool:
        """Waits until all flushed batches are durable or lost; False if `wait_s` came first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unwritten == 0, self._wait_s)

    def durable(self) -> tuple[Span, ...]:
        """Batches of this rank that are durable, but for those that were forgotten."""
        with self._changed:
            return tuple(self._durable)

    def forget(self, base: int) -> None:
        """A base of this step is durable: batches before it need not be remembered."""
        with self._changed:
            self._durable = [span for span in self._durable if span.last > base]

    def take_written(self) -> Written:
        """See `Written`."""
        with self._changed:
            written, self._written = self._written, Written()
            return written

    def close(self, *, wait: bool) -> None:
        """Ends the thread; with `wait` what is collected becomes durable first."""
        if wait:
            self.flush()
            self.drain()
            self._jobs.put(None, timeout=self._wait_s)
            self._thread.join(self._wait_s)

    # ------------------------------------------------------------------ writer thread

    def _run(self) -> None:
        while (batch := self._jobs.get()) is not None:
            try:
                nbytes = self._write(batch)
                self._note(batch, nbytes)
            except Exception as error:
                # Whatever it is costs this batch. If the thread ended, training would wait for ever.
                self._lost(batch, error)
            finally:
                self._done(batch)

    def _write(self, batch: list[_Step]) -> int:
        steps = [self._data(each) for each in batch]
        for pause_s in _PAUSES_S:
            try:
                return self._store.write(self._header, steps)
            except StorageError as error:
                log.warning("differentials to step %d: %s; trying again", batch[-1].step, error)
                time.sleep(pause_s)
        return self._store.write(self._header, steps)

    def _data(self, each: _Step) -> StepData:
        if each.handed is None or each.consumed is None:
            return StepData(each.step, None, each.state, memoryview(b""))
        each.handed.copied.wait(self._wait_s)
        return StepData(each.step, each.consumed(), each.state, memoryview(each.handed.memory.numpy()))

    def _note(self, batch: list[_Step], nbytes: int) -> None:
        with self._changed:
            before, updates = self._written, sum(each.consumed is not None for each in batch)
            self._written = Written(
                before.batches + 1, before.updates + updates, before.nbytes + nbytes, before.alerts
            )
            self._durable.append(Span(batch[0].step, batch[-1].step))

    def _lost(self, batch: list[_Step], error: Exception) -> None:
        alert = (
            f"the differentials of steps {batch[0].step} to {batch[-1].step} are lost: until the next base a "
            f"failure goes back to step {batch[0].step - 1} or before: {error or type(error).__name__}"
        )
        log.error("%s", alert)
        with self._changed:
            before = self._written
            self._written = Written(before.batches, before.updates, before.nbytes, (*before.alerts, alert))

    def _done(self, batch: list[_Step]) -> None:
        for each in batch:
            if each.handed is not None:
                self._give(each.handed.memory)
        with self._changed:
            self._unwritten -= 1
            self._changed.notify_all()

    def _give(self, memory: Tensor) -> None:
        with self._changed:
            self._free.append(memory)
