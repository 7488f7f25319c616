"""Commits of the roll-back methods: what counts as one, what is deleted, what a torn one looks like."""

import json
from pathlib import Path

import pytest

from app.baselines.commits import Commit, CommitStore, Tally, read_tallies
from layercheck.errors import DamagedShardError
from layercheck.persistence.storage import LocalStorage
from tests.fakes import FaultyStorage, PowerCutError, flip_bit


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(str(tmp_path / "run"))


def save(
    storage: LocalStorage, step: int, data: bytes = b"some bytes of a rank", prefix: str = "step"
) -> Commit:
    store = CommitStore(storage, "m", prefix)
    file = store.write_file(step, "rank-00000.safetensors", [data])
    tallies = {"interval": Tally().plus(file.nbytes, 3)}
    commit = Commit(
        step=step,
        attempt=1,
        kind="interval",
        world_size=1,
        state={"step": step},
        files=((file,),),
        tallies=tallies,
    )
    store.write(commit)
    return commit


def test_a_commit_comes_back_as_it_was_and_its_files_are_checked(storage: FaultyStorage) -> None:
    commit, store = save(storage, 7), CommitStore(storage, "m")
    assert store.read(7) == commit
    assert store.committed() == [7]
    (file,) = commit.files[0]
    room = bytearray(file.nbytes)
    store.read_file(7, file, memoryview(room))
    assert bytes(room) == b"some bytes of a rank"
    store.check_file(7, file)


@pytest.mark.parametrize("bit", range(0, 20 * 8, 13))
def test_any_flipped_bit_of_a_file_is_found(storage: FaultyStorage, bit: int) -> None:
    (file,) = save(storage, 7).files[0]
    flip_bit(Path(storage.root, "m/step-00000007", file.name), bit)
    store = CommitStore(storage, "m")
    with pytest.raises(DamagedShardError, match="checksum"):
        store.check_file(7, file)
    with pytest.raises(DamagedShardError, match="checksum"):
        store.read_file(7, file, memoryview(bytearray(file.nbytes)))


def test_a_missing_and_a_short_file_are_found(storage: FaultyStorage) -> None:
    (file,) = save(storage, 7).files[0]
    path = Path(storage.root, "m/step-00000007", file.name)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedShardError, match="has 19 bytes, its commit says 20"):
        CommitStore(storage, "m").check_file(7, file)
    path.unlink()
    with pytest.raises(DamagedShardError, match="has None bytes"):
        CommitStore(storage, "m").check_file(7, file)


def test_a_changed_record_is_no_commit_whatever_was_changed(storage: FaultyStorage) -> None:
    save(storage, 7)
    path = Path(storage.root, "m/step-00000007/commit.json")
    whole = json.loads(path.read_bytes())
    for key in whole:
        changed = {**whole, key: "other"}
        path.write_text(json.dumps(changed))
        with pytest.raises(DamagedShardError, match="damaged"):
            CommitStore(storage, "m").read(7)
    path.write_bytes(b"")
    with pytest.raises(DamagedShardError, match="damaged"):
        CommitStore(storage, "m").read(7)


def test_the_record_of_another_step_is_refused(storage: FaultyStorage) -> None:
    save(storage, 7)
    Path(storage.root, "m/step-00000007").rename(Path(storage.root, "m/step-00000008"))
    with pytest.raises(DamagedShardError, match="record of step 7"):
        CommitStore(storage, "m").read(8)


def test_the_newest_stay_and_what_is_younger_than_them_is_left_alone(storage: FaultyStorage) -> None:
    store = CommitStore(storage, "m")
    store.write_file(1, "rank-00000.safetensors", [b"its writer died"])
    for step in (2, 4, 6):
        save(storage, step)
    store.write_file(8, "rank-00000.safetensors", [b"being written"])
    store.keep_newest(2)
    assert store.folders() == [4, 6, 8]
    store.keep_newest(3)
    assert store.folders() == [4, 6, 8]
    store.roll_back_to(4)
    assert store.folders() == [4]


def test_a_crash_in_a_deletion_leaves_a_whole_commit_or_none(storage: FaultyStorage) -> None:
    for matching in ("step-00000002/commit.json", "step-00000002"):
        save(storage, 2)
        storage.arm(matching, crash=True, fail_after=0 if matching.endswith("json") else 1)
        with pytest.raises(PowerCutError):
            CommitStore(storage, "m").delete(2)
        storage.arm("nothing")
        store = CommitStore(storage, "m")
        for step in store.committed():
            store.check_file(step, store.read(step).files[0][0])
    assert store.committed() == []


def test_tallies_are_those_of_the_newest_readable_commit_of_each_kind(storage: FaultyStorage) -> None:
    save(storage, 2)
    save(storage, 4, b"torn record")
    flip_bit(Path(storage.root, "m/step-00000004/commit.json"), 999)
    assert read_tallies(storage, "m") == {"interval": Tally(events=1, nbytes=20, layer_writes=3)}
    assert read_tallies(storage, "absent") == {}
