"""With a lag the coordinator hears of an event only after the report of its step was clean (I13)."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layercheck.decision import LayerWrite
from layercheck.drift_report import DriftReport
from layercheck.errors import LayerCheckError, StorageError
from layercheck.manifest import MEMORY_PART, EventId
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.copier import ThreadCopier
from layercheck.persistence.recode import Piece
from layercheck.persistence.shard_file import ShardAbout, ShardTensor, SliceMeta, layout
from layercheck.persistence.snapshot import BlockStream, Snapshot, StagingPool
from layercheck.persistence.storage import LocalStorage
from layercheck.persistence.writer import ShardWriter
from tests.fakes import FaultyStorage

EVENT = EventId(step=7, attempt=1)


class Listener:
    """The two calls that a writer makes to its coordinator."""

    def __init__(self) -> None:
        self.recorded: list[EventId] = []
        self.lost_events: list[EventId] = []

    def record(self, event: EventId, rank: int, records: Any, trainer_state: Any) -> None:
        self.recorded.append(event)

    def lost(self, event: EventId, rank: int, reason: str) -> None:
        self.lost_events.append(event)


class Promise:
    """A report that comes when the test says so."""

    def __init__(self) -> None:
        self.came, self.asked = threading.Event(), threading.Event()
        self.outcome: DriftReport | Exception = LayerCheckError("never came")

    def result(self, limit_s: float) -> DriftReport:
        self.asked.set()
        assert self.came.wait(10)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def snapshot(pool: StagingPool) -> Snapshot:
    name = "layers.0.w"
    slices = [SliceMeta(parameter=name, layer="layers.0", step=7, shape=(4,), offset=0, numel=4, state={})]
    tensors = [ShardTensor(name, "fp32", "layers.0", "F32", 4)]
    shard = layout(tensors, slices, ShardAbout(step=7, attempt=1, part=0, rank=0, world_size=1, rng=None))
    stream, copier, block = BlockStream(pool, streaming=False), ThreadCopier(10.0), pool.take(1.0)
    with copier.copying():
        copier.copy(block.tensor[:16], torch.arange(4.0).view(torch.uint8))
        stream.append(block, 16, copier.mark())
    stream.finish(True)
    return Snapshot(EVENT, (LayerWrite("layers.0", "drift", 1.0, 0.5, 3),), {}, shard, stream)


@pytest.mark.parametrize(
    ("outcome", "recorded"),
    [
        (DriftReport(7, {"layers.0": 1.0}, 1e-4), [EVENT]),
        (DriftReport(7, {"layers.0": float("inf")}, 1e-4), []),
        (DriftReport(7, {"layers.0": 1.0}, 1e-4, errors=1), []),
        (LayerCheckError("another rank is gone"), []),
        (RuntimeError("connection closed by peer"), []),
    ],
)
def test_i13_an_event_is_recorded_only_when_its_report_has_come_and_is_clean(
    tmp_path: Path, outcome: DriftReport | Exception, recorded: list[EventId]
) -> None:
    listener, promise, pool = Listener(), Promise(), StagingPool(1 << 16)
    storage = LocalStorage(str(tmp_path))
    writer = ShardWriter(storage, listener, 0, 1, retries=0, timeout_s=30)  # type: ignore[arg-type]
    free = len(pool._free)
    writer.submit(snapshot(pool), promise)  # type: ignore[arg-type]
    assert promise.asked.wait(10)
    assert storage.size(EVENT.shard_file(0)), "the shard is durable while the report is awaited"
    assert len(pool._free) == free, "its memory is free again"
    assert listener.recorded == []
    promise.outcome = outcome
    promise.came.set()
    assert writer.close(30)
    assert listener.recorded == recorded
    assert listener.lost_events == []


def test_a_copy_that_never_ends_costs_the_event_after_a_limit(tmp_path: Path) -> None:
    class Stuck:
        def wait(self, limit_s: float) -> None:
            raise StorageError(f"a copy from the device did not end within {limit_s:g} s")

    listener, pool = Listener(), StagingPool(1 << 16)
    writer = ShardWriter(
        LocalStorage(str(tmp_path)),
        listener,
        0,
        1,
        retries=0,
        timeout_s=30,  # type: ignore[arg-type]
    )
    taken = snapshot(pool)
    block, nbytes, _ = taken.stream._filled[0]
    taken.stream._filled[0] = (block, nbytes, Stuck())
    writer.submit(taken)
    assert writer.close(30)
    assert (listener.recorded, listener.lost_events) == ([], [EVENT])
    assert any("did not end within 30 s" in alert for alert in writer.take_alerts())


def test_a_copy_for_memory_alone_that_is_given_up_is_told_to_the_tier_and_to_nobody_else(
    tmp_path: Path,
) -> None:
    storage = FaultyStorage(str(tmp_path))
    storage.arm("safetensors", times=9)
    listener, event = Listener(), EventId(step=7, attempt=1, part=MEMORY_PART)
    writer = ShardWriter(storage, listener, 0, 1, retries=3, timeout_s=30)  # type: ignore[arg-type]
    writer.submit(replace(snapshot(StagingPool(1 << 16)), event=event))
    assert writer.close(30)
    assert listener.lost_events == [event]
    assert (writer.failed_saves, writer.take_alerts()) == (0, [])


@pytest.mark.parametrize(("part", "kept"), [(0, True), (MEMORY_PART, False)])
def test_residuals_count_from_what_the_storage_has_and_not_from_memory(
    tmp_path: Path, part: int, kept: bool
) -> None:
    bases, pool = BaseCopies(lambda layer: True), StagingPool(1 << 16)
    writer = ShardWriter(LocalStorage(str(tmp_path)), Listener(), 0, 1, retries=0, timeout_s=30, bases=bases)
    taken = snapshot(pool)
    event = EventId(step=7, attempt=1, part=part)
    pieces = (Piece("layers.0", "layers.0.w", "fp32", 16),)
    writer.submit(replace(taken, event=event, pieces=pieces))
    assert writer.close(30)
    assert bool(bases._copies) == kept


def test_a_snapshot_whose_copy_is_lost_is_not_read_again() -> None:
    """Its bytes will never be those of its step, however often the write is tried."""

    class Lost:
        def wait(self, limit_s: float) -> None:
            raise StorageError("not made before the next update")

    pool = StagingPool(8192)
    stream = BlockStream(pool, streaming=False)
    stream.append(pool.take(1.0), 16, Lost())
    stream.finish(True)
    assert not stream.is_broken
    with pytest.raises(StorageError, match="not made before"):
        next(stream.chunks(1.0))
    assert stream.is_broken
    stream.release()
