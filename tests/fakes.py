"""Storages that fail, crash or dawdle at a named operation, and a clock that is set by hand."""

import errno
import threading
from collections.abc import Iterable
from pathlib import Path

from layercheck.errors import StorageError
from layercheck.persistence.file_calls import Buffer
from layercheck.persistence.storage import LocalStorage


class Clock:
    """A monotonic clock that moves when told, by `sleep`, and by `costs` seconds at each look."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.costs = 0.0

    def __call__(self) -> float:
        self.now += self.costs
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PowerCutError(BaseException):
    """The process ends here; no handler of the code under test may run on."""


class FaultyStorage(LocalStorage):
    """Fails mutating operations whose path holds `matching`.

    `fail_after=n` lets n such operations pass, then fails `times` of them. `before=False` does the operation
    first and fails then: an error although the bytes are there. `crash=True` raises `PowerCutError`
    in place of an error.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.operations: list[tuple[str, str]] = []
        self.matching, self.fail_after, self.times, self.before, self.crash = "", 0, 0, True, False

    def arm(
        self,
        matching: str = "",
        *,
        fail_after: int = 0,
        times: int = 1,
        before: bool = True,
        crash: bool = False,
    ) -> None:
        self.matching, self.fail_after, self.times = matching, fail_after, times
        self.before, self.crash = before, crash

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        with self._fault("write", path):
            super().write(path, chunks)

    def create(self, path: str, data: Buffer) -> bool:
        with self._fault("create", path):
            return super().create(path, data)

    def delete(self, path: str) -> None:
        with self._fault("delete", path):
            super().delete(path)

    def _fault(self, what: str, path: str) -> "_Fault":
        self.operations.append((what, path))
        if self.matching not in path or self.times == 0:
            return _Fault(None, self.before)
        if self.fail_after > 0:
            self.fail_after -= 1
            return _Fault(None, self.before)
        self.times -= 1
        if self.crash:
            return _Fault(PowerCutError(f"{what} {path}"), self.before)
        return _Fault(StorageError(f"injected: {what} {path}", path=path, errno=errno.ENOSPC), self.before)


class _Fault:
    def __init__(self, error: BaseException | None, before: bool) -> None:
        self.error, self.before = error, before

    def __enter__(self) -> None:
        if self.error is not None and self.before:
            raise self.error

    def __exit__(self, *_: object) -> None:
        if self.error is not None and not self.before:
            raise self.error


class SlowStorage(LocalStorage):
    """Writes of paths that hold `matching` wait until `gate` is set; `waiting` says that one has come."""

    def __init__(self, root: str, matching: str = "") -> None:
        super().__init__(root)
        self.matching = matching
        self.gate, self.waiting = threading.Event(), threading.Event()

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        if self.matching in path:
            self.waiting.set()
            assert self.gate.wait(60), "nobody opened the gate"
        super().write(path, chunks)


def flip_bit(path: Path, bit: int) -> None:
    """Flips one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)
