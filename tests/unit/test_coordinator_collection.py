from pathlib import Path

import pytest

from layercheck.coordination import journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.heart import SILENCE_S
from layercheck.errors import RestartLoopError, StorageError
from tests.fakes import Clock, FaultyStorage
from tests.runs import LAYERS, WARMUP, Group, committed, config, coordinator, plan_of, start, with_base


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(str(tmp_path / "layercheck"))


def folders(storage: FaultyStorage) -> list[int]:
    return [event.step for event in journal.event_folders(storage)]


def test_i5_collection_keeps_two_versions_of_each_layer_and_the_newest_full_event(
    storage: FaultyStorage,
) -> None:
    group = with_base(storage)
    for step in (6, 7, 8):
        group.save(step, "norm")
    assert folders(storage) == [2, 4, 7, 8]
    group.save(9, "layers.0")
    group.save(10, "embed_tokens")
    assert folders(storage) == [4, 7, 8, 9, 10]


def test_i5_a_commit_goes_before_its_shards(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.save(6)
    deleted = [path for what, path in storage.operations if what == "delete"]
    assert deleted[:2] == ["events/step-00000000.a001/commit.parquet", "events/step-00000000.a001"]


def test_i5_rows_of_deleted_commits_stay_in_the_history(storage: FaultyStorage) -> None:
    import pyarrow.parquet as pq

    with_base(storage).save(6)
    table = pq.read_table(Path(storage.root, "history"))
    assert set(table["step"].to_pylist()) == {0, 2}


def test_i5_orphans_and_dead_versions_are_swept_after_the_next_commit(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.record(6, 0, ("norm",))
    group.train(7, since=4)
    second = start(storage, group.coordinator, "t2")
    assert 6 in folders(storage)
    second.save(9, "norm")
    assert 6 not in folders(storage)


def test_i9_a_deletion_that_fails_is_an_alert_and_is_done_later(storage: FaultyStorage) -> None:
    group = with_base(storage)
    storage.arm("events/", times=1, fail_after=3)
    group.save(6)
    group.save(7)
    assert folders(storage) == [6, 7]
    assert any("collect" in alert for alert in group.beat(7).alerts)


def test_i13_nothing_is_deleted_until_probation_ends(storage: FaultyStorage) -> None:
    with_base(storage)
    second = start(storage, token="t2", probation_steps=5)
    for step in (5, 6, 7):
        second.save(step)
    before = folders(storage)
    assert before == [2, 4, 5, 6, 7]
    second.train(9)
    second.save(10)
    assert folders(storage) == [7, 10]


def test_i13_a_non_finite_end_freezes_collection(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.coordinator.end_attempt(1, "failed", "loss is not finite at step 5 in norm")
    group.save(6)
    assert folders(storage) == [2, 4, 6]


def test_i13_poison_within_probation_makes_the_next_attempt_uniform_and_then_stops(
    storage: FaultyStorage,
) -> None:
    first = with_base(storage, probation_steps=20)
    first.save(6, "norm")
    first.train(8, since=4)
    second = start(storage, first.coordinator, "t2")
    assert plan_of(second).mode == "composite"
    second.beat(9)
    second.coordinator.end_attempt(2, "failed", "NonFiniteStateError: loss")
    third = start(storage, first.coordinator, "t3")
    assert plan_of(third).mode == "uniform"
    assert third.grant.r_b == WARMUP
    third.beat(5)
    third.coordinator.end_attempt(3, "failed", "NonFiniteStateError: loss")
    with pytest.raises(RestartLoopError, match="non-finite"):
        start(storage, first.coordinator, "t4")


def test_i13_three_attempts_without_a_step_end_the_run(storage: FaultyStorage) -> None:
    group = with_base(storage)
    for number in (2, 3, 4):
        group = start(storage, group.coordinator, f"t{number}")
        group.coordinator.note_receipt(number, {"t_fail": plan_of(group).t_fail})
        group.coordinator.end_attempt(number, "failed", "boom")
    with pytest.raises(RestartLoopError, match="3 attempts in a row"):
        start(storage, token="t5")
    assert coordinator(storage).begin_attempt("t5", "another", 2, "composite").attempt == 5


def test_i13_a_step_of_progress_breaks_the_row(storage: FaultyStorage) -> None:
    group = with_base(storage)
    for number in (2, 3, 4, 5):
        group = start(storage, group.coordinator, f"t{number}")
        group.coordinator.note_receipt(number, {"t_fail": plan_of(group).t_fail})
        if number == 3:
            group.beat(plan_of(group).t_fail + 1)
    assert group.attempt == 5


def test_detection_and_rescheduling_are_timed(storage: FaultyStorage) -> None:
    clock = Clock()
    group = start(storage, coordinator(storage, clock))
    group.save(0)
    group.beat(1)
    clock.now += 3
    group.coordinator.note_failure()
    clock.now += 4
    group.coordinator.note_failure()  # the next group died before it began an attempt
    clock.now += 2
    grant = group.coordinator.begin_attempt("t2", "s1", 2, "composite")
    assert (grant.detect_s, grant.reschedule_s) == (3, 6)
    amended = group.coordinator.amend(grant.attempt, ())
    assert (amended.detect_s, amended.reschedule_s) == (3, 6), "the receipt is made from the amended grant"


def test_garbage_goes_in_small_lots_and_all_of_it_goes(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layercheck.coordination.collector._FILES_AT_ONCE", 6)  # two events of two ranks
    monkeypatch.setattr("layercheck.coordination.collector._REST", 1000)
    clock = Clock()
    clock.costs = 0.1
    group = start(storage, coordinator(storage, clock))
    for step in (0, 2, WARMUP):
        group.save(step)
    for step in range(WARMUP + 1, WARMUP + 9):
        group.save(step, *LAYERS)
    left = len(committed(storage))
    assert left > 3, "the collector rested"
    clock.now += 3600
    for _ in range(6):
        before, kept = len(committed(storage)), set(committed(storage))
        group.coordinator.tick()
        assert before - len(committed(storage)) <= 2
        assert set(committed(storage)) <= kept
    assert len(committed(storage)) == 2


def run_whose_collector_rests(storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Garbage is there, and would not be collected before the end."""
    monkeypatch.setattr("layercheck.coordination.collector._REST", 1e6)
    clock = Clock()
    clock.costs = 0.1
    group = start(storage, coordinator(storage, clock))
    for step in (0, 2, WARMUP, *range(WARMUP + 1, WARMUP + 9)):
        group.save(step, *LAYERS)
    return group


def test_a_run_that_ends_leaves_no_garbage_behind(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = run_whose_collector_rests(storage, monkeypatch)
    assert len(committed(storage)) > 2
    group.coordinator.end_attempt(group.attempt, "completed")
    assert len(committed(storage)) == 2


def test_i9_a_run_ends_although_the_storage_no_longer_answers(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim that is read before each collection cannot be read: garbage stays, the end comes."""
    group = run_whose_collector_rests(storage, monkeypatch)
    left, asked = len(committed(storage)), 0

    def refuse(folder: str) -> list[str]:
        nonlocal asked
        asked += 1
        assert asked < 20, "a storage that refuses is asked for ever"
        raise StorageError(f"cannot list {folder}")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "list", refuse)
        group.coordinator.end_attempt(group.attempt, "completed")
    assert len(committed(storage)) == left
    assert journal.load_facts(storage).progress[1].ended == "completed"


def test_a_person_who_submits_again_is_no_part_of_an_outage(storage: FaultyStorage) -> None:
    clock = Clock()
    group = start(storage, coordinator(storage, clock))
    group.save(0)
    group.beat(1)
    group.coordinator.note_failure()
    clock.now += 4000
    grant = group.coordinator.begin_attempt("t2", "another", 2, "composite", takeover=True)
    assert (grant.detect_s, grant.reschedule_s) == (None, None)


def test_a_silent_rank_0_is_told_once_in_each_silence(storage: FaultyStorage) -> None:
    clock, said = Clock(), []
    made = Coordinator(storage, config(), clock, clock.sleep, said.append)
    group = start(storage, made)
    group.save(0)
    group.beat(7)
    clock.now += SILENCE_S - 1
    made.tick()
    assert said == []
    for _ in range(3):
        clock.now += 1
        made.tick()
    (text,) = said
    assert "no heartbeat of attempt 1 for 15 s, its last step was 7" in text
    assert made.status()["alerts"] == [text]
    assert group.beat(8).alerts == ()
    clock.now += SILENCE_S
    made.tick()
    assert len(said) == 2


def test_a_silence_with_a_known_reason_is_not_told(storage: FaultyStorage) -> None:
    clock, said = Clock(), []
    made = Coordinator(storage, config(), clock, clock.sleep, said.append)
    group = start(storage, made)
    group.save(0)
    group.beat(1)
    made.note_failure()
    clock.now += SILENCE_S
    made.tick()
    group = start(storage, made, "t2")
    group.beat(2)
    made.end_attempt(2, "completed")
    clock.now += SILENCE_S
    made.tick()
    assert said == []
