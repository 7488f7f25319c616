"""Object stores and other remote file systems, through `pyarrow.fs`: one whole PUT for each object."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs

from layercheck.errors import DamagedShardError, StorageError
from layercheck.persistence.storage import Buffer, Storage, checked_path


def open_arrow(uri: str, below: list[str]) -> Storage:
    """The storage below a URI.

    Raises:
        StorageError: `pyarrow.fs` does not know the URI.
    """
    try:
        filesystem, base = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise StorageError(f"storage={uri!r} cannot be opened: {error} (`storage`)", path=uri) from error
    return ArrowStorage(filesystem, "/".join([base.rstrip("/"), *below]))


class ArrowStorage:
    """A folder of a `pyarrow.fs` file system.

    An object is put together in memory and sent by one call: closing a stream publishes what it got so far,
    also while an exception of the caller passes, so a stream is opened only once all bytes are there.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self.root = root
        self._fs = filesystem

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Storage.write`."""
        data = b"".join(bytes(memoryview(chunk).cast("B")) for chunk in chunks)
        full = self._full(path)
        with self._errors("write", path):
            self._fs.create_dir(full.rsplit("/", 1)[0], recursive=True)
            stream = self._fs.open_output_stream(full)
            stream.write(data)
            stream.close()

    def create(self, path: str, data: Buffer) -> bool:
        """See `Storage.create`, with a weaker promise.

        The common store API has no exclusive PUT. Of two claimants in the same moment the later PUT wins and
        the other one finds a strange token when it reads its claim again, which the coordinator does before
        each commit; what the loser committed meanwhile is dead by lineage (I15).
        """
        if self.size(path) is not None:
            return False
        self.write(path, [data])
        return self.read(path) == bytes(data)

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        with self._errors("read", path), self._fs.open_input_file(self._full(path)) as file:
            last = file.size() if end is None else min(end, file.size())
            return bytes(file.read_at(max(0, last - begin), begin)) if begin < last else b""

    def read_into(self, path: str, begin: int, into: memoryview) -> None:
        """See `Storage.read_into`."""
        view = into.cast("B")
        if self.size(path) is None:
            raise DamagedShardError(f"{path} is missing", path=path)
        data = self.read(path, begin, begin + len(view))
        if len(data) < len(view):
            raise DamagedShardError(
                f"{path} is short: {len(data)} of {len(view)} bytes at offset {begin}", path=path, begin=begin
            )
        view[:] = data

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        with self._errors("read", path):
            info = self._fs.get_file_info(self._full(path))
        return None if info.type == fs.FileType.NotFound else int(info.size or 0)

    def list(self, folder: str) -> list[str]:
        """See `Storage.list`."""
        selector = fs.FileSelector(self._full(folder), allow_not_found=True)
        with self._errors("list", folder):
            return sorted(info.base_name for info in self._fs.get_file_info(selector))

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        full = self._full(path)
        with self._errors("delete", path):
            kind = self._fs.get_file_info(full).type
            if kind == fs.FileType.Directory:
                self._fs.delete_dir(full)
            elif kind != fs.FileType.NotFound:
                self._fs.delete_file(full)

    def _full(self, path: str) -> str:
        return f"{self.root}/{checked_path(path)}"

    @contextmanager
    def _errors(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot {what} {path} below {self.root}: {error}; check the URI and its rights (`storage`)",
                path=path,
                root=self.root,
            ) from error
