"""GEMINI without memory or ranks: placement, records, and the decision what to recover from."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.baselines.gemini.decision import Copy, decide
from app.baselines.gemini.memory import check_room, free_bytes
from app.baselines.gemini.placement import place
from app.baselines.gemini.records import PAGE, BoxShape, SlotRecord, slot_to_fill
from layercheck.errors import ConfigError

ONE, TWO = b"life-one", b"life-two"
HOSTS = ("a", "b")


def record(shard: int, step: int, attempt: bytes = ONE, world: int = 2) -> SlotRecord:
    return SlotRecord(step, attempt, shard, world, 10, 100, bytes(16))


def held(host: str, shard: int, keeper: int, *steps: int, attempt: bytes = ONE, world: int = 2) -> set[Copy]:
    return {Copy(host, keeper, step % 2, record(shard, step, attempt, world)) for step in steps}


def both_hosts(*steps: int) -> set[Copy]:
    """Two ranks on two hosts: each host has its own rank's copies and the other's replicas."""
    own = held("a", 0, 0, *steps) | held("b", 1, 1, *steps)
    return own | held("b", 0, 1, *steps) | held("a", 1, 0, *steps)


def on(host: str, copies: set[Copy]) -> set[Copy]:
    return {copy for copy in copies if copy.host == host}


# ------------------------------------------------------------------ placement


@pytest.mark.parametrize(
    ("hosts", "keepers"),
    [
        ("a", (None,)),
        ("aa", (1, 0)),
        ("aaa", (1, 2, 0)),
        ("ab", (1, 0)),
        ("abc", (1, 2, 0)),
        ("abcd", (1, 0, 3, 2)),
        ("abcde", (1, 0, 3, 4, 2)),
        ("aabb", (2, 3, 0, 1)),
        ("abab", (1, 0, 3, 2)),
        ("aab", (2, 2, 0)),
    ],
)
def test_hosts_are_paired_and_what_is_left_over_makes_a_ring_of_three(hosts, keepers):
    assert place(hosts).keepers == keepers


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=24))
def test_a_replica_is_on_another_host_wherever_there_is_one(hosts):
    placement = place(hosts)
    if len(set(hosts)) > 1:
        assert placement.dies_with_one_host == ()
    else:
        assert placement.dies_with_one_host == tuple(range(len(hosts)))
    kept = sorted(shard for rank in range(len(hosts)) for shard in placement.kept_by(rank))
    assert kept == (list(range(len(hosts))) if len(hosts) > 1 else [])
    assert all(keeper != rank for rank, keeper in enumerate(placement.keepers))
    keys = [key for host in set(hosts) for key in placement.keys_on(host)]
    assert len(keys) == len(set(keys)) == len(hosts) + len(kept)


def test_a_loss_of_any_host_leaves_a_copy_of_every_shard_and_that_of_a_pair_does_not():
    placement = place("aabbcc")
    where = {
        shard: {host for host in "abc" for key in placement.keys_on(host) if key[0] == shard}
        for shard in range(6)
    }
    assert all(hosts - {lost} for hosts in where.values() for lost in "abc")
    assert any(not hosts - {"a", "b"} for hosts in where.values())


# ------------------------------------------------------------------ records


def test_a_record_comes_back_and_one_that_was_cut_off_or_changed_does_not():
    packed = record(3, 17).pack()
    assert SlotRecord.parse(packed + b"beyond") == record(3, 17)
    for position in range(len(packed)):
        changed = packed[:position] + bytes([packed[position] ^ 1]) + packed[position + 1 :]
        assert SlotRecord.parse(changed) is None
        assert SlotRecord.parse(packed[:position]) is None
    assert SlotRecord.parse(bytes(len(packed))) is None


def test_the_parts_of_a_box_do_not_overlap():
    shape = BoxShape(meta_bytes=PAGE + 1, data_bytes=3 * PAGE - 1)
    starts = [at(slot) for slot in (0, 1) for at in (shape.record_at, shape.meta_at, shape.data_at)]
    sizes = [PAGE, shape.meta_bytes, shape.data_bytes] * 2
    parts = [*zip(starts, sizes, strict=True), (shape.nbytes, 0)]
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(parts))


def test_the_aligned_step_is_never_overwritten():
    assert slot_to_fill((None, None), 0) == 0
    assert slot_to_fill((4, None), 4) == 1
    assert slot_to_fill((4, 5), 5) == 0
    assert slot_to_fill((4, 5), 4) == 1  # the exchange of 5 failed somewhere: 4 is what all ranks hold
    assert slot_to_fill((9, 8), 2) == 1  # neither is aligned: the older one goes


def test_a_box_is_used_again_by_the_next_life_though_its_texts_have_grown_a_little():
    made = BoxShape(100, 1000).with_slack(50)
    assert made.holds(BoxShape(130, 1030))
    assert not made.holds(BoxShape(151, 1000))
    assert not made.holds(BoxShape(100, 1051))


# ------------------------------------------------------------------ the decision


def test_a_dead_trainer_reads_its_own_host_and_no_other():
    decision = decide(HOSTS, both_hosts(4, 5), remote_step=2)
    assert (decision.kind, decision.step) == ("own", 5)
    assert [(source.how, source.copy.host, source.copy.keeper) for source in decision.sources] == [
        ("own", "a", 0),
        ("own", "b", 1),
    ]


def test_who_replaces_a_lost_host_pulls_its_shard_and_the_survivors_stay_local():
    decision = decide(("a", "c"), on("a", both_hosts(4, 5)), remote_step=2)
    assert (decision.kind, decision.step) == ("peer", 5)
    survivor, replacement = decision.sources
    assert (survivor.how, survivor.copy.host) == ("own", "a")
    assert (replacement.how, replacement.copy.host, replacement.sender) == ("peer", "a", 0)
    assert replacement.copy.key == (1, 0)


def test_ranks_that_changed_their_hosts_find_the_replica_that_is_there():
    decision = decide(("b", "a"), both_hosts(5), remote_step=None)
    assert [(source.how, source.copy.keeper) for source in decision.sources] == [("own", 1), ("own", 0)]


def test_a_host_that_lives_without_ranks_still_gives_its_copies():
    decision = decide(("c", "c"), both_hosts(5), remote_step=None)
    assert [(source.how, source.sender) for source in decision.sources] == [("host", None)] * 2


def test_all_copies_of_one_shard_lost_means_the_remote_checkpoint_for_everyone():
    copies = {copy for copy in both_hosts(4, 5) if copy.record.shard == 0}
    assert decide(HOSTS, copies, remote_step=2) == decide(HOSTS, set(), remote_step=2)
    assert (decide(HOSTS, copies, 2).kind, decide(HOSTS, copies, 2).step) == ("remote", 2)
    assert (decide(HOSTS, copies, None).kind, decide(HOSTS, copies, None).step) == ("fresh", 0)


def test_a_kill_during_replication_falls_back_one_aligned_step():
    copies = both_hosts(4) | held("a", 0, 0, 5) | held("b", 0, 1, 5)
    assert decide(HOSTS, copies, None).step == 4


def test_steps_are_never_mixed_not_even_those_of_two_lives_of_the_run():
    mixed = held("a", 0, 0, 5) | held("b", 1, 1, 4)
    assert decide(HOSTS, mixed, None).kind == "fresh"
    lives = held("a", 0, 0, 5, attempt=ONE) | held("b", 1, 1, 5, attempt=TWO)
    assert decide(HOSTS, lives, None).kind == "fresh"


def test_copies_of_another_world_size_count_for_nothing():
    assert decide(HOSTS, {*held("a", 0, 0, 5, world=3), *held("b", 1, 1, 5, world=3)}, None).kind == "fresh"


def test_a_remote_checkpoint_that_is_newer_than_the_memory_wins_and_an_equal_one_does_not():
    assert decide(HOSTS, both_hosts(5), remote_step=6).kind == "remote"
    assert decide(HOSTS, both_hosts(5), remote_step=5).kind == "own"


# ------------------------------------------------------------------ room


def test_a_host_with_too_little_memory_is_refused_with_the_numbers():
    check_room(900, 1000, "a")
    with pytest.raises(ConfigError, match=r"2\.40 GB of memory on host a .* 2\.00 GB are free"):
        check_room(2_400_000_000, 2_000_000_000, "a")


def test_the_limit_of_a_container_counts(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) > 3000
