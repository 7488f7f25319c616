"""LayerCheck's tiers in the simulation: what they cost, what they keep, who is ahead and why."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.errors import ConfigError
from simulations import tier_report
from simulations.costs import load_costs
from simulations.failures import KINDS, FailureModel
from simulations.protocols import charged_closed_form, composite_at, operating_point
from simulations.sweep import Outcome, Plan, sweep
from simulations.tables import CAUSES
from simulations.tiers import (
    K_RATIO,
    MEASURED_RESIDUALS,
    STORAGE,
    TIER_SETS,
    ResidualPoint,
    composite,
)
from simulations.winners import costs_of_time, standing, standings, winners

ROOT = Path(__file__).resolve().parents[2]
PAPER = load_costs("paper")
FREE = PAPER.model_copy(
    update={
        "methods": PAPER.methods
        | {"layercheck": PAPER.methods["layercheck"].model_copy(update={"full_stall_s": 0.0})}
    }
)
"""Copies to memory take no time."""
LLAMA3 = (63 / 419, 321 / 419, 35 / 419)
RESIDUALS, MEMORY, EACH_STEP, BOTH = TIER_SETS[1:]
PLAN = Plan(PAPER, (600.0, 3600.0), FailureModel(1.0, mix=LLAMA3), 12, horizon_s=4 * 86400.0, tiers=TIER_SETS)


@pytest.fixture(scope="module")
def outcomes():
    return sweep([PLAN])


# ---------------------------------------------------------------- what they are


def test_residuals_are_those_of_the_measurement():
    found = json.loads((ROOT / "simulations/results/2026-11-30/residuals/residuals.json").read_text())
    arm, without = found["arms"]["bits-8-V-800-r-8"], found["predicted"]["without"]
    assert MEASURED_RESIDUALS.lost_part == arm["distance_ratio"] > arm["lost_steps_ratio"]
    by_replay, usual = found["predicted"]["bits-8-V-800-r-8"], without["mean_interval_steps"]
    versions, residuals = by_replay["mean_interval_steps"], by_replay["residual_interval_steps"]
    assert MEASURED_RESIDUALS.versions_part == pytest.approx(versions / usual)
    assert MEASURED_RESIDUALS.residuals_part == pytest.approx(residuals / usual)
    # 12 bytes a parameter every 792 steps and 4 every 11.6, against 12 every 131.
    assert MEASURED_RESIDUALS.staged_part == pytest.approx((12 / versions + 4 / residuals) / (12 / usual))


def test_each_kind_of_failure_leaves_what_survives_it():
    _, places = composite("layercheck", PAPER, 1.0, BOTH)
    left = {kind: [place.name for place in places if kind in place.survives] for kind in KINDS}
    assert left == {
        "process": ["storage", "residuals", "memory", "replicas"],
        "node": ["storage", "residuals", "replicas"],
        "cluster": ["storage", "residuals"],
    }
    _, alone = composite("layercheck", PAPER, 1.0, replace(MEMORY, replicas=False))
    assert [place.name for place in alone if "node" in place.survives] == ["storage"]


def test_intervals_of_the_tiers_follow_that_of_the_versions():
    """106 steps: residuals as if every 17 (16.0 %), memory every 3.2, but 0.15 of the state a step: 7."""
    for factor, memory, residual, versions in ((1.0, 7, 17, 642), (3.0, 10, 51, 1925)):
        _, places = composite("layercheck", PAPER, factor, BOTH)
        periods = {place.name: set(place.schedule.periods) for place in places}
        assert periods == {
            "storage": {versions}, "residuals": {residual}, "memory": {memory}, "replicas": {memory}
        }  # fmt: skip
    _, places = composite("layercheck", PAPER, 2.0, EACH_STEP)
    assert set(places[1].schedule.periods) == {1}


def test_a_copy_to_memory_stalls_as_long_as_a_full_copy_is_known_to():
    cost = PAPER.methods["layercheck"]
    stall_s = {tiers.suffix: composite("layercheck", PAPER, 1.0, tiers)[0].stall_s for tiers in TIER_SETS}
    assert stall_s[""] == cost.stall_s
    assert stall_s["residuals"] == pytest.approx(cost.stall_s * MEASURED_RESIDUALS.staged_part)
    # 106 steps of versions make one full state.
    assert stall_s["memory_each_step"] == pytest.approx(cost.stall_s * 107)
    assert stall_s["memory"] == pytest.approx(cost.stall_s * (1 + 106 / 7))
    known = cost.model_copy(update={"full_stall_s": 2.0})
    costs = PAPER.model_copy(update={"methods": PAPER.methods | {"layercheck": known}})
    assert composite("layercheck", costs, 1.0, EACH_STEP)[0].stall_s - cost.stall_s == pytest.approx(2.0)


def test_after_a_recovery_from_memory_residuals_cost_one_more_state():
    usual = composite("layercheck", PAPER, 1.0)[0].recovery
    state_s = PAPER.methods["layercheck"].stall_s * 106
    for tiers, more_s in (
        (RESIDUALS, (0, 0, 0)),
        (MEMORY, (0, 0, 0)),
        (BOTH, (state_s, state_s, 0)),
        (replace(BOTH, replicas=False), (state_s, 0, 0)),
    ):
        found = composite("layercheck", PAPER, 1.0, tiers)[0].recovery
        added_s = [one.reconstruct_s - other.reconstruct_s for one, other in zip(found, usual, strict=True)]
        assert added_s == pytest.approx(more_s), tiers.suffix
        assert [one.load_s for one in found] == [one.load_s for one in usual]


def test_residuals_go_on_once_all_layers_can_have_been_written():
    """0.15 of the state a step: 7 steps."""
    _, places = composite("layercheck", PAPER, 1.0, BOTH)
    assert {place.name: place.after_memory_steps for place in places if place.name != "residuals"} == {
        "storage": None, "memory": None, "replicas": None
    }  # fmt: skip
    assert next(place.after_memory_steps for place in places if place.name == "residuals") == 7


@pytest.mark.parametrize("changes", [{"lost_part": 1.5}, {"residuals_part": 0.0}, {"versions_part": -1.0}])
def test_a_residual_point_that_cannot_be_is_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        ResidualPoint(**({"lost_part": 0.1, "residuals_part": 0.1, "versions_part": 5.0} | changes))


# ---------------------------------------------------------------- what they bring


parts = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1)).map(
    lambda three: tuple(one / sum(three) for one in three)
)


@settings(max_examples=25, deadline=None)
@given(mix=parts, mtbf_s=st.floats(60, 10_000), seed=st.integers(0, 1000))
def test_a_tier_that_survives_more_never_gives_a_lower_ettr_at_the_same_costs(mix, mtbf_s, seed):
    tiers = (STORAGE, replace(MEMORY, replicas=False), MEMORY)
    plan = Plan(FREE, (mtbf_s,), FailureModel(1.0, mix=mix), 2, seed, 50 * mtbf_s, ("matched",), tiers)
    found = [one for one in sweep([plan]) if one.point.tiers]
    assert len({round(one.ettr, 9) for one in found}) == 1, "equal costs"
    charged = [one.charged for one in found]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(charged))


def test_where_only_clusters_fail_memory_brings_what_the_storage_alone_does():
    plan = replace(
        PLAN,
        costs=FREE,
        failures=FailureModel(1.0, mix=(0.0, 0.0, 1.0)),
        tiers=(STORAGE, MEMORY, EACH_STEP),
        protocols=("matched",),
    )
    for mtbf_s in plan.mtbf_s:
        found = [one for one in sweep([plan]) if one.mtbf_s == mtbf_s and one.point.tiers]
        assert len({one.charged for one in found}) == 1
        assert len({one.lost_steps for one in found}) == 1


def test_with_processes_alone_a_copy_of_each_step_loses_one_step_a_failure():
    plan = replace(PLAN, costs=FREE, failures=FailureModel(1.0), tiers=(EACH_STEP,), protocols=("matched",))
    found = next(one for one in sweep([plan]) if one.point.tiers and one.mtbf_s == 3600.0)
    assert found.lost_steps <= 1
    expected = found.ettr - found.lost_steps * PAPER.t_iter_s / 3600.0
    assert found.charged == pytest.approx(expected, abs=1e-4)


def test_the_optimum_of_each_set_of_tiers_is_no_worse_than_other_stretches():
    failures = FailureModel(1800.0, mix=LLAMA3)
    for tiers in TIER_SETS:
        best = operating_point("layercheck", PAPER, "own_optimum", failures, tiers)
        for factor in (0.3, 1.0, 3.0):
            ratios = (K_RATIO, 0.3) if tiers.memory_k_ratio else (tiers.memory_k_ratio,)
            for ratio in ratios:
                other = composite_at("layercheck", PAPER, factor, tiers=replace(tiers, memory_k_ratio=ratio))
                value = charged_closed_form(other, failures)
                assert value <= charged_closed_form(best, failures) + 1e-6, (tiers, factor, ratio)


def test_a_method_with_copies_in_memory_stores_as_often_as_it_can_at_its_own_optimum():
    gemini = PAPER.methods["gemini"]
    failures = FailureModel(1800.0, mix=LLAMA3)
    as_measured = operating_point("gemini", PAPER, "own_optimum", failures).method
    assert as_measured.far_every * as_measured.interval_steps == pytest.approx(24 * 106, rel=0.05)
    written = gemini.model_copy(update={"far_every": 0, "far_kinds": (), "commit_delay_s": 420.0})
    costs = PAPER.model_copy(update={"methods": PAPER.methods | {"dcp_async": written}})
    often = operating_point("gemini", costs, "own_optimum", failures).method
    assert often.far_every * often.interval_steps == pytest.approx(106, abs=often.interval_steps)


# ---------------------------------------------------------------- who is ahead


def outcome(name: str, charged: float, mtbf_s: float = 3600.0, **shares: float) -> Outcome:
    every = dict.fromkeys(CAUSES, 0.0)
    point = operating_point("lowdiff", PAPER, "matched", FailureModel(mtbf_s))
    point = replace(point, method=replace(point.method, name=name))
    return Outcome(point, mtbf_s, charged, charged, 0.01, charged, 0.01, every | shares)


def test_the_cost_that_decides_is_the_one_by_which_the_better_is_ahead_most():
    ours = outcome("ours", 0.80, stall_s=0.02, lost_progress=0.08, load_s=0.1)
    theirs = outcome("theirs", 0.70, stall_s=0.10, rework_s=0.1, load_s=0.1)
    worse = outcome("worse", 0.10, rework_s=0.9)
    found = standing(ours, [worse, theirs])
    assert (found.rival, found.decides, found.mtbf_h) == ("theirs", "work done again", 1.0)
    assert found.by == pytest.approx(
        {"stalls": 0.08, "work done again": 0.1, "recoveries": 0.0, "lost progress": -0.08}
    )
    assert (found.ahead, found.times) == pytest.approx((0.1, 0.8 / 0.7))
    assert standing(theirs, [ours]).decides == "work done again"
    behind = standing(outcome("ours", 0.6, lost_progress=0.3, stall_s=0.1), [theirs])
    assert (behind.ahead, behind.decides) == (pytest.approx(-0.1), "lost progress")
    assert standing(ours, [outcome("none", 0.0)]).times is None


def test_each_mtbf_has_one_winner_and_each_of_ours_a_place():
    rows = [
        outcome("a", 0.9, 60.0), outcome("b", 0.8, 60.0), outcome("c", 0.7, 60.0),
        outcome("a", 0.5, 600.0), outcome("b", 0.8, 600.0), outcome("c", 0.7, 600.0),
    ]  # fmt: skip
    assert [(one.method, one.rival) for one in winners(rows)] == [("a", "b"), ("b", "c")]
    found = standings(rows, ["a", "b"], ["c"])
    assert [(one.method, one.rival) for one in found] == [("a", "c"), ("b", "c")] * 2
    assert [round(one.ahead, 6) for one in found] == [0.2, 0.1, -0.2, 0.1]
    assert standings(rows, ["a"], []) == []


def test_the_time_of_a_method_is_all_there(outcomes):
    for one in outcomes:
        assert sum(costs_of_time(one).values()) + one.charged == pytest.approx(1, abs=2e-3)


def test_the_report_has_all_points_and_says_where_somebody_else_is_ahead(outcomes):
    report = tier_report.content(PAPER, TIER_SETS, {"stalls": outcomes})
    assert report["interval_methods"] == ["gemini"]
    found = report["charges"]["stalls"]
    assert len(found["points"]) == 2 * 2 * 7
    assert [row["mtbf_h"] for row in found["winners"]] == pytest.approx([1 / 6, 1.0])
    rows = found["against_interval_methods"]
    assert {row["method"] for row in rows} == set(tier_report.our_names(PAPER, TIER_SETS))
    text = tier_report.markdown(report, "about")
    for row in rows:
        where = f"{row['mtbf_h']:.3g} h ({100 * row['ahead']:+.2f} points, gemini: {row['decides']})"
        assert (where in text) == (row["ahead"] <= 0), row
    steps = next(
        row for row in found["as_measured_against_interval_methods"] if row["method"] == "layercheck"
    )
    assert steps["interval_steps"] == pytest.approx(106)


def test_a_report_without_measured_ratios_says_which_are_missing(outcomes):
    text = tier_report.markdown(tier_report.content(PAPER, TIER_SETS, {"stalls": outcomes}), "about")
    assert "no ratio of step times of versions, lowdiff, gemini is known (`--step-ratio`)" in text
    assert "# Charge: stalls" in text
    assert "# Charge: slowdown" not in text
