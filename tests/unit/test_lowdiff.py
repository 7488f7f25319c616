"""LowDiff without ranks: the optimum, the files, what follows a base, compression, the way to the storage."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from app.baselines.lowdiff.batch_file import (
    BatchHeader,
    Consumed,
    Span,
    StepData,
    decode,
    encode,
    needless,
    run_after,
    spans_in,
)
from app.baselines.lowdiff.compress import keep_largest, round_to_16_bits, spread
from app.baselines.lowdiff.diff_store import DiffStore
from app.baselines.lowdiff.outbox import Outbox
from app.baselines.lowdiff.tuning import Costs, optimum
from app.baselines.settings import LowDiffSettings
from layercheck.errors import DamagedShardError
from layercheck.persistence.copier import ThreadCopier
from layercheck.persistence.storage import LocalStorage
from tests.fakes import FaultyStorage, SlowStorage, flip_bit

HEADER = BatchHeader(mode="dense", dtype="bfloat16", rho=None, layout="l", rank=0, world_size=2, steps=())
CONSUMED = Consumed(
    norm={"kind": "tensor:float32", "value": 1.5}, loss_scale=1.0, clip=1.0, groups=({"lr": 1e-3},)
)


# ---------------------------------------------------------------- the optimum


def test_the_optimum_is_the_minimum_of_the_paper_s_objective():
    costs = Costs(step_s=2.0, apply_s=3.0, base_bytes=9e9, write_bytes_per_s=1e8, mtbf_s=20_000.0)

    def wasted(batch_s: float, base_hz: float) -> float:
        lost = batch_s / 2 + costs.apply_s / 2 * (1 / (base_hz * batch_s) - 1)
        return lost / costs.mtbf_s + costs.base_bytes / costs.write_bytes_per_s * base_hz

    best = min((wasted(b, f), b, f) for b in np.geomspace(1, 1e5, 400) for f in np.geomspace(1e-6, 1, 400))
    rhythm = optimum(costs)
    assert rhythm.batch * costs.step_s == pytest.approx(best[1], rel=0.03)
    assert 1 / (rhythm.base_every * costs.step_s) == pytest.approx(best[2], rel=0.04)


def test_the_optimum_is_whole_steps_and_a_base_never_comes_before_a_batch_is_full():
    rhythm = optimum(Costs(step_s=1e4, apply_s=1.0, base_bytes=1.0, write_bytes_per_s=1.0, mtbf_s=1.0))
    assert (rhythm.batch, rhythm.base_every) == (1, 1)
    slow_replay = Costs(step_s=0.1, apply_s=100.0, base_bytes=1.0, write_bytes_per_s=100.0, mtbf_s=100.0)
    assert optimum(slow_replay).base_every >= optimum(slow_replay).batch


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch": "auto"}, "mtbf_h"),
        ({"base_every": 0}, "base_every=0"),
        ({"rho": 0.0}, "rho"),
        ({"interval": 3}, "interval"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str):
    with pytest.raises(ValidationError, match=named):
        LowDiffSettings(**settings)


# ---------------------------------------------------------------- files and what follows a base


def test_the_first_differential_after_a_base_is_that_of_the_next_step_wherever_its_batch_begins():
    spans = [Span(1, 4), Span(5, 8), Span(9, 9), Span(12, 15)]
    assert run_after(0, spans) == (Span(1, 4), Span(5, 8), Span(9, 9))
    assert run_after(6, spans) == (Span(5, 8), Span(9, 9))
    assert run_after(8, spans) == (Span(9, 9),)
    assert run_after(9, spans) == ()
    assert run_after(11, spans) == (Span(12, 15),)


def test_a_batch_is_needless_when_the_oldest_base_holds_all_of_it():
    assert needless(6, [Span(1, 4), Span(5, 6), Span(5, 8)]) == (Span(1, 4), Span(5, 6))


def test_only_names_of_batches_are_batches():
    names = [Span(11, 20).folder, "steps-00000003-00000002", "attempts", ".tmp-1", Span(1, 10).folder]
    assert spans_in(names) == (Span(1, 10), Span(11, 20))


def _file(folder: Path) -> tuple[DiffStore, Path]:
    store = DiffStore(LocalStorage(str(folder)), "m", 0)
    steps = [
        StepData(3, CONSUMED, {"step": 3}, memoryview(b"abcdef")),
        StepData(4, None, {"step": 4, "skipped": 1}, memoryview(b"")),
        StepData(5, CONSUMED, {"step": 5}, memoryview(b"ghijkl")),
    ]
    assert store.write(HEADER, steps) == len(b"".join(bytes(chunk) for chunk in encode(HEADER, steps)))
    return store, next(folder.rglob("rank-00000.diff"))


def test_a_file_gives_back_each_step_and_a_skipped_one_as_such(tmp_path: Path):
    store, _ = _file(tmp_path)
    batch = store.read(Span(3, 5))
    assert [bytes(batch.of(record)) for record in batch.header.steps] == [b"abcdef", b"", b"ghijkl"]
    assert [record.skipped for record in batch.header.steps] == [False, True, False]
    assert batch.header.steps[0].consumed == CONSUMED
    assert batch.header.steps[1].trainer_state == {"step": 4, "skipped": 1}


def test_every_flipped_bit_and_every_cut_is_damage(tmp_path: Path):
    store, path = _file(tmp_path)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        flip_bit(path, bit)
        with pytest.raises(DamagedShardError):
            store.read(Span(3, 5))
        path.write_bytes(whole)
    for length in range(0, len(whole), 5):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedShardError):
            store.read(Span(3, 5))
    with pytest.raises(DamagedShardError, match="steps 3 to 6"):
        decode(whole, Span(3, 6), "x")


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_k_keeps_the_largest_and_what_is_stored_is_what_is_left(dtype: torch.dtype):
    torch.manual_seed(0)
    parts = [torch.randn(1000).to(dtype), torch.randn(5).to(dtype), torch.empty(0, dtype=dtype)]
    whole = [part.clone() for part in parts]
    kept = [keep_largest(part, 0.01) for part in parts if part.numel()]
    assert [int((part != 0).sum()) for part in parts] == [10, 1, 0]
    for part, before in zip(parts[:2], whole, strict=False):
        assert part.abs().max() == before.abs().max()
        assert before[part == 0].abs().max() <= part[part != 0].abs().min()
    stored = torch.cat([each.view(torch.uint8) for pairs in zip(*kept, strict=True) for each in pairs])
    again = [torch.full_like(part, 7) for part in parts]
    spread(stored, again, 0.01)
    assert all(torch.equal(left, right) for left, right in zip(parts, again, strict=True))


def test_an_overflow_survives_top_k():
    part = torch.zeros(500)
    part[123] = float("nan")
    keep_largest(part, 0.01)
    assert torch.isnan(part[123])


def test_an_fp32_gradient_is_rounded_for_training_too():
    part = torch.tensor([1.0 + 2**-12, -3.0])
    stored = round_to_16_bits(part)
    assert part.tolist() == [1.0, -3.0]
    again = torch.zeros(2)
    spread(stored.view(torch.uint8), [again], None)
    assert torch.equal(part, again)
    low = torch.tensor([1.0], dtype=torch.bfloat16)
    assert round_to_16_bits(low) is low


# ---------------------------------------------------------------- the way to the storage


def _outbox(storage: LocalStorage, pending: int = 1, wait_s: float = 20.0) -> tuple[Outbox, ThreadCopier]:
    copier = ThreadCopier(wait_s=20)
    return Outbox(DiffStore(storage, "m", 0), HEADER, copier, False, pending, wait_s), copier


def _step(outbox: Outbox, step: int, source: torch.Tensor, skipped: bool = False) -> None:
    outbox.hand_over([source])
    outbox.add(step, None if skipped else lambda: CONSUMED, {"step": step})
    outbox.release()


def test_the_gradient_may_be_overwritten_only_after_release(tmp_path: Path):
    outbox, copier = _outbox(LocalStorage(str(tmp_path)))
    gate, released = threading.Event(), threading.Event()
    copier._thread.submit(gate.wait)
    source = torch.arange(6, dtype=torch.uint8)

    def train() -> None:
        _step(outbox, 1, source)
        released.set()
        source.zero_()

    trainer = threading.Thread(target=train)
    trainer.start()
    early = released.wait(0.2)
    gate.set()  # also where the test fails: the copier's thread must end
    assert not early, "nobody waited for the copy"
    trainer.join(20)
    outbox.close(wait=True)
    copier.close()
    batch = outbox._store.read(Span(1, 1))
    assert bytes(batch.of(batch.header.steps[0])) == bytes(range(6))


def test_memory_is_reused_and_a_skipped_step_leaves_a_record(tmp_path: Path):
    outbox, copier = _outbox(LocalStorage(str(tmp_path)))
    for step in range(1, 7):
        _step(outbox, step, torch.full((4,), step, dtype=torch.uint8), skipped=step in (2, 6))
        if outbox.collected == 3:
            outbox.flush()
            assert outbox.drain()
    outbox.close(wait=True)
    copier.close()
    assert len(outbox._free) == 3
    batches = [outbox._store.read(span) for span in outbox.durable()]
    steps = [
        (record.step, record.skipped, bytes(batch.of(record)))
        for batch in batches
        for record in batch.header.steps
    ]
    assert steps == [(n, n in (2, 6), b"" if n in (2, 6) else bytes([n] * 4)) for n in range(1, 7)]
    assert (outbox.take_written().updates, outbox.take_written().batches) == (4, 0)


def test_a_slow_storage_makes_training_wait_and_skips_nothing(tmp_path: Path):
    storage = SlowStorage(str(tmp_path), "diffs")
    outbox, copier = _outbox(storage)
    finished = threading.Event()

    def train() -> None:
        for step in range(1, 5):
            _step(outbox, step, torch.full((4,), step, dtype=torch.uint8))
            outbox.flush()
        finished.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    early = finished.wait(0.3)
    storage.gate.set()
    assert not early, "the queue of batches has no end"
    trainer.join(20)
    outbox.close(wait=True)
    copier.close()
    assert outbox.durable() == tuple(Span(step, step) for step in range(1, 5))


def test_a_batch_that_cannot_be_written_is_lost_with_an_alert_and_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.baselines.lowdiff.outbox._PAUSES_S", (0.0, 0.0, 0.0))
    storage = FaultyStorage(str(tmp_path))
    outbox, copier = _outbox(storage, pending=4)
    storage.arm("steps-00000002", times=4)
    for step in (1, 2, 3):
        _step(outbox, step, torch.full((4,), step, dtype=torch.uint8))
        outbox.flush()
    outbox.close(wait=True)
    copier.close()
    assert outbox.durable() == (Span(1, 1), Span(3, 3))
    (alert,) = outbox.take_written().alerts
    assert "steps 2 to 2 are lost" in alert
    outbox.forget(2)
    assert outbox.durable() == (Span(3, 3),)
