"""Slices for any world size from versions of any world size, read straight into place, block by block."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layercheck.errors import LayerCheckError
from layercheck.manifest import BadShard
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery import fetch, restore
from layercheck.recovery.fetch import FetchedLayer, Fetcher
from tests.fakes import flip_bit
from tests.shards import KEYS, Want, shelf, values, wants


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    written_by=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    world_size=st.integers(1, 6),
    block=st.integers(1, 300),
)
def test_a_composite_of_any_world_sizes_is_cut_for_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    written_by: list[int],
    world_size: int,
    block: int,
) -> None:
    store = shelf(
        tmp_path_factory.mktemp("store"),
        {f"layers.{i}": tuple((size,) for size in params) for i, params in enumerate(sizes)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "BLOCK_BYTES", block)
        for step, layer in enumerate(store.run.layer_map.layers, start=1):
            plan = store.put(layer, step, written_by[step - 1])
            cut = [
                _fetched(Fetcher(store.storage).fetch(plan, wants(layer.params, rank, world_size)))
                for rank in range(world_size)
            ]
            for spec in layer.params:
                for key in KEYS:
                    whole = np.concatenate([one.slices[spec.name].tensors[key] for one in cut])
                    np.testing.assert_array_equal(whole.view(np.float32), values(spec, key, step))
                assert all(one.slices[spec.name].scalars["step"]["value"] == step for one in cut)


def _fetched(found: FetchedLayer | BadShard) -> FetchedLayer:
    assert isinstance(found, FetchedLayer), found
    return found


def test_only_the_wanted_tensors_take_memory_but_every_byte_is_checked(tmp_path: Path) -> None:
    store = shelf(tmp_path, {"layers.0": ((8, 8),)})
    (layer,) = store.run.layer_map.layers
    plan = store.put(layer, 3, 2)
    fetcher = Fetcher(store.storage, frozenset(["fp32"]))
    found = _fetched(fetcher.fetch(plan, wants(layer.params, 0, 1)))
    assert set(found.slices["layers.0.0"].tensors) == {"fp32"}
    assert fetcher.nbytes == 64 * 4 * 3
    moments = tmp_path / plan.shards[1].file
    flip_bit(moments, 8 * (moments.stat().st_size - 1))
    bad = fetcher.fetch(plan, wants(layer.params, 0, 1))
    assert isinstance(bad, BadShard)
    assert bad.file == plan.shards[1].file
    assert "checksum" in bad.error


class CountingStorage(LocalStorage):
    """Notes the sizes of all reads into memory."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads: list[int] = []

    def read_into(self, path: str, begin: int, *into: memoryview) -> None:
        self.reads.append(sum(view.nbytes for view in into))
        super().read_into(path, begin, *into)


class Partitions:
    """Stands for an engine that keeps fp32 partitions and moments, on its own type of numbers."""

    def __init__(self, slices: dict[str, list[Want]], dtype: torch.dtype = torch.float32) -> None:
        self.slices = slices
        self.sub_groups = tuple(SimpleNamespace(index=i, layer=layer) for i, layer in enumerate(slices))
        self.cleared: list[int] = []
        self.live = {
            (want.spec.name, key): torch.full((want.numel,), torch.nan, dtype=dtype)
            for wants_of_layer in slices.values()
            for want in wants_of_layer
            for key in KEYS
        }
        self.scalars: dict[str, Any] = {}

    def clear_state(self, sub_group: int) -> None:
        self.cleared.append(sub_group)

    def room(self, part: Want, key: str) -> torch.Tensor:
        return self.live[part.spec.name, key]

    def set_scalars(self, part: Want, scalars: dict[str, Any]) -> None:
        self.scalars[part.spec.name] = scalars


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize(("written_by", "world_size"), [(1, 4), (3, 2)])
def test_a_restore_holds_one_block_beside_the_state_and_one_layer_only_where_it_must_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_by: int, world_size: int, is_direct: bool
) -> None:
    block = 64 << 10
    monkeypatch.setattr(fetch, "BLOCK_BYTES", block)
    shapes = {f"layers.{i}": ((256 << 10,), (300,)) for i in range(6)}
    store = shelf(tmp_path, shapes)
    plans = tuple(store.put(layer, 2, written_by) for layer in store.run.layer_map.layers)
    storage = CountingStorage(str(tmp_path))
    mine = {layer.name: wants(layer.params, 1, world_size) for layer in store.run.layer_map.layers}
    largest = max(sum(12 * want.numel for want in layer) for layer in mine.values())
    engine = Partitions(mine, torch.float32 if is_direct else torch.float64)
    tracemalloc.start()
    try:
        bad = restore._fetch(engine, Fetcher(storage), plans)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bad == []
    for want in (want for layer in mine.values() for want in layer):
        for key in KEYS:
            part = values(want.spec, key, 2)[want.offset : want.offset + want.numel]
            np.testing.assert_array_equal(engine.live[want.spec.name, key].numpy(), part)
        assert engine.scalars[want.spec.name]["step"]["value"] == 2
    assert max(storage.reads) <= block
    beside = 0 if is_direct else largest
    assert peak <= beside + block + (256 << 10), f"{peak} bytes with {largest} in the largest layer"
    assert peak >= beside, "the measure sees the layer itself"


def test_an_older_version_is_fetched_over_what_a_bad_one_left_in_place(tmp_path: Path) -> None:
    store = shelf(tmp_path, {"layers.0": ((50,), (7,))})
    (layer,) = store.run.layer_map.layers
    older, newer = store.put(layer, 1, 3), store.put(layer, 2, 2)
    damaged = tmp_path / newer.shards[1].file
    flip_bit(damaged, 8 * (damaged.stat().st_size - 1))
    engine: Any = Partitions({layer.name: wants(layer.params, 0, 1)})
    fetcher = Fetcher(store.storage)
    (bad,) = restore._fetch(engine, fetcher, (newer,))
    assert bad.file == newer.shards[1].file
    assert bad.layer not in engine.scalars, "nothing else is set of a layer that did not pass its check"
    assert engine.cleared == [0], "what a fresh version lacks is not taken over from an older state"
    assert restore._fetch(engine, fetcher, (older,)) == []
    assert engine.cleared == [0, 0], "nor from what was bad"
    for spec in layer.params:
        for key in KEYS:
            np.testing.assert_array_equal(engine.live[spec.name, key].numpy(), values(spec, key, 1))


def test_an_amended_plan_that_keeps_what_was_bad_is_an_error(tmp_path: Path) -> None:
    store = shelf(tmp_path, {"layers.0": ((4,),), "layers.1": ((4,),)})
    first, second = (store.put(layer, 2, 1) for layer in store.run.layer_map.layers)
    shard = second.shards[0]
    bad = BadShard(file=shard.file, layer=shard.layer, step=2, attempt=1, error="checksum")
    restore._check_all_replaced((bad,), (first, second))
    with pytest.raises(LayerCheckError, match=r"keeps layer layers\.1 of step 2"):
        restore._check_all_replaced((bad,), (first,))
