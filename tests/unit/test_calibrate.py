"""One global K0 that gives the wanted mean interval, from the drift of the warm-up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.tracking.calibrate import (
    RateMeter,
    calibrate_k0,
    expected_interval,
    failure_factor,
    find_k0,
    find_lr_ref,
    mean_interval,
)
from tests.unit.simulated_run import config, layer

ONE = {"a": 1.0, "b": 1.0, "c": 1.0}
EQUAL = {"a": 100, "b": 100, "c": 100}


def test_one_rate_for_all_gives_the_target_times_the_rate():
    k0 = calibrate_k0({"a": 2e-5, "b": 2e-5, "c": 2e-5}, EQUAL, ONE, 100, 400)
    assert k0 == pytest.approx(2e-3)


def test_the_mean_interval_weighs_layers_by_their_bytes():
    """Nine tenths of the bytes every 100 steps, one tenth every 10: 0.019 of the state a step."""
    interval = mean_interval(1.0, {"a": 0.01, "b": 0.1}, {"a": 900, "b": 100}, {"a": 1, "b": 1}, 400)
    assert interval == pytest.approx(1 / (0.9 / 100 + 0.1 / 10))


def test_a_layer_that_does_not_move_counts_as_written_at_the_age_limit():
    still = {"a": 1e-5, "b": 0.0, "c": 0.0}
    k0 = calibrate_k0(still, EQUAL, ONE, 100, 400)
    assert mean_interval(k0, still, EQUAL, ONE, 400) == pytest.approx(100)
    assert k0 == pytest.approx(1e-5 / (3 / 100 - 2 / 400))


def test_an_embedding_is_written_less_often_by_its_factor():
    factors = {"a": 10.0, "b": 1.0, "c": 1.0}
    rates = {"a": 1e-5, "b": 1e-5, "c": 1e-5}
    k0 = calibrate_k0(rates, EQUAL, factors, 50, 10_000)
    assert k0 / 1e-5 == pytest.approx(50 * (0.1 + 1 + 1) / 3)


def test_no_movement_gives_no_threshold():
    assert calibrate_k0({"a": 0.0, "b": 0.0, "c": 0.0}, EQUAL, ONE, 100, 400) is None


def test_a_target_at_the_age_limit_is_reached():
    rates = {"a": 1e-5, "b": 3e-5, "c": 1e-7}
    k0 = calibrate_k0(rates, EQUAL, ONE, 400, 400)
    assert mean_interval(k0, rates, EQUAL, ONE, 400) == pytest.approx(400)


@settings(max_examples=100, deadline=None)
@given(
    rates=st.lists(st.floats(1e-9, 1e-2) | st.just(0.0), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 10**9), min_size=12, max_size=12),
    embedding=st.floats(0.5, 20),
    part=st.floats(0.01, 1.0),
)
def test_the_calibrated_threshold_meets_any_target_that_some_layer_can_reach(rates, sizes, embedding, part):
    names = [f"l{index}" for index in range(len(rates))]
    rate, numel = dict(zip(names, rates, strict=True)), dict(zip(names, sizes, strict=False))
    factors = dict.fromkeys(names, 1.0) | {"l0": embedding}
    target = 400 * part
    k0 = calibrate_k0(rate, numel, factors, target, 400)
    if k0 is None:
        assert max(rates) == 0
    else:
        assert mean_interval(k0, rate, numel, factors, 400) == pytest.approx(target, rel=1e-6)


# --------------------------------------------------------------------------------------- warm-up and settings


LAYERS = (layer("embed_tokens", 100, "embedding"), layer("layers.0", 100), layer("layers.1", 100))


def meter(lr: float = 1e-4, steps: int = 10, per_step: float = 3e-5) -> RateMeter:
    seen = RateMeter("mean_abs")
    for _ in range(steps):
        seen.observe({one.name: per_step for one in LAYERS}, lr)
    return seen


def test_rates_are_those_at_the_reference_rate_whatever_the_schedule_was():
    seen = RateMeter("mean_abs")
    for lr in (1e-5, 5e-5, 1e-4):
        seen.observe({"layers.0": 0.3 * lr}, lr)
    assert seen.rates(2e-4, LAYERS)["layers.0"] == pytest.approx(0.6e-4)
    assert seen.rates(2e-4, LAYERS)["layers.1"] == 0.0


def test_a_step_at_learning_rate_zero_says_nothing():
    seen = meter(steps=2)
    seen.observe({"layers.0": 0.0}, 0.0)
    assert seen.observed == 2


def test_the_reference_rate_is_the_setting_then_the_initial_then_the_largest_seen():
    assert find_lr_ref(meter(1e-4), config(lr_ref=1e-3), 2e-4) == 1e-3
    assert find_lr_ref(meter(1e-4), config(), 2e-4) == 2e-4
    assert find_lr_ref(meter(1e-4), config(), None) == 1e-4
    assert find_lr_ref(RateMeter("rms"), config(), None) is None


def test_a_given_k0_replaces_the_calibration():
    assert find_k0(meter(), config(k0=1e-3), LAYERS, 1e-4) == 1e-3
    assert find_k0(meter(), config(k0_per_lr=30), LAYERS, 1e-4) == pytest.approx(3e-3)
    assert find_k0(RateMeter("mean_abs"), config(), LAYERS, 1e-4) is None


def test_the_calibrated_k0_gives_the_target_interval():
    k0 = find_k0(meter(), config(), LAYERS, 1e-4)
    assert expected_interval(k0, meter(), config(), LAYERS, 1e-4) == pytest.approx(100)


def test_observations_ride_in_json_but_not_to_another_norm():
    seen = meter()
    assert RateMeter.from_state(seen.to_state(), "mean_abs") == seen
    assert RateMeter.from_state(seen.to_state(), "rms") == RateMeter("rms")
    assert RateMeter.from_state(None, "rms") == RateMeter("rms")


@pytest.mark.parametrize(
    ("gaps", "factor"),
    [((), 1.0), ((4000,), 1.0), ((400,), 1.0), ((200,), 0.5), ((100, 300), 0.5), ((1,), 0.01)],
)
def test_thresholds_fall_when_failures_outrun_the_mean_interval(gaps: tuple[int, ...], factor: float):
    assert failure_factor(gaps, 100.0) == pytest.approx(factor)


def test_steps_without_a_failure_raise_the_thresholds_again():
    assert failure_factor((20, 80), 100.0, running=0) == pytest.approx(0.125)
    assert failure_factor((20, 80), 100.0, running=300) == pytest.approx(0.5)
    assert failure_factor((20, 80), 100.0, running=10_000) == 1.0
