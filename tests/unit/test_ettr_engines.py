"""The event-driven and the vectorised engine agree on the same failures, and book every second once."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.errors import ConfigError, LayerCheckError
from simulations.engines import reference, segments
from simulations.engines.booked import SECONDS, Booked
from simulations.failures import (
    FailureModel,
    Law,
    Repair,
    bootstrap,
    draw_failures,
    failures_at,
    parse_law,
    read_failure_times,
)
from simulations.methods import Method, Recovery, simple

HORIZON_S = 20_000.0
phase_s = st.floats(0, 80, allow_nan=False)
recoveries = st.builds(Recovery, phase_s, phase_s, phase_s, phase_s)
methods = st.builds(
    Method,
    name=st.just("any"),
    t_iter_s=st.floats(0.5, 20),
    interval_steps=st.integers(1, 40),
    stall_s=st.floats(0, 30),
    recovery=st.tuples(recoveries, recoveries, recoveries),
    far_every=st.integers(0, 5),
    far_kinds=st.sampled_from([(), ("cluster",), ("node", "cluster")]),
    delay_s=st.sampled_from([0.0, 3.0, 150.0]),
)
models = st.builds(
    FailureModel,
    mtbf_s=st.floats(20, 5000),
    law=st.sampled_from([Law(), Law("weibull", shape=0.7), bootstrap(np.array([0.0, 1.0, 5.0, 6.5]))]),
    in_recovery=st.booleans(),
    repair=st.sampled_from([None, Repair(50.0, 1.4)]),
    mix=st.sampled_from([(1.0, 0.0, 0.0), (0.3, 0.5, 0.2)]),
)


def as_numbers(booked: Booked) -> list[float]:
    return [float(getattr(booked, field.name)) for field in fields(Booked)]


@settings(max_examples=150, deadline=None)
@given(method=methods, model=models, seed=st.integers(0, 5))
def test_both_engines_book_the_same_seconds_for_the_same_failures(method, model, seed):
    failures = draw_failures(model, HORIZON_S, seed)
    slow = reference.simulate(method, failures, HORIZON_S, model.in_recovery)
    fast = segments.simulate(method, failures, HORIZON_S, model.in_recovery)
    assert as_numbers(fast) == pytest.approx(as_numbers(slow), abs=1e-5)
    assert sum(getattr(fast, name) for name in SECONDS) == pytest.approx(HORIZON_S)


def test_one_timeline_by_hand():
    """Two commits, a failure inside a step, a recovery that a second failure cuts off, then one commit."""
    method = replace(simple("one", 20.0, 2.0, 0.0, interval_steps=2), recovery=(Recovery(1, 2, 3, 4),) * 3)
    failures = failures_at(np.array([60.0, 65.0]), 100.0, FailureModel(1.0))
    for engine in (reference, segments):
        booked = engine.simulate(method, failures, 100.0)
        assert (booked.useful_s, booked.stall_s, booked.rework_s) == (60.0, 6.0, 16.0)
        assert (booked.detect_s, booked.restart_s, booked.load_s, booked.reconstruct_s) == (
            2.0,
            4.0,
            5.0,
            4.0,
        )
        assert (booked.open_s, booked.num_failures, booked.num_commits) == (3.0, 2, 3)
        assert booked.ettr == 60 / 97


def test_a_failure_of_all_nodes_goes_back_to_the_last_far_copy():
    """Seven commits of 10 s, every fourth also far away: a lost cluster takes three of them."""
    method = replace(simple("memory", 10.0, 0.0, 5.0), far_every=4, far_kinds=("cluster",))
    failures = failures_at(np.array([75.0]), 100.0, FailureModel(1.0, mix=(0.0, 0.0, 1.0)))
    for engine in (reference, segments):
        booked = engine.simulate(method, failures, 100.0)
        assert (booked.useful_s, booked.rework_s, booked.num_commits) == (60.0, 35.0, 6)
    near = failures_at(np.array([75.0]), 100.0, FailureModel(1.0))
    assert segments.simulate(method, near, 100.0).num_commits == 9


def test_a_run_without_failures_loses_its_stalls_alone():
    method = simple("one", 4.2, 0.325, 10)
    failures = failures_at(np.empty(0), 45_250.0 + 1.0, FailureModel(1.0))
    assert segments.simulate(method, failures, 45_251.0).ettr == pytest.approx(4.2 / 4.525)


def test_a_second_booked_twice_is_an_error():
    with pytest.raises(LayerCheckError, match="booked"):
        Booked(useful_s=60.0, stall_s=50.0).check(100.0)
    with pytest.raises(LayerCheckError, match="rework_s"):
        Booked(useful_s=110.0, rework_s=-10.0).check(100.0)


# ---------------------------------------------------------------- draws


def test_draws_depend_on_the_seed_alone_and_scale_with_the_mtbf():
    near, far = (draw_failures(FailureModel(mtbf_s), 86400.0, 7) for mtbf_s in (100.0, 200.0))
    again = draw_failures(FailureModel(100.0), 86400.0, 7)
    longer = draw_failures(FailureModel(100.0), 10 * 86400.0, 7)
    assert again.gaps_s.tolist() == near.gaps_s.tolist()
    assert longer.gaps_s[: len(near.gaps_s) - 1] == pytest.approx(near.gaps_s[:-1])
    count = len(far.gaps_s) - 1
    assert (2 * near.gaps_s[:count]) == pytest.approx(far.gaps_s[:count])
    assert draw_failures(FailureModel(100.0), 86400.0, 8).gaps_s[0] != near.gaps_s[0]


@pytest.mark.parametrize(
    "law", [Law(), Law("weibull", shape=0.65), bootstrap(np.array([0.0, 1.0, 4.0, 4.5]))]
)
def test_every_law_has_the_mean_that_was_asked_for(law):
    failures = [draw_failures(FailureModel(50.0, law=law), 400_000.0, seed) for seed in range(10)]
    assert np.mean([len(one.kind) for one in failures]) == pytest.approx(8000, rel=0.03)


def test_kinds_and_repairs_come_as_often_and_last_as_long_as_asked():
    model = FailureModel(20.0, repair=Repair(300.0, 1.0), mix=(0.2, 0.5, 0.3))
    failures = draw_failures(model, 1e6, 3)
    assert np.bincount(failures.kind) / len(failures.kind) == pytest.approx([0.2, 0.5, 0.3], abs=0.01)
    assert failures.repair_s.mean() == pytest.approx(300, rel=0.05)
    assert np.log(failures.repair_s).std() == pytest.approx(1.0, rel=0.02)


def test_failure_times_come_from_a_csv_with_or_without_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("time_s,what\n10,gpu\n40.5,nic\n100,gpu\n")
    assert read_failure_times(tmp_path / "a.csv").tolist() == [10, 40.5, 100]
    law = parse_law(f"bootstrap:{tmp_path / 'a.csv'}")
    assert law.unit_gaps == pytest.approx((30.5 / 45, 59.5 / 45))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "two increasing times, has 0"),
        ("5\n", "has 1"),
        ("5\n4\n", "increasing"),
        ("5\nsoon\n", "line 2: 'soon'"),
        ("5\nnan\n", "value 2 is nan"),
        ("-5\n6\n", "value 1 is -5"),
    ],
)
def test_a_csv_without_failure_times_is_one_error(tmp_path, text, named):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_failure_times(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    "text", ["weibull", "weibull:x", "weibull:0", "poisson", "exponential:2", "bootstrap:no.csv"]
)
def test_an_unknown_law_is_refused(text):
    with pytest.raises(ConfigError):
        parse_law(text)


def test_failure_times_must_increase_inside_the_horizon():
    for times in ([0.0, 5.0], [5.0, 5.0], [5.0, 200.0]):
        with pytest.raises(ConfigError, match="must increase"):
            failures_at(np.array(times), 100.0, FailureModel(1.0))
    with pytest.raises(ConfigError, match="mix"):
        FailureModel(1.0, mix=(0.5, 0.2, 0.2))
    with pytest.raises(ConfigError, match="mtbf_s=0"):
        FailureModel(0.0)
