"""The sweep, its tables and what is recommended from it."""

from dataclasses import replace

import pytest

from layercheck.errors import ConfigError
from simulations.advise import advise
from simulations.costs import load_costs, parse_costs
from simulations.failures import FailureModel
from simulations.progress import ProgressBar
from simulations.protocols import best_factor, charged_closed_form, composite_at, operating_point
from simulations.sweep import Plan, cells_of, run_cell, summarize, sweep, t_quantile
from simulations.tables import crossovers, row_of
from tests.unit.test_ettr_costs import content

PAPER = load_costs("paper")
MTBFS_S = (360.0, 1800.0, 7200.0, 10800.0)
PLAN = Plan(PAPER, MTBFS_S, FailureModel(1.0), seeds=60, horizon_s=5 * 86400.0)


@pytest.fixture(scope="module")
def outcomes():
    return sweep([PLAN])


def one_of(outcomes, protocol, method, mtbf_s):
    mine = [one for one in outcomes if (one.point.protocol, one.mtbf_s) == (protocol, mtbf_s)]
    return next(one for one in mine if one.point.method.name == method)


def test_every_point_agrees_with_the_closed_form(outcomes):
    assert len(outcomes) == 4 * 2 * 3
    for one in outcomes:
        assert one.ettr == pytest.approx(one.closed_form, abs=2.5 * one.ettr_ci + 1e-4), one


def test_lost_progress_is_sampled_at_two_thousand_failures_and_agrees_with_its_expectation(outcomes):
    for one in outcomes:
        if not one.point.tiers:
            assert (one.charged, one.lost_steps) == (one.ettr, 0.0)
            continue
        assert one.num_lost_sampled >= min(2000, one.num_failures)
        failures = FailureModel(one.mtbf_s)
        assert one.charged == pytest.approx(
            charged_closed_form(one.point, failures), abs=2.5 * one.charged_ci
        )
        assert 0 < one.charged < one.ettr


def test_lost_progress_agrees_also_where_no_failure_hits_a_recovery():
    failures = FailureModel(120.0, in_recovery=False)
    plan = replace(PLAN, mtbf_s=(120.0,), failures=failures, protocols=("matched",), horizon_s=2 * 86400.0)
    ours = sweep([plan])[0]
    assert ours.charged == pytest.approx(charged_closed_form(ours.point, failures), abs=2.5 * ours.charged_ci)


def test_the_shares_of_all_causes_are_the_whole(outcomes):
    for one in outcomes:
        shares = {cause: share for cause, share in one.shares.items() if cause != "lost_progress"}
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share >= 0 for share in shares.values())


def test_the_paper_preset_gives_the_papers_figures_at_half_an_hour(outcomes):
    found = [one_of(outcomes, "matched", name, 1800.0).ettr for name in ("layercheck", "lowdiff", "gemini")]
    assert found == pytest.approx([0.923, 0.888, 0.845], abs=0.003)


def test_an_interval_method_overtakes_a_per_step_stall_and_that_is_reported(outcomes):
    plain = [one for one in crossovers(outcomes) if one.protocol == "matched" and not one.charged]
    found = {(one.better, one.worse): one.mtbf_s / 3600 for one in plain}
    assert 1.0 < found["gemini", "layercheck"] < 2.0
    assert ("layercheck", "gemini") not in found


def test_matched_gives_every_interval_method_the_same_interval_and_optima_are_no_worse(outcomes):
    for mtbf_s in MTBFS_S:
        matched, own = (one_of(outcomes, name, "gemini", mtbf_s) for name in ("matched", "own_optimum"))
        assert matched.point.interval_steps == 106
        assert own.closed_form >= matched.closed_form


def test_the_numbers_do_not_depend_on_the_order_or_the_cut_of_the_seeds(outcomes):
    point, failures, cells = cells_of(PLAN)[3]
    backwards = [run_cell(replace(cells[0], seeds=(seed,))) for seed in reversed(range(60))]
    again = summarize(point, failures, backwards[::-1])
    assert again.ettr == outcomes[3].ettr
    assert again.charged == outcomes[3].charged


def test_a_row_has_a_unit_or_a_share_in_every_name(outcomes):
    row = row_of(one_of(outcomes, "matched", "gemini", 1800.0))
    assert row["mtbf_h"] == 0.5
    assert row["ettr_low"] < row["ettr"] < row["ettr_high"]
    assert row["share_useful"] == pytest.approx(row["ettr"], abs=1e-3)


def test_the_quantile_is_students():
    assert [round(t_quantile(n), 3) for n in (5, 10, 199)] == pytest.approx([2.571, 2.228, 1.972], abs=0.004)


def test_a_stretched_composite_stalls_less_and_loses_more():
    failures = FailureModel(1800.0)
    near, far = composite_at("layercheck", PAPER, 0.5), composite_at("layercheck", PAPER, 2.0)
    assert near.method.stall_s == pytest.approx(2 * 0.325)
    assert far.method.stall_s == pytest.approx(0.325 / 2)
    assert far.interval_steps == pytest.approx(212)
    assert composite_at("layercheck", PAPER, 10.0).interval_steps == pytest.approx(400)
    best = charged_closed_form(
        composite_at("layercheck", PAPER, best_factor("layercheck", PAPER, failures)), failures
    )
    for factor in (0.3, 0.6, 1.0, 1.5, 3.0):
        assert charged_closed_form(composite_at("layercheck", PAPER, factor), failures) <= best + 1e-6


def test_a_method_commits_no_sooner_than_it_can_write():
    costs = parse_costs(content(interval_steps=20, min_interval_steps=70), "x")
    for protocol in ("matched", "own_optimum"):
        assert operating_point("one", costs, protocol, FailureModel(60.0)).interval_steps == 70


# ---------------------------------------------------------------- advice


def test_it_says_use_something_else_where_that_wins():
    advice = advise(PAPER, FailureModel(1800.0), max_lost_share=0.01)
    assert advice.best.method == "lowdiff"
    assert "Use something else than layercheck" in advice.reason
    assert not next(one for one in advice.candidates if one.method == "layercheck").within


def test_with_a_wider_limit_it_recommends_us_and_says_what_that_loses():
    advice = advise(PAPER, FailureModel(10800.0), max_lost_share=0.08)
    assert advice.best.method == "layercheck"
    assert advice.best.lost_share <= 0.08
    assert advice.best.ettr == max(one.ettr for one in advice.candidates)
    assert advice.best.settings["target_interval"] == pytest.approx(advice.best.interval_steps, abs=1)
    assert "Charged with the progress it loses" in advice.reason


def test_a_stricter_limit_never_gives_a_longer_interval():
    limits = (0.5, 0.1, 0.05, 0.02, 0.01)
    found = [advise(PAPER, FailureModel(10800.0), limit).candidates for limit in limits]
    ours = [next(one for one in rows if one.method == "layercheck") for rows in found]
    assert [one.interval_steps for one in ours] == sorted((one.interval_steps for one in ours), reverse=True)
    assert all(one.lost_share <= limit for one, limit in zip(ours, limits, strict=True) if one.within)


# ---------------------------------------------------------------- a person watches


class Lines(list):
    def write(self, text):
        self.append(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def test_a_long_run_shows_how_far_it_is_and_a_short_one_nothing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("simulations.progress.time.monotonic", lambda: now[0])
    said = Lines()
    bar = ProgressBar("simulating", said)
    for done in range(1, 5):
        now[0] += 3.0
        bar(done, 4)
    text = "".join(said)
    assert "simulating: 2/4, 6 s, about 6 s left" in text
    assert "simulating: 4/4, 12 s, about 0 s left" in text
    short = Lines()
    ProgressBar("simulating", short)(4, 4)
    assert short == []


def test_a_plan_without_an_mtbf_is_refused():
    with pytest.raises(ConfigError, match="mtbf_s=0"):
        sweep([replace(PLAN, mtbf_s=(0.0,))])
