"""`python -m simulations.measure memory`: real kills of workers, a node, the cluster; nothing is left."""

import json
from pathlib import Path

import pytest

from app.measure.memory.overhead import EVERY_STEP, USUAL, Settings
from app.measure.regime import Regime
from layercheck.memory import folders
from simulations.measure import main
from simulations.memory.overhead import overhead

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]


def test_what_is_asked_for_holds_at_real_kills_and_a_cascade_ends_bit_identical(tmp_path: Path) -> None:
    before = folders.of_run()
    assert main(["memory", "--out", str(tmp_path), "--quick"]) == 0
    content = json.loads((tmp_path / "memory.json").read_text())
    # A run from scratch of 80 steps has no final loss to speak of: 10 lost steps are 2 to 3 % of it.
    missed = [name for name, is_met in content["verdicts"].items() if not is_met and "loss ends" not in name]
    assert not missed, content["arms"]
    assert len(content["runs"]["worker"]["recoveries"]) == 3
    assert (tmp_path / "memory.md").is_file()
    assert folders.of_run() == before


@pytest.mark.parametrize("settings", [USUAL, EVERY_STEP])
def test_the_overhead_is_measured_with_a_vault_of_its_own(tmp_path: Path, settings: Settings) -> None:
    before = folders.of_run()
    content = overhead(tmp_path, "cost", settings, Regime(num_steps=6, num_write_pairs=0))
    assert content["arms"].keys() == settings.keys()
    assert content["arms"][next(iter(settings))]["ratio"] == 1.0
    assert all(0.2 < arm["ratio"] < 5.0 for arm in content["arms"].values())
    assert json.loads((tmp_path / "cost.json").read_text()) == content
    assert folders.of_run() == before
