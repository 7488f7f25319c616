"""The memory tier on a real cluster: workers, vaults and nodes are killed, and hardly a step is lost."""

import glob
import time
from collections.abc import Iterator

import pytest

from cluster.head import PrivateHead, start_head, start_node
from layercheck.memory import folders
from tests.e2e.deaths import Deaths, kill, process_of, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
VAULT = "ray::VaultActor"
EVERY = {"checkpoint.settings.memory.enabled": True, "checkpoint.settings.memory.k_ratio": 0}


def shm() -> list[str]:
    return sorted(glob.glob(f"{folders.PLACE}/layercheck-*"))


@pytest.fixture(scope="module")
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=6) as started:
        yield started


@pytest.fixture(scope="module")
def workers_died(head: PrivateHead, tmp_path_factory: pytest.TempPathFactory) -> tuple[Deaths, list[str]]:
    """Three kills in a row; and what was in shared memory before."""
    before = shm()
    faults = "[{rank: 1, step: 12}, {rank: 0, step: 17}, {rank: 1, step: 22}]"
    run = Deaths(tmp_path_factory.mktemp("workers"), **EVERY, **{"faults.kill": faults})
    run.submit(head)
    assert run.finish() == 0, run.words()
    return run, before


def test_i15_three_killed_workers_cost_at_most_a_step_each_and_leave_nothing(workers_died):
    run, before = workers_died
    run.check_end()
    assert len(run.receipts()) == 3
    for receipt in run.receipts():
        assert receipt["mode"] == "composite"
        assert receipt["max_age"] <= 1
        assert {layer["source"] for layer in receipt["layers"]} == {"memory"}
        assert receipt["bad"] == []
    assert shm() == before


def test_the_vault_of_a_finished_run_ends_itself(workers_died, head):
    deadline = time.monotonic() + 20.0
    while processes_of(head, VAULT) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(head, VAULT) == []


def test_a_killed_vault_costs_no_attempt_and_the_next_one_has_what_it_had(head, tmp_path):
    before = shm()
    run = Deaths(tmp_path, **EVERY, **{"faults.kill": "[{rank: 1, step: 24}]"})
    run.submit(head)
    run.wait_for_step(12)
    kill(process_of(head, VAULT))
    assert run.finish() == 0, run.words()
    run.check_end()
    (receipt,) = run.receipts()
    assert receipt["max_age"] <= 1
    assert {layer["source"] for layer in receipt["layers"]} == {"memory"}
    assert shm() == before


def test_a_lost_node_is_recovered_from_its_copies_on_another(tmp_path):
    before = shm()
    settings = {"checkpoint.settings.memory.replicas": 1, "train.steps": 60}
    run = Deaths(tmp_path, **EVERY, **settings)
    with start_head(num_cpus=0) as head, start_node(head, 1) as one, start_node(head, 1) as other:
        run.submit(head)
        run.wait_for_step(12)
        with start_node(head, 1):
            lost = one if processes_of(one, "ray::RayTrainWorker") else other
            assert len(shm()) == len(before) + 2
            lost.kill()
            run.wait_for_step(run.reached(1) + 4, attempt=2)
            assert run.finish() == 0, run.words()
    run.check_end()
    (receipt,) = run.receipts()
    assert receipt["max_age"] <= 6
    assert "peer" in {layer["source"] for layer in receipt["layers"]}
    assert shm() == before
