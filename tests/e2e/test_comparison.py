"""`python -m simulations.measure methods` over real runs. What its figures are depends on the machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.costs import load_costs
from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_quick_comparison_of_one_method_gives_costs_and_ratios(tmp_path: Path) -> None:
    out = tmp_path / "m"
    options = ["--quick", "--out", str(out), "--methods", "deepspeed", "lowdiff_dense"]
    done = subprocess.run(
        [sys.executable, "-m", "simulations.measure", "methods", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((out / "comparison.json").read_text())
    assert set(found["regimes"]["own"]) == {"none", "layercheck", "deepspeed", "lowdiff_dense"}
    every_step, own = (found["regimes"][name]["deepspeed"] for name in ("every_step", "own"))
    assert (every_step["events"], every_step["steps"]) == (30, 30)
    assert (own["events"], own["steps"]) == (1, 100)
    assert own["mean_event_bytes"] == pytest.approx(every_step["mean_event_bytes"], rel=0.01)
    assert own["mean_interval"] == pytest.approx(100, rel=0.01)
    ours = found["regimes"]["own"]["layercheck"]
    assert ours["events"] > 0
    assert ours["bytes_written"] * ours["mean_interval"] == pytest.approx(ours["steps"] * ours["full_bytes"])
    lowdiff = found["lowdiff_bytes"]["lowdiff_dense"]
    assert lowdiff["measured_ratio"] == pytest.approx(lowdiff["expected_ratio"], rel=0.1)
    recovery, interval = found["recovery"], found["recovery"]["matched_interval_steps"]
    assert recovery["layercheck"]["replayed_steps"] == 0
    assert recovery["deepspeed"]["replayed_steps"] >= interval // 2
    assert recovery["lowdiff_dense"]["replayed_steps"] <= 4
    for method in ("layercheck", "deepspeed", "lowdiff_dense"):
        assert recovery[method]["reschedule_s"] > 0
        assert recovery[method]["load_s"] > 0
    assert set(load_costs(str(out)).methods) == {"layercheck", "deepspeed", "lowdiff_dense"}
    assert not list(out.glob("blocks/*/storage")), "what was read is deleted"
    assert "| deepspeed |" in (out / "comparison.md").read_text()
