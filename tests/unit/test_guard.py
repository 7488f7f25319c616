"""What the guard does in Ray Train's controller, with the states and errors of the installed Ray."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.controller.state import ReschedulingState, RunningState
from ray.train.v2.api.exceptions import ControllerError

from app.config import load_config
from cluster import guard as guard_module
from cluster.guard import ANSWER_S, GroupGuard, NoRoomError, ray_train_limits
from tests.fakes import Clock

WAIT_S = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guard_module.time, "monotonic", clock)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    return clock


def waits(guard: GroupGuard, clock: Clock, seconds: float, error: Exception | None = None) -> None:
    """One try to start the group that ends without a group."""
    guard.before_worker_group_start(None)
    clock.now += seconds
    failure = ControllerError(error or WorkerGroupStartupTimeoutError(2))
    guard.after_controller_state_update(None, ReschedulingState(failure))


def test_a_wait_for_room_ends_with_the_numbers_and_the_knob(clock: Clock) -> None:
    guard = GroupGuard("r", "/s", WAIT_S)
    waits(guard, clock, 60)
    with pytest.raises(
        NoRoomError, match=r"for 120 s; the cluster has 2 CPUs and 0 GPUs.*reschedule_wait_s=100"
    ):
        waits(guard, clock, 60)


def test_each_outage_has_the_whole_wait(clock: Clock) -> None:
    guard = GroupGuard("r", "/s", WAIT_S)
    for _ in range(3):
        waits(guard, clock, 60)
        guard.after_controller_state_update(None, RunningState())
        clock.now += 1000


def test_workers_that_die_while_they_start_do_not_lack_room(clock: Clock) -> None:
    guard = GroupGuard("r", "/s", WAIT_S)
    for _ in range(3):
        waits(guard, clock, 60, WorkerGroupStartupFailedError("one died"))


def test_a_worker_that_does_not_answer_is_killed_and_the_coordinator_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Any] = []
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(guard_module, "note_failure", lambda *where: told.append(where))
    guard = GroupGuard("r", "/s", WAIT_S)
    workers = [SimpleNamespace(actor=f"actor {rank}") for rank in range(3)]
    guard.after_worker_group_start(SimpleNamespace(get_workers=lambda: workers))
    guard.after_worker_group_poll_status(SimpleNamespace(errors={}))
    assert (killed, told) == ([], [])
    errors = {1: WorkerHealthCheckTimeoutError("hangs"), 2: RuntimeError("connection closed by peer")}
    guard.after_worker_group_poll_status(SimpleNamespace(errors=errors))
    assert (killed, told) == (["actor 1"], [("r", "/s")])


@pytest.mark.parametrize(("hang_s", "answer_s"), [(0, ANSWER_S), (1800, ANSWER_S), (20, 20)])
def test_a_worker_is_given_up_no_later_than_a_step_that_hangs(hang_s: float, answer_s: float) -> None:
    limits = ray_train_limits(0.3, hang_s, 20)
    assert float(limits["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"]) == answer_s
    assert float(limits["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]) == 20


def test_ray_train_knows_the_variables_that_are_set() -> None:
    from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

    config = load_config("tiny")
    limits = ray_train_limits(config.cluster.health_check_s, 1, config.cluster.reschedule_wait_s)
    assert limits.keys() <= ENV_VARS_TO_PROPAGATE
