"""I6: a step can have several events. What is damaged in one of them costs nothing of the others."""

from pathlib import Path

import pytest

from layercheck.coordination import journal, scrub_order
from layercheck.coordination.collect import collect
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.status import summarize
from layercheck.manifest import BadShard, EventId, LayerPlan, RecoveryPlan
from layercheck.persistence.storage import LocalStorage
from tests.runs import LAYERS, Group, shard_bytes, with_base

LAYER = "layers.0"
FROM_POLICY, SAVED_NOW = EventId(step=10, attempt=1), EventId(step=10, attempt=1, part=1)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


def save_now(group: Group, event: EventId = SAVED_NOW) -> None:
    """All ranks save a full event outside the schedule."""
    for rank in range(group.world_size):
        data = [shard_bytes(layer, event.step, event.attempt, rank) for layer in LAYERS]
        group.storage.write(event.shard_file(rank), data)
        group.coordinator.record(
            event, rank, group.rows(event, rank, LAYERS, "full"), group.state(event.step)
        )


def residual_and_version(storage: LocalStorage) -> Group:
    """A version of step 6; of step 10 a residual on it and, by `save_now`, versions of all layers."""
    group = with_base(storage)
    group.save(6, LAYER)
    group.train(10)
    group.save_residual(10, LAYER, (6, 1))
    save_now(group)
    group.train(12, since=10)
    group.coordinator.close()
    return group


def two_versions(storage: LocalStorage) -> Group:
    """Two versions of step 10: one of the policy, one of `save_now`."""
    group = with_base(storage)
    group.train(10)
    group.save(10, LAYER)
    save_now(group)
    group.train(12, since=10)
    group.coordinator.close()
    return group


def rot(group: Group, event: EventId, layer: str = LAYER) -> None:
    """As if the scrubber, or a recovery, had found one rank's part of a layer damaged twice."""
    bad = BadShard(
        file=event.shard_file(1), layer=layer, step=event.step, attempt=event.attempt, error="flipped"
    )
    group.coordinator.rotten(bad)


def plan_now(storage: LocalStorage, **request: object) -> RecoveryPlan:
    made = make_plan(journal.load_facts(storage), PlanRequest(**request))  # type: ignore[arg-type]
    assert made is not None
    return made


def of_layer(plan: RecoveryPlan) -> LayerPlan:
    return next(layer for layer in plan.layers if layer.layer == LAYER)


# ----------------------------------------------------------------------------------- a residual and a version


@pytest.mark.parametrize("blacklisted", [True, False])
def test_i6_beside_a_damaged_residual_the_version_of_the_same_step_is_used(
    storage: LocalStorage, blacklisted: bool
) -> None:
    group = residual_and_version(storage)
    without = frozenset() if blacklisted else frozenset([FROM_POLICY.shard_file(0)])
    if blacklisted:
        rot(group, FROM_POLICY)
    layer = of_layer(plan_now(storage, without=without))
    assert (layer.step, layer.events, layer.residual, layer.lost) == (10, (SAVED_NOW,), None, 2)
    assert not layer.fallback, "nothing newer is damaged"


@pytest.mark.parametrize("blacklisted", [True, False])
def test_i6_beside_a_damaged_version_the_residual_of_the_same_step_is_used(
    storage: LocalStorage, blacklisted: bool
) -> None:
    group = residual_and_version(storage)
    without = frozenset() if blacklisted else frozenset([SAVED_NOW.shard_file(0)])
    if blacklisted:
        rot(group, SAVED_NOW)
    layer = of_layer(plan_now(storage, without=without))
    assert layer.residual is not None
    assert layer.events == (EventId(step=6, attempt=1), FROM_POLICY)
    assert (layer.step, layer.residual.step, layer.lost, layer.fallback) == (6, 10, 2, True)


def test_a_damaged_residual_demotes_no_version(storage: LocalStorage) -> None:
    group = residual_and_version(storage)
    rot(group, FROM_POLICY)
    facts = journal.load_facts(storage)
    assert scrub_order.demoted(facts) == ()
    assert {row["name"]: row["step"] for row in summarize(facts)["layers"]}[LAYER] == 10


def test_a_damaged_version_demotes_its_layer_to_the_version_before(storage: LocalStorage) -> None:
    group = residual_and_version(storage)
    rot(group, SAVED_NOW)
    assert [(one.layer, one.step) for one in scrub_order.demoted(journal.load_facts(storage))] == [(LAYER, 6)]


@pytest.mark.parametrize(("bad", "sound"), [(FROM_POLICY, SAVED_NOW), (SAVED_NOW, FROM_POLICY)])
def test_what_is_left_of_the_step_is_still_read_again_and_kept(
    storage: LocalStorage, bad: EventId, sound: EventId
) -> None:
    group = residual_and_version(storage)
    rot(group, bad)
    facts = journal.load_facts(storage)
    read = {row.event for row in scrub_order.live_shards(facts) if row.layer == LAYER and row.step == 10}
    kept = {verdict.event for verdict in collect(facts, journal.event_folders(storage), 2, 1).keep}
    assert read == {sound}
    assert sound in kept


# --------------------------------------------------------------------------------- two versions of one step


@pytest.mark.parametrize(("bad", "sound"), [(FROM_POLICY, SAVED_NOW), (SAVED_NOW, FROM_POLICY)])
def test_i6_of_two_versions_of_a_step_the_sound_one_is_used(
    storage: LocalStorage, bad: EventId, sound: EventId
) -> None:
    group = two_versions(storage)
    rot(group, bad)
    assert scrub_order.demoted(journal.load_facts(storage)) == (), "the layer is as fresh as it was"
    assert of_layer(plan_now(storage)).events == (sound,)
    uniform = plan_now(storage, mode="uniform")
    assert {layer.step for layer in uniform.layers} == {10}, "all layers of that step are still there"
    assert of_layer(uniform).events == (sound,)


def test_i6_with_both_damaged_the_layer_falls_back(storage: LocalStorage) -> None:
    group = two_versions(storage)
    rot(group, FROM_POLICY)
    rot(group, SAVED_NOW)
    layer = of_layer(plan_now(storage))
    assert (layer.step, layer.fallback) == (4, True)


def test_a_residual_counts_for_its_version_whichever_event_that_is_taken_from(storage: LocalStorage) -> None:
    group = two_versions(storage)
    group.save_residual(12, LAYER, (10, 1))
    for bad in (SAVED_NOW, FROM_POLICY):
        layer = of_layer(plan_now(storage, without=frozenset([bad.shard_file(0)])))
        assert layer.residual is not None
        assert (layer.step, layer.residual.step) == (10, 12)


def test_a_blacklist_of_a_file_that_is_no_events_names_the_first_event_of_its_step() -> None:
    bad = BadShard(file="elsewhere/rank-00000.safetensors", layer=LAYER, step=3, attempt=2, error="gone")
    assert bad.event == EventId(step=3, attempt=2)
