"""Pages of a segment that has had its time become those of the next one, and nothing else of it does."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from layercheck.errors import VaultError
from layercheck.manifest import EventId
from layercheck.memory import folders, segment
from tests.vaults import HEADER, LAYERS, NEXT, TOKEN, Node, content, die, memory_event


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    die(made.vault)


def _path(node: Node, event: EventId) -> str:
    return os.path.join(node.vault.folder, folders.segment_name(event, 0))


def _held_open(node: Node, event: EventId) -> int:
    """A descriptor of its segment: its links tell whether the file has a name, whichever that is."""
    return os.open(_path(node, event), os.O_RDONLY)


@pytest.mark.parametrize("nbytes", [100, 30, 5000])
def test_a_superseded_segment_becomes_the_next_one_whatever_its_size(node: Node, nbytes: int) -> None:
    for step in (1, 2):
        node.rank.stage(memory_event(step), LAYERS)
    fd = _held_open(node, memory_event(1))
    rows = node.rank.write(memory_event(3), LAYERS, nbytes)
    assert os.path.samestat(os.fstat(fd), os.stat(_path(node, memory_event(3))))
    os.close(fd)
    assert not os.path.exists(_path(node, memory_event(1)))
    assert segment.read_held(_path(node, memory_event(3))) is None, "torn until it is sealed"
    node.rank.sink.record(memory_event(3), 0, rows, {"step": 3})
    whole = HEADER + content(LAYERS, 3, nbytes)[1]
    assert node.vault.read(memory_event(3).shard_file(0), 0, 10**6) == whole
    node.restart()
    assert memory_event(3).shard_file(0) in node.vault.files


def test_it_is_torn_at_once_although_all_that_it_was_still_lies_in_it(node: Node) -> None:
    for step in (1, 2):
        node.rank.stage(memory_event(step), LAYERS)
    path = node.vault.open(memory_event(3), 0, TOKEN, 100_000)
    assert segment.read_held(path) is None


def test_offers_of_what_it_was_are_not_those_of_what_it_becomes(node: Node) -> None:
    for step in (1, 2):
        node.rank.stage(memory_event(step), LAYERS)
    assert {held.offered for held in node.vault.settle(NEXT, 1.0)} == {(NEXT,)}
    node.rank.stage(memory_event(3), LAYERS, nbytes=10)
    held = segment.read_held(_path(node, memory_event(3)))
    assert held is not None
    assert held.offered == ()


def test_a_torn_segment_is_not_taken_over_since_whoever_fills_it_may_live(node: Node) -> None:
    node.rank.write(memory_event(1), LAYERS)
    fd = _held_open(node, memory_event(1))
    node.rank.write(memory_event(2), LAYERS)
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_the_largest_of_several_is_taken_over_and_the_others_go(node: Node) -> None:
    for step, nbytes in ((1, 50), (2, 90), (3, 70)):
        node.rank.stage(memory_event(step), (LAYERS[step % 3],), nbytes)
    node.rank.stage(memory_event(4), LAYERS)
    fds = {step: _held_open(node, memory_event(step)) for step in (1, 2, 3)}
    node.rank.write(memory_event(5), LAYERS)
    assert {step: os.fstat(fd).st_nlink for step, fd in fds.items()} == {1: 0, 2: 1, 3: 0}
    for fd in fds.values():
        os.close(fd)
    assert len(folders.segments(node.vault.folder)) == 2


def test_a_segment_that_somebody_has_removed_is_made_anew(node: Node) -> None:
    for step in (1, 2):
        node.rank.stage(memory_event(step), LAYERS)
    os.unlink(_path(node, memory_event(1)))
    node.rank.stage(memory_event(3), LAYERS)
    assert memory_event(3).shard_file(0) in node.vault.files


def test_where_there_is_no_room_what_was_superseded_goes_all_the_same(tmp_path: Path) -> None:
    node = Node(tmp_path, budget=1000)
    for step in (1, 2):
        node.rank.stage(memory_event(step), LAYERS)
    with pytest.raises(VaultError, match="no room"):
        node.vault.open(memory_event(3), 0, TOKEN, 10_000)
    assert folders.segments(node.vault.folder) == [folders.segment_name(memory_event(2), 0)]
    die(node.vault)
