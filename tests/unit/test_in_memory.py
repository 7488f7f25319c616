"""Plans with what the vaults hold: what counts, what does not, and what the storage says beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercheck.coordination import in_memory, journal
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.lineage import Lineage
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.manifest import AttemptRecord, BadShard, EventId, LayerPlan, RecoveryPlan
from layercheck.memory.held import Held
from layercheck.persistence.storage import LocalStorage
from layercheck.tracking.ledger import Ledger
from tests.runs import LAYERS, Group, config, layer_map, plan_of, run_record, start, steps, with_base
from tests.vaults import memory_event

LAYER = "layers.0"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


def held(
    group: Group,
    step: int,
    *layers: str,
    event: EventId | None = None,
    token: str = "t1",
    offered: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (0, 1),
) -> tuple[Held, ...]:
    """What the ranks of a group sealed of an event that is for memory alone, if not another is named."""
    made = event or memory_event(step, group.attempt)
    return tuple(
        Held(
            run="run",
            home=f"n{rank}",
            event=made,
            rank=rank,
            world_size=group.world_size,
            token=token,
            nbytes=1,
            records=group.rows(made, rank, layers or LAYERS, "memory"),
            trainer_state=group.state(made.step),
            offered=offered,
            node=f"n{rank}",
        )
        for rank in ranks
    )


def planned(storage: LocalStorage, *found: Held, mode: str = "composite") -> RecoveryPlan:
    facts = replace(journal.load_facts(storage), held=found)
    made = make_plan(facts, PlanRequest(mode=mode))
    assert made is not None
    return made


def of_layer(plan: RecoveryPlan, name: str = LAYER) -> LayerPlan:
    return next(layer for layer in plan.layers if layer.layer == name)


def run_to(storage: LocalStorage, step: int, **settings: object) -> Group:
    """A run whose newest version of LAYER is of step 6 and that has come to `step`."""
    group = with_base(storage, **settings)
    group.save(6, LAYER)
    group.train(step, since=4)
    group.coordinator.close()
    return group


# --------------------------------------------------------------------------------------------- what counts


def test_a_layer_comes_from_memory_where_that_is_newer_and_the_storage_says_what_it_has(
    storage: LocalStorage,
) -> None:
    group = run_to(storage, 9)
    plan = planned(storage, *held(group, 8, LAYER), *held(group, 5, "norm"), *held(group, 3, "embed_tokens"))
    layer, norm = of_layer(plan), of_layer(plan, "norm")
    assert (layer.step, layer.age, layer.lost) == (6, 1, 1)
    assert layer.memory is not None
    assert (layer.memory.step, layer.loaded.step, layer.loaded.reason) == (8, 8, "drift")
    assert (norm.step, norm.loaded.step, norm.age) == (4, 5, 4)
    assert of_layer(plan, "embed_tokens").memory is None
    assert {shard.file for shard in layer.all_shards} == {memory_event(8).shard_file(n) for n in (0, 1)}
    assert layer.nbytes == sum(shard.nbytes for shard in layer.memory.shards)
    assert (plan.t_fail, plan.t_fail_source) == (9, "journal")


def test_i10_what_was_sealed_at_the_last_step_has_age_0_also_if_no_heartbeat_told_of_it(
    storage: LocalStorage,
) -> None:
    group = run_to(storage, 9)
    plan = planned(storage, *held(group, 10))
    assert (plan.t_fail, plan.t_fail_source, plan.resume_step) == (10, "memory", 11)
    assert plan.trainer_state == group.state(10)
    assert (plan.max_age, plan.lost_steps) == (0, 0.0)


def test_an_event_that_one_rank_has_not_sealed_counts_for_nothing(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    plan = planned(storage, *held(group, 8, LAYER), *held(group, 10, ranks=(0,)))
    assert (plan.t_fail, of_layer(plan).loaded.step) == (9, 8)


def test_a_copy_of_a_segment_on_another_node_is_as_good(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    first, second = held(group, 8, LAYER)
    twice = (first, second.model_copy(update={"node": "n2"}), second.model_copy(update={"node": "n3"}))
    assert of_layer(planned(storage, *twice)).loaded.step == 8
    assert of_layer(planned(storage, first, twice[2])).loaded.step == 8


def test_a_sealed_event_that_was_to_be_committed_and_was_not_counts_as_well(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    found = held(group, 8, LAYER, event=EventId(step=8, attempt=1))
    assert of_layer(planned(storage, *found)).loaded.step == 8


def test_a_residual_of_a_later_step_is_newer_and_one_of_the_same_step_is_not(storage: LocalStorage) -> None:
    group = with_base(storage)
    group.save(6, LAYER)
    group.train(7)
    group.save_residual(8, LAYER, (6, 1))
    group.train(9, since=7)
    group.coordinator.close()
    assert of_layer(planned(storage, *held(group, 7, LAYER))).memory is None
    layer = of_layer(planned(storage, *held(group, 8, LAYER)))
    assert layer.residual is not None
    assert (layer.loaded.step, layer.loaded.residual, layer.age) == (8, None, 1)


@pytest.mark.parametrize("mode", ["uniform", "strict"])
def test_a_roll_back_takes_nothing_from_memory(storage: LocalStorage, mode: str) -> None:
    group = run_to(storage, 9, strict_max_age=1)
    facts = replace(journal.load_facts(storage), held=held(group, 9))
    plan = make_plan(facts, PlanRequest(mode=mode, strict_max_age=1))
    assert plan is not None
    if mode == "strict":
        assert plan.max_age == 0
    else:
        assert all(layer.memory is None for layer in plan.layers)
        assert plan.resume_step == 5


def test_the_warm_up_goes_back_to_its_full_event_as_before(storage: LocalStorage) -> None:
    group = start(storage)
    group.save(0)
    group.save(2)
    group.train(3)
    plan = planned(storage, *held(group, 3))
    assert (plan.mode, plan.resume_step) == ("warmup_rollback", 3)
    assert all(layer.memory is None for layer in plan.layers)


# ----------------------------------------------------------------------------------------- i15, with tokens


def test_i15_of_an_older_attempt_counts_what_every_later_one_was_told_of(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    second = start(storage, token="t2")
    told, untold = held(group, 8, LAYER, offered=("t2",)), held(group, 9, LAYER)
    assert of_layer(planned(storage, *told)).loaded.step == 8
    assert of_layer(planned(storage, *told, *untold)).loaded.step == 8, "sealed by a zombie"
    second.train(11)
    second.coordinator.close()
    start(storage, token="t3")
    assert of_layer(planned(storage, *told)).memory is None, "the third was not told"
    both = held(group, 8, LAYER, offered=("t2", "t3"))
    assert of_layer(planned(storage, *both)).loaded.step == 8


def test_i15_the_same_attempt_number_of_another_life_of_the_store_counts_for_nothing(
    storage: LocalStorage,
) -> None:
    group = run_to(storage, 9)
    assert of_layer(planned(storage, *held(group, 8, LAYER, token="another"))).memory is None


def test_i15_steps_that_were_undone_count_for_nothing(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    start(storage, token="t2")
    record = journal.read_attempt(storage, 2)
    assert record is not None
    links = (record.lineage[0], record.lineage[1].model_copy(update={"r_b": 6}))
    facts = replace(journal.load_facts(storage), held=held(group, 8, LAYER, offered=("t2",)))
    assert len(in_memory.live_events(facts, Lineage(record.lineage))) == 1
    assert in_memory.live_events(facts, Lineage(links)) == []


def _record(attempt: int, lineage: Lineage) -> AttemptRecord:
    return AttemptRecord(
        attempt=attempt, token=f"t{attempt}", submission="s", world_size=1, mode="composite", r_b=0,
        trainer_state={}, lineage=lineage.links,
    )  # fmt: skip


@given(
    lives=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    made_by=st.integers(1, 6),
    step=st.integers(0, 30),
    told=st.sets(st.integers(1, 6)),
)
def test_i15_holds_for_any_history(lives: list[int], made_by: int, step: int, told: set[int]) -> None:
    """Live exactly if made in the chain, told to all later ones, and not undone by any of them."""
    lineage, reached, records, begun = Lineage(), 0, {}, {}
    for attempt, trained in enumerate(lives, start=1):
        lineage = lineage.extended(attempt, reached, reached)
        records[attempt], begun[attempt] = _record(attempt, lineage), reached
        reached += trained
    one = Held(
        run="run", home="n0", event=memory_event(step, made_by), rank=0, world_size=1, token=f"t{made_by}",
        nbytes=1, records=(), trainer_state={}, offered=tuple(f"t{n}" for n in sorted(told)),
    )  # fmt: skip
    facts = StoreFacts(run=run_record(), attempts=records, held=(one,))
    later = [n for n in records if n > made_by]
    expected = made_by in records and all(n in told and step <= begun[n] for n in later)
    assert bool(in_memory.live_events(facts, lineage)) == expected


# ------------------------------------------------------------------------------------------- the coordinator


def test_i8_an_attempt_gets_one_plan_with_memory_in_it_and_the_same_once_more(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    found = held(group, 9, offered=("t2",))
    second = group.coordinator.begin_attempt("t2", "s1", 2, "composite", False, found)
    assert second.plan is not None
    assert (second.plan.max_age, second.r_b) == (0, 9)
    again = group.coordinator.begin_attempt("t2", "s1", 2, "composite", False, found)
    assert again.plan is not None
    assert (again.attempt, again.plan.layers) == (second.attempt, second.plan.layers)


def test_i6_a_bad_copy_costs_the_next_older_one_and_nothing_in_the_storage(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    found = (*held(group, 7, LAYER, offered=("t2",)), *held(group, 9, LAYER, offered=("t2",)))
    grant = group.coordinator.begin_attempt("t2", "s1", 2, "composite", False, found)
    for expected in (9, 7, 6):
        assert grant.plan is not None
        layer = of_layer(grant.plan)
        assert layer.loaded.step == expected
        bad = BadShard(file=layer.all_shards[1].file, layer=LAYER, step=expected, attempt=1, error="checksum")
        if expected > 6:
            grant = group.coordinator.amend(grant.attempt, (bad,))
    assert (grant.attempt, grant.r_b) == (2, 9)
    assert storage.list("blacklist") == []


def test_a_plan_of_a_coordinator_that_was_built_anew_is_that_of_the_storage(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    grant = group.coordinator.begin_attempt(
        "t2", "s1", 2, "composite", False, held(group, 9, offered=("t2",))
    )
    assert grant.plan is not None
    assert steps(grant.plan) == {"embed_tokens": 4, LAYER: 6, "norm": 4}, "what the storage has"
    other = start(storage, token="t2")
    assert all(layer.memory is None for layer in plan_of(other).layers)
    assert plan_of(other).resume_step == 10


def test_i8_what_an_older_attempt_sealed_is_refused_by_the_coordinator(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    group.coordinator.begin_attempt("t2", "s1", 2, "composite")
    group.record(9, 0, (LAYER,))
    group.record(9, 1, (LAYER,))
    assert storage.size(EventId(step=9, attempt=1).commit_file) is None


def test_i1_the_age_bound_counts_from_the_storage_after_a_recovery_from_memory(storage: LocalStorage) -> None:
    group = run_to(storage, 9)
    plan = planned(storage, *held(group, 9))
    ledger = Ledger.resumed(layer_map(), config(residual={"enabled": True}), plan)
    assert ledger.ages(9) == {"embed_tokens": 5, LAYER: 3, "norm": 5}
    assert ledger.unsaved.residual_of(LAYER) is None, "nobody keeps the weights of the version"
    assert ledger.drift == {name: plan.drift[name] for name in LAYERS}
    without = planned(storage)
    assert plan.drift == without.drift


def test_after_a_recovery_from_memory_a_layer_with_residuals_gets_a_version_at_once(
    storage: LocalStorage,
) -> None:
    group = run_to(storage, 9)
    plan = planned(storage, *held(group, 9))
    off, excluded = {}, {"residual": {"enabled": True, "exclude": [LAYER]}}
    for settings, overdue in (
        ({"residual": {"enabled": True}}, LAYERS),
        (excluded, set(LAYERS) - {LAYER}),
        (off, ()),
    ):
        ledger = Ledger.resumed(layer_map(), config(**settings), plan)
        assert {fact.name for fact in ledger.facts(10, 1e-4).layers if fact.overdue} == set(overdue)
    stored = Ledger.resumed(layer_map(), config(residual={"enabled": True}), planned(storage))
    assert not any(fact.overdue for fact in stored.facts(10, 1e-4).layers)
