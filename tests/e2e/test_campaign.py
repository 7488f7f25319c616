"""`python -m cluster.campaign`: random kills of a real run; nothing is lost, wrong or hanging.

The default run has its three kills and the same judge in test_kill_and_continue.py, which has a run anyway.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.coordinator import normal_storage
from layercheck.memory import folders
from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
PROMISED = {"kills", "recovered", "lost_versions", "wrong_bytes", "hangs", "max_age"}


def campaign(folder: Path, kills: int, seed: int, *settings: str) -> dict[str, Any]:
    result = folder / "campaign.json"
    options = [
        "--kills",
        str(kills),
        "--seed",
        str(seed),
        "--json",
        str(result),
        "--folder",
        str(folder / "c"),
        *(("--set", *settings) if settings else ()),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "cluster.campaign", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=840,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def check(result: dict[str, Any], kills: int) -> None:
    assert set(result) >= PROMISED
    assert (result["kills"], result["recovered"], result["hangs"]) == (kills, kills, 0)
    assert (result["lost_versions"], result["wrong_bytes"], result["problems"]) == (0, 0, [])
    assert result["lost_residuals"] == 0
    assert 0 < result["max_age"] <= 24
    assert result["compared"] > 10 * kills, "hardly anything was compared"


@pytest.mark.slow
def test_three_kills(tmp_path):
    check(campaign(tmp_path, 3, seed=17624), 3)


@pytest.mark.slow
def test_twelve_kills(tmp_path):
    check(campaign(tmp_path, 12, seed=12), 12)


@pytest.mark.slow
def test_eight_kills_of_a_run_with_residuals(tmp_path):
    found = campaign(tmp_path, 8, 3, "checkpoint.settings.residual.enabled=true")
    check(found, 8)
    assert found["compared_residuals"] > 0, "no recovery added a residual"


@pytest.mark.slow
def test_eight_kills_with_vaults_that_die_as_well(tmp_path):
    check(campaign(tmp_path, 8, 5, "checkpoint.settings.memory.enabled=true"), 8)
    key = folders.run_key("campaign", normal_storage(str(tmp_path / "c" / "storage")))
    assert folders.of_run(key) == []
