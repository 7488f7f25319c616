"""How the end of a worker is announced under Ray: by a signal to its process, or by the drain of its node.

A signal comes from outside of Ray (Slurm, an operator, `ray stop`). Ray Train calls the train function in a
thread of the worker, while Python hands signals to the main thread alone; that one serves the calls of Ray
Train's controller (a status poll every `health_check_s`) and handles a signal with the next of them. The
handler that Ray itself sets for SIGTERM would end the worker there and then.

The driver too may get the signal: Slurm's `--signal=B:USR1` by way of the batch script, or SIGTERM by
`ray job stop`. It tells the run's coordinator, and that tells rank 0 in its answer to the next heartbeat.

A drain (spot capacity, a node that scales down) is known to Ray: Ray Train restarts the group on other nodes
when the deadline has passed, on a budget of its own (`FailureConfig.max_preemption_failures`), if no worker
ended by itself before.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train.torch import TorchConfig

from layercheck.end_signals import listen
from layercheck.errors import LayerCheckError, PreemptedError

log = logging.getLogger(__name__)
_FALLBACK_DEADLINE_S = 120.0
"""Ray's own, for a drain without a deadline."""
_TEARDOWN_S = 60.0
_WATCH_S = 0.2
_TorchBackend: Any = TorchConfig().backend_cls


class _WatchingBackend(_TorchBackend):  # type: ignore[misc]
    """Ray's torch backend; what it executes on a worker runs in the worker's main thread."""

    def on_start(self, worker_group: Any, backend_config: "WatchingTorchConfig") -> None:
        super().on_start(worker_group, backend_config)
        worker_group.execute(_listen, backend_config.signals)


def _listen(names: tuple[str, ...]) -> None:
    listen(names, chain=False)


@dataclass
class WatchingTorchConfig(TorchConfig):
    """A `TorchConfig` whose workers note `signals` instead of ending by them."""

    signals: tuple[str, ...] = ()

    @property
    def backend_cls(self) -> type[Any]:
        """See `BackendConfig`."""
        return _WatchingBackend


@contextmanager
def driver_signals(names: tuple[str, ...], grace_s: float, tell: Callable[[float], None]) -> Iterator[None]:
    """While the driver waits for its workers, it notes its signals and passes the first one on.

    A run that has not ended `grace_s` and some time later (it may wait for resources, where nothing beats) is
    interrupted as by Ctrl-C. Main thread only.

    Args:
        names: signals.
        grace_s: seconds from the signal to the end.
        tell: passes the seconds on to the workers; may raise.
    """
    if not names:
        yield
        return
    over, signals = threading.Event(), listen(names, chain=False)

    def watch() -> None:
        while signals.came is None:
            if over.wait(_WATCH_S):
                return
        log.warning("%s: the workers are told to save and to end within %g s", signals.came, grace_s)
        try:
            tell(grace_s)
        except LayerCheckError as error:
            log.error("the workers cannot be told: %s", error)
        if not over.wait(grace_s + _TEARDOWN_S):
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch, name="layercheck-driver-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signals.restore()


class Drains:
    """What Ray says of nodes of this group that will be taken away; the same on all ranks.

    Args:
        grace_s: seconds that a last save should have.
        ask: Ray's question, a barrier of all ranks.
        clock: UNIX time in seconds, as in Ray's deadlines.
    """

    def __init__(
        self,
        grace_s: float,
        ask: Callable[[], Any] = ray.train.get_preemption_info,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._grace_s, self._ask, self._clock = grace_s, ask, clock
        self._info: Any = None
        self._heard_at = 0.0

    def ask(self) -> None:
        """Asks Ray. All ranks call it at the same steps."""
        info = self._ask()
        if info is not None and self._info is None:
            self._heard_at = self._clock()
            log.warning("nodes %s are about to be taken away", info.preempted_node_ids)
        self._info = info or self._info

    @property
    def announced(self) -> bool:
        """True once a drain was heard of."""
        return self._info is not None

    def due_s(self, step_s: float) -> float | None:
        """Seconds that remain for a last save, if it has to begin now; None while there is time to train.

        Args:
            step_s: seconds of a step: the next chance comes only after one.
        """
        if self._info is None:
            return None
        if self._info.deadline_ms is None:
            return self._grace_s
        left_s = self._deadline_s() - self._clock()
        return max(left_s, 0.0) if left_s <= self._grace_s + 2 * step_s else None

    def hold(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Waits, after the last save, until Ray ends this process: the restart is then a preemption's.

        Raises:
            PreemptedError: Ray did not. The group is restarted all the same, as after a failure.
        """
        limit_s = max(self._deadline_s() - self._clock(), 0.0) + _TEARDOWN_S
        sleep(limit_s)
        raise PreemptedError(
            f"Ray announced that nodes {self._info.preempted_node_ids} go, and did not end this worker "
            f"within {limit_s:.0f} s after the last save"
        )

    def _deadline_s(self) -> float:
        deadline_ms = self._info.deadline_ms
        return self._heard_at + _FALLBACK_DEADLINE_S if deadline_ms is None else float(deadline_ms) / 1000
