"""Three arms on the same ranks, interleaved: stock groups, saving, saving to a throttled store.

All arms see the same batches, some steps of one and then of the next: what an arm does beside training falls
into its own steps, but for that of the last one. Beside the wall-clock comparison of the arms, what saving
costs is timed directly: the seconds inside the hooks and `after_step`, and the CPU seconds of our background
threads.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from app.baselines.protocol import MethodSession
from app.data import open_dataset
from app.measure.regime import CHECKPOINT, Regime, config
from app.model import build_engine, build_model, init_distributed, set_lr
from app.order import Order
from app.schedule import lr_at
from app.step import Job, mean_over_ranks, one_step
from layercheck.persistence.file_calls import Buffer
from layercheck.persistence.storage import LocalStorage, Storage, open_storage
from layercheck.session import Session, attach
from layercheck.tracking.drift import DriftMeter

THROTTLE_BYTES_PER_S = 100e6
BURST = 5
"""Steps of an arm in a row."""
ARMS = ("stock", "saving", "throttled")


class ThrottledStorage(LocalStorage):
    """A local folder that takes `bytes_per_s`; it sleeps instead of using the processor."""

    def __init__(self, root: str, bytes_per_s: float) -> None:
        super().__init__(root)
        self._bytes_per_s = bytes_per_s

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Storage.write`."""
        super().write(path, self._slowly(chunks))

    def _slowly(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        started, nbytes = time.monotonic(), 0
        for chunk in chunks:
            yield chunk
            nbytes += len(chunk)
            time.sleep(max(0.0, started + nbytes / self._bytes_per_s - time.monotonic()))


@dataclass
class Samples:
    """One arm on one rank; lists have one entry per measured step, seconds."""

    train_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    hook_s: list[float] = field(default_factory=list)
    collective_s: list[float] = field(default_factory=list)
    thread_cpu_s: float = 0.0
    max_age: int = 0
    bytes_written: int = 0


@dataclass
class Arm:
    """An engine with or without a session, and what was measured of it.

    Attributes:
        job: its training.
        session: what protects it.
        meter: of a session that measures drift inside the optimizer.
        threads: those of the session that live as long as it does.
        samples: of the measured steps.
    """

    job: Job
    session: MethodSession | None = None
    meter: DriftMeter | None = None
    threads: tuple[threading.Thread, ...] = ()
    samples: Samples = field(default_factory=Samples)

    def step(self, step: int, measured: bool) -> None:
        """Trains one step; a collective."""
        job = self.job
        dist.barrier()
        begin = time.perf_counter()
        set_lr(job.engine, lr_at(step - 1, job.total_steps, job.config.train))
        loss, _ = mean_over_ranks(job, one_step(job, step), False)
        trained = time.perf_counter()
        if self.session is None:
            if measured:
                self.samples.train_s.append(trained - begin)
            return
        report = self.session.after_step(step, {"loss": loss})
        if not measured:
            return
        hook_s, collective_s = self._metered_s()
        self.samples.train_s.append(trained - begin - hook_s)
        self.samples.after_s.append(time.perf_counter() - trained)
        self.samples.stall_s.append(report.stall_s)
        self.samples.hook_s.append(hook_s)
        self.samples.collective_s.append(collective_s)
        self.samples.max_age = max(self.samples.max_age, report.max_age)
        self.samples.bytes_written += report.bytes_written

    def _metered_s(self) -> tuple[float, float]:
        """Seconds of the newest step in the optimizer's hooks, and in the all-reduce of drifts."""
        return (0.0, 0.0) if self.meter is None else (self.meter.hook_s, self.meter.collective_s)


def measure_arms(rank: int, storage: str, regime: Regime) -> dict[str, Samples]:
    """Runs all arms on this rank and returns their samples. Called on every rank."""
    world_size = dist.get_world_size()
    return interleaved(
        {name: _arm(rank, world_size, f"{storage}/{name}", storage, name, regime) for name in ARMS}, regime
    )


def interleaved(arms: Mapping[str, Arm], regime: Regime) -> dict[str, Samples]:
    """Takes all arms to the last step, in another order each time, and ends them. Called on every rank."""
    warmup = int(CHECKPOINT["warmup_steps"])
    order = np.random.default_rng(5)
    cpu_s: dict[str, float] = {}
    for steps in bursts(warmup, regime.last_step):
        if steps.start == warmup + 1:
            cpu_s = {name: _thread_cpu_s(arm) for name, arm in arms.items()}
        for name in order.permutation(list(arms)):
            for step in steps:
                arms[str(name)].step(step, measured=step > warmup)
    for name, arm in arms.items():
        arm.job.loader.close()
        arm.samples.thread_cpu_s = _thread_cpu_s(arm) - cpu_s[name]
        if arm.session is not None:
            arm.session.close()
    return {name: arm.samples for name, arm in arms.items()}


def bursts(warmup: int, last: int) -> list[range]:
    """Steps 1 to `last` in pieces of `BURST`; a new one begins after the warm-up."""
    return [
        range(begin, min(begin + BURST, end + 1))
        for first, end in ((1, warmup), (warmup + 1, last))
        for begin in range(first, end + 1, BURST)
    ]


def steps_inside(warmup: int, last: int) -> list[int]:
    """Places among the measured steps of those that come right after another step of the same arm.

    Beside the first of a burst runs what the arm before has left, beside these what their own has.
    """
    return [step - warmup - 1 for steps in bursts(warmup, last) if steps.start > warmup for step in steps[1:]]


def _arm(rank: int, world_size: int, folder: str, shared: str, name: str, regime: Regime) -> Arm:
    job = job_of(rank, world_size, shared, "stock" if name == "stock" else "layer", regime)
    if name == "stock":
        return Arm(job)
    store = open_storage(folder, "run")
    chosen: Storage = store
    if name == "throttled":
        chosen = ThrottledStorage(store.root, THROTTLE_BYTES_PER_S / world_size)
    return saving(job, lambda: attach(job.engine, folder, "run", CHECKPOINT, store=chosen))


def saving(job: Job, attached: Callable[[], Session]) -> Arm:
    """An arm with the session that `attached` gives; the threads which begin with it are its own."""
    before = set(threading.enumerate())
    session = attached()
    session.resume()
    threads = tuple(thread for thread in threading.enumerate() if thread not in before)
    return Arm(job, session, session.meter, threads)


def _thread_cpu_s(arm: Arm) -> float:
    """CPU seconds that the background threads of an arm have used so far."""
    idents = [thread.ident for thread in arm.threads if thread.is_alive() and thread.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def job_of(
    rank: int, world_size: int, shared: str, groups: str, regime: Regime, items: Sequence[str] = ()
) -> Job:
    """The training of one arm.

    Args:
        rank: of this process.
        world_size: number of ranks.
        shared: folder of the data.
        groups: of the optimizer, `layer` or `stock`.
        regime: how long.
        items: `--set` items of this arm alone.
    """
    settings = config(shared, groups, regime.last_step, items=items)
    init_distributed(settings)
    dataset = open_dataset(settings, rank)
    engine: Any = build_engine(build_model(settings, dataset.tokenizer, world_size), settings, world_size)
    order = Order(len(dataset), settings.train.global_batch, settings.run.seed)
    return Job(settings, rank, world_size, dataset, order, engine, regime.last_step, False)
