"""Slices for any world size from versions of any world size, one layer and one block at a time."""

import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layercheck.layers import ParamSpec
from layercheck.manifest import BadShard
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery import fetch, restore
from layercheck.recovery.fetch import FetchedLayer, Fetcher, part_of
from tests.fakes import flip_bit
from tests.shards import KEYS, shelf, values


@dataclass(frozen=True)
class Want:
    spec: ParamSpec
    offset: int
    numel: int


def wants(params: tuple[ParamSpec, ...], rank: int, world_size: int) -> list[Want]:
    return [Want(spec, *part_of(spec.numel, rank, world_size)) for spec in params]


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

    def read_into(self, path: str, begin: int, into: memoryview) -> None:
        self.reads.append(into.nbytes)
        super().read_into(path, begin, into)


class Partitions:
    """Stands for an engine: takes each layer and keeps nothing of it."""

    def __init__(self, slices: dict[str, list[Want]]) -> None:
        self.slices = slices
        self.sub_groups: tuple[Any, ...] = ()
        self.nbytes = 0

    def write(self, part: Want, tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
        self.nbytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(("written_by", "world_size"), [(1, 4), (3, 2)])
def test_a_restore_holds_one_layer_of_this_rank_and_one_block_beside_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_by: int, world_size: int
) -> None:
    block = 64 << 10
    monkeypatch.setattr(fetch, "BLOCK_BYTES", block)
    shapes = {f"layers.{i}": ((256 << 10,), (300,)) for i in range(6)}
    store = shelf(tmp_path, shapes)
    plans = tuple(store.put(layer, 2, written_by) for layer in store.run.layer_map.layers)
    storage = CountingStorage(str(tmp_path))
    mine = {layer.name: wants(layer.params, 1, world_size) for layer in store.run.layer_map.layers}
    largest = max(sum(12 * want.numel for want in layer) for layer in mine.values())
    engine = Partitions(mine)
    tracemalloc.start()
    try:
        bad = restore._fetch(engine, Fetcher(storage), plans)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bad == []
    assert engine.nbytes == sum(12 * want.numel for layer in mine.values() for want in layer)
    assert max(storage.reads) <= block
    assert peak <= largest + block + (256 << 10), f"{peak} bytes with {largest} in the largest layer"
    assert peak >= largest, "the measure sees the layer itself"


def test_the_storage_is_told_of_the_next_layers_before_one_is_read(tmp_path: Path) -> None:
    store = shelf(tmp_path, {f"layers.{i}": ((64,),) for i in range(6)})
    plans = tuple(store.put(layer, 2, 2) for layer in store.run.layer_map.layers)
    files = [plan.shards[1].file for plan in plans]
    told: list[str] = []

    class Listening(LocalStorage):
        def expect(self, path: str, begin: int, end: int) -> None:
            told.append(path)
            super().expect(path, begin, end)

        def read_into(self, path: str, begin: int, into: memoryview) -> None:
            assert told == files[: files.index(path) + restore._AHEAD]
            super().read_into(path, begin, into)

    mine = {layer.name: wants(layer.params, 1, 2) for layer in store.run.layer_map.layers}
    assert restore._fetch(Partitions(mine), Fetcher(Listening(str(tmp_path))), plans) == []  # type: ignore[arg-type]
    assert told == files


def test_a_hint_about_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    LocalStorage(str(tmp_path)).expect("events/none", 0, 10)
