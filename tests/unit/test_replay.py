"""The production policy over a recorded trace: identical decisions, and other settings on the same drift."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from layercheck.errors import ConfigError
from layercheck.persistence.quantise import Code
from simulations import replay as command
from simulations.replay_policy import compare, figures, replay, with_settings
from simulations.replay_residuals import frontier, residual_figures, rounding
from simulations.trace import read_trace
from tests.recorded import LAYERS, record_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record_run(folder)
    return folder


@pytest.mark.parametrize(
    "settings",
    [{}, {"selection": "round_robin"}, {"selection": "random"}, {"selection": "full"}, {"k0": 3e-4}],
)
def test_a_replay_decides_as_the_run_did(tmp_path, settings):
    record_run(tmp_path / "run", **settings)
    trace = read_trace(str(tmp_path / "run"))
    same = compare(trace)
    assert (same.steps, same.different) == (160, 0), same.first
    assert 0 < trace.written.sum() < trace.written.size


def test_a_replay_at_another_threshold_is_seen_to_differ(run):
    trace = read_trace(str(run))
    other = with_settings(trace.config, target_interval=14.0)
    same = compare(type(trace)(**{**vars(trace), "config": other}))
    assert same.different > 0
    assert "the run wrote" in same.first


def test_a_commit_is_heard_of_when_the_run_heard_of_it(run):
    """At once, or never: either changes what is in flight, and so what is chosen."""
    trace = read_trace(str(run))
    late = replay(trace, trace.config)
    assert (late.written != trace.written).any()


def test_lost_drift_is_the_movement_since_the_committed_version(run):
    trace = read_trace(str(run))
    done = replay(trace, trace.config, recorded_commits=True)
    numel = np.array([layer.numel for layer in LAYERS.trainable])
    lost = []
    for row, step in enumerate(trace.steps):
        if step > 20:
            since = [
                trace.delta[version : row + 1, at].sum() for at, version in enumerate(done.committed[row])
            ]
            lost.append(np.average(since, weights=numel))
    assert figures(done)["drift_lost"] == pytest.approx(np.mean(lost))


def test_figures_leave_warm_up_and_full_events_aside(run):
    trace = read_trace(str(run))
    found = figures(replay(trace, trace.config, recorded_commits=True))
    after = trace.written[20:]
    selective = after[~after.all(axis=1)]
    nbytes = np.array([12 * layer.numel for layer in LAYERS.trainable])
    assert found["steps"] == 140
    assert found["layer_writes"] == selective.sum()
    assert found["bytes_written"] == (selective @ nbytes).sum()
    assert found["full_bytes_written"] == 2 * nbytes.sum()
    assert found["mean_interval_steps"] == pytest.approx(140 * nbytes.sum() / (selective @ nbytes).sum())
    assert found["max_age"] <= 48


def test_other_modes_are_compared_at_equal_bytes(run):
    rows = command.grid(read_trace(str(run)), targets=[12.0, 500.0], limits=[48])
    assert [row["selection"] for row in rows] == ["drift", "round_robin", "random"]
    assert all(row["bytes_ratio"] == pytest.approx(1, abs=0.1) for row in rows)
    lost = {row["selection"]: row["drift_lost"] for row in rows}
    assert lost["drift"] < lost["random"]


def test_the_command_writes_table_and_answer(run, tmp_path, capsys):
    code = command.main(["--trace", str(run), "--out", str(tmp_path), "--targets", "12", "--s-max", "48"])
    assert code == 0
    assert "the replay decides as the run did at all 160 steps" in capsys.readouterr().out
    content = json.loads((tmp_path / "replay.json").read_text())
    assert content["check"] == {"steps": 160, "different": 0, "first": ""}
    assert pq.read_table(tmp_path / "replay.parquet").num_rows == len(content["rows"]) == 3
    assert (tmp_path / "replay.png").stat().st_size > 1000


def test_a_run_with_residuals_is_replayed_but_not_checked(tmp_path, capsys):
    """Its ages say when versions were committed, and nothing of an event of residuals alone."""
    record_run(tmp_path / "run", residual={"enabled": True})
    with pytest.raises(ConfigError, match=r"run has residual\.enabled: when it heard"):
        compare(read_trace(str(tmp_path / "run")))
    options = ["--trace", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--no-pictures"]
    assert command.main([*options, "--targets", "12", "--s-max", "48"]) == 0
    assert "check: not made: run run has residual.enabled" in capsys.readouterr().out
    check = json.loads((tmp_path / "out" / "replay.json").read_text())["check"]
    assert (check["steps"], check["different"]) == (0, 0)
    assert "residual.enabled" in check["first"]


def test_residuals_lose_less_for_bytes_that_are_counted_and_their_rounding_too(run):
    trace = read_trace(str(run))
    rows = frontier(trace, targets=[24.0], bits=[8, 4], ratios=[0.1])
    own, eight, four = rows
    assert (own["residual_writes"], own["bytes_share"], own["lost_share"]) == (0, 1.0, 1.0)
    assert own["lost"] == figures(replay(trace, trace.config))["drift_lost"]
    assert eight["lost_share"] < 0.7
    assert eight["drift_lost"] == four["drift_lost"]
    assert eight["rounding_lost"] < 0.2 * four["rounding_lost"]
    numel = sum(layer.numel for layer in LAYERS.trainable)
    assert eight["residual_bytes"] == pytest.approx(four["residual_bytes"] * 8.25 / 4.25, rel=0.01)
    assert eight["residual_bytes"] < eight["residual_writes"] * numel * 8.25 / 8


def test_the_rounding_is_that_of_what_came_back(run):
    trace = read_trace(str(run))
    done = replay(trace, with_settings(trace.config, residual={"enabled": True, "bits": 4, "k_ratio": 0.2}))
    numel, lost = np.array([layer.numel for layer in LAYERS.trainable]), []
    for row, step in enumerate(trace.steps):
        if step > 20:
            saves = zip(done.committed[row], done.saved[row], strict=True)
            way = [trace.delta[version:save, at].sum() for at, (version, save) in enumerate(saves)]
            lost.append(rounding(Code(4, 64)) * np.average(way, weights=numel))
    found = residual_figures(done)
    assert found["rounding_lost"] == pytest.approx(np.mean(lost))
    assert found["lost"] == found["drift_lost"] + found["rounding_lost"]
    assert 0.002 < rounding(Code(8, 64)) < 0.01 < 0.05 < rounding(Code(4, 64)) < 0.15


def test_steps_that_died_with_a_worker_are_filled_and_end_the_comparison(run, tmp_path):
    trace = read_trace(str(drop_rows(run, tmp_path, lambda step: step == 90)))
    assert trace.undisturbed == 89
    assert any(note.startswith("1 steps are missing, the first is 90: rows") for note in trace.notes)
    assert trace.delta[89].tolist() == trace.delta[88].tolist()
    assert compare(trace).steps == 89


def test_a_trace_with_a_hole_or_without_rows_is_one_error(run, tmp_path):
    with pytest.raises(ConfigError, match="the first is 41"):
        read_trace(str(drop_rows(run, tmp_path / "hole", lambda step: 40 < step < 80)))
    with pytest.raises(ConfigError, match="recorded no drift"):
        read_trace(str(drop_rows(run, tmp_path / "empty", lambda step: True)))
    with pytest.raises(ConfigError, match="begins at step 11"):
        compare(read_trace(str(drop_rows(run, tmp_path / "late", lambda step: step <= 10))))
    with pytest.raises(ConfigError, match="holds no run"):
        read_trace(str(tmp_path))


def drop_rows(run, folder, is_lost):
    """A copy of the run without the drift rows of some steps."""

    copy = shutil.copytree(run, folder / "run")
    for part in (copy / "drift").iterdir():
        table = pq.read_table(part)
        keep = [not is_lost(step) for step in table["step"].to_pylist()]
        pq.write_table(table.filter(keep), part)
    return copy
