"""`python -m simulations.validate` over real runs. Its ratios depend on the machine; what must fit, not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.step_log import read_lives
from simulations.costs import load_costs
from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_real_run_that_is_killed_by_the_clock_keeps_every_step_before_each_kill(tmp_path: Path) -> None:
    options = ["--methods", "layercheck", "--minutes", "2", "--mtbf-s", "40", "--recoveries", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "simulations.validate", "--out", str(tmp_path / "v"), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    content = json.loads((tmp_path / "v" / "validation.json").read_text())
    found = content["methods"]["layercheck"]["measured"]
    assert len(found["kills_s"]) == len(content["planned_s"])
    assert all(kill >= planned for kill, planned in zip(found["kills_s"], content["planned_s"], strict=True))
    lives = read_lives(tmp_path / "v" / "layercheck" / "failures" / "steps")
    steps = [step.step for life in lives for step in life]
    assert steps == sorted(set(steps)), "a composite replays no step"
    assert sum(found["kept_steps"]) == lives[-1][0].step - 1 - 20
    costs = load_costs(str(tmp_path / "v" / "layercheck" / "costs.json"))
    assert costs.methods["layercheck"].source == "measured"
    assert 0 < found["ettr"] < 1
