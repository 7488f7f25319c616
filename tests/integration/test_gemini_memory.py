"""GEMINI's copies in host memory, with real store processes, ranks and kills; no model, no Ray."""

import os
from pathlib import Path
from typing import Any

import pytest

from app.baselines.gemini.host import HostStore
from app.baselines.gemini.memory import HostMemoryError, attach
from app.baselines.gemini.records import BoxShape
from layercheck.errors import ConfigError
from tests.harness import run_ranks
from tests.integration.gemini_hosts import hosts
from tests.integration.gemini_ranks import (
    a_bad_round,
    a_late_copy,
    die_in_the_exchange,
    gate_and_pressure,
    lose_the_store,
    play,
    size_of,
)

OWN = ("own", "own")


def told(tmp: Path, world_size: int, *story: tuple[Any, ...]) -> list[Any]:
    """What the ranks say of a story; all say the same."""
    first, *others = run_ranks(world_size, tmp, play, str(tmp / "hosts"), *story)
    assert all(other == first for other in others)
    return first


def test_hosts_are_lost_one_after_the_other_until_only_storage_is_left(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b", "c", "d"):
        assert told(
            tmp_path, 2,
            ("copy", "ab", 1, 2, 3),
            ("find", "ab"),  # trainers died: each rank has its own host's copy
            ("find", "ab", 2),
            ("end", "b"),
            ("find", "ac"),  # who replaces b pulls its shard from a
            ("find", "cd"),  # a has no rank now
            ("end", "a"),
            ("find", "cd", 1),
            ("find", "cd"),
        ) == [
            ("own", 3, OWN),
            ("own", 3, OWN),
            ("peer", 3, ("own", "peer")),
            ("peer", 3, ("host", "host")),
            ("remote", 1, ()),
            ("fresh", 0, ()),
        ]  # fmt: skip


def test_a_ring_of_three_survives_the_loss_of_one_host(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b", "c", "d"):
        story = ("copy", "abc", 1, 2), ("end", "b"), ("find", "adc")
        assert told(tmp_path, 3, *story) == [("peer", 2, ("own", "peer", "own"))]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_in_the_exchange_falls_back_one_aligned_step(tmp_path, victim):
    with hosts(tmp_path / "hosts", "a", "b"):
        folder = str(tmp_path / "hosts")
        assert run_ranks(2, tmp_path, die_in_the_exchange, folder, "ab", 4, victim) == [None, None]
        assert told(tmp_path, 2, ("find", "ab")) == [("own", 3, OWN)]


def test_a_damaged_copy_is_passed_over_for_the_replica_and_then_for_the_step_before(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        assert told(
            tmp_path, 2,
            ("copy", "ab", 1, 2),
            ("damage", 1, 1, 2),
            ("find", "ab"),
            ("damage", 0, 1, 2),
            ("find", "ab"),
        ) == [("peer", 2, ("own", "peer")), ("own", 1, OWN)]  # fmt: skip


def test_further_lives_go_on_also_where_ranks_changed_their_hosts(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        story = ("copy", "ab", 1, 2), ("copy", "ba", 3, 4), ("find", "ba"), ("copy", "ba", 5), ("find", "ba")
        assert told(tmp_path, 2, *story) == [("own", 4, OWN), ("own", 5, OWN)]


def test_ranks_of_one_host_keep_each_others_copies(tmp_path):
    with hosts(tmp_path / "hosts", "a"):
        assert told(tmp_path, 2, ("copy", "aa", 1), ("find", "aa")) == [("own", 1, OWN)]


def test_one_rank_alone_keeps_its_own(tmp_path):
    with hosts(tmp_path / "hosts", "a"):
        assert told(tmp_path, 1, ("copy", "a", 1), ("find", "a")) == [("own", 1, ("own",))]


def test_the_update_waits_for_the_copy_and_the_next_copy_for_the_exchange(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        for seen in run_ranks(2, tmp_path, gate_and_pressure, str(tmp_path / "hosts"), "ab"):
            assert [what for what, is_so in seen.items() if not is_so] == []


def test_a_round_that_failed_on_one_rank_counts_on_none_and_the_next_one_is_tried(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        found = run_ranks(2, tmp_path, a_bad_round, str(tmp_path / "hosts"), "ab")
    assert found == [[(1, [1]), (1, [1, 2]), (3, [1, 3])]] * 2  # 3 takes the place of 2, not that of 1


def test_a_copy_that_the_optimizer_overtook_never_counts(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        late, peer = run_ranks(2, tmp_path, a_late_copy, str(tmp_path / "hosts"), "ab")
    assert "took more than wait_s" in late[0]
    assert peer[0] is not None
    assert late[1] == peer[1] == [1, 1]


def test_a_store_that_dies_alone_ends_no_training_and_bytes_are_counted(tmp_path):
    with hosts(tmp_path / "hosts", "a", "b"):
        found = run_ranks(2, tmp_path, lose_the_store, str(tmp_path / "hosts"), "ab")
    data = [len(b"meta of 0 at 1") + 4 * (size_of(rank) + 3) for rank in (0, 1)]
    for rank, (kept_before, kept_after, cost) in enumerate(found):
        assert kept_before
        assert kept_after is (rank == 1)
        assert cost.aligned
        assert 0 <= cost.sent_bytes - data[rank] < 200  # a record goes along
        assert 0 <= cost.host_bytes - sum(data) < 200


# ------------------------------------------------------------------ one store


def test_memory_has_no_name_that_could_outlive_the_store(tmp_path):
    store = HostStore("a")
    before = set(os.listdir("/dev/shm"))
    (shape, region) = store.open({(0, 0): BoxShape(100, 100)}, 10)[0, 0]
    mapped = attach(region)
    assert set(os.listdir("/dev/shm")) == before
    assert len(mapped) == shape.nbytes


def test_a_store_refuses_what_its_host_cannot_hold(monkeypatch):
    monkeypatch.setattr("app.baselines.gemini.host.free_bytes", lambda: 30_000)
    store = HostStore("a")
    with pytest.raises(ConfigError, match=r"needs .* GB of memory on host a"):
        store.open({(0, 0): BoxShape(100, 10_000)}, 10)
    store.open({(0, 0): BoxShape(100, 100)}, 10)


def test_another_run_of_the_same_name_finds_nothing_and_frees_the_memory():
    store = HostStore("a")
    store.enter("first", b"attempt1", os.getpid())
    (_, region) = store.open({(0, 0): BoxShape(100, 100)}, 10)[0, 0]
    store.enter("second", b"attempt2", os.getpid())
    assert store.copies("second") == ()
    with pytest.raises(HostMemoryError, match="does not give its memory away"):
        attach(region)


def test_a_box_that_is_no_longer_wanted_is_freed_and_one_that_has_the_room_stays():
    store = HostStore("a")
    first = store.open({(0, 0): BoxShape(100, 100), (1, 0): BoxShape(100, 100)}, 10)
    assert store.open({(0, 0): BoxShape(110, 110)}, 10)[0, 0] == first[0, 0]
    store.keep_only({(0, 0)})
    attach(first[0, 0][1])
    with pytest.raises(HostMemoryError):
        attach(first[1, 0][1])


def test_a_trainer_of_an_attempt_before_that_still_runs_is_not_read_beside(monkeypatch):
    monkeypatch.setattr("app.baselines.gemini.host._WRITER_S", 0.2)
    store = HostStore("a")
    store.enter("run", b"attempt1", os.getppid())
    with pytest.raises(HostMemoryError, match=f"process {os.getppid()} of the attempt before still runs"):
        store.enter("run", b"attempt2", os.getpid())
    store.enter("run", b"attempt1", os.getpid())  # another rank of the same attempt
