"""The ledger where D is a distance, and where a budget moves K."""

from math import inf
from typing import Any

import pytest

from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerMap
from layercheck.manifest import LayerPlan, RecoveryPlan
from layercheck.tracking.budget import PERIOD_STEPS
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.policy import threshold
from tests.unit.simulated_run import config, transformer

MAP = transformer(3)
NAMES = [layer.name for layer in MAP.layers]
DISTANCE = config(
    warmup_steps=8, warmup_full_every=4, s_max=40, target_interval=10, drift={"kind": "displacement"}
)


def distances(step: int, value: float, committed: int = -1, lost: tuple[int, ...] = ()) -> DriftReport:
    """Every layer moved by 1 in this step and is `value` away from its newest version."""
    return DriftReport(
        step,
        dict.fromkeys(NAMES, 1.0),
        1e-4,
        committed_step=committed,
        lost_steps=lost,
        displacement=dict.fromkeys(NAMES, value),
    )


def plan_of(
    known: LayerMap, t_fail: int, drift: dict[str, float], state: dict[str, Any] | None = None
) -> RecoveryPlan:
    """A full event of step 8 and nothing after it."""
    layers = tuple(
        LayerPlan(
            layer=one.name,
            numel=one.numel,
            step=8,
            attempt=1,
            age=t_fail - 8,
            lost=t_fail - 8,
            reason="full",
            shards=(),
        )
        for one in known.layers
    )
    return RecoveryPlan(
        mode="composite",
        world_size=2,
        t_fail=t_fail,
        t_fail_source="live",
        resume_step=t_fail + 1,
        trainer_state={"step": t_fail, "layercheck": state or {}},
        drift=drift,
        layers=layers,
    )


def take(ledger: Ledger, step: int, *layers: str, reason: str = "drift") -> None:
    ledger.select(PersistDecision(step, tuple(LayerWrite(name, reason, 0.0, 1.0, 0) for name in layers)))


def started() -> Ledger:
    ledger = Ledger.fresh(MAP, DISTANCE)
    ledger.observe(DriftReport(0, {}, 0.0))
    take(ledger, 0, *NAMES, reason="full")
    return ledger


def test_displacement_replaces_the_drift_instead_of_adding_to_it():
    ledger = started()
    ledger.observe(distances(1, 1.0))
    ledger.observe(distances(2, 1.4))
    ledger.observe(distances(3, 1.2))
    assert ledger.drift["layers.0"] == pytest.approx(1.2)


def test_after_a_lost_event_the_distance_from_the_older_version_counts():
    ledger = started()
    ledger.observe(distances(1, 1.0, committed=0))
    take(ledger, 1, "layers.0")
    assert ledger.drift["layers.0"] == 0.0
    # Measured before the loss was known: from the lost version, for this one step.
    ledger.observe(distances(2, 1.0, committed=0, lost=(1,)))
    ledger.observe(distances(3, 1.7, committed=0))
    assert ledger.drift["layers.0"] == pytest.approx(1.7)


def test_the_threshold_is_calibrated_on_distances_not_on_paths():
    ledger = started()
    for step in range(1, 9):
        if step == 4:
            take(ledger, 4, *NAMES, reason="full")
        ledger.observe(distances(step, 0.25 * (step % 4 or 4)))
    path = Ledger.fresh(MAP, config(**DISTANCE.model_dump() | {"drift": {"kind": "path"}}))
    for step in range(1, 9):
        path.observe(distances(step, 0.0))
    assert ledger.k0 is not None
    assert path.k0 is None or ledger.k0 < 0.5 * path.k0


def test_displacement_starts_again_at_zero_after_a_recovery_but_a_layer_owed_stays_due():
    ledger = Ledger.resumed(MAP, DISTANCE, plan_of(MAP, 12, {"layers.0": 7.0, "layers.1": inf}))
    assert ledger.drift["layers.0"] == 0.0
    assert ledger.versions.layers["layers.1"].overdue


BUDGET = config(warmup_steps=4, warmup_full_every=2, s_max=400, overhead_budget=0.02, full_every=0, k0=None)


def budget_run(stall_s: float, ledger: Ledger | None = None, steps: int = 2 * PERIOD_STEPS) -> Ledger:
    ledger = ledger or Ledger.fresh(MAP, BUDGET)
    for step in range(1, steps + 10):
        ledger.observe(DriftReport(step, dict.fromkeys(NAMES, 1e-5), 1e-4, step_s=1.0, stall_s=stall_s))
    return ledger


def test_a_stall_over_the_budget_raises_all_thresholds_and_one_below_it_lowers_them():
    assert budget_run(0.2).facts(200, 1e-4).k_factor > 1.5
    assert budget_run(0.0001).facts(200, 1e-4).k_factor < 0.7


def test_thresholds_that_are_told_are_those_that_decide_also_of_a_budget():
    ledger = budget_run(0.2)
    ledger.versions.layers["layers.1"].stagger = 0.25
    facts = ledger.facts(200, 3e-5)
    assert ledger.thresholds(3e-5) == {one.name: threshold(one, facts, BUDGET) for one in facts.layers}
    assert ledger.thresholds(3e-5)["layers.1"] == 0.25 * ledger.thresholds(3e-5)["layers.2"] > 0.0


def test_a_full_event_does_not_count_against_the_budget():
    ledger = Ledger.fresh(MAP, BUDGET)
    factors = set()
    for step in range(1, 3 * PERIOD_STEPS):
        take(ledger, step, *NAMES, reason="full")
        ledger.observe(DriftReport(step + 1, {}, 1e-4, committed_step=step, step_s=1.0, stall_s=5.0))
        factors.add(ledger.budget.factor)
    assert factors == {1.0}


def test_ranks_that_wait_and_report_the_same_step_again_count_it_once():
    once, often = Ledger.fresh(MAP, BUDGET), Ledger.fresh(MAP, BUDGET)
    for step in range(1, 2 * PERIOD_STEPS):
        known = DriftReport(step, dict.fromkeys(NAMES, 1e-5), 1e-4, step_s=1.0, stall_s=0.05)
        once.observe(known)
        for _ in range(3):
            often.observe(known)
    assert once.budget.factor == often.budget.factor > 1.0


def test_the_factor_of_the_budget_survives_a_recovery():
    state = budget_run(0.2).to_state()
    resumed = Ledger.resumed(MAP, BUDGET, plan_of(MAP, 120, {}, state))
    assert resumed.budget.factor == state["budget_factor"] > 1.5
