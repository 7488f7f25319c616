"""Object stores and other remote file systems, through `pyarrow.fs`: one whole PUT for each object."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pyarrow import fs

from layercheck.errors import DamagedShardError, StorageError
from layercheck.persistence.file_calls import Buffer
from layercheck.persistence.storage import Storage, checked_path

_S3_OPTIONS = {"endpoint_override", "scheme", "region"}
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CONNECT_S = 10.0
_REQUEST_S = 60.0


def open_arrow(uri: str, below: list[str]) -> Storage:
    """The storage below a URI.

    `s3://bucket/path` takes its endpoint from the query (`?endpoint_override=host:port&scheme=http&region=x`)
    or from `AWS_ENDPOINT_URL`, its rights from the environment, the AWS profile or the machine's role.

    Raises:
        StorageError: `pyarrow.fs` does not know the URI, or it carries a secret.
    """
    parts = urlsplit(uri)
    public = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc:
        # A URI is written into run.json, logs and command lines: nothing secret may be in it.
        raise StorageError(
            f"storage={public!r} was given with a key in it: give keys by the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile or a role (`storage`)",
            path=public,
        )
    try:
        filesystem, base = _open_s3(parts) if parts.scheme == "s3" else fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, TypeError) as error:
        why = str(error).replace(uri, public)
        raise StorageError(f"storage={public!r} cannot be opened: {why} (`storage`)", path=public) from error
    return ArrowStorage(filesystem, "/".join([base.rstrip("/"), *below]), makes_folders=parts.scheme != "s3")


def _open_s3(parts: SplitResult) -> tuple[Any, str]:
    """The file system and the path of an `s3://` URI."""
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if unknown := options.keys() - _S3_OPTIONS:
        raise ValueError(f"unknown option {min(unknown)!r}, not one of {', '.join(sorted(_S3_OPTIONS))}")
    endpoint = options.get("endpoint_override") or next(
        (os.environ[name] for name in _S3_ENDPOINTS if os.environ.get(name)), ""
    )
    scheme, _, host = endpoint.rpartition("://")
    region = options.get("region") or next((os.environ[n] for n in _S3_REGIONS if os.environ.get(n)), None)
    if region is None:
        region = "us-east-1" if endpoint else fs.resolve_s3_region(parts.netloc)
    filesystem = fs.S3FileSystem(
        endpoint_override=host or None,
        scheme=options.get("scheme") or scheme or "https",
        region=region,
        allow_delayed_open=True,  # one PUT for an object that fits into one request
        connect_timeout=_CONNECT_S,
        request_timeout=_REQUEST_S,
    )
    return filesystem, f"{parts.netloc}{parts.path}"


class ArrowStorage:
    """A folder of a `pyarrow.fs` file system.

    An object is put together in memory and sent by one call: closing a stream publishes what it got so far,
    also while an exception of the caller passes, so a stream is opened only once all bytes are there. The
    host needs memory for one more copy of the largest object (this rank's part of a full event).

    Args:
        filesystem: of `pyarrow.fs`.
        root: path of the folder in it.
        makes_folders: False where a name with slashes needs no folder: each would cost one more PUT.
    """

    exclusive = False

    def __init__(self, filesystem: Any, root: str, makes_folders: bool = True) -> None:
        self.root = root
        self._fs = filesystem
        self._makes_folders = makes_folders

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Storage.write`."""
        data = bytearray()
        for chunk in chunks:
            data += chunk
        full = self._full(path)
        with self._errors("write", path):
            if self._makes_folders:
                self._fs.create_dir(full.rsplit("/", 1)[0], recursive=True)
            stream = self._fs.open_output_stream(full)
            stream.write(data)
            stream.close()

    def create(self, path: str, data: Buffer) -> bool:
        """See `Storage.create`, but not exclusive.

        Of two in the same moment the later PUT wins, and the other one may not learn of it. What has to be
        claimed is claimed by `coordination/object_claims.py`.
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

    def read_into(self, path: str, begin: int, *into: memoryview) -> None:
        """See `Storage.read_into`: one request."""
        views = [view.cast("B") for view in into]
        wanted = sum(map(len, views))
        if self.size(path) is None:
            raise DamagedShardError(f"{path} is missing", path=path)
        data = memoryview(self.read(path, begin, begin + wanted))
        if len(data) < wanted:
            raise DamagedShardError(
                f"{path} is short: {len(data)} of {wanted} bytes at offset {begin}", path=path, begin=begin
            )
        for view in views:
            view[:], data = data[: len(view)], data[len(view) :]

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        with self._errors("read", path):
            info = self._fs.get_file_info(self._full(path))
        return int(info.size or 0) if info.type == fs.FileType.File else None

    def list(self, folder: str) -> list[str]:
        """See `Storage.list`."""
        selector = fs.FileSelector(self._full(folder) if folder else self.root, allow_not_found=True)
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

    def settle(self, folder: str) -> None:
        """See `Storage.settle`. An object that can be listed is durable already."""

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
