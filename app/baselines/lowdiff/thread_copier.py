"""Copies of host memory in a thread of their own, for a trainer that lives on the CPU."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from layercheck.errors import StorageError
from layercheck.persistence.copier import Copied


class ThreadCopier:
    """A `Copier`: `mark` starts what was queued, `hold_back` waits for it. Ends with `close`.

    Args:
        wait_s: limit of `hold_back`.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lowdiff-copy")
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._newest: _InThread | None = None
        self._stall_s = 0.0

    def copying(self) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        self._queued.append((target, source))

    def mark(self) -> Copied:  # noqa: D102
        pairs, self._queued = self._queued, []
        self._newest = _InThread(self._thread.submit(_all_of(pairs)))
        return self._newest

    def hold_back(self) -> None:  # noqa: D102
        newest, self._newest = self._newest, None
        if newest is not None:
            started = time.monotonic()
            newest.wait(self._wait_s)
            self._stall_s += time.monotonic() - started

    def take_stall_s(self) -> float:  # noqa: D102
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def close(self) -> None:
        """Ends the thread when its copies are done."""
        self._thread.shutdown(wait=True)


def _all_of(pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    def copy() -> None:
        for target, source in pairs:
            target.copy_(source)

    return copy


class _InThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, limit_s: float) -> None:
        if not wait([self._future], limit_s).done:
            raise StorageError(f"a differential was not copied within {limit_s:g} s (storage_wait_s)")
        self._future.result()
