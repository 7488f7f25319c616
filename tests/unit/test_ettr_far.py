"""Commits that die with nodes: the closed form is what the engines count."""

from dataclasses import replace
from math import exp

import pytest

from simulations.costs import load_costs
from simulations.engines.segments import simulate
from simulations.failures import FailureModel, Law, Repair, draw_failures
from simulations.far import destroyed_ettr
from simulations.methods import Method, Recovery
from simulations.protocols import best_interval, closed_form

RECOVERY = Recovery(restart_s=20.0)
KEEPS_IN_MEMORY = Method("gemini", 2.0, 5, 1.0, (RECOVERY, RECOVERY, RECOVERY), 12, ("cluster",))
LATE = replace(KEEPS_IN_MEMORY, delay_s=15.0)
"""Its commits count when the next one has been begun."""


@pytest.mark.parametrize("mix", [(0.2, 0.5, 0.3), (0.15, 0.77, 0.08), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("in_recovery", [True, False])
@pytest.mark.parametrize("mtbf_s", [60.0, 600.0])
@pytest.mark.parametrize("method", [KEEPS_IN_MEMORY, LATE], ids=("at-once", "late"))
def test_it_is_what_the_engine_counts(mix, in_recovery, mtbf_s, method):
    failures = FailureModel(mtbf_s, in_recovery=in_recovery, mix=mix)
    found = []
    for seed in range(30):
        drawn = draw_failures(failures, 3e5, seed)
        found.append(simulate(method, drawn, 3e5, in_recovery).ettr)
    mean = sum(found) / len(found)
    error = (sum((one - mean) ** 2 for one in found) / len(found) / (len(found) - 1)) ** 0.5
    assert abs(closed_form(method, failures) - mean) < 4 * error + 1e-4
    assert destroyed_ettr(method, failures) > 5 * error, "there is something to be seen"


def test_by_hand_with_two_commits_a_far_copy():
    """All failures are far: what is lost is P(n odd) of a geometric n, one commit a time."""
    method = replace(KEEPS_IN_MEMORY, far_every=2)
    failures = FailureModel(100.0, mix=(0.0, 0.0, 1.0))
    step, begun = exp(-method.cycle_s / 100.0), exp(-20.0 / 100.0)
    odd = sum(begun * step**n * (1 - step) for n in range(1, 2000, 2))
    assert destroyed_ettr(method, failures) == pytest.approx(odd * method.tau_s / 100.0)


def test_nothing_is_destroyed_where_every_commit_survives_or_no_failure_is_far():
    failures = FailureModel(100.0, mix=(0.0, 0.0, 1.0))
    assert destroyed_ettr(replace(KEEPS_IN_MEMORY, far_every=0), failures) == 0
    assert destroyed_ettr(KEEPS_IN_MEMORY, replace(failures, mix=(0.5, 0.5, 0.0))) == 0
    repaired = replace(failures, repair=Repair(100.0, 1.0))
    assert 0 < destroyed_ettr(KEEPS_IN_MEMORY, repaired) < destroyed_ettr(KEEPS_IN_MEMORY, failures)


@pytest.mark.parametrize("mtbf_s", [300.0, 3000.0, 10800.0])
def test_no_interval_is_better_than_the_optimum_also_where_commits_die(mtbf_s):
    failures = FailureModel(mtbf_s, mix=(0.15, 0.77, 0.08))
    method = replace(KEEPS_IN_MEMORY, stall_s=3.0, far_every=200, interval_steps=1)
    best = closed_form(method.at(best_interval(method, failures)), failures)
    # Far copies come after whole commits, so the curve has teeth: the search may miss one of them.
    assert all(closed_form(method.at(steps), failures) <= best + 2e-3 for steps in range(1, 200))


def test_far_copies_stay_as_many_steps_apart_at_another_interval():
    assert (KEEPS_IN_MEMORY.at(20).far_every, KEEPS_IN_MEMORY.at(1).far_every) == (3, 60)
    assert KEEPS_IN_MEMORY.at(1000).far_every == 1
    assert replace(KEEPS_IN_MEMORY, far_every=0).at(20).far_every == 0


LAWS = (Law(), Law("weibull", shape=0.7), Law("bootstrap", unit_gaps=(0.2, 0.6, 2.2)))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_commit_that_counts_late_is_lost_by_a_failure_before(law):
    """A delay of a whole cycle loses a commit of each stretch that has one: as the closed form says."""
    method = replace(KEEPS_IN_MEMORY, far_every=0, delay_s=KEEPS_IN_MEMORY.cycle_s)
    failures = FailureModel(200.0, law=law)
    at_once = replace(method, delay_s=0.0)
    drawn = [draw_failures(failures, 1e6, seed) for seed in range(5)]
    late, soon = ([simulate(each, one, 1e6).ettr for one in drawn] for each in (method, at_once))
    assert sum(late) / 5 == pytest.approx(closed_form(method, failures), abs=5e-3)
    assert all(one < other for one, other in zip(late, soon, strict=True))
    lost = [simulate(at_once, one, 1e6).num_commits - simulate(method, one, 1e6).num_commits for one in drawn]
    assert all(0 < one <= len(failed.gaps_s) for one, failed in zip(lost, drawn, strict=True))


def test_only_a_method_that_rolls_back_waits_for_its_commits():
    """A composite goes on at the next step; how late its copies count is in their schedule."""
    paper = load_costs("paper")
    late = {name: cost.model_copy(update={"commit_delay_s": 9.0}) for name, cost in paper.methods.items()}
    delays = {name: cost.method(name, 4.2).delay_s for name, cost in late.items()}
    assert delays == {"layercheck": 0.0, "lowdiff": 9.0, "gemini": 9.0}
