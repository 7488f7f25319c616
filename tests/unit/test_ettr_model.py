"""Closed forms of ETTR: golden values, the sums against draws, optimal intervals against a search."""

from itertools import pairwise
from math import gamma, inf, nan

import numpy as np
import pytest

from layercheck.errors import ConfigError
from simulations.cluster_view import MIXES, RATES, mtbf_of_cluster
from simulations.engines.segments import simulate
from simulations.failures import FailureModel, Law, draw_failures, mtbf_of_counts
from simulations.methods import simple
from simulations.model import daly_interval_s, empirical_ettr, ettr, small_loss_ettr, young_interval_s
from simulations.protocols import best_interval

PER_STEP, INTERVAL = (4.2, 0.325, 10), (445.2, 14.07, 14)
MTBFS_S = (36, 360, 1800, 10800)
WITHOUT = {"failures_in_recovery": False}
WEIBULL = {"law": "weibull", "shape": 0.7}
GOLDEN = [
    (PER_STEP, WITHOUT, (0.6817, 0.8974, 0.9219, 0.9271)),
    (PER_STEP, {}, (0.6598, 0.8971, 0.9219, 0.9271)),
    (PER_STEP, WEIBULL, (0.6971, 0.8985, 0.9220, 0.9271)),
    (INTERVAL, WITHOUT, (0.0000, 0.4611, 0.8444, 0.9477)),
    (INTERVAL, {}, (0.0000, 0.4608, 0.8444, 0.9477)),
    (INTERVAL, WITHOUT | WEIBULL, (0.0081, 0.5420, 0.8546, 0.9483)),
    (INTERVAL, WEIBULL, (0.0098, 0.5486, 0.8556, 0.9484)),
]


@pytest.mark.parametrize(("method", "how", "expected"), GOLDEN)
def test_golden_values_to_four_digits(method, how, expected):
    assert tuple(round(ettr(*method, mtbf_s, **how), 4) for mtbf_s in MTBFS_S) == expected


def test_half_an_interval_would_be_wrong_where_failures_come_as_often_as_commits():
    assert ettr(*INTERVAL, 36, **WITHOUT) == pytest.approx(3e-5, rel=0.3)


@pytest.mark.parametrize("law", [Law(), Law("weibull", shape=0.7)])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("method", [PER_STEP, INTERVAL])
@pytest.mark.parametrize("mtbf_s", [120.0, 1800.0, 10800.0])
def test_simulated_ettr_is_within_four_standard_errors_of_the_closed_form(law, given, method, mtbf_s):
    failures, horizon_s = FailureModel(mtbf_s, law=law, in_recovery=given), 20 * 86400.0
    one = simple("one", *method)
    found = [simulate(one, draw_failures(failures, horizon_s, s), horizon_s, given).ettr for s in range(30)]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    expected = ettr(*method, mtbf_s, law=law.name, shape=law.shape, failures_in_recovery=given)
    assert abs(np.mean(found) - expected) < 4 * error
    assert error < 0.004


def test_the_sum_over_observed_gaps_is_that_over_the_law_they_were_drawn_from():
    gaps_s = np.random.default_rng(1).weibull(0.7, 400_000)
    gaps_s *= 1800 / gaps_s.mean()
    assert empirical_ettr(*INTERVAL, gaps_s) == pytest.approx(ettr(*INTERVAL, 1800, **WEIBULL), abs=0.002)


def test_the_tail_of_a_long_sum_is_as_good_as_its_terms():
    """Two million terms: one by one, and by the function."""
    cycle_s, scale_s = 0.05, 1800 / gamma(1 + 1 / 0.7)
    j = np.arange(1, 2_500_000, dtype=np.float64)
    commits = float(np.exp(-(((10 + j * cycle_s) / scale_s) ** 0.7)).sum())
    assert ettr(0.04, 0.01, 10, 1800, **WEIBULL) == pytest.approx(0.04 * commits / 1800, rel=1e-7)


def test_no_failures_leave_tau_over_tau_plus_delta():
    assert ettr(4.2, 0.325, 10, inf) == 4.2 / 4.525
    assert ettr(4.2, 0.325, 10, 1e12) == pytest.approx(4.2 / 4.525, rel=1e-9)


@pytest.mark.parametrize("how", [{}, WITHOUT, WEIBULL])
def test_ettr_grows_with_mtbf_and_falls_with_stall_and_recovery(how):
    by_mtbf = [ettr(*INTERVAL, mtbf_s, **how) for mtbf_s in np.geomspace(60, 1e6, 30)]
    by_stall = [ettr(445.2, stall_s, 14, 1800, **how) for stall_s in np.linspace(0, 200, 30)]
    by_recovery = [ettr(445.2, 14, recovery_s, 1800, **how) for recovery_s in np.linspace(0, 900, 30)]
    assert all(later > earlier for earlier, later in pairwise(by_mtbf))
    assert all(later < earlier for curve in (by_stall, by_recovery) for earlier, later in pairwise(curve))


@pytest.mark.parametrize("part", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_dalys_interval_is_within_two_percent_of_a_search(part):
    mtbf_s = 3600.0
    method = simple("one", 1.0, part * mtbf_s, 30)
    best = best_interval(method, FailureModel(mtbf_s))
    assert best == pytest.approx(daly_interval_s(part * mtbf_s, mtbf_s), rel=0.02)


def test_the_search_finds_what_trying_every_interval_finds():
    method, failures = simple("one", 4.2, 14.07, 14), FailureModel(1800)
    every = [ettr(4.2 * steps, 14.07, 14, 1800) for steps in range(1, 400)]
    assert best_interval(method, failures) == int(np.argmax(every)) + 1
    assert best_interval(method, failures, smallest=300) == 300


def test_young_is_daly_for_small_stalls_and_daly_ends_at_the_mtbf():
    assert daly_interval_s(1e-4, 3600) == pytest.approx(young_interval_s(1e-4, 3600), rel=1e-3)
    assert daly_interval_s(7200, 3600) == 3600


@pytest.mark.parametrize("mtbf_h", [4, 8, 24])
def test_metas_form_for_small_losses_is_within_five_percent(mtbf_h):
    rate = 1 / (mtbf_h * 3600)
    approximate = small_loss_ettr(3600, 60, 300, rate)
    assert approximate == pytest.approx(ettr(3600, 60, 300, mtbf_h * 3600), rel=0.05)


def test_published_counts_give_the_published_times_between_failures():
    assert mtbf_of_counts(419, 54) / 60 == pytest.approx(185.6, abs=0.05)
    assert mtbf_of_cluster(2048, RATES["llama3"]) / 3600 == pytest.approx(3.09, abs=0.01)
    assert mtbf_of_cluster(16384 / 8, RATES["rsc1"]) / 3600 == pytest.approx(1.8, abs=0.01)
    assert mtbf_of_cluster(131072 / 8, RATES["rsc1"]) / 3600 == pytest.approx(0.23, abs=0.01)
    assert mtbf_of_cluster(7400, RATES["rsc1"]) / 3600 == pytest.approx(0.5, abs=0.01)
    assert mtbf_of_cluster(20500, RATES["rsc2"]) / 3600 == pytest.approx(0.5, abs=0.01)
    assert sum(MIXES["llama3"]) == pytest.approx(1)
    assert MIXES["llama3"] == pytest.approx((63 / 419, 321 / 419, 35 / 419))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 1, 100), "tau_s=0"),
        ((-1, 1, 1, 100), "tau_s=-1"),
        ((1, nan, 1, 100), "stall_s=nan"),
        ((1, 1, -3, 100), "recovery_s=-3"),
        ((1, 1, 1, 0), "mtbf_s=0"),
        ((1, 1, 1, nan), "mtbf_s=nan"),
    ],
)
def test_a_time_that_cannot_be_is_one_error_that_names_it(arguments, named):
    with pytest.raises(ConfigError, match=named):
        ettr(*arguments)


def test_a_law_needs_its_own_shape():
    with pytest.raises(ConfigError, match="needs shape"):
        ettr(1, 1, 1, 100, law="weibull")
    with pytest.raises(ConfigError, match=r"shape=0\.7"):
        ettr(1, 1, 1, 100, shape=0.7)
    with pytest.raises(ConfigError, match="gamma"):
        ettr(1, 1, 1, 100, law="gamma")
