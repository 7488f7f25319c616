"""The files of a run outside the `layercheck` folder's own code: list, read, write, local or remote."""

from pathlib import Path
from uuid import uuid4

from pyarrow import fs

from layercheck.errors import StorageError


class RunFiles:
    """The folder of one run. Paths are relative to it, with forward slashes.

    Args:
        folder: absolute path or a URI that `pyarrow.fs` knows.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder.rstrip("/")
        self._files, self._root = fs.FileSystem.from_uri(self.folder)

    def paths(self, below: str) -> list[str]:
        """Files and folders directly in `below`, sorted; none if it does not exist."""
        selector = fs.FileSelector(f"{self._root}/{below}", allow_not_found=True)
        return sorted(f"{below}/{info.base_name}" for info in self._files.get_file_info(selector))

    def exists(self, path: str) -> bool:
        """Whether there is a file of this name."""
        info = self._files.get_file_info(f"{self._root}/{path}")
        return bool(info.type == fs.FileType.File)

    def read(self, path: str) -> bytes:
        """The whole file."""
        with self._files.open_input_stream(f"{self._root}/{path}") as stream:
            return bytes(stream.read())

    def write(self, path: str, content: bytes) -> None:
        """Writes a whole file; a local one under a temporary name that is then renamed.

        Raises:
            StorageError: the storage refuses.
        """
        target = f"{self._root}/{path}"
        local = "://" not in self.folder
        place = f"{target}.{uuid4().hex}.tmp" if local else target
        try:
            if local:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
            with self._files.open_output_stream(place) as stream:
                stream.write(content)
            if local:
                self._files.move(place, target)
        except OSError as error:
            raise StorageError(
                f"cannot write {path} in {self.folder}: {error}; check run.storage: path, rights, space",
                path=path,
            ) from error

    def check_writable(self) -> None:
        """Writes, reads and deletes a small file.

        Raises:
            StorageError: one of the three fails.
        """
        name, content = f"probe-{uuid4().hex}", uuid4().bytes
        self.write(name, content)
        try:
            if self.read(name) != content:
                raise StorageError(
                    f"{self.folder} gives back other bytes than were written", path=self.folder
                )
            self._files.delete_file(f"{self._root}/{name}")
        except OSError as error:
            raise StorageError(f"cannot read back from {self.folder}: {error}", path=self.folder) from error
