"""Reports that come one step after the decision, as on an accelerator: nothing is counted twice or lost."""

import pytest

from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.tracking.ledger import Ledger
from tests.unit.simulated_run import config, transformer

MAP = transformer(3)
NAMES = [layer.name for layer in MAP.layers]


def report(step: int, *, lost: tuple[int, ...] = (), distance: float | None = None) -> DriftReport:
    displacement = None if distance is None else dict.fromkeys(NAMES, distance)
    return DriftReport(
        step, dict.fromkeys(NAMES, 1.0), 1e-4, committed_step=0, lost_steps=lost, displacement=displacement
    )


def chosen(step: int, *layers: str) -> PersistDecision:
    return PersistDecision(step, tuple(LayerWrite(name, "drift", 0.0, 1.0, 0) for name in layers))


def lagging(**drift: str) -> Ledger:
    """Steps 1 to 4 reported, "layers.0" chosen after step 5, of which nothing is known yet."""
    ledger = Ledger.fresh(
        MAP, config(warmup_steps=4, warmup_full_every=2, s_max=40, target_interval=10, drift=drift), lag=1
    )
    ledger.select(chosen(0, *NAMES))
    for step in (1, 2, 3, 4):
        ledger.observe(report(step, distance=2.0 * step if drift else None))
    ledger.select(chosen(5, "layers.0"))
    return ledger


def test_movement_that_a_version_holds_already_is_not_counted_after_its_selection():
    ledger = lagging()
    ledger.observe(report(5))
    assert (ledger.drift["layers.0"], ledger.drift["layers.1"]) == (0.0, 5.0)
    ledger.observe(report(6))
    assert (ledger.drift["layers.0"], ledger.drift["layers.1"]) == (1.0, 6.0)


def test_i9_a_lost_event_gives_back_the_movement_that_was_on_its_way_at_its_selection():
    ledger = lagging()
    ledger.observe(report(5))
    ledger.observe(report(6))
    ledger.observe(report(7, lost=(5,)))
    assert ledger.drift["layers.0"] == 7.0 == ledger.drift["layers.1"]


def test_a_distance_to_the_version_before_is_not_taken_for_one_to_the_new_version():
    ledger = lagging(kind="displacement")
    ledger.observe(report(5, distance=10.0))
    assert (ledger.drift["layers.0"], ledger.drift["layers.1"]) == (0.0, 10.0)
    ledger.observe(report(6, distance=3.0))
    assert (ledger.drift["layers.0"], ledger.drift["layers.1"]) == (3.0, 3.0)


def test_the_calibration_sees_the_step_of_a_distance_also_where_a_version_came_between():
    rates = []
    for full in (False, True):
        ledger = Ledger.fresh(
            MAP,
            config(
                warmup_steps=8,
                warmup_full_every=4,
                s_max=40,
                target_interval=10,
                drift={"kind": "displacement"},
            ),
            lag=1,
        )
        ledger.select(chosen(0, *NAMES))
        for step in range(1, 8):
            ledger.observe(report(step - 1, distance=2.0 * (step - 1)))
            if full and step == 6:
                ledger.select(chosen(6, *NAMES))
        # The vector of step 6 still measured from step 0, that of step 7 from step 6.
        ledger.observe(report(7, distance=2.0 if full else 14.0))
        rates.append(ledger.meter.to_state())
    assert rates[0] == rates[1]


def test_the_rate_of_the_newest_report_is_carried_over_a_recovery():
    ledger = lagging()
    assert ledger.lr == 1e-4
    assert ledger.to_state()["lr"] == pytest.approx(1e-4)
