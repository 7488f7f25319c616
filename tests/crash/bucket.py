"""An object store in memory, spoken to as `pyarrow.fs` is: a PUT is whole or absent, a list shows all."""

from typing import Any

import pyarrow as pa
from pyarrow import fs

from layercheck.persistence.arrow_storage import ArrowStorage
from tests.crash.events import Event, Watch

Objects = dict[str, bytes]


class Bucket:
    """The objects. `storage(root, owner)` is the real object storage of one process."""

    def __init__(self, objects: Objects | None = None) -> None:
        self.objects: Objects = dict(objects or {})
        self.watch = Watch()
        self.on_its_way: tuple[str, bytes] | None = None
        """The PUT that is being sent: it may arrive although its sender dies."""

    def state(self) -> Objects:
        """Everything, as a value."""
        return dict(self.objects)

    def storage(self, root: str, owner: str) -> ArrowStorage:
        return ArrowStorage(_BucketCalls(self, owner), root, makes_folders=False)


class _BucketCalls:
    """The part of a `pyarrow.fs.FileSystem` that the storage uses, for one process."""

    def __init__(self, bucket: Bucket, owner: str) -> None:
        self._bucket, self._owner = bucket, owner

    def open_output_stream(self, path: str) -> "_Put":
        return _Put(self, path)

    def put(self, path: str, data: bytes) -> None:
        self._bucket.on_its_way = (path, data)
        self._bucket.watch.enter(Event(self._owner, "put", path))
        self._bucket.on_its_way = None
        self._bucket.objects[path] = data

    def open_input_file(self, path: str) -> Any:
        self._bucket.watch.check(self._owner)
        if path not in self._bucket.objects:
            raise FileNotFoundError(2, "no such object", path)
        return pa.BufferReader(self._bucket.objects[path])

    def get_file_info(self, what: Any) -> Any:
        self._bucket.watch.check(self._owner)
        if isinstance(what, fs.FileSelector):
            prefix = f"{what.base_dir}/"
            below = {key[len(prefix) :] for key in self._bucket.objects if key.startswith(prefix)}
            return [self._info(prefix + name) for name in {key.split("/")[0] for key in below}]
        return self._info(what)

    def delete_file(self, path: str) -> None:
        self._bucket.watch.enter(Event(self._owner, "delete", path))
        self._bucket.objects.pop(path, None)

    def delete_dir(self, path: str) -> None:
        """One request for each object: a crash may come between."""
        for key in [key for key in self._bucket.objects if key.startswith(f"{path}/")]:
            self.delete_file(key)

    def _info(self, path: str) -> fs.FileInfo:
        if (data := self._bucket.objects.get(path)) is not None:
            return fs.FileInfo(path, type=fs.FileType.File, size=len(data))
        if any(key.startswith(f"{path}/") for key in self._bucket.objects):
            return fs.FileInfo(path, type=fs.FileType.Directory)
        return fs.FileInfo(path, type=fs.FileType.NotFound)


class _Put:
    def __init__(self, calls: _BucketCalls, path: str) -> None:
        self._calls, self._path, self._data = calls, path, bytearray()

    def write(self, data: bytes | bytearray) -> None:
        self._data += data

    def close(self) -> None:
        self._calls.put(self._path, bytes(self._data))
