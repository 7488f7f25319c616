"""A storage that fails, dawdles or is full never ends training (I9); only the age bound may (I1)."""

import errno
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from layercheck.coordination import journal
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import AgeBoundError, StorageError
from layercheck.persistence.storage import LocalStorage
from tests import micro
from tests.fakes import FaultyStorage, SlowStorage
from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, open_session, train

STEPS, FAILS_FROM, FAILS_UNTIL = 34, 12, 20
QUICK = {"write_retries": 1, "s_max": 200, "event_timeout_s": 10}


def _store(storage: str) -> str:
    return f"{storage}/run/layercheck"


def _commits(storage: str) -> dict[int, list[str]]:
    """Step -> layers of its committed event."""
    found = sorted(Path(_store(storage), "events").glob("*/commit.parquet"))
    tables = {int(path.parent.name[5:13]): pq.read_table(path).to_pylist() for path in found}
    return {step: sorted({row["layer"] for row in rows}) for step, rows in tables.items()}


def _newest(storage: str) -> dict[str, int]:
    return {layer: step for step, layers in sorted(_commits(storage).items()) for layer in layers}


class BrokenWriter(LocalStorage):
    """Raises something that no storage should, in the writer thread, while `is_broken`."""

    is_broken = False

    def write(self, path: str, chunks: Iterable[Any]) -> None:
        if self.is_broken and "/rank-" in path:
            raise ZeroDivisionError("a bug in the writer thread")
        super().write(path, chunks)


class FullDisk(LocalStorage):
    """No space left for anything while `is_broken`."""

    is_broken = False

    def write(self, path: str, chunks: Iterable[Any]) -> None:
        if self.is_broken:
            raise StorageError(f"cannot write {path}: No space left on device", errno=errno.ENOSPC)
        super().write(path, chunks)


def _train_while(storage: str, kind: type[Any], broken_on: tuple[int, ...]) -> dict[str, Any]:
    """Trains while the store of some ranks is broken from step 12 to 20; looks at the plan at its end."""
    import torch

    store = kind(_store(storage))
    rank = torch.distributed.get_rank()
    plans = {}

    def switch(session: Any, step: int) -> None:
        if rank in broken_on and step in (FAILS_FROM, FAILS_UNTIL):
            store.is_broken = step == FAILS_FROM
        if rank == 0 and step == FAILS_UNTIL:
            plans["at_end"] = _dry_plan(storage)

    result = train(storage, STEPS, each_step=switch, settings=QUICK, store=store)
    return result | plans


def _dry_plan(storage: str) -> dict[str, int]:
    """What a recovery would load now; each of its files is there."""
    plan = make_plan(
        journal.load_facts(LocalStorage(_store(storage))), PlanRequest(2, "composite", strict_max_age=None)
    )
    assert plan is not None
    for layer in plan.layers:
        assert all(Path(_store(storage), shard.file).stat().st_size >= shard.end for shard in layer.shards)
    return {layer.layer: layer.step for layer in plan.layers}


def _assert_it_went_through(storage: str, results: list[Any], words: str, told_on: int) -> None:
    """No hang, no restart, the plan intact meanwhile, an alert, and saving goes on afterwards."""
    for result in results:
        assert sorted(result["losses"]) == list(range(1, STEPS + 1))
    assert set(results[0]["at_end"]) == set(_newest(storage))
    alerts = [alert for report in results[told_on]["reports"].values() for alert in report.alerts]
    assert any(words in alert for alert in alerts), alerts
    newest = _newest(storage)
    assert min(newest.values()) > FAILS_UNTIL, newest


@pytest.mark.parametrize(
    ("kind", "broken_on", "words"),
    [
        (BrokenWriter, (1,), "a bug in the writer thread"),
        (FullDisk, (0, 1), "No space left"),
    ],
)
def test_i9_training_goes_on_and_saving_comes_back_after(
    tmp_path: Path, kind: type[Any], broken_on: tuple[int, ...], words: str
) -> None:
    storage = str(tmp_path / "store")
    results = run_ranks(2, tmp_path, _train_while, storage, kind, broken_on)
    _assert_it_went_through(storage, results, words, told_on=1)
    told_by_coordinator = [alert for report in results[0]["reports"].values() for alert in report.alerts]
    lost = {int(alert.split()[3]) for alert in told_by_coordinator if " is lost: rank " in alert}
    assert lost
    assert not lost & set(_commits(storage)), "an event that one rank could not write was committed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB; the run itself keeps less than 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], capture_output=True, timeout=20
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a small disk: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=20)


def _fill_the_disk(disk: str) -> dict[str, Any]:
    import torch

    ballast = Path(disk, "ballast")
    plans = {}

    def fill(session: Any, step: int) -> None:
        if torch.distributed.get_rank() == 0 and step == FAILS_FROM:
            _write_until_full(ballast)
        if torch.distributed.get_rank() == 0 and step == FAILS_UNTIL:
            plans["at_end"] = _dry_plan(disk)
            ballast.unlink()

    return train(disk, STEPS, each_step=fill, settings=QUICK) | plans


def _write_until_full(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass


def test_i9_a_disk_that_is_really_full_costs_events_and_nothing_else(
    small_disk: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, tmp_path, _fill_the_disk, str(small_disk))
    _assert_it_went_through(str(small_disk), results, "No space left on device", told_on=1)
    assert not list(small_disk.rglob(".tmp-*/*")), "an unfinished write was left in an event"


def _fail_some_writes(storage: str, times: int, retries: int) -> dict[str, Any]:
    """The storage of rank 1 fails `times` times from step 13 on; gives drift and flights by step."""
    import torch

    store = FaultyStorage(_store(storage))
    seen: dict[int, tuple[dict[str, float], dict[int, dict[str, float]]]] = {}

    def look(session: Any, step: int) -> None:
        if torch.distributed.get_rank() == 1 and step == FAILS_FROM:
            store.arm("/rank-", times=times)
        ledger = session._open.ledger
        held = ledger.versions._in_flight.items()
        flights = {at: {name: was.drift for name, was in event.taken.items()} for at, event in held}
        seen[step] = (dict(ledger.drift), flights)

    settings = {**QUICK, "write_retries": retries, "keep_versions": 100}  # all events stay to be looked at
    result = train(storage, STEPS, each_step=look, settings=settings, store=store)
    alerts = [alert for report in result["reports"].values() for alert in report.alerts]
    return {"alerts": alerts, "seen": seen, "losses": result["losses"], "left": store.times}


def test_i9_a_storage_that_fails_three_times_is_asked_a_fourth_time_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    storage = str(tmp_path / "store")
    results = run_ranks(2, tmp_path, _fail_some_writes, storage, 3, 3)
    assert results[1]["left"] == 0
    assert [result["alerts"] for result in results] == [[], []]
    chosen = {step for _, flights in results[0]["seen"].values() for step in flights}
    assert {step for step in chosen if step > FAILS_FROM} <= set(_commits(storage))


@pytest.mark.slow
def test_i9_the_drift_of_a_lost_event_is_given_back_on_every_rank(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    results = run_ranks(2, tmp_path, _fail_some_writes, storage, 2, 1)
    assert any("is lost" in alert for alert in results[1]["alerts"])
    assert results[0]["seen"] == results[1]["seen"], "the ranks' books differ"
    seen = results[0]["seen"]
    chosen = {step: layers for _, flights in seen.values() for step, layers in flights.items()}
    (lost,) = set(chosen) - set(_commits(storage))
    back = min(step for step in seen if step > lost and lost not in seen[step][1])
    for layer in chosen[lost]:
        drift, flights = seen[back]
        # Due as it is, it may have been chosen again in the same step.
        taken, meanwhile = chosen[lost][layer], seen[back - 1][0][layer]
        after = flights.get(back, drift).get(layer, drift[layer])
        assert after > taken + meanwhile > 0, f"{layer}: {taken} taken at {lost}, {after} at {back}"


def _train_on_a_storage_that_never_commits(storage: str, on_bound: str) -> dict[str, Any]:
    """From step 9 on, rank 1 writes nothing until the end."""
    import torch

    store = SlowStorage(_store(storage))
    store.gate.set()
    engine = micro.build()
    settings = {"on_bound": on_bound, "storage_wait_s": 6.0, "staging_bytes": 64 << 20}
    session = open_session(engine, storage, store=store, **settings)
    session.resume()
    ended: str | None = None
    alerts: list[str] = []
    step = 0
    try:
        while step < STEPS:
            step += 1
            loss = micro.train_step(engine, step)
            alerts += session.after_step(step, {"loss": loss}).alerts
            if step == CONFIG["warmup_steps"] and torch.distributed.get_rank() == 1:
                session._open.writer.drain(30)
                store.matching = "/rank-"
                store.gate.clear()
    except AgeBoundError as error:
        ended = str(error)
    store.gate.set()
    if ended is None:
        session.close()
    return {"step": step, "ended": ended, "alerts": alerts}


def test_i1_wait_ends_in_one_error_on_all_ranks_after_storage_wait_s(tmp_path: Path) -> None:
    results = run_ranks(2, tmp_path, _train_on_a_storage_that_never_commits, str(tmp_path), "wait")
    for result in results:
        assert "s_max=16" in result["ended"]
        assert "storage_wait_s=6" in result["ended"]
    assert len({result["step"] for result in results}) == 1
    assert results[0]["step"] <= CONFIG["warmup_steps"] + CONFIG["s_max"]


def test_i1_continue_goes_on_to_the_end_and_tells_that_the_bound_is_broken(tmp_path: Path) -> None:
    results = run_ranks(2, tmp_path, _train_on_a_storage_that_never_commits, str(tmp_path), "continue")
    for result in results:
        assert (result["ended"], result["step"]) == (None, STEPS)
        assert any("the age bound s_max=16 is broken" in alert for alert in result["alerts"])


def _train_with_little_staging(storage: str, staging_bytes: int, fail: bool = False) -> dict[str, Any]:
    """Full events only, with a store that takes 20 ms for each block; the last state of this rank beside."""
    import time

    import torch

    class Dawdling(LocalStorage):
        def write(self, path: str, chunks: Iterable[Any]) -> None:
            if fail and "/rank-" in path and "step-00000008" in path and torch.distributed.get_rank() == 1:
                next(iter(chunks))
                raise StorageError(f"cannot write {path}")
            super().write(path, self._slowly(chunks) if "/rank-" in path else chunks)

        def _slowly(self, chunks: Iterable[Any]) -> Iterator[Any]:
            for chunk in chunks:
                yield chunk
                time.sleep(0.02)

    states: dict[int, dict[str, bytes]] = {}

    def keep(session: Any, step: int) -> None:
        zero3 = session._zero3
        states[step] = {
            f"{part.spec.name}/{key}": tensor.numpy().tobytes()
            for parts in zero3.slices.values()
            for part in parts
            for key, tensor in zero3.tensors(part).items()
        }

    settings = {"selection": "full", "target_interval": 5, "staging_bytes": staging_bytes}
    result = train(storage, 10, each_step=keep, settings=settings, store=Dawdling(_store(storage)))
    return result | {"states": states}


def _files_hold_the_states(storage: str, results: list[Any]) -> set[int]:
    checked = set()
    for step in _commits(storage):
        for rank, result in enumerate(results):
            file = next(
                Path(_store(storage), "events").glob(f"step-{step:08d}.*/rank-{rank:05d}.safetensors")
            )
            with safe_open(file, "np") as shard:
                held = {name: shard.get_tensor(name).tobytes() for name in shard.keys()}  # noqa: SIM118
            if step:
                assert held == result["states"][step], f"step {step} rank {rank}"
                checked.add(step)
    return checked


def test_i4_an_event_larger_than_the_staging_memory_streams_through_and_is_booked_as_stall(
    tmp_path: Path,
) -> None:
    ample, tiny = str(tmp_path / "ample"), str(tmp_path / "tiny")
    fast = run_ranks(2, tmp_path, _train_with_little_staging, ample, 64 << 20)
    slow = run_ranks(2, tmp_path, _train_with_little_staging, tiny, 20_000)
    assert _files_hold_the_states(tiny, slow) == _files_hold_the_states(ample, fast) >= {4, 8}
    assert slow[0]["losses"] == fast[0]["losses"]
    for step in (4, 8):
        blocks = slow[0]["reports"][step].bytes_written // 4096
        assert slow[0]["reports"][step].stall_s > 0.01 * blocks, "the wait for the writer is not booked"
        assert any("raise staging_bytes" in alert for alert in slow[0]["reports"][step].alerts)
        assert fast[0]["reports"][step].alerts == ()


def test_i9_a_streaming_event_that_fails_is_lost_and_training_is_not_held_up(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    settings = partial(_train_with_little_staging, fail=True)
    results = run_ranks(2, tmp_path, settings, storage, 20_000)
    for result in results:
        assert sorted(result["losses"]) == list(range(1, 11))
    told = [alert for report in results[1]["reports"].values() for alert in report.alerts]
    assert any("step-00000008.a001 of rank 1 could not be written" in alert for alert in told), told
    assert 8 not in _commits(storage)
    assert max(_commits(storage)) > 8, "the base is owed until one is committed"
