"""What is said of the warm-up is what the settings and the calibration say."""

import re

import pytest

from layercheck.drift_report import DriftReport
from layercheck.tracking.calibrate import mean_interval
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.warmup import told_at_the_end, told_at_the_start
from tests.unit.simulated_run import config, transformer

MAP = transformer(3)
CONFIG = config(warmup_steps=40, warmup_full_every=8, s_max=60, target_interval=12, embedding_factor=1)


@pytest.mark.parametrize("done", [0, 39])
def test_an_attempt_that_begins_in_the_warm_up_says_where_a_restart_goes_back_to(done: int) -> None:
    told = told_at_the_start(done, CONFIG)
    assert told is not None
    assert told.startswith("warm-up until step 40: a restart before its end goes back")
    assert "one every 8 steps" in told


def test_after_the_warm_up_nothing_is_said() -> None:
    assert told_at_the_start(40, CONFIG) is None


@pytest.mark.parametrize(("k0", "interval"), [(None, 12), (2e-3, 6)])
def test_the_end_names_k0_and_the_mean_interval_that_it_gives(k0: float | None, interval: float) -> None:
    ledger = Ledger.fresh(MAP, CONFIG.model_copy(update={"k0": k0}), initial_lr=1e-4)
    rates = {layer.name: 1e-4 * (1 + index) for index, layer in enumerate(MAP.layers)}
    for step in range(1, 41):
        assert told_at_the_end(step, ledger) is None
        ledger.observe(DriftReport(step, rates, 1e-4))
    told = told_at_the_end(40, ledger)
    assert told is not None
    assert ledger.k0 is not None
    found = re.search(r"at step 40: K0 = (\S+) at learning rate 0.0001, a mean interval of (\S+) steps", told)
    assert found, told
    assert float(found[1]) == pytest.approx(ledger.k0, rel=1e-2)
    numel = {layer.name: layer.numel for layer in MAP.layers}
    expected = mean_interval(ledger.k0, rates, numel, dict.fromkeys(rates, 1.0), CONFIG.s_max)
    assert float(found[2]) == pytest.approx(expected, rel=1e-2) == pytest.approx(interval, rel=0.02)


def test_a_layer_that_never_moved_leaves_the_end_untold() -> None:
    ledger = Ledger.fresh(MAP, CONFIG, initial_lr=1e-4)
    still = dict.fromkeys((layer.name for layer in MAP.layers), 0.0)
    for step in range(1, 45):
        ledger.observe(DriftReport(step, still, 1e-4))
    assert told_at_the_end(44, ledger) is None
