import os
import threading
from pathlib import Path

import pytest
from pyarrow import fs

from layercheck.errors import ConfigError, DamagedShardError, StorageError
from layercheck.persistence.arrow_storage import ArrowStorage
from layercheck.persistence.storage import (
    TEMP_PREFIX,
    LocalStorage,
    Storage,
    open_storage,
    open_store,
)


@pytest.fixture(params=["local", "arrow"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    root = str(tmp_path / "run" / "layercheck")
    return LocalStorage(root) if request.param == "local" else ArrowStorage(fs.LocalFileSystem(), root)


def test_what_is_written_is_read_back_whole_and_in_parts(storage: Storage) -> None:
    storage.write("events/e/x.bin", [b"abc", memoryview(b"def"), bytearray(b"")])
    assert storage.read("events/e/x.bin") == b"abcdef"
    assert storage.read("events/e/x.bin", 2, 4) == b"cd"
    assert storage.read("events/e/x.bin", 4, 99) == b"ef"
    assert storage.size("events/e/x.bin") == 6
    assert storage.list("events/e") == ["x.bin"]


def test_a_later_write_replaces_the_object(storage: Storage) -> None:
    storage.write("p.json", [b"long old content"])
    storage.write("p.json", [b"new"])
    assert storage.read("p.json") == b"new"


def test_what_is_absent_reads_as_absent(storage: Storage) -> None:
    assert storage.size("none") is None
    assert storage.list("none") == []
    storage.delete("none")
    with pytest.raises(StorageError, match="none"):
        storage.read("none")


def test_delete_takes_files_and_whole_folders(storage: Storage) -> None:
    storage.write("a/b/1", [b"1"])
    storage.write("a/b/2", [b"2"])
    storage.delete("a/b/1")
    assert storage.list("a/b") == ["2"]
    storage.delete("a")
    assert storage.list("a") == []


def test_create_takes_a_free_name_once(storage: Storage) -> None:
    assert storage.create("attempts/a001.json", b"one")
    assert not storage.create("attempts/a001.json", b"two")
    assert storage.read("attempts/a001.json") == b"one"
    assert storage.list("attempts") == ["a001.json"]


def test_read_into_fills_exactly_or_names_the_damage(storage: Storage) -> None:
    storage.write("s", [bytes(range(10))])
    into = bytearray(4)
    storage.read_into("s", 3, memoryview(into))
    assert into == bytes([3, 4, 5, 6])
    with pytest.raises(DamagedShardError, match="short"):
        storage.read_into("s", 8, memoryview(into))
    with pytest.raises(DamagedShardError, match="missing"):
        storage.read_into("gone", 0, memoryview(into))


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", "", "a\\b", "./a"])
def test_no_path_leaves_the_store(storage: Storage, path: str) -> None:
    with pytest.raises(StorageError, match="leaves the store"):
        storage.write(path, [b"x"])


class BrokenError(Exception):
    pass


def test_i2_an_exception_while_writing_leaves_no_name(storage: Storage) -> None:
    def chunks():
        yield b"half of it"
        raise BrokenError

    with pytest.raises(BrokenError):
        storage.write("events/e/shard", chunks())
    assert storage.list("events/e") == []


def test_i2_the_name_appears_only_after_all_bytes(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    seen: list[list[str]] = []

    def chunks():
        yield b"1"
        seen.append(storage.list("e"))
        yield b"2"

    storage.write("e/shard", chunks())
    assert len(seen[0]) == 1
    assert seen[0][0].startswith(TEMP_PREFIX)
    assert storage.list("e") == ["shard"]


def test_i2_file_and_folders_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes before the name, the name before the return, entries of new folders too."""
    acts: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        acts.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real_fsync(fd)

    def rename(source: object, target: object) -> None:
        acts.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    LocalStorage(str(tmp_path / "lc")).write("events/e/shard", [b"x"])
    at = acts.index("rename")
    assert acts[:3] == ["sync .", "sync lc", "sync lc/events"]
    assert acts[at - 1].startswith("sync lc/events/e/" + TEMP_PREFIX)
    assert acts[at + 1 :] == ["sync lc/events/e", "sync lc/events"]


def test_i2_a_folder_sync_that_fails_takes_a_new_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.write("e/first", [b"x"])
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="Input/output"):
        storage.write("e/second", [b"y"])
    assert storage.list("e") == ["first"]


def test_only_one_of_many_claimants_gets_the_name(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    start, wins = threading.Barrier(8), []

    def claim(number: int) -> None:
        start.wait(10)
        if storage.create("attempts/a002.json", str(number).encode()):
            wins.append(number)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(wins) == 1
    assert storage.read("attempts/a002.json") == str(wins[0]).encode()


def test_a_refusing_disk_is_one_error_with_path_and_knob(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write run\.json .*`storage`") as caught:
        LocalStorage(str(tmp_path / "file")).write("run.json", [b"{}"])
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("run", ["../up", "a/b", "", ".hidden", "a b", "x\n"])
def test_a_run_name_that_would_leave_the_folder_is_refused(tmp_path: Path, run: str) -> None:
    with pytest.raises(ConfigError, match="run name"):
        open_storage(str(tmp_path), run)


def test_storage_and_store_arguments_name_the_same_folder(tmp_path: Path) -> None:
    made = open_storage(str(tmp_path), "r1")
    made.write("run.json", [b"{}"])
    for store in ("r1", "r1/", "r1/layercheck"):
        assert open_store(f"{tmp_path}/{store}").read("run.json") == b"{}"
    assert open_storage(f"file://{tmp_path}", "r1").size("run.json") == 2


def test_an_unknown_uri_is_refused_with_the_uri(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nosuch://"):
        open_storage("nosuch://bucket/x", "r1")
