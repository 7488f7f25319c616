"""A recovery reads from the nearest memory, checks every byte, and goes on to the next place if it must."""

import logging
from pathlib import Path

import numpy as np
import pytest

from layercheck.errors import VaultError
from layercheck.manifest import BadShard, LayerPlan, PlannedSave
from layercheck.memory import segment
from layercheck.memory.held import Held
from layercheck.memory.reader import MemoryFirst, OwnCopy, PeerCopy
from layercheck.recovery.fetch import FetchedLayer, Fetcher
from tests.fakes import flip_bit
from tests.shards import KEYS, Shelf, shelf, values, wants

SHAPES = {"a": ((40, 3), (7,)), "b": ((9,),)}


class Peer:
    """The vault of another node with one file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.is_dead = data, False

    def read(self, file: str, begin: int, end: int) -> bytes:
        if self.is_dead:
            raise VaultError("node n1 is gone")
        return self.data[begin:end]


def put(store: Shelf, tmp: Path, plan: LayerPlan, rank: int = 0) -> Path:
    """The same file as a segment."""
    file = plan.shards[rank].file
    data = store.storage.read(file)
    path = tmp / f"segment-{rank}"
    segment.create(str(path), len(data))
    segment.fill(str(path), [data])
    held = Held(
        run="run", home="n0", event=plan.shards[rank].event, rank=rank, world_size=1, token="11" * 16,
        nbytes=len(data), records=(plan.shards[rank],), trainer_state={},
    )  # fmt: skip
    segment.seal(str(path), held)
    return path


def fetch(reader: MemoryFirst, plan: LayerPlan, store: Shelf) -> FetchedLayer | BadShard:
    (layer,) = (one for one in store.run.layer_map.layers if one.name == plan.layer)
    fetcher = Fetcher(reader, sleep=lambda _: None, pass_over=reader.pass_over)
    return fetcher.fetch(plan, wants(layer.params, 0, 1))


def check(found: FetchedLayer | BadShard, store: Shelf, step: int) -> None:
    assert isinstance(found, FetchedLayer), found
    (layer,) = (one for one in store.run.layer_map.layers if one.name == found.layer)
    for spec in layer.params:
        for key in KEYS:
            got = found.slices[spec.name].tensors[key].view(np.float32)
            np.testing.assert_array_equal(got, values(spec, key, step))


@pytest.fixture
def store(tmp_path: Path) -> Shelf:
    return shelf(tmp_path / "store", SHAPES)


def test_memory_is_read_and_the_storage_is_not(store: Shelf, tmp_path: Path) -> None:
    plan = store.put(store.run.layer_map.layers[0], 5, 1)
    path, file = put(store, tmp_path, plan), plan.shards[0].file
    size = store.storage.size(file)
    assert size is not None
    store.storage.delete(file)
    reader = MemoryFirst(store.storage, {file: [OwnCopy(str(path), size)]})
    check(fetch(reader, plan, store), store, 5)
    assert reader.tiers == {file: "memory"}
    assert reader.size(file) == size


@pytest.mark.parametrize("where", [segment.DATA_AT + 3, segment.DATA_AT + 2000, -1])
def test_i6_a_bad_copy_is_passed_over_out_loud_for_the_peer_and_then_for_the_storage(
    store: Shelf, tmp_path: Path, where: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit of the header, one of the weights, a segment that is gone."""
    plan = store.put(store.run.layer_map.layers[0], 5, 1)
    path, file = put(store, tmp_path, plan), plan.shards[0].file
    data = store.storage.read(file)
    if where < 0:
        path.unlink()
    else:
        flip_bit(path, 8 * where)
    peer = Peer(data)
    copies = {file: [OwnCopy(str(path), len(data)), PeerCopy(peer, file, len(data))]}  # type: ignore[arg-type]
    reader = MemoryFirst(store.storage, copies)
    with caplog.at_level(logging.WARNING):
        check(fetch(reader, plan, store), store, 5)
    assert reader.tiers == {file: "peer"}
    assert f"the copy of {file} in memory is damaged or gone: reading that in peer" in caplog.text
    peer.is_dead = True
    reader = MemoryFirst(store.storage, copies)
    check(fetch(reader, plan, store), store, 5)
    assert reader.tiers == {file: "storage"}


def test_i6_what_is_bad_everywhere_is_a_bad_shard(store: Shelf, tmp_path: Path) -> None:
    plan = store.put(store.run.layer_map.layers[1], 5, 1)
    path, file = put(store, tmp_path, plan), plan.shards[0].file
    data = store.storage.read(file)
    flip_bit(path, 8 * (segment.DATA_AT + len(data) - 1))
    flip_bit(Path(store.storage.root, file), 8 * (len(data) - 2))
    reader = MemoryFirst(store.storage, {file: [OwnCopy(str(path), len(data))]})
    bad = fetch(reader, plan, store)
    assert isinstance(bad, BadShard)
    assert bad.file == file


def test_the_version_in_memory_is_loaded_in_place_of_that_in_the_storage(
    store: Shelf, tmp_path: Path
) -> None:
    layer = store.run.layer_map.layers[0]
    old, new = store.put(layer, 5, 1), store.put(layer, 8, 1)
    path, file = put(store, tmp_path, new), new.shards[0].file
    size = store.storage.size(file)
    assert size is not None
    store.storage.delete(file)
    plan = old.model_copy(update={"memory": PlannedSave(step=8, attempt=1, shards=new.shards)})
    reader = MemoryFirst(store.storage, {file: [OwnCopy(str(path), size)]})
    found = fetch(reader, plan, store)
    check(found, store, 8)
    path.unlink()
    bad = fetch(MemoryFirst(store.storage, {file: [OwnCopy(str(path), size)]}), plan, store)
    assert isinstance(bad, BadShard)
    assert (bad.step, bad.file) == (8, file)


def test_no_reading_beyond_the_file_sees_what_lies_behind_it(store: Shelf, tmp_path: Path) -> None:
    plan = store.put(store.run.layer_map.layers[1], 5, 1)
    path, file = put(store, tmp_path, plan), plan.shards[0].file
    size = len(store.storage.read(file))
    reader = MemoryFirst(store.storage, {file: [OwnCopy(str(path), size)]})
    assert reader.read(file, size - 3, size + 50) == store.storage.read(file, size - 3)
    assert reader.read(file) == store.storage.read(file)
    room = bytearray(20)
    with pytest.raises(Exception, match="ends after 0 of 20"):
        reader.read_into(file, size - 3, memoryview(room))
