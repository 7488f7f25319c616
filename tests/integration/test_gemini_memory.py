"""GEMINI's copies in host memory, with real store processes, ranks and kills; no model, no Ray."""

import os
from pathlib import Path

import pytest

from app.baselines.gemini.host import HostStore
from app.baselines.gemini.memory import HostMemoryError, attach
from app.baselines.gemini.records import BoxShape
from tests.harness import run_ranks
from tests.integration.gemini_hosts import hosts
from tests.integration.gemini_ranks import (
    META_ROOM,
    copy_and_die,
    costs,
    damage,
    die_in_the_exchange,
    find_again,
    gate_and_pressure,
    go_on_and_die,
    lose_the_store,
    size_of,
)


def copied(tmp: Path, where: str, *steps: int) -> str:
    """All ranks have copied these steps and were killed."""
    folder = str(tmp / "hosts")
    assert run_ranks(len(where), tmp, copy_and_die, folder, where, b"life-one", *steps) == [None] * len(where)
    return folder


def test_after_a_kill_of_all_trainers_each_rank_finds_its_shard_on_its_own_host(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        folder = copied(tmp_path, "ab", 1, 2, 3)
        assert run_ranks(2, tmp_path, find_again, folder, "ab") == [("own", 3, True, ("own", "own"))] * 2


def test_a_lost_host_is_replaced_from_its_peer_and_two_lost_hosts_are_not(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b", "c", "d") as running:
        folder = copied(tmp_path, "ab", 1, 2)
        running["b"].kill()
        running["b"].join()
        assert run_ranks(2, tmp_path, find_again, folder, "ac") == [("peer", 2, True, ("own", "peer"))] * 2
        assert run_ranks(2, tmp_path, find_again, folder, "cd") == [("peer", 2, True, ("host", "host"))] * 2
        running["a"].kill()
        running["a"].join()
        assert run_ranks(2, tmp_path, find_again, folder, "cd", 1) == [("remote", 1, True, ())] * 2
        assert run_ranks(2, tmp_path, find_again, folder, "cd") == [("fresh", 0, True, ())] * 2


def test_a_ring_of_three_survives_each_loss(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b", "c", "d") as running:
        folder = copied(tmp_path, "abc", 1, 2)
        running["b"].kill()
        running["b"].join()
        found = run_ranks(3, tmp_path, find_again, folder, "adc")
        assert found == [("peer", 2, True, ("own", "peer", "own"))] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_in_the_exchange_falls_back_one_aligned_step(tmp_path, victim):
    with hosts(tmp_path / "hosts", "a", "b"):
        folder = str(tmp_path / "hosts")
        assert run_ranks(2, tmp_path, die_in_the_exchange, folder, "ab", 4, victim) == [None, None]
        assert run_ranks(2, tmp_path, find_again, folder, "ab") == [("own", 3, True, ("own", "own"))] * 2


def test_a_damaged_copy_is_passed_over_for_the_replica_and_then_for_the_step_before(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        folder = copied(tmp_path, "ab", 1, 2)
        run_ranks(2, tmp_path, damage, folder, "ab", (1, 1), 2)
        assert run_ranks(2, tmp_path, find_again, folder, "ab") == [("peer", 2, True, ("own", "peer"))] * 2
        run_ranks(2, tmp_path, damage, folder, "ab", (1, 0), 2)
        assert run_ranks(2, tmp_path, find_again, folder, "ab") == [("own", 1, True, ("own", "own"))] * 2


def test_a_second_life_whose_ranks_changed_hosts_goes_on_and_is_found(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        folder = copied(tmp_path, "ab", 1, 2)
        assert run_ranks(2, tmp_path, go_on_and_die, folder, "ba", 3, 4) == [None, None]
        assert run_ranks(2, tmp_path, find_again, folder, "ba") == [("own", 4, True, ("own", "own"))] * 2


def test_one_host_alone_and_one_rank_alone_keep_copies_too(tmp_path):
    with hosts(tmp_path / "hosts", "a"):
        folder = copied(tmp_path, "aaa", 1)
        assert run_ranks(3, tmp_path, find_again, folder, "aaa") == [("own", 1, True, ("own",) * 3)] * 3
    with hosts(tmp_path / "hosts", "a"):
        folder = copied(tmp_path, "a", 1)
        assert run_ranks(1, tmp_path, find_again, folder, "a") == [("own", 1, True, ("own",))]


def test_the_update_waits_for_the_copy_and_the_next_copy_for_the_exchange(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        for seen in run_ranks(2, tmp_path, gate_and_pressure, str(tmp_path / "hosts"), "ab"):
            assert [what for what, is_so in seen.items() if not is_so] == []


def test_bytes_of_host_and_network_are_counted(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        found = run_ranks(2, tmp_path, costs, str(tmp_path / "hosts"), "ab")
    meta = len(b"meta of 0 at 1")
    data = [4 * (size_of(rank) + 3) for rank in (0, 1)]
    for rank, cost in enumerate(found):
        assert cost.aligned
        assert 0 <= cost.sent_bytes - meta - data[rank] < 200  # a record goes along
        assert cost.host_bytes == 2 * (meta + data[rank])


def test_a_store_that_dies_alone_is_noticed_and_ends_no_training(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        assert run_ranks(2, tmp_path, lose_the_store, str(tmp_path / "hosts"), "ab") == [True, True]


# ------------------------------------------------------------------ one store


def test_memory_has_no_name_that_could_outlive_the_store(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with hosts(tmp_path / "hosts", "a") as running:
        copied(tmp_path, "aa", 1)
        assert {name for name in set(os.listdir("/dev/shm")) - before if "gemini" in name} == set()
        running["a"].kill()
        running["a"].join()
    assert {name for name in set(os.listdir("/dev/shm")) - before if "gemini" in name} == set()


def test_another_run_of_the_same_name_finds_nothing_and_frees_the_memory():
    store = HostStore("a")
    store.enter("first", b"attempt1", os.getpid())
    (_, region) = store.open({(0, 0): BoxShape(META_ROOM, 100)})[0, 0]
    store.enter("second", b"attempt2", os.getpid())
    assert store.copies("second") == ()
    with pytest.raises(HostMemoryError, match="does not give its memory away"):
        attach(region)


def test_a_box_that_is_no_longer_wanted_is_freed():
    store = HostStore("a")
    store.enter("first", b"attempt1", os.getpid())
    regions = store.open({(0, 0): BoxShape(META_ROOM, 100), (1, 0): BoxShape(META_ROOM, 100)})
    store.keep_only({(0, 0)})
    attach(regions[0, 0][1])
    with pytest.raises(HostMemoryError):
        attach(regions[1, 0][1])


def test_a_trainer_of_an_attempt_before_that_still_runs_is_not_read_beside(monkeypatch):
    monkeypatch.setattr("app.baselines.gemini.host._WRITER_S", 0.2)
    store = HostStore("a")
    store.enter("run", b"attempt1", os.getppid())
    with pytest.raises(HostMemoryError, match=f"process {os.getppid()} of the attempt before still runs"):
        store.enter("run", b"attempt2", os.getpid())
    store.enter("run", b"attempt1", os.getpid())  # another rank of the same attempt
