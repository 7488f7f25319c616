import json
import math
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from layercheck.coordination import commit_file, history, journal
from layercheck.coordination.commit_file import DamagedCommitError
from layercheck.manifest import Commit, EventId, LineageLink, Progress
from layercheck.persistence.storage import LocalStorage
from tests.fakes import FaultyStorage, PowerCutError, flip_bit
from tests.runs import with_base

EVENT = EventId(step=6, attempt=1)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


def a_commit(storage: LocalStorage, **state: object) -> Commit:
    group = with_base(storage)
    rows = tuple(row for rank in (0, 1) for row in group.rows(EVENT, rank, ("norm", "layers.0")))
    lineage = (LineageLink(attempt=1, r_b=0, predecessor=0, saw_step=-1),)
    return Commit(event=EVENT, records=rows, trainer_state={"step": 6, **state}, lineage=lineage)


def test_a_commit_is_read_back_as_it_was(storage: LocalStorage) -> None:
    commit = a_commit(storage, lr=1e-5, scale=math.inf, nested={"rng": "keyed", "n": [1, 2.5]})
    assert commit_file.decode(commit_file.encode(commit), EVENT) == commit


def test_any_parquet_reader_opens_a_commit(storage: LocalStorage, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    (tmp_path / "c.parquet").write_bytes(commit_file.encode(a_commit(storage)))
    table = pq.read_table(tmp_path / "c.parquet")
    assert table.column_names == [
        "layer", "step", "attempt", "rank", "world_size", "file", "begin", "end", "nbytes", "xxh3_128",
        "drift", "threshold", "age", "reason", "snapshot_s", "write_s",
    ]  # fmt: skip
    assert set(table.schema.metadata) >= {b"trainer_state", b"lineage", b"event", b"digest", b"format"}
    assert json.loads(table.schema.metadata[b"trainer_state"]) == {"step": 6}


def test_i6_a_commit_moved_to_another_event_is_no_commit(storage: LocalStorage) -> None:
    data = commit_file.encode(a_commit(storage))
    with pytest.raises(DamagedCommitError, match="belongs to"):
        commit_file.decode(data, EventId(step=7, attempt=1))


def test_i6_a_truncated_commit_is_no_commit(storage: LocalStorage) -> None:
    data = commit_file.encode(a_commit(storage))
    for length in range(0, len(data), 97):
        with pytest.raises(DamagedCommitError):
            commit_file.decode(data[:length], EVENT)


def check_flips(commit: Commit, bits: range) -> None:
    """Flips each of these bits; asserts that it gives the same commit or none."""
    data = commit_file.encode(commit)
    same = 0
    for bit in bits:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        try:
            assert commit_file.decode(bytes(flipped), EVENT) == commit, f"bit {bit} gives another commit"
            same += 1
        except DamagedCommitError:
            pass
    assert same < len(bits), "no flip was ever noticed"


def test_i6_a_flipped_bit_never_gives_another_commit(storage: LocalStorage) -> None:
    commit = a_commit(storage)
    check_flips(commit, range(0, 8 * len(commit_file.encode(commit)), 61))


def test_i6_a_flipped_bit_of_the_footer_never_gives_another_trainer_state(storage: LocalStorage) -> None:
    """No checksum of Parquet covers these bytes."""
    commit = a_commit(storage, consumed=4711)
    text = commit_file.canonical(commit.trainer_state)
    begin = 8 * commit_file.encode(commit).index(text)
    check_flips(commit, range(begin, begin + 8 * len(text)))


@pytest.mark.slow
def test_i6_no_flipped_bit_at_all_gives_another_commit(storage: LocalStorage) -> None:
    commit = a_commit(storage)
    check_flips(commit, range(8 * len(commit_file.encode(commit))))


def test_a_flipped_bit_of_a_progress_file_makes_it_absent(storage: LocalStorage) -> None:
    """812 read as 813 would resume at a wrong step without a word."""
    progress = Progress(attempt=1, step=812, trainer_state={"step": 812}, drift={"norm": math.inf})
    path = Path(storage.root, journal.progress_file(1))
    journal.write_progress(storage, progress)
    assert journal.read_progress(storage, 1) == progress
    for bit in range(len(path.read_bytes()) * 8):
        flip_bit(path, bit)
        assert journal.read_progress(storage, 1) in (None, progress)
        flip_bit(path, bit)


def test_a_damaged_progress_file_is_announced(storage: LocalStorage) -> None:
    with_base(storage)
    Path(storage.root, journal.progress_file(1)).write_bytes(b'{"step": 4')
    facts = journal.load_facts(storage)
    assert facts.progress == {}
    assert any("progress.json counts as absent" in note for note in facts.notes)


def test_unfinished_writes_are_no_records(storage: LocalStorage) -> None:
    with_base(storage)
    storage.write("attempts/.tmp-1-a009.json", [b"{"])
    storage.write("blacklist/.tmp-1", [b"{"])
    facts = journal.load_facts(storage)
    assert facts.highest_attempt == 1
    assert sorted(journal.unfinished(storage)) == ["attempts/.tmp-1-a009.json", "blacklist/.tmp-1"]


def test_progress_whose_name_is_gone_is_found_in_the_newest_whole_temp_file(storage: LocalStorage) -> None:
    """As a crash leaves it where a rename over a taken name is refused, and the old file has to go first."""
    with_base(storage)
    written = journal.read_progress(storage, 1)
    assert written is not None
    newest = written.model_copy(update={"step": written.step + 2, "beat": written.beat + 2})
    foreign = newest.model_copy(update={"attempt": 7, "beat": 99})
    for name, record in (("1", written), ("2", newest), ("3", foreign)):
        storage.write(f"attempts/.tmp-{name}", [journal.dump(record)])
    storage.write("attempts/.tmp-4", [journal.dump(newest)[:-9]])
    assert journal.read_progress(storage, 1) == written, "its own file comes first"
    storage.delete(journal.progress_file(1))
    assert journal.read_progress(storage, 1) == newest
    assert journal.load_facts(storage).progress == {1: newest}


def test_history_parts_do_not_overwrite_each_other(storage: LocalStorage) -> None:
    commit = a_commit(storage)  # its warm-up left one part
    history.append_history(storage, 1, commit.records)
    history.append_history(storage, 1, commit.records)
    assert storage.list("history") == [f"attempt-001-{part:05d}.parquet" for part in range(3)]
    assert history.read_history(storage)[-2 * len(commit.records) :] == [*commit.records] * 2
    storage.write("history/attempt-001-00001.parquet", [b"PAR1 no longer"])
    assert history.read_history(storage)[-len(commit.records) :] == [*commit.records]


def test_small_history_parts_are_merged_and_no_row_is_lost_or_doubled(storage: LocalStorage) -> None:
    rows = a_commit(storage).records
    events = range(100, 100 + 3 * history.MERGED_AT_ONCE)
    for step in events:
        history.append_history(storage, 7, [row.model_copy(update={"step": step}) for row in rows])
    own = [name for name in storage.list("history") if name.startswith("attempt-007-")]
    assert len(own) < history.MERGED_AT_ONCE
    found = [row.step for row in history.read_history(storage) if row.step >= 100]
    assert found == [step for step in events for _ in rows]


def test_a_damaged_history_part_stays_where_it_is_when_the_others_are_merged(storage: LocalStorage) -> None:
    rows = a_commit(storage).records
    for _ in range(history.MERGED_AT_ONCE - 1):
        history.append_history(storage, 7, rows)
    storage.write("history/attempt-007-00003.parquet", [b"PAR1 no longer"])
    history.append_history(storage, 7, rows)
    own = [name for name in storage.list("history") if name.startswith("attempt-007-")]
    assert own == [f"attempt-007-{part:05d}.parquet" for part in (3, history.MERGED_AT_ONCE)]
    found = [row for row in history.read_history(storage) if row.step == EVENT.step]
    assert len(found) == (history.MERGED_AT_ONCE - 1) * len(rows)


def test_a_crash_while_parts_are_merged_leaves_every_row(tmp_path: Path) -> None:
    storage = FaultyStorage(str(tmp_path / "s"))
    rows = a_commit(storage).records
    for _ in range(history.MERGED_AT_ONCE - 1):
        history.append_history(storage, 7, rows)
    storage.arm("attempt-007-", crash=True, fail_after=2)  # after the new part and the merged one
    with pytest.raises(PowerCutError):
        history.append_history(storage, 7, rows)
    seen = [row for row in history.read_history(storage) if row.step == EVENT.step]
    assert len(seen) >= history.MERGED_AT_ONCE * len(rows)


def test_the_digest_is_that_of_the_whole_record_row_by_row(storage: LocalStorage) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    commit = a_commit(storage, scale=math.inf)
    metadata = pq.ParquetFile(pa.BufferReader(commit_file.encode(commit))).metadata.metadata
    later = {"kind", "base_step", "base_attempt"}  # only in rows of residuals
    whole = commit.model_dump(exclude={"records": {"__all__": later}})
    expected = xxh3_128_hexdigest(commit_file.canonical(whole))
    assert metadata[b"digest"].decode() == expected
