"""Copies on another node: what survives a node, and that nobody waits for them or is harmed by them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layercheck.errors import VaultError
from layercheck.manifest import EventId
from layercheck.memory import segment
from layercheck.persistence.storage import LocalStorage
from tests.vaults import HEADER, NEXT, Rank, Told, claim, content, die, make_vault, memory_event, rank_of

LAYERS = ("a", "b")


class Pair:
    """Two nodes; the first one's copies go to the second."""

    def __init__(self, tmp: Path, budget: int = 10**7) -> None:
        self.storage, self.told = LocalStorage(str(tmp / "store")), Told()
        claim(self.storage)
        self.peer: Any = make_vault(tmp, self.storage, self.told, budget, node="n1")
        self.found: Any = self.peer
        self.vault = make_vault(tmp, self.storage, self.told, node="n0", find_peer=lambda: self.found)
        self.rank: Rank = rank_of(self.vault, self.storage, self.told)

    def settle_copies(self) -> None:
        assert self.vault._copies is not None
        assert self.vault._copies.drain(5.0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for vault in (made.vault, made.peer):
        die(vault)


def test_what_is_sealed_here_is_whole_there_and_is_not_written_twice(pair: Pair) -> None:
    pair.rank.stage(EventId(step=3, attempt=1), LAYERS, nbytes=segment._CHUNK_BYTES)
    pair.rank.stage(memory_event(3), LAYERS)
    pair.settle_copies()
    assert pair.vault.drain(0, 5.0)
    assert pair.peer.files == pair.vault.files
    for held in pair.peer.settle(NEXT, 5.0):
        assert held.node == "n1"
        assert pair.peer.read(held.file, 0, held.nbytes) == pair.vault.read(held.file, 0, held.nbytes)
    assert list(pair.told.recorded) == [(EventId(step=3, attempt=1), 0)]


def test_after_the_loss_of_a_node_its_copies_are_offered_and_written(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.vault._uploads.close(5.0)
    pair.rank.stage(EventId(step=3, attempt=1), LAYERS)
    pair.settle_copies()
    die(pair.vault)
    assert pair.told.recorded == {}
    (held,) = pair.peer.settle(NEXT, 5.0)
    assert (held.event.step, held.rank, held.offered) == (3, 0, (NEXT,))
    assert pair.storage.read(held.file) == HEADER + content(LAYERS, 3)[1]
    assert list(pair.told.recorded) == [(EventId(step=3, attempt=1), 0)]
    die(pair.peer)


def test_copies_go_as_their_originals_go(pair: Pair) -> None:
    for step in range(1, 20):
        pair.rank.stage(memory_event(step), LAYERS)
        pair.settle_copies()
    assert {held.event.step for held in pair.peer.settle(NEXT, 1.0)} == {18, 19}


def test_a_copy_never_replaces_what_a_rank_of_that_node_has_made(pair: Pair) -> None:
    """A rank that moved between the nodes has the same name on both."""
    there = rank_of(pair.peer, pair.storage, pair.told)
    there.stage(memory_event(3), LAYERS, nbytes=50)
    pair.rank.stage(memory_event(3), LAYERS)
    pair.settle_copies()
    (held,) = pair.peer.settle(NEXT, 1.0)
    assert held.nbytes == len(HEADER) + 100


def test_what_may_have_been_taken_over_while_it_was_sent_is_never_called_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, end, ended = pair.peer.copy_put, pair.peer.copy_end, []

    def put_late(file: str, begin: int, data: bytes) -> None:
        if file == memory_event(1).shard_file(0):
            for step in (2, 3):
                pair.rank.stage(memory_event(step), LAYERS)
        put(file, begin, data)

    def note(held: Any) -> None:
        ended.append(held.event.step)
        end(held)

    monkeypatch.setattr(pair.peer, "copy_put", put_late)
    monkeypatch.setattr(pair.peer, "copy_end", note)
    pair.rank.stage(memory_event(1), LAYERS)
    pair.settle_copies()
    assert ended == [2, 3]


@pytest.mark.parametrize("failing", ["copy_begin", "copy_put", "copy_end"])
def test_a_node_that_fails_costs_its_copies_alone(
    pair: Pair, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise VaultError("the vault of node n1 is gone")

    monkeypatch.setattr(pair.peer, failing, gone)
    pair.rank.stage(EventId(step=3, attempt=1), LAYERS)
    pair.settle_copies()
    assert pair.vault.drain(0, 5.0)
    assert len(pair.told.recorded) == 1
    assert pair.peer.settle(NEXT, 1.0) == (), "a torn copy is none"
    monkeypatch.undo()
    pair.rank.stage(memory_event(4), LAYERS)
    pair.settle_copies()
    assert [held.event.step for held in pair.peer.settle(NEXT, 1.0)] == [4]


def test_without_another_node_and_on_a_full_one_training_goes_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path, budget=10)
    pair.rank.stage(memory_event(3), LAYERS)
    pair.found = None
    pair.rank.stage(memory_event(4), LAYERS)
    pair.settle_copies()
    assert pair.peer.files == frozenset()
    assert len(pair.vault.files) == 2
    for vault in (pair.vault, pair.peer):
        die(vault)


def test_the_last_rank_of_a_node_does_not_wait_for_ranks_of_which_it_has_copies(pair: Pair) -> None:
    there = rank_of(pair.peer, pair.storage, pair.told, rank=1)
    there.stage(memory_event(3), LAYERS)
    pair.rank.stage(memory_event(3), LAYERS)
    pair.settle_copies()
    pair.peer.end(1)
    assert pair.peer.is_over


def test_a_vault_that_comes_back_still_knows_whose_segments_it_has(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    there = rank_of(pair.peer, pair.storage, pair.told, rank=1)
    there.stage(memory_event(3), LAYERS)
    pair.rank.stage(memory_event(3), LAYERS)
    pair.settle_copies()
    die(pair.peer)
    again = make_vault(tmp_path, pair.storage, pair.told, node="n1")
    again.end(0)
    assert not again.is_over, "rank 1 of this node has not ended"
    again.end(1)
    assert again.is_over
    die(pair.vault)
