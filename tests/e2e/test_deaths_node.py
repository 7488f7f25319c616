"""A node is lost: with room elsewhere the workers move, without the run says so and ends."""

import pytest

from cluster.head import PrivateNode, start_head, start_node
from tests.e2e.deaths import Deaths, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
WAIT_S = 15


def test_workers_move_to_another_node_and_a_run_without_room_ends_with_one_error(tmp_path):
    run = Deaths(tmp_path, **{"train.steps": 100_000, "cluster.reschedule_wait_s": WAIT_S})
    with start_head(num_cpus=0) as head, start_node(head, 2) as one, start_node(head, 2) as other:
        run.submit(head)
        run.wait_for_step(12)
        spare = _lose_node_of_workers(one, other)
        run.wait_for_step(run.reached(1) + 8, attempt=2)
        spare.kill()
        assert run.finish() == 1
        run.check_store()
    (receipt,) = run.receipts()
    assert receipt["resume_step"] == receipt["t_fail"] + 1
    (error,) = [line for line in run.log.read_text().splitlines() if line.startswith("error: ")]
    assert "no room for its workers" in error
    assert f"reschedule_wait_s={WAIT_S} is over" in error
    assert run.summary()["status"] == "failed"


def _lose_node_of_workers(one: PrivateNode, other: PrivateNode) -> PrivateNode:
    """Kills the node that trains; returns the other one."""
    trains, spare = (one, other) if _has_workers(one) else (other, one)
    assert _has_workers(trains)
    assert not _has_workers(spare), "both workers were to be on one node"
    trains.kill()
    return spare


def _has_workers(node: PrivateNode) -> bool:
    return bool(processes_of(node, "ray::RayTrainWorker"))
