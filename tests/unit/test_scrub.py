"""I6: live versions are read again in the background, and a rotten one is replaced while it is not needed."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.coordination import journal, scrub_order
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.scrub import Scrubber
from layercheck.drift_report import DriftReport
from layercheck.errors import StorageError
from layercheck.layers import LayerMap, LayerStep
from layercheck.manifest import BadShard, ShardRecord
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.policy import decide
from tests.fakes import Clock, flip_bit
from tests.runs import LAYERS
from tests.stores import RealRun, real_run
from tests.unit.simulated_run import config as settings_of
from tests.unit.simulated_run import layer

HOUR_S = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


class Pacer:
    """Notes the seconds that a scrubber would wait."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.clock.sleep(seconds)
        return False


def scrubber(run: RealRun, hours: float = 1.0) -> tuple[Scrubber, Pacer]:
    clock = Clock()
    pacer = Pacer(clock)
    return Scrubber(run.storage, run.coordinator, hours, clock, pacer), pacer


def live(run: RealRun) -> tuple[ShardRecord, ...]:
    facts = run.coordinator.facts()
    assert facts is not None
    return scrub_order.live_shards(facts)


def rot(run: RealRun, step: int, layer: str, rank: int = 1) -> ShardRecord:
    """Flips one bit in the middle of a shard."""
    (row,) = [row for row in live(run) if (row.step, row.layer, row.rank) == (step, layer, rank)]
    flip_bit(run.folder / row.file, 8 * ((row.begin + row.end) // 2) + 3)
    return row


def read_all(run: RealRun, made: Scrubber | None = None) -> None:
    made = made or scrubber(run)[0]
    for _ in live(run):
        made.turn()


# ---------------------------------------------------------------- order and pace


def row(number: int, nbytes: int = 10) -> ShardRecord:
    return ShardRecord(
        layer=f"l{number}", step=1, attempt=1, rank=0, world_size=1, file=f"events/e/{number}", begin=0,
        end=nbytes, xxh3_128="", drift=0.0, threshold=0.0, age=0, reason="full", snapshot_s=0.0, write_s=0.0,
    )  # fmt: skip


@given(st.integers(1, 30), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_shard_is_read_once_before_any_is_read_again(count: int, seed: int) -> None:
    rows, read_at, order = [row(n) for n in range(count)], {}, []
    for turn in range(2 * count):
        chosen = scrub_order.in_turn(rows, read_at, seed)[0]
        read_at[scrub_order.key_of(chosen)] = float(turn)
        order.append(chosen.layer)
    assert sorted(order[:count]) == sorted(one.layer for one in rows)
    assert order[count:] == order[:count]


def test_attempts_that_are_all_short_read_different_shards() -> None:
    rows = [row(n) for n in range(40)]
    first = {scrub_order.in_turn(rows, {}, attempt)[0].layer for attempt in range(200)}
    assert len(first) > 35


def test_what_is_committed_meanwhile_is_read_too(run: RealRun) -> None:
    made, _ = scrubber(run)
    for _ in live(run):
        made.turn()
    run.save(15, "layers.0")
    rot(run, 15, "layers.0")
    for _ in live(run):
        made.turn()
    assert [one.step for one in journal.load_facts(run.storage).bad] == [15]


def test_one_round_takes_the_period_whatever_the_sizes(run: RealRun) -> None:
    made, pacer = scrubber(run, hours=2.0)
    for _ in live(run):
        made.turn()
    assert sum(pacer.waits) == pytest.approx(2 * HOUR_S, rel=0.01)


def test_a_large_layer_is_paced_chunk_by_chunk(run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layercheck.coordination.audit._CHUNK_BYTES", 16)
    made, pacer = scrubber(run)
    largest = max(one.nbytes for one in live(run))
    for _ in live(run):
        made.turn()
    total = sum(one.nbytes for one in live(run))
    assert largest > 16
    assert max(pacer.waits) <= HOUR_S * 16 / total


# ---------------------------------------------------------------- what it finds


def test_i6_a_sound_store_stays_as_it_is(run: RealRun) -> None:
    read_all(run)
    assert run.storage.list("blacklist") == []
    assert run.coordinator.status()["alerts"] == []


def test_i6_a_rotten_version_is_blacklisted_announced_and_its_layer_demoted(run: RealRun) -> None:
    bad = rot(run, 12, "layers.0")
    read_all(run)
    reply = run.coordinator.heartbeat(run.attempt, 15, {"step": 15}, dict.fromkeys(LAYERS, 0.0))
    assert reply.demoted == (LayerStep("layers.0", 8),)
    assert len(reply.alerts) == 1
    assert "layers.0 of step 12 has rotted" in reply.alerts[0]
    facts = journal.load_facts(run.storage)
    assert [(one.file, one.layer, one.step) for one in facts.bad] == [(bad.file, "layers.0", 12)]
    plan = make_plan(facts, PlanRequest(2))
    assert plan is not None
    (planned,) = [one for one in plan.layers if one.layer == "layers.0"]
    assert (planned.step, planned.fallback) == (8, True)


def test_i6_a_rotten_version_that_is_not_the_newest_makes_nothing_due(run: RealRun) -> None:
    rot(run, 8, "layers.0")
    read_all(run)
    reply = run.coordinator.heartbeat(run.attempt, 15, {"step": 15}, {})
    assert reply.demoted == ()
    assert len(reply.alerts) == 1
    assert len(journal.load_facts(run.storage).bad) == 1


def test_i6_a_rotten_header_is_found_too(run: RealRun) -> None:
    (row,) = [one for one in live(run) if (one.step, one.rank) == (10, 0)]
    flip_bit(run.folder / row.file, 8 * 40)
    read_all(run)
    assert [one.step for one in journal.load_facts(run.storage).bad] == [10]


def test_a_new_version_ends_the_demotion(run: RealRun) -> None:
    rot(run, 12, "layers.0")
    read_all(run)
    run.save(15, "layers.0")
    reply = run.coordinator.heartbeat(run.attempt, 15, {"step": 15}, {})
    assert (reply.demoted, reply.committed_step) == ((), 15)


def test_i5_collection_keeps_the_older_version_of_a_rotten_one(run: RealRun) -> None:
    rot(run, 12, "layers.0")
    read_all(run)
    run.save(15, "norm")
    run.save(16, "norm")
    found = {(one.layer, one.step) for one in live(run)}
    assert {("layers.0", 8), ("layers.0", 4)} <= found


def test_a_shard_that_is_collected_while_it_is_read_is_not_rotten(run: RealRun) -> None:
    class Collected(type(run.storage)):  # type: ignore[misc]
        def read_into(self, path: str, begin: int, *into: memoryview) -> None:
            if "step-00000008" in path:
                self.delete("events/step-00000008.a001")
            super().read_into(path, begin, *into)

    clock = Clock()
    made = Scrubber(Collected(str(run.folder)), run.coordinator, 1.0, clock, Pacer(clock))
    for _ in live(run):
        made.turn()
    assert run.storage.list("blacklist") == []


def test_i9_a_storage_that_refuses_everything_for_a_while_is_not_rot(run: RealRun) -> None:
    class Refuses(type(run.storage)):  # type: ignore[misc]
        refuses = True

        def size(self, path: str) -> int | None:
            if self.refuses:
                raise StorageError("no answer", path=path)
            return super().size(path)  # type: ignore[no-any-return]

    clock = Clock()
    storage = Refuses(str(run.folder))
    made = Scrubber(storage, run.coordinator, 1.0, clock, Pacer(clock))
    for _ in live(run):
        made.turn()
    storage.refuses = False
    for _ in live(run):
        made.turn()
    assert run.storage.list("blacklist") == []


def test_i9_a_rotten_shard_that_could_not_be_reported_is_found_again(run: RealRun) -> None:
    class Unheard:
        def __init__(self) -> None:
            self.heard: list[str] = []
            self.deaf = True

        def facts(self) -> StoreFacts | None:
            return run.coordinator.facts()

        def rotten(self, bad: BadShard) -> None:
            if self.deaf:
                self.deaf = False
                raise StorageError("no answer")
            self.heard.append(bad.layer)

    rot(run, 12, "layers.0")
    clock, manifest = Clock(), Unheard()
    made = Scrubber(run.storage, manifest, 1.0, clock, Pacer(clock))
    with pytest.raises(StorageError):
        read_all(run, made)
    made.turn()
    assert manifest.heard == ["layers.0"]


def test_i8_a_fenced_coordinator_blacklists_nothing(run: RealRun) -> None:
    rot(run, 12, "layers.0")
    made, _ = scrubber(run)
    rows = live(run)
    RealRun(run.folder.parent, token="t2")
    for _ in rows:
        made.turn()
    assert run.storage.list("blacklist") == []


# ---------------------------------------------------------------- the thread


def test_the_thread_finds_it_and_ends_at_close(run: RealRun) -> None:
    rot(run, 12, "layers.0")
    made = Scrubber(run.storage, run.coordinator, 0.2 / HOUR_S)
    made.start()
    deadline = time.monotonic() + 30
    while not run.storage.list("blacklist") and time.monotonic() < deadline:
        time.sleep(0.02)
    made.close()
    assert len(run.storage.list("blacklist")) == 1
    assert not made._thread.is_alive()


def test_a_scrubber_that_waits_for_hours_ends_at_once(run: RealRun) -> None:
    made = Scrubber(run.storage, run.coordinator, 24.0)
    made.start()
    made.close()
    assert not made._thread.is_alive()


@pytest.mark.parametrize(("hours", "scrubs"), [(0.0, False), (24.0, True)])
def test_scrub_hours_of_zero_turns_it_off(tmp_path: Path, hours: float, scrubs: bool) -> None:
    run = RealRun(tmp_path / "r1", scrub_hours=hours)
    run.coordinator.scrub_in_background()
    assert (run.coordinator._scrubber is not None) == scrubs
    run.coordinator.close()


# ---------------------------------------------------------------- the ledger of every rank

MAP = LayerMap(layers=(layer("a", 10), layer("b", 10), layer("cold", 10, trainable=False)))
CONFIG = settings_of(warmup_steps=4, warmup_full_every=2, s_max=40, target_interval=10, max_event_share=1.0)
RATE = 1e-4


def ledger_at(step: int) -> Ledger:
    """All committed at step 0 and at the base; nothing is due at `step`."""
    ledger = Ledger.fresh(MAP, CONFIG)
    ledger.observe(DriftReport(0, {}, 0.0))
    ledger.select(decide(ledger.facts(0, 0.0), CONFIG))
    for now in range(1, step + 1):
        ledger.observe(DriftReport(now, {"a": 1.0, "b": 1.0}, RATE, committed_step=now - 1))
        ledger.select(decide(ledger.facts(now, RATE), CONFIG))
    return ledger


def hear(ledger: Ledger, step: int, demoted: LayerStep | None = None) -> set[str]:
    """One more step; returns the layers that it saves."""
    ledger.observe(DriftReport(step, {"a": 0.0, "b": 0.0}, RATE, committed_step=step - 1, demoted=demoted))
    decision = decide(ledger.facts(step, RATE), CONFIG)
    ledger.select(decision)
    return {write.layer for write in decision.writes}


def test_i1_a_layer_whose_version_rotted_is_as_old_as_the_one_before_and_due_at_once() -> None:
    ledger = ledger_at(6)
    assert hear(ledger, 7) == set()
    assert hear(ledger, 8, LayerStep("a", 2)) == {"a"}
    assert ledger.ages(8) == {"a": 6, "b": 4}
    assert hear(ledger, 9) == set(), "it is written once"
    assert ledger.ages(9)["a"] == 1


def test_i1_a_layer_without_any_sound_version_blocks_the_ranks_until_it_has_one() -> None:
    ledger = ledger_at(6)
    assert hear(ledger, 7, LayerStep("a", -1)) == {"a"}
    assert decide(ledger.facts(7, RATE), CONFIG).must_wait
    hear(ledger, 8)
    assert not decide(ledger.facts(8, RATE), CONFIG).must_wait


def test_what_is_known_already_or_on_its_way_is_not_written_twice() -> None:
    ledger = ledger_at(6)
    assert hear(ledger, 7, LayerStep("a", 2)) == {"a"}
    assert hear(ledger, 8, LayerStep("a", 2)) == {"a"}, "the commit of step 7 rotted as well"
    ledger.observe(DriftReport(9, {}, RATE, committed_step=7, demoted=LayerStep("a", 2)))
    assert decide(ledger.facts(9, RATE), CONFIG).writes == (), "the version of step 8 is on its way"


def test_i11_a_frozen_layer_that_rotted_is_part_of_the_next_full_event() -> None:
    ledger = ledger_at(6)
    assert "cold" not in ledger.full_set
    hear(ledger, 7, LayerStep("cold", -1))
    assert "cold" in ledger.full_set
