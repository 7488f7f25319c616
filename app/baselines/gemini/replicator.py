"""One thread that copies a rank's state into its host's memory and exchanges it with the peer.

States of the copy of step t on one rank:
1. `begin`: waits until the round before is over (back-pressure), then hands the live tensors over (training
   thread).
2. the state is copied into the own box (replicator). Forward and backward of t + 1 may run; `hold_back`,
   called before each optimizer call, waits for the copy (training thread): the update gate.
3. checksum, exchange with the peer, then the records of both copies (replicator). Training goes on.
4. all ranks say that their copies of t are whole. Only now may the slots of the step before be overwritten:
   whenever everything dies, the newest step that all ranks hold is still whole on all of them.
5. `wait`: the round is over (training thread).

No collective of the default group in the replicator; nothing but the exchange's own group.
A round that fails leaves the aligned step where it was and ends the copies of this attempt with an alert:
training does not die of it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from app.baselines.gemini.box import Box, as_tensor
from app.baselines.gemini.exchange import Exchange, Filled, Wanted
from app.baselines.gemini.host import Key
from app.baselines.gemini.placement import Placement
from app.baselines.gemini.records import BoxShape, SlotRecord, slot_to_fill
from layercheck.errors import LayerCheckError

_ROUND_WAITS = 10
"""A round has many transfers, each with a limit of its own."""


class HostCopyError(LayerCheckError):
    """A copy did not end within its limit, or its box has not the room."""


@dataclass(frozen=True, slots=True)
class Image:
    """The state after `step` as it lies in memory now: meta bytes and the live tensors, in their order."""

    step: int
    meta: bytes
    sources: tuple[Tensor, ...]

    @property
    def shape(self) -> BoxShape:
        """The room that it needs."""
        return BoxShape(len(self.meta), sum(source.nbytes for source in self.sources))


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round took on this rank."""

    step: int
    copy_s: float
    exchange_s: float
    host_bytes: int
    sent_bytes: int
    aligned: bool


class Replicator:
    """See the module.

    Args:
        rank: of this process.
        placement: who keeps whose replica.
        attempt: random mark of this life of the worker group, the same on all ranks.
        boxes: those of this rank, by (shard, keeper).
        exchange: to the peers.
        aligned: newest step that all ranks hold, 0 for none.
        wait_s: limit of the wait for a copy, ten times that for a round.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        attempt: bytes,
        boxes: Mapping[Key, Box],
        exchange: Exchange,
        aligned: int,
        wait_s: float,
    ) -> None:
        self._rank, self._placement, self._attempt = rank, placement, attempt
        self.boxes = dict(boxes)
        self._exchange = exchange
        self.aligned = aligned
        self._wait_s = wait_s
        self.broken: str | None = None
        self.costs: deque[RoundCost] = deque()
        """Of rounds that are over; whoever reads them takes them out."""
        self._told = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._void = False
        """The optimizer has gone on before the copy was whole: it must never count."""
        self._copied, self._over = threading.Event(), threading.Event()
        self._copied.set()
        self._over.set()
        self._thread = threading.Thread(target=self._run, name="gemini", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ training thread

    def begin(self, image: Image) -> None:
        """Starts the round of this step. The live tensors must not change before `hold_back` has returned."""
        self.wait()
        if self.broken is not None:
            return
        reading = _reading(image.sources)
        self._copied.clear()
        self._over.clear()
        self._jobs.put(lambda: self._round(image, reading))

    def hold_back(self) -> None:
        """The update gate: returns when the host copy is done, or void because it took more than `wait_s`."""
        if not self._copied.wait(self._wait_s):
            self._void = True

    def wait(self) -> None:
        """Returns when no round is under way, or when it took so long that host copies have to end."""
        limit_s = _ROUND_WAITS * self._wait_s
        if not self._over.wait(limit_s):
            self.broken = f"an exchange was not over within {limit_s:g} s ({_ROUND_WAITS} times wait_s)"

    def take_alerts(self) -> tuple[str, ...]:
        """What a person should know, once."""
        if self.broken is None or self._told:
            return ()
        self._told = True
        return (
            f"host copies stop at step {self.aligned} until the next restart, the storage goes on: "
            f"{self.broken}",
        )

    def close(self, *, wait: bool) -> None:
        """Ends the thread; with `wait` the round under way comes to its end first."""
        if wait:
            self.wait()
        self._jobs.put(None)
        self.hold_back()

    # ------------------------------------------------------------------ replicator thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # a dead peer, lost memory: the training thread tells it
                self.broken = f"{type(error).__name__}: {error}"
            finally:
                self._copied.set()
                self._over.set()

    def _round(self, image: Image, reading: AbstractContextManager[None]) -> None:
        began = time.monotonic()
        box = self.boxes[self._rank, self._rank]
        slot = slot_to_fill(box.steps(), self.aligned)
        box.wipe(slot)
        with reading:
            _fill(box, slot, image)
        if self._void:
            raise HostCopyError(f"the copy of step {image.step} took more than wait_s={self._wait_s:g} s")
        self._copied.set()
        copied = time.monotonic()
        record = self._record(image, box, slot)
        sent_before, received_before = self._exchange.sent_bytes, self._exchange.received_bytes
        wanted = self._make_room()
        good = self._exchange.swap(Filled(box, slot, record), self._placement.keepers[self._rank], wanted)
        box.seal(slot, record)  # not before: own copy and replica count from the same exchange on
        aligned = self._exchange.all_say(good)
        if aligned:
            self.aligned = image.step
        self.costs.append(
            RoundCost(
                step=image.step,
                copy_s=copied - began,
                exchange_s=time.monotonic() - copied,
                host_bytes=record.meta_bytes
                + record.data_bytes
                + self._exchange.received_bytes
                - received_before,
                sent_bytes=self._exchange.sent_bytes - sent_before,
                aligned=aligned,
            )
        )

    def _record(self, image: Image, box: Box, slot: int) -> SlotRecord:
        sizes = image.shape.meta_bytes, image.shape.data_bytes
        world_size = len(self._placement.hosts)
        return SlotRecord(image.step, self._attempt, self._rank, world_size, *sizes, box.digest(slot, *sizes))

    def _make_room(self) -> Sequence[Wanted]:
        wanted = []
        for shard in self._placement.kept_by(self._rank):
            box = self.boxes[shard, self._rank]
            slot = slot_to_fill(box.steps(), self.aligned)
            box.wipe(slot)
            wanted.append(Wanted(shard, box, slot))
        return wanted


def _reading(sources: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Made in the training thread, entered by the replicator: inside, the sources are those of now.

    On an accelerator the copies run on a stream of their own, after all work that is queued now, and have
    ended at the exit.
    """
    device = sources[-1].device
    if device.type == "cpu":
        return nullcontext()
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))
    return _beside(device, ready)


@contextmanager
def _beside(device: torch.device, ready: torch.cuda.Event) -> Iterator[None]:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _fill(box: Box, slot: int, image: Image) -> None:
    if not box.shape.holds(image.shape):
        raise HostCopyError(f"the state of step {image.step} has grown: {image.shape}, in {box.shape}")
    box.meta(slot, len(image.meta)).copy_(as_tensor(image.meta))
    target, done = box.data(slot, image.shape.data_bytes), 0
    for source in image.sources:
        raw = source.view(torch.uint8)
        target.narrow(0, done, raw.numel()).copy_(raw)
        done += raw.numel()
