"""The documents followed by the letter: the tutorial, and commands that run for more than a moment."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.locks import prepare_extensions
from tests.documents import ROOT, python_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]


def environment(folder: Path) -> dict[str, str]:
    clean = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **prepare_extensions(str(folder))}


def newest_step(folder: Path) -> int:
    files = folder.glob("runs/own/layercheck/attempts/*.progress.json")
    return max((json.loads(path.read_text())["step"] for path in files), default=0)


def kill_all(pid: int) -> None:
    """SIGKILL to a launcher and its workers, which have sessions of their own."""
    launcher = psutil.Process(pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.kill()


def layercheck(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "layercheck.cli", *args],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_until_rank_1_is_killed(folder: Path, env: dict[str, str]) -> str:
    """The first life of the tutorial: all that it said until its launcher ended by itself."""
    with open(folder / "first.log", "w") as log:
        first = subprocess.Popen(
            [*PROGRAM, "400"], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while newest_step(folder) <= 40:
            said = (folder / "first.log").read_text()
            assert first.poll() is None, said[-3000:]
            assert time.monotonic() < deadline, f"step 40 did not come in time: {said[-3000:]}"
            time.sleep(0.2)
        number = re.search(r"^rank 1 is process (\d+)$", said, re.MULTILINE)
        assert number, said[-3000:]
        os.kill(int(number[1]), signal.SIGKILL)
        assert first.wait(timeout=90) != 0
    finally:
        if first.poll() is None:
            kill_all(first.pid)
    return (folder / "first.log").read_text()


def test_the_tutorial_is_killed_and_goes_on_at_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(python_of(ROOT / "docs" / "tutorial.md"))
    env = environment(tmp_path)
    before = run_until_rank_1_is_killed(tmp_path, env)
    assert "warm-up until step 10: " in before
    assert "warm-up over at step 10: " in before
    stopped = newest_step(tmp_path)
    last = stopped + 20
    again = subprocess.run(
        [*PROGRAM, str(last)], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert again.returncode == 0, (again.stdout + again.stderr)[-3000:]
    recovered = re.search(
        r"recovered \(composite\) after step (\d+) \(known from (?:journal|commit)\): going on at step (\d+) "
        r"with layers (\d+) to (\d+) steps old",
        again.stderr,
    )
    assert recovered, again.stderr[-3000:]
    t_fail = int(recovered[1])
    assert int(recovered[2]) == t_fail + 1
    assert int(recovered[3]) < int(recovered[4])
    assert t_fail >= stopped
    assert f"step {t_fail} " in before
    steps = [int(line.split()[1]) for line in again.stdout.splitlines() if line.startswith("step ")]
    assert steps == list(range(t_fail + 1, last + 1))
    assert "recoverable" in layercheck(tmp_path, "status", "runs/own")
    plan = layercheck(tmp_path, "plan", "runs/own")
    assert f"resumes at step {last + 1}" in plan
    assert "oldest layer 0 steps" in plan, "save_now at the end"
    layercheck(tmp_path, "verify", "runs/own")
    layercheck(tmp_path, "report", "runs/own", "--out", "own.html")
    assert (tmp_path / "own.html").stat().st_size > 10_000


def test_a_local_cluster_of_three_nodes_runs_a_training_and_leaves_nothing(tmp_path: Path) -> None:
    """As in the page on clusters."""
    short = [
        "train.steps=12",
        "checkpoint.settings.warmup_steps=4",
        "checkpoint.settings.warmup_full_every=2",
    ]
    command = [sys.executable, "-m", "cluster.local", "--nodes", "3", "--cpus", "2", "--"]
    command += [sys.executable, "-m", "app", "--config", "tiny", "--run-name", "local"]
    command += ["--storage", str(tmp_path), "--set", *short]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(tmp_path), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "3 Ray nodes with 2 CPUs each" in done.stdout
    found = json.loads((tmp_path / "local" / "summary.json").read_text())
    assert (found["status"], found["steps"]) == ("completed", 12)
