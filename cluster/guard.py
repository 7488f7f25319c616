"""What Ray Train does not do by itself when workers are lost; the one file that knows its inner hooks.

All of it runs in the process of Ray Train's controller:
1. a worker that is there but does not answer (stopped, swapped out, stuck in a native call) is killed as soon
   as Ray Train gives it up; asking it to shut down first would take another half minute.
2. the coordinator is told of each failure at once, so that the receipt can say how long the restart took.
3. a wait for nodes that do not come is said out loud and ends.
"""

import logging
import time
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ReschedulingState, RunningState

from cluster.client import note_failure
from layercheck.errors import LayerCheckError

log = logging.getLogger(__name__)

ANSWER_S = 600.0
"""A worker that has not answered for so long is given up; sooner if `hang_s` is shorter."""
_LOOK_S = 60.0


class NoRoomError(LayerCheckError):
    """The cluster had no room for the workers within `cluster.reschedule_wait_s`."""

    retry_may_help = False


def ray_train_limits(health_check_s: float, hang_s: float, reschedule_wait_s: float) -> dict[str, str]:
    """Environment variables of the driver that set Ray Train's own limits; it hands them on."""
    return {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(health_check_s),
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(min(hang_s or ANSWER_S, ANSWER_S)),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(min(_LOOK_S, reschedule_wait_s)),
    }


class GroupGuard(WorkerGroupCallback, ControllerCallback):
    """A callback for `ray.train.RunConfig`.

    Args:
        run: run name.
        storage: storage path or URI of the run.
        reschedule_wait_s: seconds that a worker group may wait for its resources.
    """

    def __init__(self, run: str, storage: str, reschedule_wait_s: float) -> None:
        self._run, self._storage = run, storage
        self._wait_s = reschedule_wait_s
        self._group: Any = None
        self._waiting_since_s: float | None = None

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """The group is about to ask for its resources."""
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()

    def after_worker_group_start(self, worker_group: Any) -> None:
        """All workers answer."""
        self._group = worker_group

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Some workers may have failed."""
        errors = worker_group_status.errors
        if not errors:
            return
        note_failure(self._run, self._storage)
        for rank, error in errors.items():
            if isinstance(error, WorkerHealthCheckTimeoutError):
                log.warning("rank %d of run %s does not answer: it is killed", rank, self._run)
                ray.kill(self._group.get_workers()[rank].actor)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """The group runs, or could not be started.

        Raises:
            NoRoomError: it has waited for resources long enough; Ray Train ends the run with it.
        """
        if isinstance(current_state, RunningState):
            self._waiting_since_s = None
        if not isinstance(current_state, ReschedulingState) or self._waiting_since_s is None:
            return
        failure = getattr(current_state.training_failed_error, "controller_failure", None)
        if isinstance(failure, WorkerGroupStartupTimeoutError):
            self._still_no_room(time.monotonic() - self._waiting_since_s)

    def _still_no_room(self, waited_s: float) -> None:
        total = ray.cluster_resources()  # type: ignore[no-untyped-call]
        have = {kind: total.get(kind, 0) for kind in ("CPU", "GPU")}
        text = (
            f"run {self._run}: no room for its workers for {waited_s:.0f} s; the cluster has "
            f"{have['CPU']:g} CPUs and {have['GPU']:g} GPUs in all: add nodes or lower cluster.workers"
        )
        if waited_s >= self._wait_s:
            raise NoRoomError(f"{text}; reschedule_wait_s={self._wait_s:g} is over", waited_s=waited_s)
        log.warning("%s (the run ends after reschedule_wait_s=%g)", text, self._wait_s)
