"""Lost progress in weight space: what the ranks know of it, what the journal keeps, what a plan says."""

from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.coordination.lost import lost_drift, measure_of
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerStep
from layercheck.lost import in_words, over_all
from layercheck.manifest import LayerPlan, Progress
from layercheck.tracking.unsaved import Unsaved
from tests.unit.simulated_run import SimulatedRun, config, transformer

MAP = transformer(2)
NAMES = [layer.name for layer in MAP.trainable]


def report(step: int, delta: float = 1.0, **more: object) -> DriftReport:
    return DriftReport(step, dict.fromkeys(NAMES, delta), 1e-4, **more)  # type: ignore[arg-type]


def journal(books: Unsaved, step: int) -> Progress:
    state = {"step": step, "layercheck": {"unsaved": books.to_state()}}
    return Progress(attempt=1, step=step, trainer_state=state, drift={})


# ------------------------------------------------------------------------------------------------ the books


def test_a_save_is_lost_with_the_movement_that_it_holds_until_it_is_committed():
    books = Unsaved.since(10, MAP, "mean_abs")
    for step in (11, 12):
        books.observe(report(step))
    books.take(12, ["norm"])
    books.observe(report(13))
    assert books.layers["norm"].lost == books.layers["lm_head"].lost == 3.0
    assert books.lost_steps(13) == books.lost_drift == 3.0
    books.commit(12)
    assert (books.layers["norm"].lost, books.layers["lm_head"].lost) == (1.0, 3.0)
    assert books.lost_steps(13) == pytest.approx(3 - 2 * 10 / sum(books.numel.values()))


def test_the_movement_of_a_lost_save_goes_to_the_next_one():
    books = Unsaved.since(0, MAP, "mean_abs")
    for step in (1, 2, 3):
        books.observe(report(step))
        books.take(step, ["norm"])
    books.lose(2)
    books.commit(1)
    assert books.layers["norm"].pending == {3: 2.0}
    books.lose(3)
    books.observe(report(4))
    assert (books.layers["norm"].lost, books.layers["norm"].since) == (3.0, 1)


def test_movement_that_a_save_holds_and_a_lag_reports_late_is_not_counted_again():
    books = Unsaved.since(0, MAP, "mean_abs")
    books.take(1, ["norm"])
    books.observe(report(1))
    assert books.layers["norm"].lost == 1.0
    books.commit(1)
    assert books.layers["norm"].lost == 0.0


def test_a_measured_distance_is_no_sum():
    books = Unsaved.since(0, MAP, "displacement mean_abs")
    for step, distance in ((1, 1.0), (2, 1.4), (3, 0.5)):
        books.observe(report(step, displacement=dict.fromkeys(NAMES, distance)))
    assert books.lost_drift == 0.5
    assert in_words(0.5, books.measure) == "0.5 (mean_abs)"
    assert in_words(0.5, "mean_abs") == "at most 0.5 (mean_abs)"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40))
def test_books_hold_all_that_moved_since_the_newest_committed_save(turns: list[tuple[int, bool]]):
    books, in_flight, committed = Unsaved.since(0, MAP, "mean_abs"), [], 0
    for step, (what, saves) in enumerate(turns, start=1):
        books.observe(report(step))
        if saves:
            books.take(step, ["norm"])
            in_flight.append(step)
        if in_flight and what == 1:
            committed = in_flight.pop(0)
            books.commit(committed)
        if in_flight and what == 2:
            books.lose(in_flight.pop(0))
        assert books.layers["norm"].lost == step - committed
        assert books.layers["norm"].committed == committed


def test_what_a_rotten_version_held_is_lost_again():
    """Versions of steps 4 and 8, one unit a step; that of step 8 rots. One in flight holds everything."""
    for in_flight in (False, True):
        books = Unsaved.since(0, MAP, "mean_abs")
        for step in range(1, 11):
            books.observe(report(step))
            if step in (4, 8) or (step == 10 and in_flight):
                books.take(step, ["norm"])
            books.commit(step if step < 10 else 0)
        assert books.layers["norm"].lost == 2.0
        books.rotted("norm", 8, 4, 10)
        assert (books.layers["norm"].lost, books.layers["norm"].committed) == (6.0, 4)
        assert lost_drift(journal(books, 10), "norm", 4, 6) == pytest.approx(6.0)
        assert books.layers["norm"].base == ((10, 0) if in_flight else None)
        books.observe(report(11, displacement=dict.fromkeys(NAMES, 0.1)))
        assert books.layers["norm"].lost == (6.1 if in_flight else 7.0), "no distance from a rotten version"
        books.take(12, ["norm"])
        books.commit(12)
        assert books.layers["norm"].lost == 0.0


def test_what_the_attempt_began_with_is_not_lost_again_with_a_rotten_version():
    settings_ = config(warmup_steps=10, warmup_full_every=5, s_max=40, target_interval=10)
    ledger = SimulatedRun(MAP, settings_, lambda step, name: 0.5).run(0, 30).ledger
    ledger.began = 8
    norm = ledger.unsaved.layers["norm"]
    assert (norm.committed, norm.pending) == (29, {})
    ledger.observe(DriftReport(30, {}, 1e-4, demoted=LayerStep("norm", 5)))
    assert (norm.committed, norm.lost) == (8, pytest.approx(0.5 * (30 - 8)))


def test_a_residual_in_flight_is_worth_nothing_once_its_version_has_rotted():
    books = Unsaved.since(0, MAP, "mean_abs")
    for step in range(1, 11):
        books.observe(report(step))
        if step == 6:
            books.take(step, ["norm"])
            books.commit(step)
    books.take_residuals(10, ["norm"])
    books.rotted("norm", 6, 2, 10)
    books.commit(10)
    assert (books.layers["norm"].lost, books.layers["norm"].committed) == (8.0, 2)


def test_the_ledger_keeps_them_through_a_run_with_slow_and_lost_saves():
    settings_ = config(warmup_steps=10, warmup_full_every=5, s_max=40, target_interval=10)
    run = SimulatedRun(
        MAP, settings_, lambda step, name: 0.5, delay=lambda s: 1 + s % 3, loses=lambda s: s % 11 == 0
    )
    for step in range(80):
        run.step(step)
        ages = run.ledger.ages(step)
        for name, layer in run.ledger.unsaved.layers.items():
            assert layer.lost == pytest.approx(0.5 * ages[name]), (step, name)
        assert run.ledger.unsaved.lost_steps(step) == pytest.approx(run.ledger.weighted_age(step))


# ------------------------------------------------------------------------------------------- from the journal


def booked(measure: str = "mean_abs") -> Progress:
    """A save of step 4 committed, one of step 6 in flight, journaled at step 9; one unit a step."""
    books = Unsaved.since(0, MAP, measure)
    for step in range(1, 10):
        books.observe(report(step))
        if step in (4, 6):
            books.take(step, ["norm"])
        if step == 5:
            books.commit(4)
    return journal(books, 9)


@pytest.mark.parametrize(
    ("saved", "t_fail", "expected"),
    [
        (4, 9, 5.0),  # the save in flight never came
        (6, 9, 3.0),  # it did
        (6, 11, 5.0),  # two more steps than were journaled
        (1, 9, 8.0),  # a fall-back behind what the books know
        (10, 12, 2.0),  # a save that was not journaled: as fast as before
        (11, 11, 0.0),
    ],
)
def test_what_is_lost_with_the_save_that_comes_back(saved: int, t_fail: int, expected: float):
    assert lost_drift(booked(), "norm", saved, t_fail - saved) == pytest.approx(expected)


def planned(saved: int, t_fail: int, beat: Progress) -> LayerPlan:
    lost = t_fail - saved
    return LayerPlan(
        layer="norm", numel=10, step=saved, attempt=1, age=lost, lost=lost, reason="drift", shards=(),
        lost_drift=lost_drift(beat, "norm", saved, lost),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "t_fail", "is_measured"),
    [
        (4, 9, False),  # the distance over the save in flight and the one since are added
        (6, 9, True),  # the save in flight came: one distance
        (6, 11, False),  # two steps were not journaled
        (1, 9, False),  # nor is what the fall-back lies behind
        (9, 9, True),
    ],
)
def test_a_plan_says_distance_only_where_all_of_it_is_one(saved: int, t_fail: int, is_measured: bool):
    beat = booked("displacement mean_abs")
    measure = measure_of(beat, t_fail, [planned(saved, t_fail, beat)])
    assert measure == ("displacement mean_abs" if is_measured else "mean_abs")
    assert measure_of(booked(), t_fail, [planned(saved, t_fail, beat)]) == "mean_abs"


def test_the_way_since_a_rotten_version_is_not_told_as_a_distance():
    books = Unsaved.since(0, MAP, "displacement mean_abs")
    books.observe(report(1, displacement=dict.fromkeys(NAMES, 1.0)))
    assert books.to_state()["measure"] == "displacement mean_abs"
    books.rotted("norm", 0, 0, 1)
    assert books.to_state()["measure"] == "mean_abs"


def test_nothing_lost_is_said_without_a_measure():
    assert in_words(0.0, "") == in_words(0.0, "mean_abs") == "0"
    assert measure_of(None, 4, [planned(4, 4, booked())]) == ""


def test_nothing_is_said_of_steps_of_which_nothing_is_known():
    beat = booked()
    assert lost_drift(None, "norm", 4, 5) is None
    assert lost_drift(replace_state(beat, {}), "norm", 4, 5) is None
    assert lost_drift(journal(Unsaved.since(9, MAP, "mean_abs"), 9), "norm", 4, 5) is None
    assert lost_drift(None, "norm", 4, 0) == 0.0
    assert in_words(None, "") == "unknown"


def replace_state(beat: Progress, known: dict[str, object]) -> Progress:
    return beat.model_copy(update={"trainer_state": {"step": beat.step, "layercheck": known}})


# ------------------------------------------------------------------------------------------------ over layers


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=6), min_size=1, max_size=4))
def test_over_all_is_the_norm_of_the_whole_model(model: list[list[float]]):
    every = [x for layer in model for x in layer]
    mean_abs = [(len(layer), sum(map(abs, layer)) / len(layer)) for layer in model]
    rms = [(len(layer), sqrt(sum(x * x for x in layer) / len(layer))) for layer in model]
    assert over_all("mean_abs", mean_abs) == pytest.approx(sum(map(abs, every)) / len(every))
    assert over_all("displacement rms", rms) == pytest.approx(sqrt(sum(x * x for x in every) / len(every)))
