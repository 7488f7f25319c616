from pathlib import Path

import pytest

from layercheck.coordination import journal
from layercheck.errors import (
    FencedError,
    NoPlanError,
)
from layercheck.manifest import BadShard, EventId, RecoveryPlan
from tests.fakes import Clock, FaultyStorage
from tests.runs import LAYERS, WARMUP, Group, committed, coordinator, plan_of, start, steps, with_base


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(str(tmp_path / "layercheck"))


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


def test_i15_a_step_undone_by_a_roll_back_is_not_where_the_next_failure_was(storage: FaultyStorage) -> None:
    first = with_base(storage)
    first.train(9, since=4)
    second = start(storage, first.coordinator, "t2")  # begins at 9
    assert second.grant.r_b == 9
    made = second.coordinator
    assert made.begin_attempt("t3", "s1", 2, "uniform").r_b == WARMUP
    plan = plan_of(start(storage, made, "t4"))
    assert (plan.t_fail, plan.resume_step) == (WARMUP, WARMUP + 1)


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
