from pathlib import Path

import pytest

from layercheck.coordination import journal
from layercheck.coordination.commit_file import text_of
from layercheck.errors import (
    StorageError,
    StoreMismatchError,
)
from layercheck.manifest import EventId
from tests.fakes import Clock, FaultyStorage
from tests.runs import LAYERS, committed, config, coordinator, run_record, start, with_base


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(str(tmp_path / "layercheck"))


def test_a_new_store_starts_afresh_and_says_so(storage: FaultyStorage) -> None:
    grant = start(storage).grant
    assert (grant.attempt, grant.r_b, grant.plan) == (1, 0, None)
    assert any("starts afresh" in note for note in grant.notes)


def test_i2_an_event_exists_once_all_ranks_are_durable_and_the_commit_is(storage: FaultyStorage) -> None:
    group = start(storage)
    group.record(0, 0, LAYERS, "full")
    assert committed(storage) == []
    assert group.beat(0).committed_step == -1
    group.record(0, 1, LAYERS, "full")
    assert committed(storage) == ["events/step-00000000.a001"]
    assert group.beat(0).committed_step == 0


def test_a_repeated_record_changes_nothing(storage: FaultyStorage) -> None:
    group = start(storage)
    group.save(0)
    writes = len(storage.operations)
    group.save(0)
    assert [o for o in storage.operations[writes:] if "commit" in o[1]] == []


def test_i15_events_commit_in_step_order(storage: FaultyStorage) -> None:
    group = start(storage)
    group.record(0, 0, LAYERS)
    group.selected |= dict.fromkeys(LAYERS, 2)
    event, rows = group.write(2, 1, LAYERS)
    group.coordinator.record(event, 1, rows, group.state(2))
    assert group.beat(2).lost_steps == (0,)  # rank 1 went on without step 0
    group.record(2, 0, LAYERS)
    assert group.beat(2).committed_step == 2
    group.record(0, 1, LAYERS)
    assert committed(storage) == ["events/step-00000002.a001"]


def test_a_complete_event_waits_for_an_earlier_one(storage: FaultyStorage) -> None:
    group = start(storage, world_size=1)
    group.selected["norm"] = 1
    group.beat(1)  # names the event of step 1 before any shard of it came
    event, rows = group.write(2, 0, LAYERS)
    group.coordinator._book._spoke.clear()
    group.coordinator._book.open[event] = type(group.coordinator._book.open[EventId(step=1, attempt=1)])(
        event, 0.0, {0: rows}, {0: text_of(rows)}, group.state(2)
    )
    group.coordinator.tick()
    assert committed(storage) == []
    group.record(1, 0, ("norm",))
    assert len(committed(storage)) == 2


def test_an_event_that_a_rank_cannot_write_is_lost_for_ever(storage: FaultyStorage) -> None:
    group = start(storage)
    group.save(0)
    group.record(3, 0, ("norm",))
    group.coordinator.lost(EventId(step=3, attempt=1), 1, "disk full")
    group.record(3, 1, ("norm",))
    reply = group.beat(3)
    assert reply.lost_steps == (3,)
    assert reply.committed_step == 0
    assert any("disk full" in alert for alert in reply.alerts)
    assert group.beat(3).alerts == ()


def test_an_incomplete_event_is_lost_after_the_timeout(storage: FaultyStorage) -> None:
    clock = Clock()
    group = start(storage, coordinator(storage, clock))
    group.record(0, 0, LAYERS)
    clock.now += 9.9
    group.coordinator.tick()
    assert group.beat(1).lost_steps == ()
    clock.now += 0.2
    group.coordinator.tick()
    assert group.beat(1).lost_steps == (0,)
    group.record(0, 1, LAYERS)
    assert committed(storage) == []


def test_i3_ranks_that_chose_different_layers_do_not_commit(storage: FaultyStorage) -> None:
    group = start(storage)
    group.record(0, 0, LAYERS)
    group.record(0, 1, LAYERS[:2])
    assert group.beat(0).lost_steps == (0,)
    assert committed(storage) == []


def test_i9_a_commit_that_fails_is_tried_again_and_then_lost(storage: FaultyStorage) -> None:
    clock = Clock()
    group = start(storage, coordinator(storage, clock, write_retries=2))
    storage.arm("commit.parquet", times=2)
    group.save(0)
    for _ in range(2):
        assert committed(storage) == []
        clock.now += 10
        group.coordinator.tick()
    assert group.beat(0).committed_step == 0
    storage.arm("commit.parquet", times=99)
    group.save(1, "norm")
    for _ in range(4):
        clock.now += 5
        group.coordinator.tick()
    reply = group.beat(1)
    assert reply.lost_steps == (1,)
    assert any("commit failed" in alert for alert in reply.alerts)


def test_i9_a_journal_that_cannot_be_written_is_an_alert(storage: FaultyStorage) -> None:
    group = start(storage)
    storage.arm("progress", times=1)
    assert any("journal" in alert for alert in group.beat(1).alerts)


def test_progress_is_written_at_most_once_a_second(storage: FaultyStorage) -> None:
    clock = Clock()
    group = start(storage, coordinator(storage, clock))
    for step in range(1, 41):
        clock.now += 0.1
        group.beat(step)
    writes = [o for o in storage.operations if "progress" in o[1]]
    assert 3 <= len(writes) <= 5
    group.coordinator.close()
    found = journal.read_progress(storage, 1)
    assert found is not None
    assert found.step == 40


def test_a_repeated_heartbeat_of_one_step_moves_the_file(storage: FaultyStorage) -> None:
    clock = Clock()
    group = start(storage, coordinator(storage, clock))
    group.beat(1)
    before = journal.read_progress(storage, 1)
    clock.now += 5
    group.beat(1)
    assert journal.read_progress(storage, 1) != before


def test_i7_a_store_of_another_model_names_the_first_difference(storage: FaultyStorage) -> None:
    made = start(storage).coordinator
    other = run_record(frozen=("lm_head",))
    with pytest.raises(StoreMismatchError, match=r"parameter lm_head\.w is new"):
        made.open_run(other, "probe")
    with pytest.raises(StoreMismatchError, match="optimizer is AdamW, not SGD"):
        made.open_run(run_record().model_copy(update={"optimizer": "SGD"}), "probe")


def test_changed_settings_are_named(storage: FaultyStorage) -> None:
    made = start(storage).coordinator
    changes = made.open_run(run_record(config(s_max=50)), "probe")
    assert changes == ("checkpoint.s_max: 40 -> 50",)


def test_a_probe_that_is_not_seen_is_an_error(storage: FaultyStorage) -> None:
    with pytest.raises(StorageError, match="does not see"):
        coordinator(storage).open_run(run_record(), "elsewhere")


def test_i7_a_store_without_its_run_record_is_not_started_afresh(storage: FaultyStorage) -> None:
    group = with_base(storage)
    storage.delete("run.json")
    with pytest.raises(StoreMismatchError, match=r"no run\.json"):
        group.coordinator.open_run(run_record(), "probe")


def test_status_has_the_keys_of_the_command(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.train(6, since=4)
    status = group.coordinator.status()
    assert (status["run"], status["attempt"], status["step"], status["world_size"]) == ("r1", 1, 6, 2)
    assert status["recoverable"]
    assert status["max_age"] == 2
    assert {row["name"]: row["age"] for row in status["layers"]} == dict.fromkeys(LAYERS, 2)
    assert set(status["layers"][0]) == {
        "name", "step", "attempt", "age", "nbytes", "drift", "threshold", "reason",
        "residual", "lost", "lost_drift", "if_dies",
    }  # fmt: skip
