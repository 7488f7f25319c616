"""A vault on its own: what it writes, keeps and drops, and what any death leaves in shared memory."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from layercheck.errors import FencedError, VaultError
from layercheck.manifest import EventId
from layercheck.memory import folders, segment
from tests.fakes import SlowStorage, flip_bit
from tests.vaults import (
    HEADER,
    LAYERS,
    NEXT,
    RUN,
    TOKEN,
    Node,
    Told,
    claim,
    content,
    die,
    event,
    make_vault,
    memory_event,
    rank_of,
    whole,
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    die(made.vault)


# ----------------------------------------------------------------------------------- sealed means written


def test_what_a_rank_seals_is_written_and_reported_as_by_its_writer(node: Node) -> None:
    node.rank.stage(event(3), LAYERS)
    assert node.vault.drain(0, 5.0)
    assert node.storage.read(event(3).shard_file(0)) == whole(3)
    (rows,) = node.told.recorded.values()
    assert [row.layer for row in rows] == list(LAYERS)
    assert all(row.write_s > 0 for row in rows)
    assert node.vault.read(event(3).shard_file(0), 4, 20) == whole(3)[4:20]


def test_a_copy_for_memory_alone_never_reaches_the_storage(node: Node) -> None:
    node.rank.stage(memory_event(3), LAYERS)
    assert node.vault.drain(0, 5.0)
    assert node.told.recorded == {}
    assert node.storage.list("events") == []
    (held,) = node.vault.settle(NEXT, 1.0)
    assert (held.event, held.layers, held.node) == (memory_event(3), frozenset(LAYERS), "n0")


def test_a_rank_that_dies_after_the_seal_and_before_the_word_is_heard_all_the_same(node: Node) -> None:
    rows = node.rank.write(event(3), LAYERS)
    _, nbytes = node.rank.sink._open[event(3)]
    node.vault.sealed = lambda file: None  # type: ignore[method-assign]
    node.rank.sink.record(event(3), 0, rows, {"step": 3})
    del node.vault.sealed
    assert node.told.recorded == {}
    (held,) = node.vault.settle(NEXT, 5.0)
    assert held.nbytes == nbytes
    assert node.storage.read(event(3).shard_file(0)) == whole(3)
    assert list(node.told.recorded) == [(event(3), 0)]


@pytest.mark.parametrize("made", [event(3), memory_event(3)])
def test_a_vault_that_is_gone_after_the_seal_is_not_waited_for(node: Node, made: EventId) -> None:
    def gone(file: str) -> None:
        raise VaultError("the vault of node n0 is gone")

    node.vault.sealed = gone  # type: ignore[method-assign]
    node.rank.stage(made, LAYERS)
    assert len(node.rank.sink.take_alerts()) == 1
    assert (node.storage.size(made.shard_file(0)) is None) == made.in_memory
    assert list(node.told.recorded) == ([] if made.in_memory else [(made, 0)])
    node.restart()
    assert node.vault.files == {made.shard_file(0)}


def test_a_vault_that_dies_is_followed_by_one_that_writes_what_it_had_sealed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.storage.arm("rank-", times=100)
    node.vault._uploads.close(5.0)  # it dies before it has written anything
    node.rank.stage(event(3), LAYERS)
    node.rank.write(event(4), LAYERS)
    node.storage.arm("rank-", times=0)
    node.restart()
    assert node.vault.drain(0, 5.0)
    assert list(node.told.recorded) == [(event(3), 0)], "the torn one is not"
    node.restart()
    assert node.vault.drain(0, 5.0)
    die(node.vault)


def test_a_segment_of_a_store_that_was_deleted_is_neither_written_nor_offered_as_ours(node: Node) -> None:
    stranger = rank_of(node.vault, node.storage, node.told, token=NEXT)
    stranger.stage(event(3), LAYERS)
    assert node.vault.drain(0, 5.0)
    assert node.told.recorded == {}
    assert node.storage.list("events") == []


def test_bytes_that_changed_in_memory_do_not_reach_the_storage(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.vault._uploads.close(5.0)
    node.rank.stage(event(3), LAYERS)
    (path,) = (Path(node.vault.folder, name) for name in folders.segments(node.vault.folder))
    flip_bit(path, 8 * (segment.DATA_AT + len(HEADER) + 5))
    node.restart()
    assert node.vault.drain(0, 5.0)
    assert node.storage.size(event(3).shard_file(0)) is None
    assert (node.told.recorded, node.told.lost_events) == ({}, [event(3)])
    die(node.vault)


@pytest.mark.parametrize("times", [1, 100])
def test_i9_a_storage_that_refuses_is_asked_again_and_then_costs_one_event(
    tmp_path: Path, times: int
) -> None:
    node = Node(tmp_path)
    die(node.vault)
    node.vault = make_vault(tmp_path, node.storage, node.told, retries=1)
    node.rank = rank_of(node.vault, node.storage, node.told)
    node.storage.arm("rank-", times=times)
    node.rank.stage(event(3), LAYERS)
    assert node.vault.drain(0, 5.0)
    assert node.told.lost_events == ([] if times == 1 else [event(3)])
    assert len(node.told.recorded) == (times == 1)
    die(node.vault)


# ------------------------------------------------------------------------------------------------ what may go


def test_the_newest_copy_of_each_layer_stays_and_older_ones_go(node: Node) -> None:
    for step in range(1, 29):
        node.rank.stage(memory_event(step), LAYERS[: 1 + step % 3])
    node.rank.write(memory_event(29), ("a",))
    kept = {held.event.step: held.layers for held in node.vault.settle(NEXT, 1.0)}
    assert kept == {26: frozenset("abc"), 28: frozenset("ab")}, "27 has nothing that 28 has not newer"


def test_what_is_sealed_in_the_same_step_replaces_nothing_yet(node: Node) -> None:
    """Another rank may die before it seals that: then the copy of the step before is needed."""
    node.rank.stage(memory_event(7), LAYERS)
    node.rank.stage(event(8), LAYERS)
    node.rank.stage(memory_event(8), ("a",))
    assert memory_event(7).shard_file(0) in node.vault.files
    assert node.vault.drain(0, 5.0)
    node.rank.stage(memory_event(9), ("a",))
    assert memory_event(7).shard_file(0) not in node.vault.files


def test_what_is_not_written_yet_stays_even_when_memory_is_full(tmp_path: Path) -> None:
    node = Node(tmp_path, budget=1000)
    node.vault._uploads.close(5.0)  # a storage that hangs
    node.rank.stage(event(1), LAYERS)
    node.rank.stage(event(2), LAYERS)
    node.rank.stage(memory_event(3), LAYERS)
    with pytest.raises(VaultError, match=r"memory\.budget_gb"):
        node.rank.stage(memory_event(4), LAYERS)
    assert node.vault.files == {
        event(1).shard_file(0),
        event(2).shard_file(0),
        memory_event(3).shard_file(0),
    }
    assert len(node.rank.sink.take_alerts()) == 1
    with pytest.raises(VaultError):
        node.rank.stage(memory_event(5), LAYERS)
    assert node.rank.sink.take_alerts() == [], "said once"
    die(node.vault)


def test_an_event_that_memory_cannot_take_goes_to_the_storage_after_those_before_it(tmp_path: Path) -> None:
    """A coordinator takes a rank that speaks of a later event at its word: the earlier one will not come."""
    storage, told = SlowStorage(str(tmp_path / "store"), "step-00000001"), Told()
    claim(storage)
    vault = make_vault(tmp_path, storage, told, budget=700)
    rank = rank_of(vault, storage, told)
    rank.stage(event(1), LAYERS)
    threading.Timer(0.3, storage.gate.set).start()
    rank.stage(event(2), LAYERS, nbytes=400)
    assert [key for key, _ in told.recorded] == [event(1), event(2)]
    assert storage.read(event(2).shard_file(0)) == HEADER + content(LAYERS, 2, 400)[1]
    die(vault)


def test_a_machine_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, begin: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    node = Node(tmp_path)
    monkeypatch.setattr("os.posix_fallocate", no_room)
    with pytest.raises(VaultError, match="/dev/shm"):
        node.rank.stage(memory_event(1), LAYERS)
    assert folders.segments(node.vault.folder) == []
    die(node.vault)


# --------------------------------------------------------------------------------------- torn, foreign, old


@pytest.mark.parametrize("cut", [0, 10, segment.DATA_AT, segment.DATA_AT + 50, -1])
def test_a_torn_segment_is_none(node: Node, cut: int) -> None:
    node.rank.stage(memory_event(3), LAYERS)
    (name,) = folders.segments(node.vault.folder)
    path = Path(node.vault.folder, name)
    path.write_bytes(path.read_bytes()[:cut])
    assert segment.read_held(str(path)) is None
    node.restart()
    assert node.vault.settle(NEXT, 1.0) == ()
    node.rank.stage(memory_event(4), LAYERS)
    assert folders.segments(node.vault.folder) == ["step-00000004.a001.p9999.r00000"], "its rank went on"


def test_no_flipped_bit_of_what_a_segment_says_of_itself_is_believed(node: Node) -> None:
    node.rank.stage(memory_event(3), ("a",))
    (name,) = folders.segments(node.vault.folder)
    path = Path(node.vault.folder, name)
    whole = path.read_bytes()
    meta_at = segment.DATA_AT + len(HEADER) + 100
    for byte in (*range(40), *range(meta_at, len(whole), 7)):
        flip_bit(path, 8 * byte + byte % 8)
        assert segment.read_held(str(path)) is None, byte
        path.write_bytes(whole)
    assert segment.read_held(str(path)) is not None


def test_a_foreign_file_is_removed_and_one_of_another_run_is_not_ours(node: Node) -> None:
    Path(node.vault.folder, "something").write_bytes(b"x" * 5000)
    node.rank.sink._about = type(node.rank.sink._about)("another", "n0", 0, 1, TOKEN)
    node.rank.stage(memory_event(3), LAYERS)
    assert "torn" in node.rank.sink.take_alerts()[0]
    assert node.vault.settle(NEXT, 1.0) == ()
    assert "something" not in os.listdir(node.vault.folder)


def test_offers_add_up_and_a_torn_one_counts_for_nothing(node: Node) -> None:
    node.rank.stage(memory_event(3), LAYERS)
    (name,) = folders.segments(node.vault.folder)
    path = Path(node.vault.folder, name)
    assert node.vault.settle(NEXT, 1.0)[0].offered == (NEXT,)
    with path.open("ab") as file:
        file.write(b"torn")
    assert node.vault.settle("33" * 16, 1.0)[0].offered == (NEXT, "33" * 16)
    node.restart()
    assert node.vault.settle(NEXT, 1.0)[0].offered == (NEXT, "33" * 16), "once each"


def test_i8_an_attempt_that_goes_on_fences_those_before_and_keeps_what_it_came_from(node: Node) -> None:
    node.rank.stage(memory_event(3), LAYERS)
    node.rank.stage(memory_event(4), ("a",))
    zombie = node.rank
    node.vault.began(NEXT, {memory_event(3).shard_file(0)})
    assert node.vault.files == {memory_event(3).shard_file(0)}
    with pytest.raises(FencedError):
        zombie.stage(memory_event(5), LAYERS)
    rank_of(node.vault, node.storage, node.told, token=NEXT).stage(memory_event(4, attempt=2), LAYERS)
    node.vault.began(NEXT, set())
    assert len(node.vault.files) == 2, "the word of a second rank of the node changes nothing"


def test_what_a_later_attempt_has_dropped_is_not_tried_again_and_again(tmp_path: Path) -> None:
    """With eight tries half a minute would pass before the next file of this node is written."""
    storage, told = SlowStorage(str(tmp_path / "store"), "step-00000001"), Told()
    claim(storage)
    claim(storage, 2, NEXT)
    vault = make_vault(tmp_path, storage, told, budget=10**8, retries=8)
    rank_of(vault, storage, told).stage(event(1), LAYERS, nbytes=segment._CHUNK_BYTES)
    assert storage.waiting.wait(5.0)
    vault.began(NEXT, set())
    storage.gate.set()
    rank_of(vault, storage, told, token=NEXT).stage(event(2, attempt=2), LAYERS)
    assert vault.drain(0, 5.0)
    assert (event(2, attempt=2), 0) in told.recorded
    die(vault)


# ------------------------------------------------------------------------------------------------- the end


def test_the_last_rank_of_a_node_frees_everything_of_the_run_on_this_machine(tmp_path: Path) -> None:
    node = Node(tmp_path)
    dead = make_vault(tmp_path, node.storage, node.told, node="n1")
    rank_of(dead, node.storage, node.told).stage(memory_event(3), LAYERS)
    die(dead)
    node.rank.stage(event(3), LAYERS)
    rank_of(node.vault, node.storage, node.told, rank=1).stage(event(3), LAYERS)
    node.vault.end(0)
    assert len(node.left) == 2
    node.vault.end(1)
    assert node.left == []


def test_a_folder_without_an_owner_goes_after_a_while_and_one_with_an_owner_never(tmp_path: Path) -> None:
    node = Node(tmp_path)
    place = str(tmp_path / "shm")
    node.rank.stage(memory_event(3), LAYERS)
    assert folders.sweep(place) == []
    die(node.vault)
    assert folders.sweep(place, older_than_s=3600.0) == []
    assert folders.sweep(place, run="another") == []
    assert folders.sweep(place) == [node.vault.folder]
    assert node.left == []


def test_what_a_dead_node_left_goes_and_that_of_a_living_one_waits_for_its_vault(tmp_path: Path) -> None:
    place = str(tmp_path / "shm")
    folders_of = [folders.folder_of(RUN, node, place) for node in ("n0", "n1", "n2")]
    owner = Node(tmp_path).vault  # of n0
    for folder in folders_of[1:]:
        folders.take(folder).release()
    assert folders.sweep(place, run=RUN, nodes=["n1"]) == [folders_of[2]], "n0 has a vault, n1 may get one"
    assert sorted(folders.of_run(RUN, place)) == sorted(folders_of[:2])
    die(owner)
    assert folders.sweep(place, run=RUN, nodes=["n1"]) == [folders_of[0]]


def test_two_vaults_of_one_node_are_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(VaultError, match="another vault"):
        folders.take(node.vault.folder, limit_s=0.1)
    die(node.vault)


def test_a_child_that_outlives_a_vault_does_not_keep_its_folder(tmp_path: Path) -> None:
    node = Node(tmp_path)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0)
    try:
        node.restart()  # refused after 20 s if the child held the lock
        die(node.vault)
    finally:
        os.write(tell, b"x")
        assert os.waitpid(child, 0)[1] == 0
