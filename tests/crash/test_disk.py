"""The disk of the matrix behaves as a real one, and loses in a power cut what a real one may lose."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from layercheck.errors import StorageError
from layercheck.persistence.file_calls import FileCalls
from layercheck.persistence.storage import LocalStorage
from tests.crash.disk import Disk, after_power_cut, files, is_settled

NAMES = ("a", "b", "d/a", "d/b", "d", "e", "e/a")


def random_calls(seed: int, number: int) -> list[tuple[str, str, str]]:
    rng = random.Random(seed)
    kinds = ["make", "make", "mkdir", "mkdir", "rename", "link", "unlink", "rmdir", "list", "stat", "read"]
    return [(rng.choice(kinds), rng.choice(NAMES), rng.choice(("a", "b", "c"))) for _ in range(number)]


def outcome(calls: FileCalls, root: str, kind: str, name: str, other: str) -> Any:
    """What a call gave, or the number of its error."""
    path = f"{root}/{name}"
    beside = f"{path.rpartition('/')[0]}/{other}"
    try:
        if kind == "make":
            fd = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            calls.write(fd, memoryview(f"{name} {other}".encode()))
            calls.fsync(fd)
            return calls.close(fd)
        if kind == "read":
            fd = calls.open(path, os.O_RDONLY)
            buffer = bytearray(4)
            try:
                return calls.preadv(fd, [memoryview(buffer)], 2), bytes(buffer), calls.stat(fd).st_size
            finally:
                calls.close(fd)
        if kind == "list":
            return sorted(calls.listdir(path))
        if kind == "stat":
            found = calls.lstat(path)
            return found.st_mode & 0o170000, found.st_size if found.st_mode & 0o100000 else None
        if kind == "mkdir":
            return calls.mkdir(path, 0o777)
        if kind in ("rename", "link"):
            return getattr(calls, kind)(path, beside)
        return getattr(calls, kind)(path)
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("seed", range(8))
def test_every_call_gives_what_the_real_file_system_gives(tmp_path: Path, seed: int) -> None:
    disk = Disk()
    calls = disk.view("p")
    calls.mkdir("/r", 0o777)
    for kind, name, other in random_calls(seed, 300):
        if kind in ("rename", "link") and (tmp_path / name).is_dir():
            continue  # only files are renamed and linked
        if kind == "rename" and (tmp_path / name).parent.joinpath(other).is_dir():
            continue
        real = outcome(os, str(tmp_path), kind, name, other)
        assert outcome(calls, "/r", kind, name, other) == real, (kind, name, other)
    held = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert files(disk.nodes) == {f"/r/{name}": data for name, data in held.items()}


def test_bytes_that_were_not_fsynced_are_lost_torn_or_zero() -> None:
    disk = Disk()
    calls = disk.view("p")
    fd = calls.open("/f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    calls.write(fd, memoryview(b"abcd"))
    root = calls.open("/", os.O_RDONLY | os.O_DIRECTORY)
    calls.fsync(root)
    found = {files(after_power_cut(disk.nodes, lambda _, k=k: k))["/f"] for k in range(4)}
    assert found == {b"", b"ab", bytes(4), b"abcd"}
    assert not is_settled(disk.nodes)
    calls.fsync(fd)
    assert is_settled(disk.nodes)


def test_a_name_that_was_not_fsynced_is_there_or_not_and_a_rename_may_leave_both() -> None:
    disk = Disk()
    calls = disk.view("p")
    fd = calls.open("/temp", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    calls.fsync(fd)
    calls.rename("/temp", "/name")
    found = {tuple(files(after_power_cut(disk.nodes, random.Random(k).randrange))) for k in range(40)}
    assert found == {(), ("/temp",), ("/name",), ("/temp", "/name")}


def test_what_a_write_returned_for_survives_any_power_cut() -> None:
    disk = Disk()
    storage = disk.storage("/shared/run", "p")
    storage.write("events/e/shard", [b"one", b"two"])
    assert storage.create("run.json", b"run")
    for seed in range(40):
        cut = after_power_cut(disk.nodes, random.Random(seed).randrange)
        left = Disk(cut).storage("/shared/run", "p")
        assert left.read("events/e/shard") == b"onetwo"
        assert left.read("run.json") == b"run"


@pytest.mark.parametrize("renames", ["atomic", "refused", "in two steps"])
def test_i12_a_replacement_leaves_the_old_or_the_new_bytes_in_any_power_cut(renames: Any) -> None:
    """Where the old name goes first, the new bytes may still have their temp name alone."""
    disk = Disk(renames=renames)
    storage = disk.storage("/shared/run", "p")
    storage.write("progress", [b"old"])
    moments: list[Any] = []
    disk.watch.on_event = lambda number, half: moments.append(disk.state())
    storage.write("progress", [b"new"])
    assert len(moments) > 3
    for moment in (*moments, disk.state()):
        for seed in range(40):
            left = files(after_power_cut(moment, random.Random(seed).randrange)).values()
            assert b"old" in left or b"new" in left


def test_i5_what_a_successor_sees_and_settles_survives_although_its_writer_died_before_the_fsync() -> None:
    disk = Disk()
    disk.storage("/shared/run", "p").write("events/e/commit", [b"old"])
    calls = disk.view("dead")
    fd = calls.open("/shared/run/events/e/temp", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    calls.write(fd, memoryview(b"new"))
    calls.fsync(fd)
    calls.rename("/shared/run/events/e/temp", "/shared/run/events/e/commit")
    poorest = Disk(after_power_cut(disk.nodes, lambda _: 0))
    assert poorest.storage("/shared/run", "p").read("events/e/commit") == b"old"
    disk.storage("/shared/run", "successor").settle("events/e")
    assert is_settled(disk.nodes)


def test_a_real_storage_keeps_nothing_of_a_write_that_failed_in_the_middle() -> None:
    disk = Disk()
    storage = disk.storage("/shared/run", "p")

    def broken() -> Any:
        yield b"half"
        raise StorageError("given up")

    with pytest.raises(StorageError, match="given up"):
        storage.write("events/e/shard", broken())
    assert files(disk.nodes) == {}
    assert isinstance(storage, LocalStorage)
