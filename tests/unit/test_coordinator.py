from pathlib import Path

import pytest

from layercheck.coordination import journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.errors import (
    FencedError,
    NoPlanError,
    RestartLoopError,
    RunIsLiveError,
    StorageError,
    StoreMismatchError,
)
from layercheck.manifest import BadShard, EventId, RecoveryPlan
from tests.fakes import Clock, FaultyStorage
from tests.runs import LAYERS, WARMUP, Group, config, coordinator, run_record, start, with_base


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(str(tmp_path / "layercheck"))


def plan_of(group: Group) -> RecoveryPlan:
    assert group.grant.plan is not None
    return group.grant.plan


def steps(plan: RecoveryPlan) -> dict[str, int]:
    return {layer.layer: layer.step for layer in plan.layers}


def committed(storage: FaultyStorage) -> list[str]:
    return [e.folder for e in journal.event_folders(storage) if storage.size(e.commit_file) is not None]


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
        event, 0.0, {0: rows}, group.state(2)
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


def test_recovery_takes_the_newest_version_of_each_layer_and_goes_on_at_the_next_step(
    storage: FaultyStorage,
) -> None:
    group = with_base(storage)
    group.save(6, "norm")
    group.save(7, "layers.0")
    group.train(9, since=4)
    plan = plan_of(start(storage, group.coordinator, "t2"))
    assert (plan.t_fail, plan.t_fail_source, plan.resume_step) == (9, "live", 10)
    assert steps(plan) == {"embed_tokens": 4, "layers.0": 7, "norm": 6}
    assert [layer.age for layer in plan.layers] == [5, 2, 3]
    assert plan.weighted_age == pytest.approx((10 * 5 + 20 * 2 + 30 * 3) / 60)
    assert plan.trainer_state["step"] == 9
    assert plan.drift == dict.fromkeys(LAYERS, 0.25)


def test_i12_the_plan_is_the_same_with_the_coordinator_alive_and_rebuilt(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.save(6, "norm")
    group.train(9, since=4)
    group.coordinator.close()
    rebuilt = plan_of(start(storage, token="t2"))
    storage.delete("attempts/a002.json")
    alive = plan_of(start(storage, group.coordinator, "t3"))
    assert rebuilt.t_fail_source == "journal"
    assert alive.t_fail_source == "live"
    assert alive.model_copy(update={"t_fail_source": "journal"}) == rebuilt


def test_i12_without_a_journaled_heartbeat_the_newest_commit_says_where_the_run_was(
    storage: FaultyStorage,
) -> None:
    group = with_base(storage)
    group.save(7, "norm")
    storage.delete("attempts/a001.progress.json")
    plan = plan_of(start(storage, token="t2"))
    assert (plan.t_fail, plan.t_fail_source, plan.trainer_state["step"]) == (7, "commit", 7)


def test_before_the_base_recovery_rolls_back_to_the_newest_full_event(storage: FaultyStorage) -> None:
    group = start(storage)
    group.save(0)
    group.save(2)
    group.train(3)
    plan = plan_of(start(storage, group.coordinator, "t2"))
    assert (plan.mode, plan.t_fail, plan.resume_step) == ("warmup_rollback", 3, 3)
    assert plan.trainer_state["step"] == 2


def test_i8_the_same_token_gets_the_same_attempt_and_plan(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.train(9, since=4)
    first = start(storage, group.coordinator, "t2").grant
    again = start(storage, group.coordinator, "t2").grant
    rebuilt = start(storage, token="t2").grant
    assert first.plan is not None
    for other in (again, rebuilt):
        assert other.plan is not None
        assert (other.attempt, other.r_b) == (first.attempt, first.r_b)
        assert other.plan.layers == first.plan.layers
        assert other.plan.trainer_state == first.plan.trainer_state
        assert other.plan.resume_step == first.plan.resume_step


def test_the_same_token_of_a_fresh_run_starts_afresh_again(storage: FaultyStorage) -> None:
    start(storage)
    assert start(storage).grant.plan is None
    assert journal.attempt_numbers(storage) == [1]


def test_i8_a_fenced_token_gets_no_attempt(storage: FaultyStorage) -> None:
    group = with_base(storage)
    start(storage, group.coordinator, "t2")
    with pytest.raises(FencedError):
        start(storage, group.coordinator, "t1")


def test_i8_a_zombie_can_neither_commit_nor_delete(storage: FaultyStorage) -> None:
    zombie = with_base(storage)
    zombie.train(6, since=4)
    zombie.record(7, 0, ("norm",))
    zombie.coordinator.close()
    other = start(storage, token="t2")  # another coordinator on the same store
    before = committed(storage)
    deletions = [o for o in storage.operations if o[0] == "delete"]
    zombie.record(7, 1, ("norm",))
    assert committed(storage) == before
    assert [o for o in storage.operations if o[0] == "delete"] == deletions
    assert zombie.beat(8).fenced
    assert not other.beat(7).fenced
    assert journal.read_progress(storage, 1).step == 6


def test_i8_late_calls_of_an_old_attempt_are_refused(storage: FaultyStorage) -> None:
    old = with_base(storage)
    new = start(storage, old.coordinator, "t2")
    old.save(7)
    assert old.beat(7).fenced
    assert all(".a001" not in e or "step-00000007" not in e for e in committed(storage))
    assert not new.beat(5).fenced


def test_i15_a_commit_that_its_successor_did_not_see_is_dead(storage: FaultyStorage) -> None:
    zombie = with_base(storage)
    zombie.train(8, since=4)
    zombie.record(6, 0, ("norm",))
    other = start(storage, token="t2")
    # A zombie on a storage without fences: its commit lands after the claim.
    event = EventId(step=6, attempt=1)
    rows = zombie.rows(event, 0, ("norm",)) + zombie.rows(event, 1, ("norm",))
    lineage = journal.read_attempt(storage, 1).lineage
    commit = journal.Commit(event=event, records=rows, trainer_state={"step": 6}, lineage=lineage)
    journal.write_commit(storage, commit)
    other.train(10)
    plan = plan_of(start(storage, token="t3"))
    assert steps(plan)["norm"] == WARMUP


def test_i15_versions_beyond_a_roll_back_are_dead(storage: FaultyStorage) -> None:
    first = with_base(storage)
    first.save(6, "norm")
    first.train(9, since=4)
    second = Group(first.coordinator, storage, first.coordinator.begin_attempt("t2", "s1", 2, "uniform"))
    assert second.grant.r_b == WARMUP
    second.train(5)
    plan = plan_of(start(storage, first.coordinator, "t3"))
    assert steps(plan)["norm"] == WARMUP
    assert plan.t_fail == 5


def test_i7_a_store_without_a_usable_version_names_the_layers(storage: FaultyStorage) -> None:
    group = with_base(storage)
    for event in journal.event_folders(storage):
        path = Path(storage.root, event.commit_file)
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(NoPlanError, match=r"embed_tokens.*norm"):
        start(storage, token="t2")
    assert journal.attempt_numbers(storage) == [1]
    assert group.grant.attempt == 1


def test_i6_a_damaged_commit_counts_as_absent_and_is_announced(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.save(6, "norm")
    group.train(8, since=4)
    path = Path(storage.root, "events/step-00000006.a001/commit.parquet")
    path.write_bytes(path.read_bytes()[:-1])
    grant = start(storage, token="t2").grant
    assert any("step-00000006.a001/commit.parquet counts as absent" in note for note in grant.notes)
    assert steps(grant.plan)["norm"] == WARMUP


def bad(plan: RecoveryPlan, layer: str) -> BadShard:
    found = next(entry for entry in plan.layers if entry.layer == layer)
    return BadShard(
        file=found.shards[0].file, layer=layer, step=found.step, attempt=found.attempt, error="checksum"
    )


def test_i6_a_bad_shard_costs_that_one_layer_an_older_version(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.save(6, "norm")
    group.save(7, "layers.0")
    group.train(9, since=4)
    second = start(storage, group.coordinator, "t2")
    amended = second.coordinator.amend(2, (bad(plan_of(second), "norm"),))
    assert amended.attempt == 2
    assert amended.plan is not None
    assert steps(amended.plan) == {"embed_tokens": 4, "layers.0": 7, "norm": 4}
    assert [layer.fallback for layer in amended.plan.layers] == [False, False, True]
    assert amended.plan.resume_step == 10
    assert steps(plan_of(start(storage, token="t3")))["norm"] == 4


def test_i15_an_amended_roll_back_gets_a_record_of_its_own(storage: FaultyStorage) -> None:
    group = start(storage)
    group.save(0)
    group.save(2)
    group.train(3)
    second = start(storage, group.coordinator, "t2")
    shard = bad(plan_of(second), "norm")
    amended = second.coordinator.amend(2, (shard,))
    assert (amended.attempt, amended.r_b) == (3, 0)
    assert amended.plan is not None
    assert amended.plan.resume_step == 1
    assert second.coordinator.amend(2, (shard,)).attempt == 3  # a retry of the call
    third = Group(second.coordinator, storage, amended)
    third.train(1)
    assert steps(plan_of(start(storage, group.coordinator, "t4"))) == dict.fromkeys(LAYERS, 0)


def test_an_unreadable_attempt_without_commits_counts_as_never_begun(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.train(6, since=4)
    start(storage, group.coordinator, "t2")
    Path(storage.root, "attempts/a002.json").write_bytes(b"{")
    third = start(storage, token="t3").grant
    assert third.attempt == 3
    assert third.r_b == 6
    assert any("attempt 2 counts as never begun" in note for note in third.notes)
    assert [link.attempt for link in journal.read_attempt(storage, 3).lineage] == [1, 3]


def test_an_unreadable_attempt_is_known_from_its_commits(storage: FaultyStorage) -> None:
    group = with_base(storage)
    second = start(storage, group.coordinator, "t2")
    second.save(8)
    second.train(9)
    second.coordinator.close()
    Path(storage.root, "attempts/a002.json").write_bytes(b"{")
    plan = plan_of(start(storage, token="t3"))
    assert steps(plan) == dict.fromkeys(LAYERS, 8)
    assert plan.t_fail == 9


def test_a_layer_whose_selected_event_never_became_live_is_carried_as_due(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.record(6, 0, ("norm",))  # rank 1 dies before it wrote
    group.train(8, since=4)
    plan = plan_of(start(storage, group.coordinator, "t2"))
    assert plan.drift == {"embed_tokens": 0.25, "layers.0": 0.25, "norm": float("inf")}


def test_lost_steps_of_one_layer_never_count_twice(storage: FaultyStorage) -> None:
    group = with_base(storage)
    group.train(10, since=4)
    second = start(storage, group.coordinator, "t2")
    assert plan_of(second).lost_steps == 6
    second.train(13)
    third = plan_of(start(storage, group.coordinator, "t3"))
    assert third.max_age == 9
    assert third.lost_steps == 3


def test_i12_a_coordinator_rebuilt_in_mid_attempt_declares_forgotten_events_lost(
    storage: FaultyStorage,
) -> None:
    """Else the session would take the commit of step 7 for that of step 6 as well."""
    group = with_base(storage)
    group.record(6, 0, ("norm",))
    rebuilt = coordinator(storage)
    group.coordinator = rebuilt
    group.record(6, 1, ("norm",))
    group.save(7, "layers.0")
    reply = group.beat(7)
    assert reply.committed_step == 7
    assert reply.lost_steps == (6,)


def test_i12_an_event_that_nobody_spoke_of_again_times_out(storage: FaultyStorage) -> None:
    clock = Clock()
    group = with_base(storage)
    group.selected["norm"] = 6
    group.coordinator = coordinator(storage, clock)
    assert group.beat(6).lost_steps == ()
    clock.now += 11
    assert group.beat(6).lost_steps == (6,)


# ---------------------------------------------------------------- takeovers


def test_a_moving_run_is_refused_with_its_step(storage: FaultyStorage) -> None:
    clock = Clock()
    living = start(storage, coordinator(storage, clock))
    living.save(0)
    beats = iter(range(1, 99))

    def sleep(seconds: float) -> None:
        clock.now += seconds
        living.beat(next(beats))

    rival = Coordinator(storage, config(), clock, sleep)
    with pytest.raises(
        RunIsLiveError, match=r"run r1 is live \(step \d+, moving\); end it or pass --takeover"
    ):
        rival.begin_attempt("t2", "s2", 2, "composite")
    assert not living.beat(50).fenced


def test_a_run_that_does_not_move_is_taken_over_with_a_progress_line(storage: FaultyStorage) -> None:
    clock, said = Clock(), []
    group = with_base(storage)
    rival = Coordinator(storage, config(takeover_s=12), clock, clock.sleep, said.append)
    begun = clock.now
    assert rival.begin_attempt("t2", "s2", 2, "composite").attempt == 2
    assert clock.now - begun >= 12
    assert any("watched" in line for line in said)
    clock.now += 1
    assert group.grant.attempt == 1


def test_takeover_does_not_watch(storage: FaultyStorage) -> None:
    clock = Clock()
    with_base(storage)
    rival = Coordinator(storage, config(), clock, clock.sleep)
    assert rival.begin_attempt("t2", "s2", 2, "composite", takeover=True).attempt == 2
    assert clock.now == 1000.0


def test_a_run_that_ended_is_not_watched(storage: FaultyStorage) -> None:
    clock = Clock()
    group = with_base(storage)
    group.coordinator.end_attempt(1, "failed", "boom")
    rival = Coordinator(storage, config(), clock, clock.sleep)
    assert rival.begin_attempt("t2", "s2", 2, "composite").attempt == 2
    assert clock.now == 1000.0


def test_two_claimants_get_two_numbers_and_the_newer_one_fences_the_older(storage: FaultyStorage) -> None:
    with_base(storage)
    one, two = coordinator(storage), coordinator(storage)
    first = Group(one, storage, one.begin_attempt("t2", "s1", 2, "composite"))
    second = Group(two, storage, two.begin_attempt("t3", "s1", 2, "composite"))
    assert (first.attempt, second.attempt) == (2, 3)
    assert first.beat(5).fenced
    assert not second.beat(5).fenced


# ---------------------------------------------------------------- collection and poison


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
    grant = group.coordinator.begin_attempt("t2", "s1", 2, "composite")
    assert (grant.detect_s, grant.reschedule_s) == (3, 4)


# ---------------------------------------------------------------- the run itself


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
        "name", "step", "attempt", "age", "nbytes", "drift", "threshold", "reason"
    }  # fmt: skip
