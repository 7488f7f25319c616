"""Claims by token, on a store whose `create` promises nothing."""

from pathlib import Path

import pytest
from pyarrow import fs

from layercheck.coordination import journal, object_claims
from layercheck.coordination.timer import Timer
from layercheck.persistence.arrow_storage import ArrowStorage
from tests.fakes import Clock
from tests.runs import Group, config, coordinator, run_record

LOW, HIGH = "0" * 31 + "1", "f" * 32


@pytest.fixture
def storage(tmp_path: Path) -> ArrowStorage:
    return ArrowStorage(fs.LocalFileSystem(), str(tmp_path / "run" / "layercheck"))


def test_the_lowest_token_wins_whoever_came_first(storage: ArrowStorage) -> None:
    clock = Clock()
    answers = {}

    def rival_comes(seconds: float) -> None:
        storage.write(f"attempts/a002.{LOW}.json", [b"rival"])
        clock.sleep(seconds)

    answers["first"] = object_claims.claim(storage, 2, HIGH, b"first", Timer(clock, rival_comes))
    assert answers == {"first": False}
    assert storage.list("attempts") == [f"a002.{LOW}.json"], "the loser takes its record away"
    assert object_claims.path(storage, 2) == f"attempts/a002.{LOW}.json"


def test_a_later_rival_with_a_higher_token_changes_nothing(storage: ArrowStorage) -> None:
    clock = Clock()

    def rival_comes(seconds: float) -> None:
        storage.write(f"attempts/a002.{HIGH}.json", [b"rival"])
        clock.sleep(seconds)

    assert object_claims.claim(storage, 2, LOW, b"first", Timer(clock, rival_comes))
    assert storage.read(object_claims.path(storage, 2)) == b"first"


def test_a_number_that_somebody_holds_is_not_claimed_again(storage: ArrowStorage) -> None:
    clock = Clock()
    assert object_claims.claim(storage, 2, HIGH, b"first", Timer(clock, clock.sleep))
    assert not object_claims.claim(storage, 2, LOW, b"second", Timer(clock, clock.sleep))
    assert object_claims.path(storage, 2) == f"attempts/a002.{HIGH}.json"


def test_a_slow_put_is_withdrawn_even_if_it_lands_once_more_and_its_number_is_gone(
    storage: ArrowStorage,
) -> None:
    clock = Clock()

    class SlowPut(ArrowStorage):
        def write(self, path: str, chunks: object) -> None:
            super().write(path, chunks)  # type: ignore[arg-type]
            clock.sleep(0.6)

    slow = SlowPut(fs.LocalFileSystem(), storage.root)
    assert not object_claims.claim(slow, 2, LOW, b"slow", Timer(clock, clock.sleep))
    storage.write(f"attempts/a002.{LOW}.json", [b"slow"])  # the network delivers it a second time
    assert object_claims.path(storage, 2) is None
    assert object_claims.numbers(storage) == {2}


def test_a_claim_that_died_before_it_was_sure_is_finished_by_the_same_token(storage: ArrowStorage) -> None:
    clock = Clock()
    storage.write(f"attempts/a002.{HIGH}.json", [b"first"])
    assert object_claims.confirm(storage, 2, HIGH, Timer(clock, clock.sleep))
    assert clock.now > Clock().now, "it waits for rivals as the claim itself would have"
    storage.write(f"attempts/a002.{LOW}.json", [b"too late"])
    assert object_claims.confirm(storage, 2, HIGH, Timer(clock, clock.sleep))
    assert storage.read(object_claims.path(storage, 2)) == b"first"


def test_a_claim_that_died_before_it_was_sure_may_have_lost_meanwhile(storage: ArrowStorage) -> None:
    clock = Clock()
    storage.write(f"attempts/a002.{LOW}.json", [b"slow and dead"])
    storage.write(f"attempts/a002.{HIGH}.json", [b"rival"])
    storage.write(f"attempts/a002.{HIGH}.won", [b"won"])
    assert not object_claims.confirm(storage, 2, LOW, Timer(clock, clock.sleep))
    assert storage.read(object_claims.path(storage, 2)) == b"rival"


def test_i8_a_second_claimant_of_an_object_store_fences_the_first(storage: ArrowStorage) -> None:
    first, second = coordinator(storage), coordinator(storage)  # type: ignore[arg-type]
    storage.write("probe", [b"x"])
    first.open_run(run_record(config()), "probe")
    old = Group(first, storage, first.begin_attempt(HIGH, "s1", 2, "composite"), 2)  # type: ignore[arg-type]
    old.save(0)
    new = second.begin_attempt(LOW, "s1", 2, "composite")
    assert (old.attempt, new.attempt) == (1, 2)
    old.save(2)
    assert [event.step for event in journal.event_folders(storage) if _is_committed(storage, event)] == [0]
    assert old.beat(3).fenced


def _is_committed(storage: ArrowStorage, event: object) -> bool:
    return storage.size(event.commit_file) is not None  # type: ignore[attr-defined]
