"""Where bytes go: one folder of one run, reached by eight operations. URIs are in `arrow_storage`.

What a caller may assume when `write` returns: the object is whole, has its final name, and survives a power
cut. What it may assume after an exception: nothing new has that name. Nothing here is retried; the writer and
the coordinator decide about that.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from layercheck.errors import ConfigError, DamagedShardError, StorageError

Buffer = bytes | bytearray | memoryview
TEMP_PREFIX = ".tmp-"
"""Names that begin so are unfinished writes: no reader looks at them, collection may delete them."""

_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_KNOB = "check the storage path, its rights and free space (`storage`)"


class Storage(Protocol):
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

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes `begin` to `end` (default: all); fewer if the object ends before."""
        ...

    def read_into(self, path: str, begin: int, into: memoryview) -> None:
        """Fills `into` from `begin` on.

        Raises:
            DamagedShardError: the object is missing or too short.
        """
        ...

    def expect(self, path: str, begin: int, end: int) -> None:
        """These bytes will be read soon: a hint, which never waits and never fails."""
        ...

    def size(self, path: str) -> int | None:
        """Size of an object in bytes, None if it does not exist."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted, unfinished ones included; empty if there is no such folder."""
        ...

    def delete(self, path: str) -> None:
        """Deletes an object or a whole folder; a missing one is fine."""
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
        raise StorageError(f"path {path!r} leaves the store", path=path)
    return path


class LocalStorage:
    """Plain os calls on a local or shared POSIX folder.

    States of a write, all in the caller's thread: (1) temp name made exclusively in the target folder; (2)
    bytes written, GIL released in each call; (3) file fsynced; (4) renamed; (5) folder fsynced, and its
    parent, which another rank may have made and not yet fsynced. A crash before (4) leaves a temp name that
    no reader sees; a crash between (4) and (5) leaves either no name or the whole object.
    """

    exclusive = True

    def __init__(self, root: str) -> None:
        self.root = root

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Storage.write`."""
        target = self._full(path)
        with self._errors("write", path):
            existed = target.exists()
            temp = self._write_temp(target, chunks)
            try:
                os.rename(temp, target)
                self._fsync_folders(target.parent)
            except BaseException:
                for name in (temp,) if existed else (temp, target):
                    with suppress(OSError):
                        name.unlink()
                raise

    def create(self, path: str, data: Buffer) -> bool:
        """See `Storage.create`. `link` fails on a taken name, so exactly one of many claimants wins."""
        target = self._full(path)
        with self._errors("create", path):
            temp = self._write_temp(target, [data])
            try:
                os.link(temp, target)
            except FileExistsError:
                return False
            finally:
                temp.unlink(missing_ok=True)
            self._fsync_folders(target.parent)
            return True

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        with self._errors("read", path), open(self._full(path), "rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(max(0, end - begin))

    def read_into(self, path: str, begin: int, into: memoryview) -> None:
        """See `Storage.read_into`."""
        view = into.cast("B")
        try:
            with self._errors("read", path):
                fd = os.open(self._full(path), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    done = _fill(fd, begin, view)
                finally:
                    os.close(fd)
        except StorageError as error:
            if error.facts.get("errno") == errno.ENOENT:
                raise DamagedShardError(f"{path} is missing", path=path) from error
            raise
        if done < len(view):
            raise DamagedShardError(
                f"{path} is short: {done} of {len(view)} bytes at offset {begin}", path=path, begin=begin
            )

    def expect(self, path: str, begin: int, end: int) -> None:
        """See `Storage.expect`. The kernel reads ahead into its cache, many requests at once."""
        with suppress(OSError):
            fd = os.open(self._full(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        with self._errors("read", path):
            try:
                return self._full(path).stat().st_size
            except FileNotFoundError:
                return None

    def list(self, folder: str) -> list[str]:
        """See `Storage.list`."""
        with self._errors("list", folder):
            try:
                return sorted(os.listdir(self._full(folder)))
            except FileNotFoundError:
                return []

    def delete(self, path: str) -> None:
        """See `Storage.delete`. The deletion of a file is durable at return: its shards may go next."""
        target = self._full(path)
        with self._errors("delete", path):
            if target.is_dir():
                shutil.rmtree(target)
            elif target.exists():
                target.unlink(missing_ok=True)
                _fsync_folder(target.parent)

    def _full(self, path: str) -> Path:
        return Path(self.root, checked_path(path))

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

    def _write_temp(self, target: Path, chunks: Iterable[Buffer]) -> Path:
        """A finished and fsynced temp file beside the target; removed if anything fails."""
        self._make_folders(target.parent)
        temp = target.parent / f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                for chunk in chunks:
                    _write_all(fd, chunk)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        return temp

    def _make_folders(self, folder: Path) -> None:
        """Makes missing folders and fsyncs the entry of each new one, topmost first."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(new)
            _fsync_folder(new.parent)

    def _fsync_folders(self, folder: Path) -> None:
        _fsync_folder(folder)
        if folder != Path(self.root):
            _fsync_folder(folder.parent)


def _write_all(fd: int, chunk: Buffer) -> None:
    view = memoryview(chunk).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def _fill(fd: int, begin: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], begin + done)
        if count == 0:
            break
        done += count
    return done


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
