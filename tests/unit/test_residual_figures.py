"""The arithmetic of `residuals.json`, on weights whose ways are known."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from app.measure.residuals.notes import BLOCK, Notes, Sampler, Samples, distances, read_samples
from app.measure.residuals.spec import KilledRun, Recovered
from layercheck.persistence.quantise import Code, dequantise, quantise
from simulations.replay_policy import replay, with_settings
from simulations.residuals.arms import (
    FULL,
    QUICK,
    SEED,
    WITHOUT,
    Extent,
    best,
    chosen,
    grid,
    kill_steps,
    killed_runs,
    residual,
)
from simulations.residuals.figures import Written, arm_figures, needed, verdicts
from simulations.residuals.frontier import frontier, lost_distance, movement, with_own_saves
from simulations.residuals.pictures import draw
from simulations.residuals.result import markdown
from simulations.trace import read_trace
from tests.recorded import record_run

STEPS = 160


def recovered(killed_at: int, distance: float, drift: float | None = 3.0, **more: object) -> Recovered:
    values = {
        "by_layer": {}, "t_fail": killed_at, "resume_step": killed_at + 1, "lost_steps": 10.0,
        "max_age": 7, "weighted_age": 5.0, "nbytes": 1,
    }  # fmt: skip
    return Recovered(killed_at=killed_at, distance=distance, lost_drift=drift, **{**values, **more})


# ---------------------------------------------------------------- kills


def test_an_arm_is_compared_kill_by_kill() -> None:
    base = [recovered(10, 4.0, lost_steps=50.0), recovered(20, 6.0, lost_steps=50.0)]
    arm = [recovered(10, 1.0, max_age=9), recovered(20, 1.5, resume_step=18)]
    found = arm_figures(arm, Written(60, 40), base, Written(80, 0))
    assert found.distance == 1.25
    assert found.distance_ratio == pytest.approx(0.25)
    assert found.distance_error == pytest.approx(0.0), "each kill has the same ratio"
    assert found.bytes_ratio == 100 / 80
    assert (found.lost_steps, found.lost_steps_ratio) == (10.0, 0.2)
    assert found.drift_over_distance == pytest.approx(3 / 1.25)
    assert (found.max_age, found.again_steps) == (9, 3)


def test_the_error_is_that_of_paired_differences() -> None:
    base = [recovered(10, 1.0), recovered(20, 1.0), recovered(30, 1.0)]
    arm = [recovered(10, 0.1), recovered(20, 0.2), recovered(30, 0.3)]
    found = arm_figures(arm, Written(1, 0), base, Written(1, 0))
    assert found.distance_error == pytest.approx(0.1 / 3**0.5)


def test_a_receipt_that_does_not_know_is_not_taken_for_no_loss() -> None:
    base = [recovered(10, 1.0), recovered(20, 1.0)]
    found = arm_figures([recovered(10, 1.0), recovered(20, 1.0, None)], Written(1, 0), base, Written(1, 0))
    assert (found.lost_drift, found.drift_over_distance) == (None, None)


def test_kills_at_other_steps_are_no_pair() -> None:
    with pytest.raises(AssertionError):
        arm_figures([recovered(10, 1.0)] * 2, Written(1, 0), [recovered(11, 1.0)] * 2, Written(1, 0))


def test_what_is_asked_for_has_to_hold_in_one_run() -> None:
    base = [recovered(10, 1.0), recovered(20, 1.0)]

    def arm(distance: float, nbytes: int) -> object:
        pair = [recovered(10, distance), recovered(20, distance)]
        return arm_figures(pair, Written(nbytes, 0), base, Written(100, 0))

    limits = {1.15: 0.2, 1.5: 0.12}
    found = verdicts({"little": arm(0.3, 110), "much": arm(0.12, 150)}, limits)  # type: ignore[dict-item]
    assert list(found.values()) == [False, True]
    found = verdicts({"one": arm(0.2, 115)}, limits)  # type: ignore[dict-item]
    assert list(found.values()) == [True, False]


def test_kills_are_far_apart_and_after_the_first_interval() -> None:
    for extent in (FULL, QUICK):
        kills = kill_steps(extent, 1)
        assert len(kills) == extent.kills
        assert kills[0] >= extent.warmup_steps + extent.interval
        part = (extent.steps - extent.warmup_steps - extent.interval) / extent.kills
        assert all(later - one >= part / 4 - 1 for one, later in pairwise(kills))
        assert kills[-1] < extent.steps
    assert kill_steps(FULL, 1) != kill_steps(FULL, 2)


# ---------------------------------------------------------------- points


def test_the_points_that_are_run_are_the_best_that_their_bytes_allow() -> None:
    rows = [
        {"bits": bits, "version": 400, "residual": r, "bytes_share": nbytes, "distance_share": lost}
        for bits, r, nbytes, lost in (
            (8, 2, 2.0, 0.05), (8, 4, 1.4, 0.1), (8, 8, 1.1, 0.2), (8, 9, 1.0, 0.3), (4, 3, 1.0, 0.25),
            (4, 2, 1.49, 0.01),
        )
    ]  # fmt: skip
    names = [point.name for point in chosen(rows)]
    assert names == ["bits-8-V-400-r-8", "bits-8-V-400-r-4", "bits-4-V-400-r-3"]
    assert chosen(rows)[0].settings == residual(8, 400, 8)
    assert best(rows, 0.5)["bytes_share"] == 1.0, "nothing is so cheap: the cheapest"
    found = needed(rows, 0.2)
    assert found is not None
    assert found["residual"] == 8
    assert needed(rows, 0.001) is None


def test_the_same_point_is_not_run_twice() -> None:
    rows = [
        {"bits": bits, "version": 400, "residual": 8, "bytes_share": 1.0, "distance_share": 0.1}
        for bits in (8, 4)
    ]
    assert [point.name for point in chosen(rows)] == ["bits-8-V-400-r-8", "bits-4-V-400-r-8"]


def test_runs_differ_in_their_settings_alone() -> None:
    (one,), (other,) = killed_runs(QUICK, WITHOUT), killed_runs(QUICK, chosen(_some_rows())[0])
    assert one.kills == other.kills
    assert one.model_copy(update={"name": other.name, "checkpoint": other.checkpoint}) == other
    assert "residual" not in one.checkpoint
    assert other.checkpoint["residual"]["k_ratio"] == 3 / 40
    assert KilledRun.model_validate_json(other.model_dump_json()) == other


def test_each_seed_of_kills_is_a_run_of_its_own() -> None:
    runs = killed_runs(FULL, WITHOUT)
    assert [run.kills for run in runs] == [kill_steps(FULL, seed) for seed in FULL.kill_seeds]
    assert len({run.name for run in runs}) == len({run.kills for run in runs}) == len(FULL.kill_seeds) > 1
    assert {run.seed for run in runs} == {SEED}, "the same training"


def _some_rows() -> list[dict[str, object]]:
    return [
        {"bits": bits, "version": version, "residual": r, "bytes_share": 1.0, "distance_share": 0.1}
        for bits, version, r in grid(QUICK)
    ]


# ---------------------------------------------------------------- weights


def test_distance_is_over_all_parameters_and_by_layer() -> None:
    lost = {("a", "x"): np.array([1.0, 2.0], np.float32), ("b", "y"): np.array([5.0], np.float32)}
    back = {("a", "x"): np.array([1.0, 1.0], np.float32), ("b", "y"): np.array([3.0], np.float32)}
    assert distances(lost, back) == (pytest.approx(1.0), {"a": 0.5, "b": 2.0})


def test_notes_come_back(tmp_path) -> None:
    notes = Notes(tmp_path / "run-notes")
    weights = {("layers.0", "a.weight"): np.arange(3, dtype=np.float32)}
    notes.keep_lost(120, weights)
    notes.keep_lost(40, {("layers.0", "a.weight"): np.zeros(3, np.float32)})
    assert notes.killed_at == [40, 120]
    np.testing.assert_array_equal(notes.lost(120)["layers.0", "a.weight"], [0, 1, 2])
    for one in (recovered(120, 2.0), recovered(40, 1.0)):
        notes.add(one)
    assert [one.distance for one in notes.recoveries()] == [1.0, 2.0]
    (run,) = killed_runs(QUICK, WITHOUT)
    assert not notes.has_finished(run)
    notes.finish(run)
    assert notes.has_finished(run)
    assert not notes.has_finished(run.model_copy(update={"seed": 4}))


def _weights(generator: np.random.Generator, scale: float) -> dict[tuple[str, str], np.ndarray]:
    sizes = {("a", "big"): 50 * BLOCK + 7, ("a", "small"): BLOCK, ("b", "tiny"): 3, ("b", "mid"): 2 * BLOCK}
    return {key: (scale * generator.standard_normal(n)).astype(np.float32) for key, n in sizes.items()}


def test_a_sample_stands_for_the_parameters_by_their_size(tmp_path) -> None:
    generator = np.random.default_rng(0)
    steps = [_weights(generator, scale) for scale in (1.0, 2.0)]
    sampler = Sampler(tmp_path, steps[0])
    for weights in steps:
        sampler.add(weights)
    found = read_samples(tmp_path)
    assert found.weights.shape[0] == 2
    assert found.share.sum() == pytest.approx(1)
    counted = {"a": 51 * BLOCK + 7, "b": 2 * BLOCK}
    for layer, numel in counted.items():
        share = found.share[found.layers[layer]].sum()
        assert share == pytest.approx(numel / sum(counted.values()))
    for row, weights in zip(found.weights, steps, strict=True):
        for layer, columns in found.layers.items():
            whole = np.concatenate([values for (of, _), values in weights.items() if of == layer])
            assert set(row[columns].tolist()) <= set(whole.tolist())
    blocks = found.weights[1, found.layers["a"]].reshape(-1, BLOCK)
    big = steps[1]["a", "big"][: 50 * BLOCK].reshape(-1, BLOCK)
    assert all((big == block).all(axis=1).any() for block in blocks[:-1]), "whole blocks"


# ---------------------------------------------------------------- the frontier


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record_run(folder, STEPS)
    return read_trace(str(folder))


def _samples(trace, step) -> Samples:
    """Two blocks of each layer; `step(generator, shape)` gives the updates."""
    width = 2 * BLOCK
    generator = np.random.default_rng(2)
    updates = step(generator, (STEPS, width * len(trace.names)))
    weights = np.cumsum(updates, axis=0).astype(np.float32)
    layers = {name: slice(at * width, (at + 1) * width) for at, name in enumerate(trace.names)}
    numel = np.repeat([layer.numel for layer in trace.layer_map.trainable], width).astype(float)
    return Samples(weights, layers, numel / numel.sum())


def _walk(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_normal(shape)


def test_what_would_be_lost_is_the_distance_from_what_would_come_back(trace) -> None:
    samples = _samples(trace, _walk)
    settings = {"residual": {"enabled": True, "bits": 4, "k_ratio": 0.2}}
    done = replay(trace, with_settings(trace.config, **settings))
    assert (done.saved > done.committed).any()
    found = lost_distance(done, samples)
    for row in (30, 90, STEPS - 1):
        lost = np.zeros(len(samples.share))
        for at, name in enumerate(trace.names):
            columns = samples.layers[name]
            version, saved = (
                samples.weights[one[row, at] - 1, columns] for one in (done.committed, done.saved)
            )
            back = version + dequantise(*quantise(saved - version, Code(4, 64)), version.size, Code(4, 64))
            lost[columns] = np.abs(samples.weights[row, columns] - back)
        assert found[row] == pytest.approx((lost * samples.share).sum(), rel=1e-4)
    assert np.isnan(found[:5]).all(), "nothing of the run was saved yet"
    assert np.isfinite(found[20:]).all()


def test_a_save_of_the_step_counts_where_it_is_committed(trace) -> None:
    samples = _samples(trace, _walk)
    settings = {"residual": {"enabled": True, "bits": 8, "k_ratio": 0.2}}
    done = replay(trace, with_settings(trace.config, **settings))
    early, late = lost_distance(done, samples), lost_distance(with_own_saves(done), samples)
    saved_now = (done.written | done.added).any(axis=1)
    assert saved_now[20:].any()
    assert (late[20:][saved_now[20:]] < early[20:][saved_now[20:]]).all()
    np.testing.assert_array_equal(late[20:][~saved_now[20:]], early[20:][~saved_now[20:]])


def test_distances_grow_as_the_steps_or_as_their_root(trace) -> None:
    straight = movement(trace, _samples(trace, lambda generator, shape: np.ones(shape)), (1, 2, 4, 16))
    walk = movement(trace, _samples(trace, _walk), (1, 2, 4, 16))
    for row in straight[1:]:
        assert row["exponent"] == pytest.approx(1, rel=1e-3)
        assert row["distance"] == pytest.approx(row["path"], rel=1e-3)
    assert [row["lag"] for row in walk] == [1, 2, 4, 16]
    for row in walk[1:]:
        assert row["exponent"] == pytest.approx(0.5, abs=0.03)
    assert [row["lag"] for row in movement(trace, _samples(trace, _walk), (1, 100))] == [1], "too few steps"


SMALL = Extent(1, STEPS, 2, (3,), {}, (12, 24), (2, 4))


def test_the_frontier_is_beside_the_run_without_residuals(trace) -> None:
    shown: list[tuple[int, int]] = []
    extent = replace(SMALL, checkpoint={"target_interval": 12})
    rows = frontier(trace, _samples(trace, _walk), extent, lambda *at: shown.append(at))
    base, *points = rows
    assert (base["bits"], base["bytes_share"], base["distance_share"], base["lost_share"]) == (0, 1, 1, 1)
    assert [(row["bits"], row["version"], row["residual"]) for row in points] == list(grid(extent))
    assert len(points) == 8 == len(shown)
    assert base["residual_interval_steps"] is None
    for row in points:
        assert 1 <= row["residual_interval_steps"] < 2.5 * row["residual"]
    by = {(row["bits"], row["version"], row["residual"]): row for row in points}
    assert by[8, 24, 2]["distance"] < by[8, 24, 4]["distance"] < base["distance"]
    assert by[8, 24, 2]["distance"] < by[4, 24, 2]["distance"], "rounding counts"
    assert by[4, 24, 2]["bytes_share"] < by[8, 24, 2]["bytes_share"]
    assert by[8, 24, 2]["bytes_written"] < by[8, 12, 2]["bytes_written"]


def test_tables_and_pictures_show_every_run_and_point(trace, tmp_path) -> None:
    extent = replace(SMALL, checkpoint={"target_interval": 12})
    rows = frontier(trace, _samples(trace, _walk), extent, lambda *_: None)
    base = [recovered(10, 4.0), recovered(20, 6.0)]
    arms = {
        "without": arm_figures(base, Written(80, 0), base, Written(80, 0)),
        "bits-4": arm_figures(
            [recovered(10, 1.0), recovered(20, 1.5, None)], Written(60, 40), base, Written(80, 0)
        ),
    }
    content = {
        "arms": {name: vars_of(one) for name, one in arms.items()},
        "predicted": {"without": rows[0], "bits-4": rows[3]},
        "verdicts": verdicts(arms, {1.15: 0.2}),
        "movement": movement(trace, _samples(trace, _walk), (1, 2)),
        "needed": {"0.2": None, "0.9": rows[1]},
        "loss": {"first": 3.0, "last": 2.0},
        "frontier": rows,
        "conditions": {
            "parameters": 7, "steps": 160, "base_steps": 1, "warmup_steps": 20, "interval": 12.0, "s_max": 48,
            "kills": 2, "kill_seeds": [3],
        },
    }  # fmt: skip
    text = markdown(json.loads(json.dumps(content)))
    assert "| bits-4 | 1.250 |" in text
    assert "25.0 +- 0.0" in text
    assert "not known" in text
    assert "no point of the grid has it" in text
    assert text.count("\n| 8 |") == text.count("\n| 4 |") == 4
    draw(content, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"frontier.png", "movement.png"}


def vars_of(arm) -> dict[str, object]:
    return {name: getattr(arm, name) for name in arm.__slots__}
