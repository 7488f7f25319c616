"""What an event is charged: its visible stall, or all that training loses to it."""

import pytest

from layercheck.errors import ConfigError
from simulations.charges import charged, event_costs, unknown, with_step_ratios
from simulations.costs import Costs, MethodCosts, load_costs, parse_costs
from simulations.failures import FailureModel
from simulations.protocols import closed_form, operating_point
from simulations.tiers import MEASURED_RESIDUALS, TIER_SETS, composite

PAPER = load_costs("paper")
OURS = PAPER.methods["layercheck"]
T_ITER_S, STATE_S = PAPER.t_iter_s, OURS.stall_s * 106
_, RESIDUALS, MEMORY, EACH_STEP, BOTH = TIER_SETS
RATIOS = {"gemini": 5.0, "lowdiff": 1.05, "versions": 12.0, "residuals": 5.0, "memory": 10.0}
"""As if they had been measured: only where they are above visible stalls do they count."""


def slowed(costs: Costs = PAPER, **ratios: float) -> Costs:
    return charged(with_step_ratios(costs, RATIOS | ratios), "slowdown")


def with_method(name: str, **changes: object) -> Costs:
    cost = MethodCosts.model_validate(PAPER.methods[name].model_dump() | changes)
    return PAPER.model_copy(update={"methods": PAPER.methods | {name: cost}})


def test_visible_stalls_are_charged_as_they_are():
    costs = with_step_ratios(PAPER, RATIOS)
    assert charged(costs, "stalls") is costs


def test_an_event_costs_what_it_makes_a_step_longer_but_never_less_than_its_stall():
    methods = slowed().methods
    assert methods["gemini"].stall_s == pytest.approx(4 * T_ITER_S)
    assert methods["lowdiff"].stall_s == PAPER.methods["lowdiff"].stall_s > 0.05 * T_ITER_S
    assert slowed(gemini=0.5).methods["gemini"].stall_s == PAPER.methods["gemini"].stall_s


def test_a_composite_pays_for_what_it_copies():
    costs = slowed()
    versions, residuals, memory = 11 * T_ITER_S, 4 * T_ITER_S, 9 * T_ITER_S
    assert versions > STATE_S
    stall_s = {tiers.suffix: composite("layercheck", costs, 1.0, tiers)[0].stall_s for tiers in TIER_SETS}
    assert stall_s[""] == pytest.approx(versions / 106)
    assert composite("layercheck", costs, 2.0)[0].stall_s == pytest.approx(versions / 212)
    point = MEASURED_RESIDUALS
    with_residuals = (versions / point.versions_part + residuals / point.residuals_part) / 106
    assert stall_s["residuals"] == pytest.approx(with_residuals)
    assert stall_s["memory"] == pytest.approx(versions / 106 + memory / 7)
    assert stall_s["memory_each_step"] == pytest.approx(versions / 106 + memory)
    assert stall_s["residuals_memory"] == pytest.approx(with_residuals + memory / 7)
    recovery = composite("layercheck", costs, 1.0, BOTH)[0].recovery[0]
    assert recovery.reconstruct_s - OURS.recovery.reconstruct_s == pytest.approx(versions)


def test_copies_whose_ratio_is_unknown_hide_as_much_as_versions_and_none_costs_less_than_its_stall():
    costs = with_step_ratios(PAPER, {"gemini": 1.0, "lowdiff": 1.0, "versions": 12.0})
    ours = charged(costs, "slowdown").methods["layercheck"]
    assert (ours.residual_stall_s, ours.full_stall_s) == pytest.approx(
        (11 * T_ITER_S - STATE_S * 2 / 3, 11 * T_ITER_S)
    )
    costs = with_step_ratios(PAPER, {"gemini": 1.0, "lowdiff": 1.0, "versions": 1.0})
    ours = charged(costs, "slowdown").methods["layercheck"]
    assert (ours.residual_stall_s, ours.full_stall_s) == pytest.approx((STATE_S / 3, STATE_S))
    ours = slowed(versions=1.0, residuals=0.5, memory=0.9).methods["layercheck"]
    assert ours.stall_s == pytest.approx(OURS.stall_s)
    assert (ours.residual_stall_s, ours.full_stall_s) == pytest.approx((STATE_S / 3, STATE_S))
    known = with_method("layercheck", full_stall_s=90.0, residual_stall_s=80.0)
    ours = slowed(known, memory=2.0, residuals=2.0).methods["layercheck"]
    assert (ours.residual_stall_s, ours.full_stall_s) == (80.0, 90.0)


def test_what_a_step_of_a_composite_is_slower_than_its_versions_explain_is_paid_at_every_step():
    ours = slowed(layercheck=1.5).methods["layercheck"]
    versions_s = 11 * T_ITER_S / 106
    assert ours.stall_s == pytest.approx(0.5 * T_ITER_S)
    assert ours.stall_fixed_s == pytest.approx(0.5 * T_ITER_S - versions_s)
    ours = slowed(layercheck=0.9).methods["layercheck"]
    assert (ours.stall_s, ours.stall_fixed_s) == pytest.approx((versions_s, 0.0))


def test_a_stored_copy_costs_what_a_copy_beside_training_does_less_its_commit():
    beside = MethodCosts.model_validate(
        PAPER.methods["gemini"].model_dump() | {"far_every": 0, "far_kinds": (), "commit_delay_s": 420.0}
    )
    costs = PAPER.model_copy(update={"methods": PAPER.methods | {"checkfreq": beside, "dcp_async": beside}})
    found = slowed(costs, checkfreq=9.0, dcp_async=20.0)
    assert found.methods["gemini"].far_stall_s == pytest.approx(8 * T_ITER_S - 4 * T_ITER_S)
    assert found.methods["checkfreq"].far_stall_s == 0
    method = found.methods["gemini"].method("gemini", T_ITER_S)
    assert method.stall_s == pytest.approx(4 * T_ITER_S + 4 * T_ITER_S / method.far_every)
    assert method.stored(2).stall_s == pytest.approx(6 * T_ITER_S)
    often = method.at(10 * method.interval_steps)
    assert often.far_every == round(method.far_every / 10)
    assert often.stall_s == pytest.approx(4 * T_ITER_S + 4 * T_ITER_S / often.far_every)


def test_where_storing_costs_something_its_optimum_is_in_between():
    beside = MethodCosts.model_validate(
        PAPER.methods["gemini"].model_dump() | {"far_every": 0, "far_kinds": (), "commit_delay_s": 4.2}
    )
    costs = PAPER.model_copy(update={"methods": PAPER.methods | {"checkfreq": beside}})
    found = slowed(costs, checkfreq=40.0)
    failures = FailureModel(1800.0, mix=(0.1, 0.5, 0.4))
    best = operating_point("gemini", found, "own_optimum", failures).method
    measured = found.methods["gemini"].method("gemini", T_ITER_S)
    steps = best.far_every * best.interval_steps
    assert 1 < steps < measured.far_every * measured.interval_steps
    for often in (1, 10 * best.far_every):
        assert closed_form(best.stored(often), failures) < closed_form(best, failures)


@pytest.mark.parametrize(
    ("ratios", "named"),
    [
        ({"memroy": 1.1}, "step-ratio 'memroy' is none of layercheck, lowdiff, gemini, versions, residuals"),
        ({"memory": 0.0}, "step-ratio memory=0"),
        ({"gemini": float("nan")}, "step-ratio gemini=nan"),
    ],
)
def test_wrong_ratios_are_named(ratios, named):
    with pytest.raises(ConfigError, match=named):
        with_step_ratios(PAPER, ratios)


def test_costs_without_layers_know_no_copies():
    costs = PAPER.model_copy(update={"methods": {"gemini": PAPER.methods["gemini"]}})
    with pytest.raises(ConfigError, match=r"'versions' is none of gemini$"):
        with_step_ratios(costs, {"versions": 1.1})
    content = costs.model_dump()
    content["methods"]["gemini"]["copy_slowdown_s"] = {"versions": 1.0}
    with pytest.raises(ConfigError, match="needs layers"):
        parse_costs(content, "costs")


def test_a_ratio_that_is_unknown_is_asked_for_and_one_that_is_given_replaces_the_costs_own():
    assert unknown(PAPER) == ["versions", "lowdiff", "gemini"]
    with pytest.raises(ConfigError, match="no measured step ratio of versions, lowdiff, gemini"):
        charged(PAPER, "slowdown")
    known = with_method("gemini", slowdown_s=2.0)
    assert unknown(known) == ["versions", "lowdiff"]
    kept = with_step_ratios(known, {"versions": 2.0}).methods
    assert (kept["gemini"].slowdown_s, kept["lowdiff"].slowdown_s) == (2.0, None)
    assert kept["layercheck"].copy_slowdown_s == pytest.approx({"versions": T_ITER_S})
    assert with_step_ratios(known, {"gemini": 3.0}).methods["gemini"].slowdown_s == pytest.approx(
        2 * T_ITER_S
    )
    assert not kept["gemini"].copy_slowdown_s


def test_the_table_of_events_says_what_each_charge_is():
    ratios = {"gemini": 5.0, "lowdiff": 0.9, "versions": 12.0, "memory": 1.5, "layercheck": 0.9}
    found = {one.name: one for one in event_costs(with_step_ratios(PAPER, ratios))}
    assert {name: one.basis for name, one in found.items()} == {
        "layercheck": "a ratio below 1 is noise: its versions and what is fixed",
        "layercheck: versions": "ratio",
        "layercheck: residuals": "hides as much as versions",
        "layercheck: memory": "visible stall, which is more",
        "lowdiff": "a ratio below 1 is noise: visible stall",
        "gemini": "ratio",
    }
    assert found["gemini"].ratio == pytest.approx(5.0)
    assert found["layercheck: residuals"].ratio is None
    assert found["layercheck: versions"].stall_s == pytest.approx(STATE_S)
    hidden_s = [
        found[f"layercheck: {name}"].charged_s - share * STATE_S
        for name, share in (("residuals", 1 / 3), ("versions", 1))
    ]
    assert hidden_s[0] == pytest.approx(hidden_s[1])
    assert found["gemini"].charged_s == pytest.approx(4 * T_ITER_S)
