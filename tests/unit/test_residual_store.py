"""Residuals in a store: which one a plan takes, what keeps and what sweeps them, and old files unchanged."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from xxhash import xxh3_128_hexdigest

from layercheck.coordination import commit_file, history, journal
from layercheck.coordination.audit import audit
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.scrub_order import live_shards
from layercheck.manifest import BadShard, Commit, EventId, LayerPlan, PlannedSave, RecoveryPlan, ShardRecord
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.quantise import Code, dequantise, quantise
from layercheck.persistence.shard_file import ResidualMeta, ShardAbout, ShardTensor, SliceMeta, layout
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery.fetch import FetchedLayer, Fetcher, part_of
from tests.fakes import flip_bit
from tests.runs import Group, committed, coordinator, start, with_base
from tests.shards import Shelf, shelf, values, wants

LAYER = "layers.0"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


def plan_now(storage: LocalStorage, **request: object) -> RecoveryPlan:
    made = make_plan(journal.load_facts(storage), PlanRequest(**request))  # type: ignore[arg-type]
    assert made is not None
    return made


def of_layer(plan: RecoveryPlan, name: str = LAYER) -> LayerPlan:
    return next(layer for layer in plan.layers if layer.layer == name)


def with_residuals(storage: LocalStorage, **settings: object) -> Group:
    """A version of step 6 and residuals of steps 8 and 10 on it; the run has come to step 12."""
    group = with_base(storage, **settings)
    group.save(6, LAYER)
    group.train(7)
    group.save_residual(8, LAYER, (6, 1))
    group.train(9, since=7)
    group.save_residual(10, LAYER, (6, 1))
    group.train(12, since=9)
    group.coordinator.close()
    return group


# --------------------------------------------------------------------------------------------------- the plan


def test_the_newest_residual_of_the_planned_version_is_added(storage: LocalStorage) -> None:
    with_residuals(storage)
    plan = plan_now(storage)
    layer = of_layer(plan)
    assert layer.residual is not None
    assert (layer.step, layer.age, layer.residual.step, layer.lost) == (6, 6, 10, 2)
    assert layer.nbytes == sum(shard.nbytes for shard in layer.shards + layer.residual.shards)
    assert all(other.residual is None for other in plan.layers if other.layer != LAYER)
    assert [event.step for event in layer.events] == [6, 10]


def test_a_newer_version_makes_the_residuals_of_the_older_one_dead(storage: LocalStorage) -> None:
    group = with_residuals(storage)
    group.save(12, LAYER)
    layer = of_layer(plan_now(storage))
    assert (layer.step, layer.residual) == (12, None)


def test_a_residual_of_another_attempts_version_of_the_same_step_is_none_of_this(
    storage: LocalStorage,
) -> None:
    group = with_residuals(storage)
    group.save_residual(11, LAYER, (6, 2))
    group.save_residual(12, LAYER, (4, 1))
    layer = of_layer(plan_now(storage))
    assert layer.residual is not None
    assert layer.residual.step == 10


def test_a_roll_back_adds_nothing_and_at_step_nothing_later(storage: LocalStorage) -> None:
    with_residuals(storage, keep_versions=4)
    assert all(layer.residual is None for layer in plan_now(storage, mode="uniform").layers)
    assert of_layer(plan_now(storage, at_step=9)).residual is None, "that of step 8 is gone"


def test_a_damaged_residual_costs_no_more_than_itself(storage: LocalStorage) -> None:
    with_residuals(storage)
    event = EventId(step=10, attempt=1)
    without = of_layer(plan_now(storage, without=frozenset([event.shard_file(1)])))
    assert (without.step, without.residual, without.fallback, without.lost) == (6, None, True, 6)
    bad = BadShard(file=event.shard_file(1), layer=LAYER, step=10, attempt=1, error="flipped")
    journal.blacklist_shard(storage, bad)
    assert of_layer(plan_now(storage)) == without


def test_what_a_zombie_added_is_dead(storage: LocalStorage) -> None:
    group = with_residuals(storage)
    second = start(storage, coordinator(storage), token="t2")
    assert of_layer(second.grant.plan).residual is not None  # type: ignore[arg-type]
    group.save_residual(13, LAYER, (6, 1))
    assert of_layer(plan_now(storage)).residual.step == 10  # type: ignore[union-attr]


def test_a_later_attempt_adds_to_the_version_of_an_earlier_one(storage: LocalStorage) -> None:
    with_residuals(storage)
    second = start(storage, coordinator(storage), token="t2")
    second.train(14)
    second.save_residual(14, LAYER, (6, 1))
    second.train(16, since=14)
    second.coordinator.close()
    layer = of_layer(plan_now(storage))
    assert layer.residual is not None
    assert (layer.attempt, layer.residual.attempt, layer.residual.step, layer.lost) == (1, 2, 14, 2)


# ------------------------------------------------------------------------------------------ collection, scrub


def test_i5_each_kept_version_keeps_its_newest_residual_and_no_other(storage: LocalStorage) -> None:
    group = with_residuals(storage)
    folders = committed(storage)
    assert "events/step-00000010.a001" in folders
    assert "events/step-00000008.a001" not in folders
    group.save(12, LAYER)
    assert "events/step-00000010.a001" in committed(storage), "its version is the second newest"
    group.save(13, LAYER)
    assert "events/step-00000010.a001" not in committed(storage)
    rows = history.read_history(storage)
    assert {(row.step, row.kind, row.base_step) for row in rows if row.step >= 8} == {
        (8, "residual", 6), (10, "residual", 6),
    }  # fmt: skip
    assert all(row.kind == "version" for row in rows if row.step < 8)


def test_every_residual_that_a_plan_could_use_is_scrubbed_and_verified(storage: LocalStorage) -> None:
    with_residuals(storage)
    facts = journal.load_facts(storage)
    shards = live_shards(facts)
    assert {shard.step for shard in shards if shard.layer == LAYER} >= {4, 6, 10}
    # These shards have no header: each of the rows is looked at, and each is bad.
    assert {fault.step for fault in audit(storage, facts).bad} >= {4, 6, 10}


# ----------------------------------------------------------------------------------------- files as they were


def test_a_commit_without_residuals_has_the_digest_and_the_columns_it_always_had(
    storage: LocalStorage,
) -> None:
    group = with_base(storage)
    event = EventId(step=6, attempt=1)
    rows = group.rows(event, 0, ("norm",)) + group.rows(event, 1, ("norm",))
    commit = Commit(event=event, records=rows, trainer_state={"step": 6}, lineage=())
    data = commit_file.encode(commit)
    assert pq.read_table(pa.BufferReader(data)).schema.names == commit_file.SCHEMA.names
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata.metadata
    assert metadata[b"digest"] == GOLDEN_DIGEST, "older stores would not be readable any more"


GOLDEN_DIGEST = b"1bd979be27bdadd40b3e76ca59bbfe3e"
"""Of the version of the library before there were residuals."""


def test_a_commit_with_a_residual_is_read_back_and_a_turned_base_is_seen(storage: LocalStorage) -> None:
    with_residuals(storage)
    event = EventId(step=10, attempt=1)
    data = storage.read(event.commit_file)
    commit = commit_file.decode(data, event)
    assert commit.bases == {LAYER: (6, 1)}
    turned = tuple(row.model_copy(update={"base_step": 4}) for row in commit.records)
    texts = [commit_file.text_of(commit.records)]
    forged = commit_file.encode(commit.model_copy(update={"records": turned}), texts)
    with pytest.raises(commit_file.DamagedCommitError, match="digest"):
        commit_file.decode(forged, event)


def test_a_header_of_a_version_has_no_key_more() -> None:
    meta = SliceMeta(parameter="p", layer="a", step=1, shape=(4,), offset=0, numel=4)
    header = layout(
        [ShardTensor("p", "fp32", "a", "F32", 4)],
        [meta],
        ShardAbout(step=1, attempt=1, rank=0, world_size=1),
    ).header
    told = json.loads(json.loads(header[8:])["__metadata__"]["p"])
    assert list(told) == ["layer", "step", "shape", "offset", "numel", "state"]


# --------------------------------------------------------------------------------------------------- fetching


def put_residual(store: Shelf, plan: LayerPlan, step: int, world_size: int, code: Code) -> LayerPlan:
    """Writes the residual of a shelf's version, as the ranks of that world size would."""
    (layer,) = (one for one in store.run.layer_map.layers if one.name == plan.layer)
    event, shards = EventId(step=step, attempt=2), []
    about = ResidualMeta(bits=code.bits, block=code.block, base_step=plan.step, base_attempt=plan.attempt)  # type: ignore[arg-type]
    for rank in range(world_size):
        tensors, slices, data = [], [], b""
        for spec in layer.params:
            begin, count = part_of(spec.numel, rank, world_size)
            codes, scales = quantise(values(spec, "exp_avg", step)[begin : begin + count], code)
            tensors.append(ShardTensor(spec.name, "residual", layer.name, code.dtype, codes.size))
            tensors.append(ShardTensor(spec.name, "residual_scale", layer.name, "BF16", scales.size))
            data += codes.tobytes() + scales.tobytes()
            slices.append(
                SliceMeta(
                    parameter=spec.name, layer=layer.name, step=step, shape=spec.shape, offset=begin,
                    numel=count, residual=about,
                )
            )  # fmt: skip
        placed = layout(tensors, slices, ShardAbout(step=step, attempt=2, rank=rank, world_size=world_size))
        store.storage.write(event.shard_file(rank), [placed.header, data])
        begin, end = placed.layers[layer.name]
        shards.append(
            ShardRecord(
                layer=layer.name, step=step, attempt=2, rank=rank, world_size=world_size,
                file=event.shard_file(rank), begin=begin, end=end, xxh3_128=xxh3_128_hexdigest(data),
                drift=1.0, threshold=0.5, age=1, reason="residual", snapshot_s=0.0, write_s=0.0,
                kind="residual", base_step=plan.step, base_attempt=plan.attempt,
            )
        )  # fmt: skip
    return plan.model_copy(update={"residual": PlannedSave(step=step, attempt=2, shards=tuple(shards))})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("version_by", "residual_by", "read_by"), [(2, 2, 2), (3, 2, 4), (1, 4, 3), (4, 3, 1)]
)
def test_weights_are_version_plus_residual_bit_by_bit_at_any_world_sizes(
    tmp_path: Path, bits: int, version_by: int, residual_by: int, read_by: int
) -> None:
    store, code = shelf(tmp_path, {"layers.0": ((7, 43), (5,))}), Code(bits, 64)
    (layer,) = store.run.layer_map.layers
    plan = put_residual(store, store.put(layer, 3, version_by), 9, residual_by, code)
    bases = [BaseCopies(lambda name: True) for _ in range(read_by)]
    found = [
        Fetcher(store.storage, bases=bases[rank]).fetch(plan, wants(layer.params, rank, read_by))
        for rank in range(read_by)
    ]
    for spec in layer.params:
        added = [
            dequantise(*quantise(part, code), part.size, code)
            for begin, count in (part_of(spec.numel, rank, residual_by) for rank in range(residual_by))
            for part in (values(spec, "exp_avg", 9)[begin : begin + count],)
        ]
        expected = values(spec, "fp32", 3) + np.concatenate(added)
        assert all(isinstance(one, FetchedLayer) for one in found), found
        whole = np.concatenate([one.slices[spec.name].tensors["fp32"] for one in found])  # type: ignore[union-attr]
        np.testing.assert_array_equal(whole.view(np.float32), expected)
        moments = np.concatenate([one.slices[spec.name].tensors["exp_avg"] for one in found])  # type: ignore[union-attr]
        np.testing.assert_array_equal(moments.view(np.float32), values(spec, "exp_avg", 3))
        kept = np.concatenate([copies.of(layer.name, spec.name, (3, 1)) for copies in bases])
        np.testing.assert_array_equal(kept, values(spec, "fp32", 3))


def test_who_wants_the_moments_alone_needs_no_residual(tmp_path: Path) -> None:
    store = shelf(tmp_path, {"layers.0": ((70,),)})
    (layer,) = store.run.layer_map.layers
    plan = put_residual(store, store.put(layer, 3, 1), 9, 1, Code(8, 64))
    fetcher = Fetcher(store.storage, frozenset(["exp_avg"]))
    found = fetcher.fetch(plan, wants(layer.params, 0, 1))
    assert isinstance(found, FetchedLayer)
    (spec,) = layer.params
    assert set(found.slices[spec.name].tensors) == {"exp_avg"}
    moments = found.slices[spec.name].tensors["exp_avg"].view(np.float32)
    np.testing.assert_array_equal(moments, values(spec, "exp_avg", 3))


def test_i6_a_flipped_bit_anywhere_in_a_residual_is_found(tmp_path: Path) -> None:
    store = shelf(tmp_path, {"layers.0": ((70,),)})
    (layer,) = store.run.layer_map.layers
    plan = put_residual(store, store.put(layer, 3, 1), 9, 1, Code(8, 64))
    assert plan.residual is not None
    path = tmp_path / plan.residual.shards[0].file
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 53):
        flip_bit(path, bit)
        bad = Fetcher(store.storage, sleep=lambda _: None).fetch(plan, wants(layer.params, 0, 1))
        assert isinstance(bad, BadShard), bit
        assert bad.step == 9
        path.write_bytes(whole)
    path.write_bytes(whole[:-1])
    assert isinstance(Fetcher(store.storage).fetch(plan, wants(layer.params, 0, 1)), BadShard)


def test_a_residual_of_another_version_is_bad(tmp_path: Path) -> None:
    store = shelf(tmp_path, {"layers.0": ((70,),)})
    (layer,) = store.run.layer_map.layers
    plan = put_residual(store, store.put(layer, 3, 1), 9, 1, Code(8, 64))
    other = store.put(layer, 4, 1).model_copy(update={"residual": plan.residual})
    bad = Fetcher(store.storage).fetch(other, wants(layer.params, 0, 1))
    assert isinstance(bad, BadShard)
    assert "not of version 4" in bad.error
