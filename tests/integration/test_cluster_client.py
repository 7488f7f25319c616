"""The coordinator's actor and its client, on a real cluster with a coordinator that only counts."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError

from cluster import coordinator as coordinator_module
from cluster.actors import NAMESPACE
from cluster.client import ActorClient, connect, note_failure
from cluster.coordinator import coordinator_name, start_coordinator
from layercheck.config import LayerCheckConfig
from layercheck.errors import ConfigError, CoordinatorLostError, FencedError, RunIsLiveError, StorageError
from layercheck.manifest import EventId
from tests.integration.ledger import LedgerCoordinator

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ActorClient]:
    config = LayerCheckConfig()
    handle = start_coordinator("run", str(tmp_path), config, LedgerCoordinator)
    connected = connect("run", str(tmp_path), config, limit_s=30, factory=LedgerCoordinator)
    assert connected.status()["step"] == 0
    yield connected
    ray.kill(handle, no_restart=True)


def wait_until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def test_errors_of_the_coordinator_arrive_as_their_own_class_with_their_facts(client):
    with pytest.raises(RunIsLiveError, match="pass --takeover") as caught:
        client.begin_attempt("t", "second", 2, "composite")
    # Ray's own wrapper passes for both classes, but its text is a remote traceback.
    assert type(caught.value) is RunIsLiveError
    assert str(caught.value) == "run x is live (step 812, moving); end it or pass --takeover"
    assert caught.value.facts == {"step": 812}
    with pytest.raises(FencedError):
        client.record(EventId(step=1, attempt=1), 0, (), {"step": 1})


def test_a_bug_in_the_coordinator_is_not_taken_for_a_lost_one(client):
    with pytest.raises(RayTaskError, match="a bug in lost"):
        client.lost(EventId(step=1, attempt=1), 0, "disk full")


def test_the_same_run_and_storage_find_the_same_actor_and_others_do_not(client, tmp_path):
    again = connect("run", f"{tmp_path}/sub/..", factory=LedgerCoordinator)
    assert again.health()["pid"] == client.health()["pid"]
    assert coordinator_name("run", "s3://b/x/") == coordinator_name("run", "s3://b/x")
    assert coordinator_name("run", "/a") != coordinator_name("run", "/b")


def test_a_relative_storage_is_refused_as_workers_run_elsewhere():
    with pytest.raises(ConfigError, match="storage='runs' is relative"):
        connect("run", "runs").health()
    with pytest.raises(ConfigError, match="storage='runs' is relative"):
        start_coordinator("run", "runs")


def test_a_killed_actor_comes_back_with_what_storage_holds(client):
    client.heartbeat(1, 7, {"step": 7}, {})
    before = client.health()["pid"]
    os.kill(before, signal.SIGKILL)
    assert client.status()["step"] == 7
    assert client.health()["pid"] != before


def test_a_call_that_the_actor_dies_in_is_made_again(client):
    reply = client.heartbeat(1, 9, {"step": 9, "die": True}, {})
    assert reply.committed_step == 9


def test_i12_an_actor_that_somebody_ended_for_good_is_created_again(client, tmp_path):
    client.heartbeat(1, 5, {"step": 5}, {})
    ray.kill(ray.get_actor(coordinator_name("run", str(tmp_path)), namespace=NAMESPACE), no_restart=True)
    assert client.status()["step"] == 5


def test_a_coordinator_that_does_not_answer_is_lost_after_the_limit(client, tmp_path):
    impatient = connect("run", str(tmp_path), limit_s=2, factory=LedgerCoordinator)
    pid = client.health()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(CoordinatorLostError, match="did not answer status within 2 s"):
            impatient.status()
        assert time.monotonic() - begin < 8
    finally:
        os.kill(pid, signal.SIGCONT)


def test_heartbeats_are_served_while_another_call_watches(client):
    watcher = threading.Thread(target=client.amend, args=(1, ()), daemon=True)  # blocks until a receipt comes
    watcher.start()
    begin = time.monotonic()
    assert client.heartbeat(1, 3, {"step": 3}, {}).committed_step == 3
    assert time.monotonic() - begin < 20
    assert watcher.is_alive()
    client.note_receipt(1, {})
    watcher.join(20)
    assert not watcher.is_alive()


def test_a_bug_in_tick_restarts_the_actor_instead_of_leaving_it_half_dead(client, tmp_path):
    before = client.health()["pid"]
    (tmp_path / "run" / "break-tick").touch()
    wait_until(lambda: client.health()["pid"] != before)
    wait_until(lambda: client.status()["ticks"] > 1)


def test_a_store_that_cannot_be_read_is_told_to_the_caller_and_not_a_lost_coordinator(tmp_path):
    (tmp_path / "sick").mkdir()
    (tmp_path / "sick" / "unreadable").touch()
    start_coordinator("sick", str(tmp_path), None, LedgerCoordinator)
    client = connect("sick", str(tmp_path), factory=LedgerCoordinator)
    with pytest.raises(StorageError, match="cannot read"):
        client.status()
    (tmp_path / "sick" / "unreadable").unlink()
    assert client.status()["step"] == 0


def test_a_living_actor_works_by_the_settings_of_the_submission_that_got_the_attempt(client, tmp_path):
    other = connect("run", str(tmp_path), {"takeover_s": 7}, factory=LedgerCoordinator)
    with pytest.raises(RunIsLiveError):
        other.begin_attempt("t2", "second", 2, "composite")
    assert client.status()["takeover_s"] == 30
    grant = other.begin_attempt("t3", "third", 2, "composite")
    assert client.status()["takeover_s"] == 7
    assert grant.wait_s == 30, "that of the one which waited"


def test_a_failure_that_the_driver_saw_reaches_the_coordinator(client, tmp_path):
    client.status()
    note_failure("run", str(tmp_path))
    wait_until((tmp_path / "run" / "failure").exists)


def test_a_failure_without_a_coordinator_is_nobodys_business(ray_cluster, tmp_path):
    note_failure("nobody", str(tmp_path))
    assert not exists("nobody", tmp_path)


def test_the_actor_ends_by_itself_when_no_heartbeat_comes(tmp_path):
    start_coordinator("idle", str(tmp_path), {"idle_s": 1}, LedgerCoordinator)
    wait_until(lambda: not exists("idle", tmp_path))


def test_the_actor_ends_after_a_grace_when_the_run_completes(tmp_path):
    start_coordinator("done", str(tmp_path), None, LedgerCoordinator)
    client = connect("done", str(tmp_path), factory=LedgerCoordinator)
    client.end_attempt(1, "failed")
    client.heartbeat(1, 1, {"step": 1}, {})
    client.end_attempt(1, "completed")
    wait_until(lambda: not exists("done", tmp_path), limit_s=coordinator_module._GRACE_S + 20)
    assert (tmp_path / "done" / "closed").exists()


def exists(run: str, storage: Path) -> bool:
    try:
        ray.get_actor(coordinator_name(run, str(storage)), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
