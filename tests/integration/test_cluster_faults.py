"""A fault is carried out once in the life of a run, whatever happens around it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.faults import FaultPlan, InjectedError, injected_faults
from layercheck.errors import ConfigError

STEPS = """
import sys
from cluster.faults import FaultPlan
plan = FaultPlan.parse([{"rank": 1, "step": 3, "times": int(sys.argv[2])}], sys.argv[1], "run")
for step in range(1, 6):
    for rank in (0, 1):
        plan.maybe_kill(rank, step)
    print(step, flush=True)
"""


def life(storage: Path, times: int = 1) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(storage), str(times)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.split()[-1]


def test_a_fault_kills_at_its_step_and_not_again_after_the_restart(tmp_path):
    assert life(tmp_path) == (-signal.SIGKILL, "2")
    assert life(tmp_path) == (0, "5")
    assert injected_faults(tmp_path / "run" / "faults") == [{"rank": 1, "step": 3}]


def test_a_fault_with_two_times_kills_two_lives_of_the_same_step(tmp_path):
    assert [life(tmp_path, times=2)[0] for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_the_marker_is_on_disk_before_the_kill(tmp_path, monkeypatch, caplog):
    seen = []
    monkeypatch.setattr(os, "kill", lambda pid, sig: seen.append((sig, plan.injected())))
    plan = FaultPlan.parse([{"rank": 0, "step": 2}], str(tmp_path), "run")
    plan.maybe_kill(0, 2)
    assert seen == [(signal.SIGKILL, [{"rank": 0, "step": 2}])]
    assert caplog.messages == ["fault: SIGKILL to rank 0 after step 2"]


def test_a_fault_may_raise_or_stop_instead(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, sig: sent.append((pid, sig)))
    entries = [{"rank": 0, "step": 2, "how": "stop"}, {"rank": 0, "step": 3, "how": "raise"}]
    plan = FaultPlan.parse(entries, str(tmp_path), "run")
    plan.maybe_kill(0, 2)
    assert sent == [(os.getpid(), signal.SIGSTOP)]
    with pytest.raises(InjectedError, match="rank 0 raises after step 3"):
        plan.maybe_kill(0, 3)
    plan.maybe_kill(0, 3)


def test_no_faults_touch_nothing(tmp_path):
    plan = FaultPlan.parse([], str(tmp_path), "run")
    plan.maybe_kill(0, 1)
    assert list(tmp_path.iterdir()) == []
    assert plan.injected() == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rank": 1}, "must have the keys"),
        ({"rank": 1, "step": 2, "node": 3}, "must have the keys"),
        ({"rank": -1, "step": 2}, "rank=-1"),
        ({"rank": 1, "step": "2"}, "step='2'"),
        ({"rank": 1, "step": 2, "times": 0}, "times=0"),
        ({"rank": 1, "step": 2, "how": "hang"}, "how='hang'"),
    ],
)
def test_a_wrong_fault_is_refused_by_name(entry, message):
    with pytest.raises(ConfigError, match=message):
        FaultPlan.parse([entry], "/runs", "run")


def test_faults_on_a_remote_storage_are_refused():
    with pytest.raises(ConfigError, match="s3://bucket"):
        FaultPlan.parse([{"rank": 1, "step": 2}], "s3://bucket/runs", "run")
