"""Ranks that copy made-up states into host memory and find them again; no model, no Ray."""

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.baselines.gemini.box import Box
from app.baselines.gemini.exchange import Exchange
from app.baselines.gemini.find import Finder
from app.baselines.gemini.placement import place
from app.baselines.gemini.records import BoxShape
from app.baselines.gemini.replicator import Image, Replicator
from tests.integration.gemini_hosts import SocketHosts

RUN = "run-1"
CHUNK = 1000
META_ROOM = 64


def size_of(rank: int) -> int:
    """Elements of a rank's shard: all differ, the last one has none."""
    return max(0, 5000 - 777 * rank) if rank < 3 else 0


def state(rank: int, step: int) -> Tensor:
    return torch.arange(size_of(rank), dtype=torch.float32) + 10_000 * rank + step


def image(rank: int, step: int) -> Image:
    return Image(step, f"meta of {rank} at {step}".encode(), (state(rank, step), torch.zeros(3)))


class Life:
    """One life of the worker group on this rank: finds what there is and copies from then on."""

    def __init__(self, folder: str, where: str, attempt: bytes, wait_s: float = 20) -> None:
        self.rank = dist.get_rank()
        self.hosts = SocketHosts(folder, where[self.rank])
        self.exchange = Exchange(CHUNK, wait_s)
        self.hosts.own().enter(RUN, attempt, os.getpid())
        self.finder = Finder(self.hosts, self.exchange, RUN)
        self.placement = place(self.finder.places)
        self._attempt, self._wait_s = attempt, wait_s
        self.replicator: Any = None

    def find(self, remote: int | None = None) -> tuple[str, int, bool]:
        """(kind, step, the shard is the state of that step)."""
        found = self.finder.find(remote)
        self.found = found
        if found.shard is None:
            return found.decision.kind, found.decision.step, True
        step = found.decision.step
        meta = bytes(found.shard.meta.numpy()) == f"meta of {self.rank} at {step}".encode()
        values = found.shard.data.clone().view(torch.float32)[:-3]
        return found.decision.kind, step, meta and torch.equal(values, state(self.rank, step))

    def begin(self, aligned: int = 0) -> Replicator:
        keys = {(self.rank, self.rank), *((shard, self.rank) for shard in self.placement.kept_by(self.rank))}
        shapes = {(shard, keeper): BoxShape(META_ROOM, 4 * (size_of(shard) + 3)) for shard, keeper in keys}
        boxes = {key: Box(*found) for key, found in self.hosts.own().open(shapes).items()}
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def copy_and_die(folder: str, where: str, attempt: bytes, *steps: int) -> None:
    life = Life(folder, where, attempt)
    life.find()
    life.begin()
    life.copy(*steps)
    die()


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
            return die() if posted[0] == 5 else post(stream, view)

        life.exchange._post = dies  # type: ignore[method-assign]
    replicator.begin(image(life.rank, at))
    replicator.wait()
    assert replicator.broken is not None
    replicator.begin(image(life.rank, at + 1))  # training does not die of it
    replicator.wait()
    die()


def find_again(folder: str, where: str, remote: int | None = None) -> tuple[Any, ...]:
    life = Life(folder, where, b"life-two")
    kind, step, right = life.find(remote)
    hows = tuple(source.how for source in life.found.decision.sources)
    return kind, step, right, hows


def go_on_and_die(folder: str, where: str, *steps: int) -> tuple[Any, ...]:
    """A second life that copies further steps before it dies."""
    life = Life(folder, where, b"life-two")
    found = life.find()
    life.begin(aligned=found[1])
    life.copy(*steps)
    die()
    return found


def damage(folder: str, where: str, key: tuple[int, int], step: int) -> None:
    """Flips one byte of a copy; by the rank on whose host it is."""
    life = Life(folder, where, b"life-bad")
    if dist.get_rank() == key[1]:
        box = Box(*life.hosts.own().region(key))
        slot = box.steps().index(step)
        box.data(slot)[7] ^= 1
    dist.barrier()


def gate_and_pressure(folder: str, where: str) -> dict[str, Any]:
    """What training waits for, by events and not by time: a copy that is held, then an exchange that is."""
    life = Life(folder, where, b"life-one")
    life.find()
    replicator = life.begin()
    seen: dict[str, Any] = {}
    copy_may_end, swap_may_end = threading.Event(), threading.Event()
    live = state(life.rank, 1)
    held = Image(1, b"meta", (live, torch.zeros(3)))
    swap = life.exchange.swap
    life.exchange.swap = lambda *args: swap_may_end.wait(20) and swap(*args)  # type: ignore
    original = replicator._round
    replicator._round = lambda image, ready: original(image, lambda: copy_may_end.wait(20))  # type: ignore
    replicator.begin(held)
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
    first = box.data(box.steps().index(1)).clone().view(torch.float32)[:-3]
    seen["the copy is that of its step"] = torch.equal(first, state(life.rank, 1))
    seen["both steps are aligned"] = [cost.aligned for cost in replicator.costs] == [True, True]
    seen["every step was copied"] = sorted(box.steps()) == [1, 2]
    replicator.close(wait=True)
    return seen


def _in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _still_runs(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return thread.is_alive()


def lose_the_store(folder: str, where: str) -> bool:
    """The boxes of a host whose store has died are known to be lost; training can go on writing to them."""
    life = Life(folder, where, b"life-one")
    life.find()
    replicator = life.begin()
    life.copy(1)
    kept = all(box.is_kept for box in replicator.boxes.values())
    if life.rank == 0:
        life.hosts.end_all()
        while any(box.is_kept for box in replicator.boxes.values()):
            time.sleep(0.02)
    dist.barrier()
    life.copy(2)
    return kept and not any(box.is_kept for box in replicator.boxes.values())


def costs(folder: str, where: str) -> Any:
    life = Life(folder, where, b"life-one")
    life.find()
    replicator = life.begin()
    life.copy(1)
    return replicator.costs[0]
