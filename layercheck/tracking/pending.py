"""The reduced vector of one step on its way to the host, and the report that it becomes.

The vector is summed and copied in the background; nobody waits until somebody asks. Two threads may ask: the
training thread, which decides by the report one step later, and the writer, which must not say that an event
is durable before the report of its step was clean (I13).
"""

from collections.abc import Callable
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from layercheck.device_event import DeviceEvent
from layercheck.drift_report import DriftReport
from layercheck.errors import LayerCheckError

REPORT_S = 1800.0
"""Limit of the wait for a device; on a host the limit is that of the process group's own collectives."""


class PendingReport:
    """Starts the all-reduce of `vector` at once: a collective. `result` is none.

    Args:
        step: the optimizer step that the vector belongs to.
        vector: this rank's summands, in doubles; it may be changed.
        read: makes the report of the sums.
    """

    def __init__(self, step: int, vector: Tensor, read: Callable[[list[float]], DriftReport]) -> None:
        self.step = step
        self._read = read
        self._report: DriftReport | None = None
        self._lock = Lock()
        self._host = vector
        self._copied: DeviceEvent | None = None
        work = dist.all_reduce(vector, async_op=True)
        assert work is not None, "this rank belongs to the default group"
        self._work = work
        if vector.is_cuda:
            self._work.wait()  # makes the stream wait for the sum, not the host
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._copied = DeviceEvent()

    def result(self, limit_s: float = REPORT_S) -> DriftReport:
        """The report, the same on every rank and at every call. From any thread; waits at most `limit_s`.

        Raises:
            LayerCheckError: the device did not deliver it in time.
            RuntimeError: the process group failed, because a rank is gone.
        """
        with self._lock:
            if self._report is None:
                self._wait(limit_s)
                self._report = self._read(self._host.tolist())
            return self._report

    def _wait(self, limit_s: float) -> None:
        if self._copied is None:
            self._work.wait()
        elif not self._copied.wait(limit_s):
            raise LayerCheckError(
                f"the reduced drift of step {self.step} did not come within {limit_s:g} s: "
                "another rank is gone or stands still",
                step=self.step,
            )
