"""How live state gets into host buffers: by a thread of its own, or on a side stream of an accelerator.

States of the copies of one step:
1. `copying` begins: what is copied is the state as all work queued so far leaves it (training thread).
2. `copy` queues one copy; `mark` stands for all that were queued before it (training thread).
3. `hold_back`, before the optimizer changes anything: the change comes after the last mark. Host or device
   waits, which is part of the visible stall (training thread).
4. the writer reads a buffer only after `Copied.wait` (writer thread).

Copies end in the order in which they were queued. So a buffer that is given back and filled again while an
old copy into it is still queued ends up with the newer bytes.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from layercheck.device_event import DeviceEvent
from layercheck.errors import StorageError


class Copied(Protocol):
    """Copies that may still be on their way."""

    def wait(self, limit_s: float) -> None:
        """Returns when their bytes are there.

        Raises:
            StorageError: they were not within `limit_s`.
        """
        ...


class Copier(Protocol):
    """See the module."""

    def copying(self, at_once: bool = False) -> AbstractContextManager[None]:
        """Surrounds the calls of `copy` and `mark` of one step; what was not marked by then is given up.

        `at_once`: who queues waits for buffers, which only copies that were made give back.
        """
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies `source` into the host buffer `target`, of the same shape and type, now or later."""
        ...

    def mark(self) -> Copied:
        """Stands for all copies so far."""
        ...

    def hold_back(self) -> None:
        """What is queued on the device from now on comes after all copies that were marked."""
        ...

    def take_stall_s(self) -> float:
        """Seconds of waiting because of `hold_back`, as far as known and not told before."""
        ...

    def close(self) -> None:
        """No copy follows; those that are queued are still made. Safe twice."""
        ...


class ThreadCopier:
    """For state in host memory: copies beside the next forward and backward, in one thread.

    It begins where `copying` ends, so as not to take the processor from who queues; or at each mark, for who
    waits for a buffer meanwhile. A copy that comes too late is lost, and training goes on: whoever waits for
    it is told.

    Args:
        wait_s: limit of `hold_back`.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layercheck-copy")
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._marked: list[_InThread] = []
        self._at_once = False
        self._newest: _InThread | None = None
        self._update = _NextUpdate()
        self._stall_s = 0.0

    @contextmanager
    def copying(self, at_once: bool = False) -> Iterator[None]:  # noqa: D102
        self._at_once = at_once
        try:
            yield
        finally:
            self._queued = []
            self._begin()

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        self._queued.append((target, source))

    def mark(self) -> Copied:  # noqa: D102
        self._newest = _InThread(self._queued, self._update)
        self._queued = []
        self._marked.append(self._newest)
        if self._at_once:
            self._begin()
        return self._newest

    def _begin(self) -> None:
        marked, self._marked = self._marked, []
        if marked:
            self._thread.submit(_make_all, marked)

    def hold_back(self) -> None:  # noqa: D102
        newest, self._newest = self._newest, None
        if newest is None:
            return
        started = time.monotonic()
        self._update.came_too_early = not newest.made.wait(self._wait_s)
        self._update = _NextUpdate()
        self._stall_s += time.monotonic() - started

    def take_stall_s(self) -> float:  # noqa: D102
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def close(self) -> None:  # noqa: D102
        self._thread.shutdown(wait=False)


class _NextUpdate:
    """That of the optimizer which copies have to be made before."""

    came_too_early = False


class _InThread:
    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], update: _NextUpdate) -> None:
        self._pairs = pairs
        self._update = update
        self._error: Exception | None = None
        self.made = threading.Event()

    def make(self) -> None:
        try:
            for target, source in self._pairs:
                target.copy_(source)
        except Exception as error:
            self._error = error  # for whoever waits: `wait`
        self._pairs = ()
        self.made.set()

    def wait(self, limit_s: float) -> None:
        if not self.made.wait(limit_s):
            raise StorageError(f"a copy in host memory was not made within {limit_s:g} s (storage_wait_s)")
        if self._update.came_too_early:
            raise StorageError(
                "a copy in host memory was not made before the next update of the optimizer (storage_wait_s)"
            )
        if self._error is not None:
            raise StorageError(f"a copy in host memory failed: {self._error}") from self._error


def _make_all(marked: Sequence[_InThread]) -> None:
    for each in marked:
        each.make()


class StreamCopier:
    """For state on a CUDA device; targets have to be pinned. The host never waits here.

    Args:
        device: where the state lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._newest: DeviceEvent | None = None
        self._waits: deque[tuple[DeviceEvent, DeviceEvent]] = deque()

    @contextmanager
    def copying(self, at_once: bool = False) -> Iterator[None]:  # noqa: D102
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        target.copy_(source, non_blocking=True)

    def mark(self) -> Copied:  # noqa: D102
        self._newest = DeviceEvent(self._stream)
        return _OnStream(self._newest)

    def hold_back(self) -> None:  # noqa: D102
        if self._newest is None:
            return
        compute = torch.cuda.current_stream(self._device)
        before = DeviceEvent(compute, timed=True)
        self._newest.hold_back(compute)
        self._waits.append((before, DeviceEvent(compute, timed=True)))
        self._newest = None

    def take_stall_s(self) -> float:  # noqa: D102
        stall_s = 0.0
        while self._waits and self._waits[0][1].is_over:
            before, after = self._waits.popleft()
            stall_s += before.seconds_until(after)
        return stall_s

    def close(self) -> None:  # noqa: D102
        pass


class _OnStream:
    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def wait(self, limit_s: float) -> None:
        if not self._event.wait(limit_s):
            raise StorageError(f"a copy from the device did not end within {limit_s:g} s")
