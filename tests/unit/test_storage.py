import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def test_one_read_fills_any_number_of_pieces_one_after_another(storage: Storage) -> None:
    content = bytes(i % 251 for i in range(5000))
    storage.write("s", [content])
    pieces = [bytearray(i % 4) for i in range(3000)]
    storage.read_into("s", 7, *map(memoryview, pieces))
    assert b"".join(pieces) == content[7 : 7 + sum(map(len, pieces))]
    with pytest.raises(DamagedShardError, match="short: 10 of 12 bytes"):
        storage.read_into("s", 4990, memoryview(bytearray(5)), memoryview(bytearray(7)))


def test_a_read_that_the_kernel_cuts_short_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class Hesitant:
        """A file system that gives at most three bytes a call."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            left, room = 3, []
            for view in buffers:
                room.append(view[:left])
                left -= len(room[-1])
            return os.preadv(fd, room, offset)

    storage = LocalStorage(str(tmp_path), Hesitant())
    storage.write("s", [bytes(range(100))])
    pieces = [bytearray(n) for n in (1, 0, 5, 2, 7)]
    storage.read_into("s", 4, *map(memoryview, pieces))
    assert b"".join(pieces) == bytes(range(4, 19))


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
    acts = [act for act in acts if not act.startswith("sync ..")]  # folders that others made long ago
    at = acts.index("rename")
    assert acts[:3] == ["sync .", "sync lc", "sync lc/events"]
    assert acts[at - 1].startswith("sync lc/events/e/" + TEMP_PREFIX)
    assert acts[at + 1 :] == ["sync lc/events/e"]


def test_i2_a_folder_that_somebody_else_made_is_synced_once_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its maker may have died between making it and the sync of its entry."""
    (tmp_path / "lc" / "events" / "e").mkdir(parents=True)
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    storage = LocalStorage(str(tmp_path / "lc"))
    storage.write("events/e/one", [b"x"])
    assert {".", "lc", "lc/events", "lc/events/e"} <= set(synced)
    synced.clear()
    storage.write("events/e/two", [b"x"])
    assert [name for name in synced if ".tmp-" not in name] == ["lc/events/e"]


def test_i5_deleting_what_is_gone_already_makes_the_deletion_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who deleted the commit may have died before the folder was synced; its shards go only after that."""
    storage = LocalStorage(str(tmp_path))
    storage.write("events/e/shard", [b"x"])
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    storage.delete("events/e/commit.parquet")
    assert synced == [str(tmp_path / "events" / "e")]


def test_a_symbolic_link_inside_the_store_leads_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    storage = LocalStorage(str(tmp_path / "lc"))
    storage.write("events/e/shard", [b"x"])
    (tmp_path / "lc" / "events" / "link").symlink_to(outside)
    (tmp_path / "lc" / "events" / "e" / "file").symlink_to(outside / "precious")
    for path in ("events/link/precious", "events/e/file"):
        assert storage.size(path) is None
        with pytest.raises(StorageError, match="symbolic link"):
            storage.read(path)
        with pytest.raises(DamagedShardError, match="missing"):
            storage.read_into(path, 0, memoryview(bytearray(1)))
    assert storage.list("events/link") == []
    with pytest.raises(StorageError, match="symbolic link"):
        storage.write("events/link/new", [b"x"])
    for path in ("events/link/precious", "events/link", "events/e"):
        storage.delete(path)
    assert storage.list("events") == []
    assert [path.read_bytes() for path in outside.iterdir()] == [b"precious"]


def test_the_root_of_a_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "lc").symlink_to(tmp_path / "disk")
    storage = LocalStorage(str(tmp_path / "lc"))
    storage.write("run.json", [b"{}"])
    assert (tmp_path / "disk" / "run.json").read_bytes() == b"{}"
    assert storage.list("") == ["run.json"]


def test_a_file_system_that_refuses_to_rename_over_a_name_still_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(source: str, target: str) -> None:
        if os.path.exists(target):
            raise FileExistsError(17, "File exists", target)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    storage = LocalStorage(str(tmp_path))
    for text in (b"one", b"two"):
        storage.write("attempts/a001.progress.json", [text])
        assert storage.read("attempts/a001.progress.json") == text
    assert storage.list("attempts") == ["a001.progress.json"]


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
