"""A POSIX file system in memory whose power can be cut: what was not fsynced may be there, or in part.

Nodes are immutable values, so a snapshot is one shallow copy. A folder remembers the changes since its last
fsync; after a power cut any subset of them has reached the disk. A file that was not fsynced holds what it
held then, the first half, zeros of the right length, or everything.
"""

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from layercheck.persistence.storage import LocalStorage
from tests.crash.events import Event, Watch

Renames = Literal["atomic", "refused", "in two steps"]
"""Over a taken name: as POSIX says; EEXIST; or the old name goes first, and a crash may come between."""
Change = tuple[str, ...] | tuple[str, str, int] | tuple[str, str, str, int]
_ROOT = 0


@dataclass(frozen=True, slots=True)
class FileNode:
    """`durable` is what the file held at its last fsync."""

    data: bytes = b""
    durable: bytes = b""


@dataclass(frozen=True, slots=True)
class FolderNode:
    """`pending` are the changes since the last fsync: ("add", name, node), ("drop", name), ("move", ...)."""

    entries: Mapping[str, int] = field(default_factory=dict)
    durable: Mapping[str, int] = field(default_factory=dict)
    pending: tuple[Change, ...] = ()


Nodes = dict[int, FileNode | FolderNode]
Pick = Callable[[int], int]
"""Which of n possibilities the power cut leaves: 0 is the poorest, n - 1 what the processes saw."""


class Disk:
    """The file system. `view(owner)` are the calls of one process."""

    def __init__(self, nodes: Nodes | None = None, renames: Renames = "atomic") -> None:
        self.nodes: Nodes = dict(nodes or {_ROOT: FolderNode()})
        self.renames = renames
        self.watch = Watch()

    def state(self) -> Nodes:
        """Everything, as a value."""
        return dict(self.nodes)

    def view(self, owner: str) -> "DiskCalls":
        """What one process calls in place of `os`."""
        return DiskCalls(self, owner)

    def storage(self, root: str, owner: str) -> LocalStorage:
        """The real local storage on this disk, as one process has it."""
        return LocalStorage(root, self.view(owner))

    def find(self, path: str) -> int | None:
        """The node of an absolute path."""
        node = _ROOT
        for part in path.split("/"):
            if part:
                folder = self.nodes[node]
                if isinstance(folder, FileNode):
                    raise _error(errno.ENOTDIR, path)
                if part not in folder.entries:
                    return None
                node = folder.entries[part]
        return node

    def new_node(self, node: FileNode | FolderNode) -> int:
        number = max(self.nodes) + 1
        self.nodes[number] = node
        return number

    def change(self, folder: int, change: Change) -> None:
        """A change of a folder, seen by everybody at once and durable at its fsync."""
        node = self.nodes[folder]
        assert isinstance(node, FolderNode)
        entries = dict(node.entries)
        _apply(entries, change)
        self.nodes[folder] = replace(node, entries=entries, pending=(*node.pending, change))


def after_power_cut(nodes: Nodes, pick: Pick) -> Nodes:
    """One of the states in which the disk may be found."""
    found: Nodes = {}
    for number, node in nodes.items():
        if isinstance(node, FileNode):
            data = node.data
            if node.data != node.durable:
                half = node.data[: len(node.data) // 2]
                data = (node.durable, half, bytes(len(node.data)), node.data)[pick(4)]
            found[number] = FileNode(data, data)
            continue
        entries = dict(node.durable)
        for change in node.pending:
            if change[0] == "move":
                _apply_move(entries, change, pick(3))
            elif pick(2):
                _apply(entries, change)
        found[number] = FolderNode(entries, entries)
    return found


def is_settled(nodes: Nodes) -> bool:
    """True if a power cut would change nothing."""
    return all(
        node.data == node.durable if isinstance(node, FileNode) else not node.pending
        for node in nodes.values()
    )


def flipped(nodes: Nodes, path: str, offset: int) -> Nodes:
    """The disk with one rotten byte."""
    disk = Disk(nodes)
    number = disk.find(path)
    assert number is not None, path
    node = disk.nodes[number]
    assert isinstance(node, FileNode)
    data = bytearray(node.data)
    data[offset] ^= 0x40
    disk.nodes[number] = FileNode(bytes(data), bytes(data))
    return disk.nodes


def files(nodes: Nodes, at: int = _ROOT, prefix: str = "") -> dict[str, bytes]:
    """Path -> content of every file that can be reached."""
    folder, found = nodes[at], {}
    assert isinstance(folder, FolderNode)
    for name, number in folder.entries.items():
        node = nodes[number]
        if isinstance(node, FileNode):
            found[f"{prefix}/{name}"] = node.data
        else:
            found |= files(nodes, number, f"{prefix}/{name}")
    return found


def _apply(entries: dict[str, int], change: Change) -> None:
    if change[0] == "add":
        entries[str(change[1])] = int(change[2])
    elif change[0] == "drop":
        entries.pop(str(change[1]), None)
    else:
        _apply_move(entries, change, 2)


def _apply_move(entries: dict[str, int], change: Change, how: int) -> None:
    """A rename that was not fsynced: not there (0), under both names (1), done (2)."""
    _, source, target, number = change
    if how:
        entries[str(target)] = int(number)
    if how == 2:
        entries.pop(str(source), None)


class DiskCalls:
    """The functions of `os` that a local storage needs, for one process. Errors are those of Linux."""

    def __init__(self, disk: Disk, owner: str) -> None:
        self._disk, self._owner = disk, owner
        self._open_files: dict[int, tuple[int, str]] = {}
        self._next = 3

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._disk.watch.check(self._owner)
        number = self._disk.find(path)
        if flags & os.O_CREAT:
            folder, name = self._folder_of(path)
            if number is not None:
                raise _error(errno.EEXIST, path)
            self._enter("create", path)
            number = self._disk.new_node(FileNode())
            self._disk.change(folder, ("add", name, number))
        if number is None:
            raise _error(errno.ENOENT, path)
        if flags & os.O_DIRECTORY and isinstance(self._disk.nodes[number], FileNode):
            raise _error(errno.ENOTDIR, path)
        self._next += 1
        self._open_files[self._next] = (number, path)
        return self._next

    def write(self, fd: int, data: memoryview) -> int:
        number, path = self._open_files[fd]
        node = self._file(number)
        part = FileNode(node.data + bytes(data[: len(data) // 2]), node.durable)
        torn = self._enter("write", path, lambda: {**self._disk.nodes, number: part})
        self._disk.nodes[number] = part if torn else FileNode(node.data + bytes(data), node.durable)
        if torn:
            raise self._disk.watch.end_of_life(self._owner)
        return len(data)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._disk.watch.check(self._owner)
        data = memoryview(self._file(self._open_files[fd][0]).data)[offset:]
        left = len(data)
        for buffer in buffers:
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            data = data[len(part) :]
        return left - len(data)

    def fsync(self, fd: int) -> None:
        number, path = self._open_files[fd]
        node = self._disk.nodes[number]
        if isinstance(node, FileNode):
            self._enter("fsync", path)
            self._disk.nodes[number] = FileNode(node.data, node.data)
        else:
            self._enter("fsync folder", path)
            self._disk.nodes[number] = FolderNode(node.entries, node.entries)

    def close(self, fd: int) -> None:
        del self._open_files[fd]

    def rename(self, source: str, target: str) -> None:
        folder, name = self._folder_of(source)
        target_folder, target_name = self._folder_of(target)
        assert folder == target_folder, "the model knows renames inside one folder only"
        number = self._existing(source)
        if self._disk.find(target) == number:
            return  # two names of one file: POSIX does nothing
        if self._disk.find(target) is not None and self._disk.renames != "atomic":
            if self._disk.renames == "refused":
                raise _error(errno.EEXIST, target)
            self._enter("rename, first step", target)
            self._disk.change(folder, ("drop", target_name))
        self._enter("rename", target)
        self._disk.change(folder, ("move", name, target_name, number))

    def link(self, source: str, target: str) -> None:
        folder, name = self._folder_of(target)
        number = self._existing(source)
        if self._disk.find(target) is not None:
            raise _error(errno.EEXIST, target)
        self._enter("link", target)
        self._disk.change(folder, ("add", name, number))

    def unlink(self, path: str) -> None:
        folder, name = self._folder_of(path)
        if isinstance(self._disk.nodes[self._existing(path)], FolderNode):
            raise _error(errno.EISDIR, path)
        self._enter("unlink", path)
        self._disk.change(folder, ("drop", name))

    def mkdir(self, path: str, mode: int) -> None:
        folder, name = self._folder_of(path)
        if self._disk.find(path) is not None:
            raise _error(errno.EEXIST, path)
        self._enter("mkdir", path)
        self._disk.change(folder, ("add", name, self._disk.new_node(FolderNode())))

    def rmdir(self, path: str) -> None:
        folder, name = self._folder_of(path)
        node = self._disk.nodes[self._existing(path)]
        if isinstance(node, FileNode):
            raise _error(errno.ENOTDIR, path)
        if node.entries:
            raise _error(errno.ENOTEMPTY, path)
        self._enter("rmdir", path)
        self._disk.change(folder, ("drop", name))

    def listdir(self, path: str) -> list[str]:
        self._disk.watch.check(self._owner)
        node = self._disk.nodes[self._existing(path)]
        if isinstance(node, FileNode):
            raise _error(errno.ENOTDIR, path)
        return list(node.entries)

    def stat(self, path: str | int) -> os.stat_result:
        self._disk.watch.check(self._owner)
        node = self._disk.nodes[self._open_files[path][0] if isinstance(path, int) else self._existing(path)]
        kind, size = (stat.S_IFREG, len(node.data)) if isinstance(node, FileNode) else (stat.S_IFDIR, 0)
        return os.stat_result((kind | 0o755, 0, 0, 1, 0, 0, size, 0, 0, 0))

    lstat = stat

    def _enter(self, call: str, path: str, half: Callable[[], Nodes] | None = None) -> bool:
        return self._disk.watch.enter(Event(self._owner, call, path), half)

    def _existing(self, path: str) -> int:
        self._disk.watch.check(self._owner)
        number = self._disk.find(path)
        if number is None:
            raise _error(errno.ENOENT, path)
        return number

    def _folder_of(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        number = self._existing(folder)
        if isinstance(self._disk.nodes[number], FileNode):
            raise _error(errno.ENOTDIR, path)
        return number, name

    def _file(self, number: int) -> FileNode:
        node = self._disk.nodes[number]
        if isinstance(node, FolderNode):
            raise _error(errno.EISDIR, str(number))
        return node


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
