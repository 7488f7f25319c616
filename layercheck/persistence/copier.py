"""How live state gets into host buffers: at once, or queued on a side stream of an accelerator.

States of the copies of one step:
1. `copying` begins: what is copied is the state as all work queued so far leaves it (training thread).
2. `copy` queues one copy; `mark` stands for all that were queued before it (training thread).
3. `hold_back`, before the optimizer changes anything: the change comes after the last mark. The device waits,
   the host does not; this wait is the visible stall (training thread).
4. the writer reads a buffer only after `Copied.wait` (writer thread).

Copies end in the order in which they were queued. So a buffer that is given back and filled again while an
old copy into it is still queued ends up with the newer bytes.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    def copying(self) -> AbstractContextManager[None]:
        """Surrounds the calls of `copy` and `mark` of one step."""
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
        """Seconds for which the device waited in `hold_back`, as far as known and not told before."""
        ...


class _Done:
    def wait(self, limit_s: float) -> None:
        pass


class HostCopier:
    """For state in host memory: a copy is finished when `copy` returns."""

    _done = _Done()

    def copying(self) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        target.copy_(source)

    def mark(self) -> Copied:  # noqa: D102
        return self._done

    def hold_back(self) -> None:  # noqa: D102
        pass

    def take_stall_s(self) -> float:  # noqa: D102
        return 0.0


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
    def copying(self) -> Iterator[None]:  # noqa: D102
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


class _OnStream:
    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def wait(self, limit_s: float) -> None:
        if not self._event.wait(limit_s):
            raise StorageError(f"a copy from the device did not end within {limit_s:g} s")
