"""Rows of commits that a coordinator keeps for weeks: the same rows, in a few objects."""

import gc
from pathlib import Path

import pytest

from layercheck.coordination import commit_file
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.facts import version_in, versions_of
from layercheck.coordination.rows import PackedRows, columns_of, joined, nbytes_of, packed
from layercheck.manifest import Commit, EventId, LineageLink, ShardRecord
from tests.runs import config
from tests.stores import real_run

RANKS = 4


def row(rank: int, layer: str, step: int = 7) -> ShardRecord:
    begin = 100 * rank
    event = EventId(step=step, attempt=1)
    return ShardRecord(
        layer=layer, step=step, attempt=1, rank=rank, world_size=RANKS, file=event.shard_file(rank),
        begin=begin, end=begin + rank + 1, xxh3_128=f"{rank}{layer}", drift=0.5, threshold=0.25, age=3,
        reason="drift", snapshot_s=0.0, write_s=rank / 8,
    )  # fmt: skip


def commit(rows: list[ShardRecord]) -> Commit:
    link = LineageLink(attempt=1, r_b=0, predecessor=0, saw_step=-1)
    return Commit(
        event=EventId(step=7, attempt=1), records=tuple(rows), trainer_state={"step": 7}, lineage=(link,)
    )


@pytest.mark.parametrize("stride", [1, 2, 7])
def test_a_packed_commit_says_what_it_said_before(stride: int) -> None:
    rows = [row(rank, layer) for layer in ("norm", "layers.0") for rank in range(RANKS)]
    rows.append(row(2, "lm_head"))  # not whole
    plain = commit([rows[stride * i % 9] for i in range(9)])
    small = packed(plain)
    assert packed(small) is small
    assert list(small.records) == list(plain.records)
    assert len(small.records) == 9
    assert small.records[3] == plain.records[3]
    assert list(small.records[2:5]) == list(plain.records[2:5])
    assert small.records[-1] == plain.records[-1]
    assert {layer: list(found) for layer, found in small.by_layer.items()} == {
        layer: list(found) for layer, found in plain.by_layer.items()
    }
    assert small.whole_layers == plain.whole_layers
    assert set(small.whole_layers) == {"norm", "layers.0"}
    assert [v.key for v in versions_of(small)] == [v.key for v in versions_of(plain)]
    for layer in small.whole_layers:
        ours, theirs = version_in(small, layer), version_in(plain, layer)
        assert ours is not None
        assert theirs is not None
        assert ours.nbytes == theirs.nbytes == 1 + 2 + 3 + 4
    assert nbytes_of(small.records) == nbytes_of(plain.records) == 20 + 3


def test_a_commit_without_rows_is_one_without_layers() -> None:
    small = packed(commit([]))
    assert (len(small.records), small.by_layer, small.whole_layers) == (0, {}, ())
    assert nbytes_of(small.records) == 0


def test_rows_go_into_the_history_as_they_were(tmp_path: Path) -> None:
    first, second = [row(rank, "norm") for rank in range(RANKS)], [row(1, "lm_head", step=9)]
    both = joined([PackedRows.of(first), second])
    assert commit_file.decode_history(commit_file.encode_history(both)) == (*first, *second)
    assert columns_of(both[1:2]) == columns_of(first[1:2])


def test_the_garbage_collection_has_no_row_of_a_kept_commit_to_walk_over() -> None:
    kept = packed(commit([row(rank, layer) for layer in ("norm", "layers.0") for rank in range(RANKS)]))
    assert set(kept.whole_layers) == {"norm", "layers.0"}
    gc.collect()  # the first walk finds out which tuples hold plain values alone
    assert isinstance(kept.records, PackedRows)
    assert not any(map(gc.is_tracked, kept.records.columns.values()))
    assert not [one for one in gc.get_objects() if isinstance(one, ShardRecord) and one.step == 7]


def test_a_coordinator_keeps_its_commits_packed_also_after_a_restart(tmp_path: Path) -> None:
    run = real_run(tmp_path / "r1")
    for coordinator in (run.coordinator, Coordinator(run.storage, config())):
        facts = coordinator.facts()
        assert facts is not None
        assert facts.commits
        assert all(isinstance(commit.records, PackedRows) for commit in facts.commits)
