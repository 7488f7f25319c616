"""The life of drift and versions through selection, commit, loss and recovery."""

import json
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.manifest import LayerPlan, RecoveryPlan
from layercheck.tracking.ledger import Ledger, LedgerEvents
from layercheck.tracking.policy import decide
from tests.unit.simulated_run import SimulatedRun, config, transformer

MAP = transformer(3)
NAMES = [layer.name for layer in MAP.layers]
CONFIG = config(warmup_steps=4, warmup_full_every=2, s_max=40, target_interval=10)


def report(step: int, delta: float = 1.0, committed: int = -1, lost: tuple[int, ...] = ()) -> DriftReport:
    return DriftReport(step, dict.fromkeys(NAMES, delta), 1e-4, committed_step=committed, lost_steps=lost)


def chosen(step: int, *layers: str, reason: str = "drift") -> PersistDecision:
    writes = tuple(LayerWrite(name, reason, 0.0, 1.0, 0) for name in layers)
    return PersistDecision(step, writes)


def started() -> Ledger:
    """Everything committed at step 0, then four steps of drift 1 each."""
    ledger = Ledger.fresh(MAP, CONFIG)
    ledger.observe(DriftReport(0, {}, 0.0))
    ledger.select(chosen(0, *NAMES, reason="full"))
    ledger.observe(report(1, committed=0))
    for step in (2, 3, 4):
        ledger.observe(report(step))
    return ledger


def layer_facts(ledger: Ledger, name: str, step: int = 10):
    return next(one for one in ledger.facts(step, 1e-4).layers if one.name == name)


# ------------------------------------------------------------------------------------------- one event's life


def test_drift_adds_up_until_the_layer_is_selected():
    ledger = started()
    assert ledger.drift["layers.0"] == 4.0
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(5))
    assert (ledger.drift["layers.0"], ledger.drift["layers.1"]) == (1.0, 5.0)


def test_a_selected_layer_is_in_flight_until_its_commit_is_reported():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    known = layer_facts(ledger, "layers.0")
    assert (known.selected, known.committed, known.in_flight) == (4, 0, True)
    assert ledger.observe(report(6, committed=4)) == LedgerEvents(committed=(4,))
    known = layer_facts(ledger, "layers.0")
    assert (known.selected, known.committed, known.in_flight) == (4, 4, False)


def test_i9_the_drift_of_a_lost_event_comes_back():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(5))
    assert ledger.observe(report(6, lost=(4,))) == LedgerEvents(lost=(4,))
    assert ledger.drift["layers.0"] == 6.0 == ledger.drift["layers.1"]
    assert layer_facts(ledger, "layers.0").selected == 0


def test_a_loss_under_a_newer_version_in_flight_comes_back_only_if_that_is_lost_too():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(5))
    ledger.select(chosen(5, "layers.0"))
    ledger.observe(report(6, lost=(4,)))
    assert ledger.drift["layers.0"] == 1.0
    assert layer_facts(ledger, "layers.0").selected == 5
    ledger.observe(report(7, lost=(5,)))
    assert ledger.drift["layers.0"] == 7.0
    assert layer_facts(ledger, "layers.0").selected == 0


def test_a_lost_newer_version_leaves_the_older_one_that_is_still_in_flight():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(5))
    ledger.select(chosen(5, "layers.0"))
    ledger.observe(report(6, lost=(5,)))
    assert ledger.drift["layers.0"] == 2.0
    assert layer_facts(ledger, "layers.0").selected == 4


def test_a_commit_number_does_not_cover_an_event_lost_in_the_same_report():
    ledger = started()
    ledger.select(chosen(3, "layers.0"))
    ledger.select(chosen(4, "layers.1"))
    events = ledger.observe(report(5, committed=4, lost=(3,)))
    assert events == LedgerEvents(committed=(4,), lost=(3,))
    assert layer_facts(ledger, "layers.0").committed == 0
    assert layer_facts(ledger, "layers.1").committed == 4


def test_a_report_repeated_by_ranks_that_wait_counts_its_drift_once():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(4, committed=4))
    assert ledger.drift["layers.1"] == 4.0
    assert layer_facts(ledger, "layers.0").committed == 4


def test_notices_that_are_told_again_change_nothing():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(5, lost=(4,)))
    assert ledger.observe(report(6, lost=(4,), committed=0)) == LedgerEvents()
    assert ledger.drift["layers.0"] == 6.0


def test_movement_that_a_version_already_holds_is_dropped_when_it_arrives_late():
    ledger = started()
    ledger.select(chosen(6, "layers.0"))
    ledger.observe(report(5))
    ledger.observe(report(6))
    ledger.observe(report(7))
    assert ledger.drift["layers.0"] == 1.0


def test_two_events_at_one_step_are_a_mistake_of_ours():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    with pytest.raises(AssertionError, match="two events at step 4"):
        ledger.select(chosen(4, "layers.1"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_i9_whatever_is_lost_no_movement_disappears(data: st.DataObject):
    """When nothing is in flight, D is all movement since the newest committed version of the layer."""
    ledger, moved, committed = started(), 4.0, 0
    held = dict.fromkeys(NAMES, 0.0)
    in_flight: dict[int, dict[str, float]] = {}
    for step in range(5, 20):
        lost: tuple[int, ...] = ()
        fate = data.draw(st.sampled_from(["none", "lose", "commit"])) if in_flight else "none"
        if fate == "lose":
            lost = (data.draw(st.sampled_from(sorted(in_flight))),)
            del in_flight[lost[0]]
        elif fate == "commit":
            committed = data.draw(st.sampled_from(sorted(in_flight)))
            for event in [event for event in sorted(in_flight) if event <= committed]:
                held.update(in_flight.pop(event))
        ledger.observe(report(step, committed=committed, lost=lost))
        moved += 1.0
        layers = data.draw(st.lists(st.sampled_from(NAMES[:3]), unique=True, max_size=2))
        if layers:
            ledger.select(chosen(step, *layers))
            in_flight[step] = dict.fromkeys(layers, moved)
    ledger.observe(report(20, delta=0.0, committed=committed, lost=tuple(in_flight)))
    assert ledger.drift == {name: moved - at for name, at in held.items()}


# ------------------------------------------------------------------------------------------------ readings


def test_the_margin_is_five_at_first_then_follows_the_slowest_of_the_last_commits():
    ledger = Ledger.fresh(MAP, config(s_max=400))
    assert ledger.margin == 5
    ledger.select(chosen(1, "layers.0"))
    ledger.observe(report(12, committed=1))
    assert ledger.margin == 1 + 17
    for step in range(20, 40):
        ledger.select(chosen(step, "layers.0"))
        ledger.observe(report(step + 1, committed=step))
    assert ledger.margin == 1 + 2


def test_the_margin_never_takes_more_than_a_quarter_of_s_max():
    ledger = Ledger.fresh(MAP, CONFIG)
    ledger.select(chosen(1, "layers.0"))
    ledger.observe(report(30, committed=1))
    assert ledger.margin == 10
    assert Ledger.fresh(MAP, config(s_max=8, target_interval=4, warmup_full_every=2)).margin == 2


def test_the_lag_of_the_measuring_is_part_of_the_margin():
    ledger = Ledger.fresh(MAP, config(), lag=1)
    ledger.select(chosen(1, "layers.0"))
    ledger.observe(report(3, committed=1))
    assert ledger.margin == 1 + 1 + 3


def test_i1_ages_count_from_commits_not_from_selection():
    ledger = started()
    ledger.select(chosen(4, *NAMES))
    assert ledger.max_age(9) == 9 == ledger.weighted_age(9)
    ledger.observe(report(9, committed=4))
    assert ledger.ages(9) == dict.fromkeys(NAMES, 5)


def test_i13_the_first_layer_with_a_non_finite_drift_is_named():
    ledger = started()
    bad = DriftReport(5, dict.fromkeys(NAMES, 1.0) | {"norm": inf, "layers.1": float("nan")}, 1e-4)
    assert ledger.non_finite(bad) == "layers.1"
    assert ledger.non_finite(report(5)) is None


def test_first_writes_after_a_full_event_are_spread_and_the_next_are_not():
    ledger = started()
    staggers = [layer_facts(ledger, name).stagger for name in NAMES]
    assert staggers == sorted(staggers)
    assert min(staggers) >= 0.05
    ledger.select(chosen(4, "layers.0"))
    assert layer_facts(ledger, "layers.0").stagger == 1.0
    ledger.observe(report(5, lost=(4,)))
    assert layer_facts(ledger, "layers.0").stagger == staggers[1]


def test_thresholds_are_those_of_the_policy_and_unknown_before_the_calibration():
    assert set(Ledger.fresh(MAP, CONFIG).thresholds(1e-4).values()) == {None}
    ledger = started()
    assert ledger.thresholds(1e-4)["lm_head"] == pytest.approx(
        ledger.k0 * layer_facts(ledger, "lm_head").stagger
    )


def test_i10_a_full_event_outside_the_schedule_leaves_every_layer_fresh():
    ledger = started()
    ledger.select(chosen(4, "layers.0"))
    ledger.observe(report(5, committed=5))
    ledger.saved_now(5)
    assert ledger.max_age(5) == 0
    assert set(ledger.drift.values()) == {0.0}
    assert ledger.facts(5, 1e-4).event_taken
    assert ledger.to_state()["newest_full"] == 5


def test_k0_is_calibrated_once_from_the_second_half_of_the_warm_up():
    """Steps 3 and 4 move 2, steps 1 and 2 moved 50: a target of 10 steps gives K0 near 20."""
    ledger = Ledger.fresh(MAP, config(warmup_steps=4, warmup_full_every=2, s_max=4000, target_interval=10))
    for step, delta in ((1, 50.0), (2, 50.0), (3, 2.0), (4, 2.0), (5, 70.0)):
        assert (ledger.k0 is None) == (step <= 4)
        ledger.observe(report(step, delta))
    total = 10 * 2.0 * (3000 / 10 + 6010) / 9010
    assert ledger.k0 == pytest.approx(total)
    assert ledger.lr_ref == 1e-4


def test_calibration_waits_for_the_first_movement_when_the_warm_up_had_none():
    ledger = Ledger.fresh(MAP, CONFIG)
    for step in range(1, 7):
        ledger.observe(report(step, delta=0.0))
    assert ledger.k0 is None
    ledger.observe(report(7, delta=1.0))
    assert ledger.k0 is not None


# ------------------------------------------------------------------------------------------------ recovery


def plan(run: SimulatedRun, t_fail: int, drift: dict[str, float] | None = None) -> RecoveryPlan:
    """What a coordinator would make of a run that died after step `t_fail`."""
    ledger, by_name = run.ledger, run.layer_map.by_name
    layers = tuple(
        LayerPlan(
            layer=name,
            numel=by_name[name].numel,
            step=known.committed,
            attempt=1,
            age=t_fail - known.committed,
            lost=t_fail - known.committed,
            reason="full" if known.committed == 20 else "drift",
            shards=(),
        )
        for name, known in ledger.versions.layers.items()
    )
    carried = {
        name: inf if known.selected != known.committed else known.drift
        for name, known in ledger.versions.layers.items()
    }
    return RecoveryPlan(
        mode="composite",
        world_size=2,
        t_fail=t_fail,
        t_fail_source="live",
        resume_step=t_fail + 1,
        trainer_state={"step": t_fail, "layercheck": json.loads(json.dumps(ledger.to_state()))},
        drift=carried if drift is None else drift,
        layers=layers,
    )


def failing_run(last: int = 57, **more: object) -> SimulatedRun:
    known = config(warmup_steps=20, warmup_full_every=10, s_max=60, target_interval=15, **more)
    run = SimulatedRun(MAP, known, lambda step, name: 1e-5 * (1 + len(name) % 4), delay=lambda step: 2)
    return run.run(0, last)


def test_a_recovered_ledger_goes_on_where_the_old_one_was():
    run = failing_run()
    new = Ledger.resumed(MAP, run.config, plan(run, 57))
    old = run.ledger
    assert (new.k0, new.lr_ref, new.margin) == (old.k0, old.lr_ref, old.margin)
    for name in NAMES:
        before, after = layer_facts(old, name), layer_facts(new, name)
        assert after.committed == before.committed
        assert after.stagger == before.stagger
        assert after.overdue == before.in_flight
        if not before.in_flight:
            assert after.drift == before.drift


def test_the_schedule_of_writes_is_that_of_a_run_without_the_failure():
    unhurt = failing_run(last=120, failure_aware=False)
    hurt = failing_run(last=57, failure_aware=False)
    hurt.ledger = Ledger.resumed(MAP, hurt.config, plan(hurt, 57))
    hurt._due_at.clear()
    hurt.run(58, 120)

    def writes(run: SimulatedRun) -> int:
        return sum(len(one.writes) for one in run.decisions if one.step > 57)

    assert abs(writes(hurt) - writes(unhurt)) <= 2


def test_a_layer_whose_event_never_became_live_is_due_at_once_also_after_a_second_failure():
    run = failing_run()
    run.ledger = Ledger.resumed(MAP, run.config, plan(run, 57, dict.fromkeys(NAMES, 0.0) | {"norm": inf}))
    assert layer_facts(run.ledger, "norm").overdue
    run.ledger = Ledger.resumed(MAP, run.config, plan(run, 58, dict.fromkeys(NAMES, 0.0)))
    run.ledger.observe(report(59, 0.0))
    decision = decide(run.ledger.facts(59, 1e-4), run.config)
    assert [write.layer for write in decision.writes] == ["norm"]
    run.ledger.select(decision)
    assert not layer_facts(run.ledger, "norm").overdue


def test_a_recovered_run_owes_a_full_event_only_if_the_last_one_is_not_live():
    run = failing_run()
    known = plan(run, 57)
    assert decide(Ledger.resumed(MAP, run.config, known).facts(57, 1e-4), run.config).writes == ()
    older = known.layers[0].model_copy(update={"step": 10})
    damaged = known.model_copy(update={"layers": (older, *known.layers[1:])})
    ledger = Ledger.resumed(MAP, run.config, damaged)
    ledger.observe(report(58))
    assert {write.reason for write in decide(ledger.facts(58, 1e-4), run.config).writes} == {"full"}


def test_failures_that_outrun_the_interval_lower_k_and_the_factor_is_carried():
    run = failing_run()
    first = Ledger.resumed(MAP, run.config, plan(run, 57))
    assert (first.gaps, first.k_factor) == ((57,), pytest.approx(57 / 60, rel=1e-6))
    run.ledger = first
    second = Ledger.resumed(MAP, run.config, plan(run, 60))
    assert second.gaps == (57, 3)
    assert second.k_factor == pytest.approx(30 / 60, rel=1e-6)
    assert second.to_state()["k_factor"] == second.k_factor
    assert Ledger.resumed(MAP, failing_run(failure_aware=False).config, plan(run, 60)).k_factor == 1.0


def test_one_early_failure_does_not_lower_k_for_ever():
    run = failing_run(last=12)
    run.ledger = Ledger.resumed(MAP, run.config, plan(run, 12))
    run.run(13, 20)
    assert run.ledger.k_factor == pytest.approx(20 / 60, rel=1e-6)
    run.run(21, 45)
    assert run.ledger.k_factor == pytest.approx(45 / 60, rel=1e-6)
    run.run(46, 70)
    assert run.ledger.k_factor == 1.0


def test_observations_made_before_a_failure_in_the_warm_up_count_after_it():
    run = failing_run(last=14)
    ledger = Ledger.resumed(MAP, run.config, plan(run, 14))
    for step in range(15, 21):
        ledger.observe(DriftReport(step, {n: 1e-5 * (1 + len(n) % 4) for n in NAMES}, 1e-4))
    assert ledger.k0 == pytest.approx(failing_run(last=20).ledger.k0)


def test_the_state_is_json():
    state = failing_run().ledger.to_state()
    assert json.loads(json.dumps(state)) == state
    assert {"k0", "lr_ref", "delays", "selected", "stagger", "k_factor"} <= state.keys()
