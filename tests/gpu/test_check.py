"""The check of the accelerator path: its logic on a CPU, itself where there is an accelerator."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu.check import LATER, measure
from tests.harness import run_ranks

STEPS = 20


def _measure_tiny(storage: str) -> dict[str, Any]:
    from tests.gpu.model import TINY

    return measure(TINY, "cpu", STEPS, storage)


@pytest.mark.slow
def test_the_check_finds_a_cpu_run_exact_and_measures_its_steps(tmp_path: Path) -> None:
    (found,) = run_ranks(1, tmp_path, _measure_tiny, str(tmp_path / "store"))
    json.dumps(found)
    assert found["losses_equal"]
    assert found["recovery"]["exact"]
    assert (found["recovery"]["first_step"], found["recovery"]["max_age"]) == (STEPS + 1, 0)
    assert found["syncs"] == {"steps": 0, "where": {}}
    assert found["step_s_off"] > 0
    assert found["events"] > 0
    assert found["layer_writes"] >= found["events"]
    assert LATER > 1


def _run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "check.json"
    command = [sys.executable, "-m", "tests.gpu.check", "--json", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(file.read_text()))


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = _run(tmp_path, "--device", "cpu", "--tiny", "--steps", str(STEPS))
    assert found["recovery"]["exact"]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator_the_host_never_waits_and_recovery_is_exact(tmp_path: Path) -> None:
    found = _run(tmp_path)
    assert found["syncs"]["steps"] == 0, found["syncs"]
    assert found["losses_equal"]
    assert found["recovery"]["exact"]
