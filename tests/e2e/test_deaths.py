"""Every death recovers: real workers, drivers, actors and heads are killed or stopped, training goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.head import PrivateHead, start_head
from cluster.locks import prepare_extensions
from tests.e2e.deaths import COORDINATOR, STEPS, Deaths, kill, process_of, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
RAISED, BOTH, STOPPED = 10, 16, 22


@pytest.fixture(scope="module")
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=6) as started:
        yield started


@pytest.fixture(scope="module")
def workers_died(head: PrivateHead, tmp_path_factory: pytest.TempPathFactory) -> Deaths:
    """Rank 1 raises, then both ranks are killed, then rank 0 is stopped."""
    run = Deaths(
        tmp_path_factory.mktemp("workers"),
        **{
            "faults.kill": f"[{{rank: 1, step: {RAISED}, how: raise}}, {{rank: 0, step: {BOTH}}}, "
            f"{{rank: 1, step: {BOTH}}}, {{rank: 0, step: {STOPPED}, how: stop}}]",
            "checkpoint.settings.hang_s": 5,
        },
    )
    run.submit(head)
    assert run.finish() == 0, run.words()
    return run


def test_every_death_of_workers_costs_one_attempt_and_no_step(workers_died):
    workers_died.check_end()
    found = workers_died.summary()
    assert (found["attempts"], found["failures"]) == (4, 3)
    for resumed, fault in zip(found["resumed"], (RAISED, BOTH, STOPPED), strict=True):
        assert resumed["t_fail"] in (fault - 1, fault), resumed
        assert resumed["resume_step"] == resumed["t_fail"] + 1
        assert resumed["mode"] == "composite"


def test_the_receipt_says_how_long_the_outage_took(workers_died):
    for receipt in workers_died.receipts():
        assert receipt["detect_s"] is not None
        assert receipt["reschedule_s"] > 0
    # Nobody can know of a stopped rank before hang_s is over.
    assert workers_died.receipts()[-1]["detect_s"] > 4


def test_the_rank_that_waits_for_a_stopped_one_says_why_it_ends(workers_died):
    assert f"no step was completed within hang_s=5 s after step {STOPPED}" in workers_died.log.read_text()


def test_the_only_worker_that_is_stopped_is_missed_and_replaced(head, tmp_path):
    run = Deaths(
        tmp_path,
        **{
            "cluster.workers": 1,
            "faults.kill": f"[{{rank: 0, step: {RAISED}, how: stop}}]",
            "checkpoint.settings.hang_s": 18,
        },
    )
    run.submit(head)
    assert run.finish() == 0, run.words()
    run.check_end()
    (resumed,) = run.summary()["resumed"]
    assert resumed["t_fail"] == RAISED
    log = run.log.read_text()
    assert f"no heartbeat of attempt 1 for 15 s, its last step was {RAISED}" in log
    assert "rank 0 of run run does not answer: it is killed" in log


def test_a_coordinator_that_dies_in_training_costs_no_attempt_and_one_that_dies_in_recovery_no_step(
    head, tmp_path
):
    run = Deaths(tmp_path, **{"train.steps": 80, "faults.kill": "[{rank: 1, step: 40}]"})
    run.submit(head)
    run.wait_for_step(12)
    kill(process_of(head, COORDINATOR))
    run.wait(lambda: any(run.store.glob("attempts/a002*")), "the next attempt")
    kill(process_of(head, COORDINATOR))
    assert run.finish() == 0, run.words()
    run.check_end()
    found = run.summary()
    assert found["failures"] == 1
    resumed = found["resumed"][-1]
    # The second one died with its newest heartbeats; the journal may be a second behind.
    assert resumed["resume_step"] == resumed["t_fail"] + 1


def test_controller_driver_and_the_whole_head_are_killed_and_the_run_is_submitted_again(tmp_path):
    run = Deaths(tmp_path, **{"train.steps": 60, "checkpoint.settings.takeover_s": 5})
    with start_head(num_cpus=6) as first:
        run.submit(first)
        run.wait_for_step(12)
        kill(process_of(first, "ray::TrainController"))
        assert run.finish() == 1
        assert "Ray Train's controller is gone: submit the run again" in run.words()
        run.submit(first)
        run.wait_for_step(run.reached(1) + 8, attempt=2)
        run.end_driver()
        run.submit(first)
        run.wait_for_step(run.reached(2) + 8, attempt=3)
        first.kill()
        run.end_driver()
    with start_head(num_cpus=6) as second:
        run.submit(second)
        assert run.finish() == 0, run.words()
    run.check_end()
    found = run.summary()
    assert (found["attempts"], found["failures"]) == (4, 3)
    for resumed in found["resumed"]:
        assert resumed["resume_step"] == resumed["t_fail"] + 1


def test_workers_killed_while_they_hold_the_lock_of_the_op_do_not_hang_the_next_start(head, tmp_path):
    run = Deaths(tmp_path)
    folder = Path(prepare_extensions(run.run)["TORCH_EXTENSIONS_DIR"])
    run.submit(head)
    run.wait(lambda: len(processes_of(head, "ray::RayTrainWorker")) == 2, "two workers")
    pids = processes_of(head, "ray::RayTrainWorker")
    # The lock is held for some milliseconds.
    run.wait(lambda: any(folder.glob("*/lock")), "a worker that loads the op", look_s=0.001)
    for pid in pids:
        kill(pid)
    assert any(folder.glob("*/lock")), "the lock of a dead process is what this test is about"
    assert run.finish() == 0, run.words()
    run.check_end()
    assert not any(folder.glob("*/lock"))
    assert run.summary()["steps"] == STEPS
