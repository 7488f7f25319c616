"""The end of a worker is announced on a real cluster: everything is saved first, and nothing is lost."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.head import PrivateHead, start_head
from tests.e2e.runs import committed_versions, finish, progress_step, start_app, summary, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=6) as started:
        yield started


def _processes(head: PrivateHead, words: str) -> list[psutil.Process]:
    """The processes of this head's jobs whose command line holds these words: ranks, or the driver itself."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("LAYERCHECK_HEAD") == str(head.folder)
            if ours and words in " ".join(process.cmdline()) and "sh" not in process.name():
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile
    return found


def _trains(process: subprocess.Popen[str], folder: Path, attempt: int, step: int) -> None:
    wait_until(lambda: progress_step(folder, attempt) >= step, process)


@pytest.mark.parametrize(("who", "name"), [("worker", "SIGTERM"), ("driver", "SIGUSR1")])
def test_a_signal_to_one_process_ends_the_run_with_all_layers_saved_and_the_next_goes_on(
    head: PrivateHead, tmp_path: Path, who: str, name: str
) -> None:
    signals = {"checkpoint.settings.preemption_signals": f"[{name}]"}
    run = start_app(head, tmp_path, "told", **{"train.steps": 100_000, **signals})
    _trains(run, tmp_path / "told", 1, 12)
    told = _processes(head, "RayTrainWorker") if who == "worker" else _processes(head, " -m app ")
    assert len(told) == (2 if who == "worker" else 1)
    os.kill(told[-1].pid, signal.Signals[name])
    code, output = finish(run)
    assert code == os.EX_TEMPFAIL, output[-4000:]
    assert "submit the same run name again" in output
    assert "[FailurePolicy] RETRY" not in output
    found = summary(tmp_path / "told")
    assert (found["status"], found["attempts"], found["failures"]) == ("preempted", 1, 0)
    assert found["layer_writes_by_reason"]["preemption"] == len(
        {layer for layer, _, _ in committed_versions(tmp_path / "told")}
    )
    code, output = finish(start_app(head, tmp_path, "told", **{"train.steps": found["steps"] + 2}))
    assert code == 0, output[-4000:]
    again = summary(tmp_path / "told")
    assert again["status"] == "completed"
    (resumed,) = again["resumed"]
    assert set(resumed["ages"].values()) == {0}
    assert resumed["resume_step"] == found["steps"] + 1


def test_where_the_setting_says_so_ray_restarts_the_group_after_a_signal(head, tmp_path):
    settings = {"cluster.on_signal": "restart", "train.steps": 100_000}
    run = start_app(head, tmp_path, "again", **settings)
    try:
        _trains(run, tmp_path / "again", 1, 12)
        os.kill(_processes(head, "RayTrainWorker")[0].pid, signal.SIGTERM)
        _trains(run, tmp_path / "again", 2, 14)
        for worker in _processes(head, "RayTrainWorker"):
            os.kill(worker.pid, signal.SIGTERM)
        _trains(run, tmp_path / "again", 3, 16)
    finally:
        run.kill()
        run.wait(30)
