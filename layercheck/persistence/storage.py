"""Where bytes go: one folder of one run, reached by seven operations. URIs are in `arrow_storage`.

What a caller may assume when `write` returns: the object is whole, has its final name, and survives a power
cut. What it may assume after an exception: nothing new has that name. Nothing here is retried; the writer and
the coordinator decide about that.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from layercheck.errors import ConfigError, DamagedShardError, StorageError
from layercheck.persistence.file_calls import ABSENT, Buffer, FileCalls, absent_is_fine, fill

TEMP_PREFIX = ".tmp-"
"""Names that begin so are unfinished writes: no reader looks at them, collection may delete them."""

_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Nothing is there, or a link, or a file where a folder should be."""
_KNOB = "check the storage path, its rights and free space (`storage`)"


class Readable(Protocol):
    """What a recovery needs of a place with shard files; see `Storage`."""

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes `begin` to `end` (default: all); fewer if the object ends before."""
        ...

    def read_into(self, path: str, begin: int, *into: memoryview) -> None:
        """Fills memory, one piece after another, from `begin` on.

        Raises:
            DamagedShardError: the object is missing or too short.
        """
        ...

    def size(self, path: str) -> int | None:
        """Size of an object in bytes, None if it does not exist."""
        ...


class Storage(Readable, Protocol):
    """One run's `layercheck` folder. Paths are relative to it, with forward slashes.

    Every operation raises `StorageError` with the path and the reason when the storage refuses.
    """

    root: str
    exclusive: bool
    """True if of many that `create` one name in the same moment exactly one is told that it did."""

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Writes one whole object; durable at return, absent after an exception."""
        ...

    def create(self, path: str, data: Buffer) -> bool:
        """Like `write`, but only if the name is free; False if it was taken."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder (`""`: the root), sorted, unfinished ones included; empty if it is not there."""
        ...

    def delete(self, path: str) -> None:
        """Deletes an object or a whole folder; a missing one is fine."""
        ...

    def settle(self, folder: str) -> None:
        """Makes durable what a reader sees in a folder; a missing folder is fine.

        Whoever wrote it may have died before it was durable; who builds on it calls this first.
        """
        ...


def open_storage(uri: str, run: str) -> Storage:
    """The `layercheck` folder of a run below a storage path. Touches nothing yet.

    Args:
        uri: local path, `file://` URI, or a URI that `pyarrow.fs` knows (`s3://`, `gs://`, `hdfs://`).
        run: run name; letters, digits, `.`, `_` and `-`, not beginning with a dot.

    Raises:
        ConfigError: the run name would leave the folder or hide in it.
        StorageError: the URI is of no known kind.
    """
    if not _RUN_NAME.fullmatch(run):
        raise ConfigError(
            f"run name {run!r}: use letters, digits, '.', '_' and '-', not beginning with '.' (`run`)",
            run=run,
        )
    return _open(uri, [run, "layercheck"])


def open_run_folder(uri: str, run: str) -> Storage:
    """The folder of a run itself, where `metrics/` and `drift/` lie beside `layercheck/`."""
    return _open(uri, [run])


def open_store(store: str) -> Storage:
    """The storage of a STORE argument: a run folder or the `layercheck` folder inside it, path or URI."""
    path, mark, query = store.partition("?") if "://" in store else (store, "", "")
    trimmed = path.rstrip("/") or "/"
    below = [] if trimmed.rsplit("/", 1)[-1] == "layercheck" else ["layercheck"]
    return _open(trimmed + mark + query, below)


def _open(uri: str, below: list[str]) -> Storage:
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme == "file":
        return LocalStorage(os.path.join(os.path.abspath(os.path.expanduser(rest if mark else uri)), *below))
    from layercheck.persistence.arrow_storage import open_arrow

    return open_arrow(uri, below)


def checked_path(path: str) -> str:
    """The path itself if it stays inside the store; a path from a damaged record must not leave it."""
    parts = path.split("/")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise DamagedShardError(f"path {path!r} leaves the store", path=path)
    return path


class LocalStorage:
    """Plain os calls on a local or shared POSIX folder.

    States of a write, all in the caller's thread: (1) folders made, each entry on the way to them durable;
    (2) temp name made exclusively in the target folder; (3) bytes written, GIL released in each call; (4)
    file fsynced; (5) renamed; (6) folder fsynced. A crash before (5) leaves a temp name that no reader sees;
    a crash between (5) and (6) leaves either no name or the whole object, and readers may see a name that a
    power cut still takes away: see `settle`.

    Symbolic links below the root are not followed: they could lead out of the store. The root may be one.

    Args:
        root: the run's folder.
        calls: the file system; a test may bring one whose power can be cut.
    """

    exclusive = True

    def __init__(self, root: str, calls: FileCalls = os) -> None:
        self.root = os.path.abspath(root)
        self._os = calls
        self._durable: set[str] = set()
        """Folders whose entry this process has seen reach the disk."""

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Storage.write`."""
        with self._errors("write", path):
            folder, target = self._ready(path)
            existed = self._kind(target) is not None
            temp = self._write_temp(folder, chunks)
            try:
                if existed:
                    # Where the old name goes before the new one comes, a power cut must leave the temp name.
                    self._fsync_folder(folder)
                self._replace(temp, target)
                self._fsync_folder(folder)
            except BaseException:
                for name in (temp,) if existed else (temp, target):
                    with suppress(OSError):
                        self._os.unlink(name)
                raise

    def create(self, path: str, data: Buffer) -> bool:
        """See `Storage.create`. `link` fails on a taken name, so exactly one of many claimants wins."""
        with self._errors("create", path):
            folder, target = self._ready(path)
            temp = self._write_temp(folder, [data])
            try:
                self._os.link(temp, target)
            except FileExistsError:
                return False
            finally:
                with suppress(FileNotFoundError):
                    self._os.unlink(temp)
            self._fsync_folder(folder)
            return True

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        with self._errors("read", path):
            fd = self._open(path)
            try:
                size = self._os.stat(fd).st_size
                data = bytearray(max(0, (size if end is None else min(end, size)) - begin))
                done = fill(self._os, fd, begin, [memoryview(data)])
                return bytes(memoryview(data)[:done])
            finally:
                self._os.close(fd)

    def read_into(self, path: str, begin: int, *into: memoryview) -> None:
        """See `Storage.read_into`."""
        views = [view.cast("B") for view in into]
        wanted = sum(map(len, views))
        try:
            with self._errors("read", path):
                fd = self._open(path)
                try:
                    done = fill(self._os, fd, begin, views)
                finally:
                    self._os.close(fd)
        except StorageError as error:
            if error.facts.get("errno") in ABSENT:
                raise DamagedShardError(f"{path} is missing", path=path) from error
            raise
        if done < wanted:
            raise DamagedShardError(
                f"{path} is short: {done} of {wanted} bytes at offset {begin}", path=path, begin=begin
            )

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        with self._errors("read", path), absent_is_fine():
            found = self._os.stat(self._full(path))
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def list(self, folder: str) -> list[str]:
        """See `Storage.list`."""
        with self._errors("list", folder), absent_is_fine():
            return sorted(self._os.listdir(self._full(folder) if folder else self.root))
        return []

    def delete(self, path: str) -> None:
        """See `Storage.delete`. The deletion of a file is durable at return: its shards may go next.

        Also that of a file which is gone already: whoever deleted it may have died before it was durable. A
        link is deleted, not what it leads to.
        """
        with self._errors("delete", path), absent_is_fine():
            folder, target = self._parts(path)
            if self._kind(target) == stat.S_IFDIR:
                self._delete_folder(target)
                return
            with suppress(FileNotFoundError):
                self._os.unlink(target)
            self._fsync_folder(folder)

    def settle(self, folder: str) -> None:
        """See `Storage.settle`."""
        with self._errors("settle", folder), absent_is_fine():
            full = self._full(folder)
            if self._kind(full) == stat.S_IFDIR:
                self._make_durable(full)
                self._fsync_folder(full)

    # ------------------------------------------------------------------ names

    def _full(self, path: str) -> str:
        """The object's own name. A link is refused here, and so is one on the way."""
        _, target = self._parts(path)
        if self._kind(target) == stat.S_IFLNK:
            raise OSError(errno.ELOOP, "a symbolic link inside the store is not followed")
        return target

    def _parts(self, path: str) -> tuple[str, str]:
        """(folder, name) of an object, which itself may be missing or a link."""
        folder = self.root
        *folders, name = checked_path(path).split("/")
        for part in folders:
            folder = os.path.join(folder, part)
            if self._kind(folder) == stat.S_IFLNK:
                raise OSError(errno.ELOOP, "a symbolic link inside the store is not followed")
        return folder, os.path.join(folder, name)

    def _kind(self, name: str) -> int | None:
        """`stat.S_IFDIR`, `S_IFREG`, `S_IFLNK`, ...; None for nothing."""
        try:
            return stat.S_IFMT(self._os.lstat(name).st_mode)
        except FileNotFoundError:
            return None

    @contextmanager
    def _errors(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(
                f"cannot {what} {path} below {self.root}: {reason}; {_KNOB}",
                path=path,
                root=self.root,
                errno=error.errno,
            ) from error

    # ------------------------------------------------------------------ bytes

    def _open(self, path: str) -> int:
        return self._os.open(self._full(path), os.O_RDONLY | os.O_CLOEXEC)

    def _write_temp(self, folder: str, chunks: Iterable[Buffer]) -> str:
        """A finished and fsynced temp file beside the target; removed if anything fails."""
        temp = os.path.join(folder, f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        fd = self._os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    while view:
                        view = view[self._os.write(fd, view) :]
                self._os.fsync(fd)
            finally:
                self._os.close(fd)
        except BaseException:
            with suppress(FileNotFoundError):
                self._os.unlink(temp)
            raise
        return temp

    def _replace(self, temp: str, target: str) -> None:
        """Renames. Where a taken name is refused (some mounted object and Windows shares) it goes first.

        A crash between leaves the temp file alone. Only progress (for which the journal then looks there) and
        receipts are ever replaced; and a commit or shard that is written again, whose first try has failed.
        """
        try:
            self._os.rename(temp, target)
        except FileExistsError:
            self._os.unlink(target)
            self._os.rename(temp, target)

    # ------------------------------------------------------------------ folders

    def _ready(self, path: str) -> tuple[str, str]:
        """(folder, name) of an object that is about to be written; the folder is there and durable."""
        folder, target = self._parts(path)
        self._make_durable(folder)
        return folder, target

    def _make_durable(self, folder: str) -> None:
        """Makes missing folders and fsyncs the entry of each, topmost first; once for each folder.

        Also of those that exist: whoever made one may not have fsynced it yet, and may be dead.
        """
        todo = []
        while folder != os.path.dirname(folder) and not (
            folder in self._durable and self._kind(folder) == stat.S_IFDIR
        ):
            todo.append(folder)
            folder = os.path.dirname(folder)
        for new in reversed(todo):
            existed = self._kind(new) is not None
            if not existed:
                with suppress(FileExistsError):
                    self._os.mkdir(new, 0o777)
            try:
                self._fsync_folder(os.path.dirname(new))
            except OSError:
                # Folders above the root may be somebody else's, on a disk that we may not even open.
                if not existed or new.startswith(os.path.join(self.root, "")):
                    raise
            self._durable.add(new)

    def _delete_folder(self, folder: str) -> None:
        """Deletes a folder of files. Not durable at return: what comes back is an orphan once more."""
        self._durable.discard(folder)
        for name in self._os.listdir(folder):
            inner = os.path.join(folder, name)
            if self._kind(inner) == stat.S_IFDIR:
                self._delete_folder(inner)
            else:
                with suppress(FileNotFoundError):
                    self._os.unlink(inner)
        with suppress(FileNotFoundError):
            self._os.rmdir(folder)

    def _fsync_folder(self, folder: str) -> None:
        fd = self._os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._os.fsync(fd)
        finally:
            self._os.close(fd)
