"""Ranks that copy made-up states into host memory and find them again; no model, no Ray."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.baselines.gemini.box import Box
from app.baselines.gemini.exchange import Exchange
from app.baselines.gemini.find import Finder, Found
from app.baselines.gemini.placement import place
from app.baselines.gemini.replicator import Image, Replicator
from tests.integration.gemini_hosts import SocketHosts

RUN = "run-1"
CHUNK = 1000
SLACK = 100
NOBODY = 1 << 30


def size_of(rank: int) -> int:
    """Elements of a rank's shard: all differ."""
    return 5000 - 777 * rank


def state(rank: int, step: int) -> Tensor:
    return torch.arange(size_of(rank), dtype=torch.float32) + 10_000 * rank + step


def image(rank: int, step: int) -> Image:
    return Image(step, f"meta of {rank} at {step}".encode(), (state(rank, step), torch.zeros(3)))


class Life:
    """One life of the worker group on this rank: looks for what there is, then copies."""

    def __init__(
        self, folder: str, where: str, attempt: bytes, wait_s: float = 20, pid: int | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self.hosts = SocketHosts(folder, where[self.rank])
        self.exchange = Exchange(CHUNK, wait_s)
        self.hosts.own().enter(RUN, attempt, pid or os.getpid())
        self.finder = Finder(self.hosts, self.exchange, RUN)
        self.placement = place(self.finder.places)
        self._attempt, self._wait_s = attempt, wait_s
        self.replicator: Any = None

    def find(self, remote: int | None = None) -> Found:
        found = self.finder.find(remote)
        if found.shard is not None:
            step, shard = found.decision.step, found.shard
            assert bytes(shard.meta.numpy()) == f"meta of {self.rank} at {step}".encode()
            assert torch.equal(shard.data.clone().view(torch.float32)[:-3], state(self.rank, step))
        return found

    def begin(self, aligned: int = 0) -> Replicator:
        keys = {(self.rank, self.rank), *((shard, self.rank) for shard in self.placement.kept_by(self.rank))}
        needs = {(shard, keeper): image(shard, 1).shape for shard, keeper in keys}
        boxes = {key: Box(*found) for key, found in self.hosts.own().open(needs, SLACK).items()}
        self.replicator = Replicator(
            self.rank, self.placement, self._attempt, boxes, self.exchange, aligned, self._wait_s
        )
        return self.replicator

    def copy(self, *steps: int) -> None:
        """Copies these steps, each to its end."""
        for step in steps:
            self.replicator.begin(image(self.rank, step))
            self.replicator.wait()
            assert self.replicator.broken is None, self.replicator.broken


# ---------------------------------------------------------------- stories: ("what", ...) one after the other


def play(folder: str, *story: tuple[Any, ...]) -> list[Any]:
    """Lives of one group of processes, and what befalls the hosts between them.

    Each life has a process id of its own that nobody has: those of the lives before are dead.

    ("copy", where, *steps)       a life that goes on from what it finds and copies these steps
    ("end", *hosts)               hosts are lost
    ("damage", keeper, shard, step)   one byte of a copy is flipped
    ("find", where, remote)       gives (kind, step, how each rank gets its shard)
    """
    told = []
    for number, (what, *args) in enumerate(story):
        answer = globals()[f"_{what}"](folder, b"life%04d" % number, *args)
        dist.barrier()
        if answer is not None:
            told.append(answer)
    return told


def _copy(folder: str, attempt: bytes, where: str, *steps: int) -> None:
    life = Life(folder, where, attempt, pid=NOBODY)
    life.begin(life.find().decision.step)
    life.copy(*steps)
    life.replicator.close(wait=True)


def _end(folder: str, attempt: bytes, *names: str) -> None:
    if dist.get_rank() == 0:
        for name in names:
            SocketHosts(folder, name).end_own()


def _damage(folder: str, attempt: bytes, keeper: int, shard: int, step: int) -> None:
    if dist.get_rank() == keeper:
        box = Box(*SocketHosts(folder, "ab"[keeper]).own().region((shard, keeper)))
        box.data(box.steps().index(step), 8)[7] ^= 1


def _find(folder: str, attempt: bytes, where: str, remote: int | None = None) -> tuple[Any, ...]:
    decision = Life(folder, where, attempt, pid=NOBODY).find(remote).decision
    return decision.kind, decision.step, tuple(source.how for source in decision.sources)


# ---------------------------------------------------------------- kills, waits, losses


def die_in_the_exchange(folder: str, where: str, at: int, victim: int) -> None:
    """All ranks copy up to `at`; in that round `victim` dies with half of its shard sent."""
    life = Life(folder, where, b"life-one", wait_s=5)
    life.find()
    replicator = life.begin()
    life.copy(*range(1, at))
    if life.rank == victim:
        posted = [0]
        post = life.exchange._post

        def dies(stream: Any, view: Tensor) -> Any:
            posted[0] += stream.sends
            if posted[0] == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return post(stream, view)

        life.exchange._post = dies  # type: ignore[method-assign]
    replicator.begin(image(life.rank, at))
    replicator.wait()
    assert replicator.broken is not None
    replicator.begin(image(life.rank, at + 1))  # training does not die of it
    replicator.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def gate_and_pressure(folder: str, where: str) -> dict[str, Any]:
    """What training waits for, by events and not by time: a copy that is held, then an exchange that is."""
    life = Life(folder, where, b"life-one")
    replicator = life.begin()
    seen: dict[str, Any] = {}
    copy_may_end, swap_may_end = threading.Event(), threading.Event()
    live = state(life.rank, 1)
    swap, whole_round = life.exchange.swap, replicator._round
    life.exchange.swap = lambda *args: swap_may_end.wait(20) and swap(*args)  # type: ignore
    replicator._round = lambda image, _: whole_round(image, _once(copy_may_end))  # type: ignore
    replicator.begin(Image(1, b"meta", (live, torch.zeros(3))))
    seen["forward runs beside the copy"] = not replicator._copied.is_set()
    gate = _in_thread(replicator.hold_back)
    seen["the update waits for the copy"] = _still_runs(gate)
    copy_may_end.set()
    gate.join(20)
    seen["and goes on once it is done"] = not gate.is_alive()
    live.zero_()  # the optimizer has stepped
    seen["the exchange goes on beside the step"] = not replicator._over.is_set()
    following = _in_thread(lambda: replicator.begin(image(life.rank, 2)))
    seen["the next capture waits for the exchange"] = _still_runs(following) and replicator.aligned == 0
    swap_may_end.set()
    following.join(20)
    replicator.wait()
    box = replicator.boxes[life.rank, life.rank]
    first = box.data(box.steps().index(1), 4 * size_of(life.rank)).clone().view(torch.float32)
    seen["the copy is that of its step"] = torch.equal(first, state(life.rank, 1))
    seen["both steps are aligned"] = [cost.aligned for cost in replicator.costs] == [True, True]
    seen["every step was copied"] = sorted(box.steps()) == [1, 2]
    replicator.close(wait=True)
    return seen


def a_bad_round(folder: str, where: str) -> list[Any]:
    """Rank 1 takes in a damaged copy of step 2: its aligned step and what its host holds, after each step."""
    life = Life(folder, where, b"life-one")
    replicator = life.begin()
    swap = life.exchange.swap
    seen = []
    for step in (1, 2, 3):
        spoilt = life.rank == 1 and step == 2
        life.exchange.swap = (lambda *args: swap(*args) and False) if spoilt else swap  # type: ignore
        life.copy(step)
        dist.barrier()
        held = {copy.record.step for copy in life.hosts.own().copies(RUN)}
        seen.append((replicator.aligned, sorted(held)))
        dist.barrier()
    return seen


def a_late_copy(folder: str, where: str) -> tuple[str | None, Any]:
    """The optimizer goes on before the copy is whole: it never counts, on any rank."""
    life = Life(folder, where, b"life-one", wait_s=1)
    replicator = life.begin()
    life.copy(1)
    may_end, whole_round = threading.Event(), replicator._round
    if life.rank == 0:
        replicator._wait_s = 0.1
        replicator._round = lambda image, _: whole_round(image, _once(may_end))  # type: ignore
    replicator.begin(image(life.rank, 2))
    replicator.hold_back()
    may_end.set()
    replicator._wait_s = 20
    replicator.wait()
    dist.barrier()
    return replicator.broken, sorted(copy.record.step for copy in life.hosts.own().copies(RUN))


@contextmanager
def _once(event: threading.Event) -> Iterator[None]:
    """A copy that does not begin before."""
    event.wait(20)
    yield


def _in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _still_runs(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return thread.is_alive()


def lose_the_store(folder: str, where: str) -> tuple[Any, ...]:
    """A store dies alone after step 1: its boxes are known to be lost, and training can go on."""
    life = Life(folder, where, b"life-one")
    replicator = life.begin()
    life.copy(1)
    (first,) = replicator.costs
    kept = all(box.is_kept for box in replicator.boxes.values())
    if life.rank == 0:
        life.hosts.end_own()
        deadline = time.monotonic() + 20
        while any(box.is_kept for box in replicator.boxes.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
    dist.barrier()
    life.copy(2)
    return kept, any(box.is_kept for box in replicator.boxes.values()), first
