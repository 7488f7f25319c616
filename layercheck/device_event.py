"""A place in the work of a CUDA stream, for which the host may wait with a limit."""

import time
from typing import Any

import torch

_POLL_S = 3e-4


class DeviceEvent:
    """Recorded when it is made: it is over when all work queued on the stream before it is.

    Args:
        stream: default: the current one of the current device.
        timed: `seconds_until` will be asked.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None, *, timed: bool = False) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self._event.record(stream or torch.cuda.current_stream())

    @property
    def is_over(self) -> bool:
        """Never waits."""
        return bool(self._event.query())

    def wait(self, limit_s: float) -> bool:
        """Makes the host wait, from any thread; False if the limit came first."""
        deadline = time.monotonic() + limit_s
        while not self.is_over:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Work queued on `stream` from now on begins after this event; the host goes on."""
        stream.wait_event(self._event)

    def seconds_until(self, later: "DeviceEvent") -> float:
        """Device time between two timed events that are over."""
        return float(self._event.elapsed_time(later._event)) / 1000
