"""Costs: the schema refuses what nobody vouches for, and a run's own folder gives its costs."""

import json

import pytest

from layercheck.errors import ConfigError
from layercheck.persistence.storage import LocalStorage
from layercheck.tracking.metrics_log import METRICS, PartWriter
from simulations.cluster_view import RESTARTS, Scaling, parse_mix, parse_rate
from simulations.costs import Costs, load_costs, parse_costs, with_same_restart
from tests.runs import LAYERS
from tests.stores import RealRun

RECOVERY = {"detect_s": 1.0, "restart_s": 2.0, "load_s": 3.0, "reconstruct_s": 4.0}
RESUMED = {
    "detect_s": 1.0, "reschedule_s": 20.0, "plan_s": 0.5, "fetch_s": 2.5, "install_s": 0.25,
    "first_step_s": 3.0,
}  # fmt: skip


def content(**method: object) -> dict:
    one = {"source": "measured", "commits": "interval", "stall_s": 1.0, "recovery": RECOVERY} | method
    one = {key: value for key, value in one.items() if value is not None}
    return {"format_version": 1, "title": "t", "t_iter_s": 2.0, "methods": {"one": one}}


def test_detection_and_restart_can_be_those_of_all():
    costs = parse_costs(content(), "x")
    other = costs.methods["one"].model_copy(
        update={
            "recovery": costs.methods["one"].recovery.model_copy(update={"detect_s": 3.0, "restart_s": 8.0})
        }
    )
    both = costs.model_copy(update={"methods": {"one": costs.methods["one"], "two": other}})
    for cost in with_same_restart(both).methods.values():
        assert cost.recovery.model_dump() == {
            "detect_s": 2.0, "restart_s": 5.0, "load_s": 3.0, "reconstruct_s": 4.0
        }  # fmt: skip


def test_a_file_is_read_as_it_was_written(tmp_path):
    costs = parse_costs(
        content(interval_steps=50, measured={"bytes_written": 5e9}, spread={"stall_s": 0.1}), "x"
    )
    path = tmp_path / "costs.json"
    path.write_text(costs.model_dump_json())
    assert load_costs(str(path)) == load_costs(str(tmp_path)) == costs
    method = costs.methods["one"].method("one", costs.t_iter_s)
    assert (method.tau_s, method.stall_s, method.recovery_s((1, 0, 0))) == (100.0, 1.0, 10.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": None}, "methods.one.source"),
        ({"source": "guessed"}, "source='guessed'"),
        ({"stall_s": -0.5}, "stall_s=-0.5"),
        ({"stall_s": float("nan")}, "stall_s=nan"),
        ({"recovery": RECOVERY | {"load_s": float("inf")}}, "load_s=inf"),
        ({"stall": 3}, "unknown key 'methods.one.stall'"),
        ({"commits": "every_step", "interval_steps": 5}, "interval_steps=5"),
        ({"stall_fixed_s": 2.0}, "stall_fixed_s=2"),
    ],
)
def test_wrong_costs_are_one_error_that_names_the_value(changes, named):
    with pytest.raises(ConfigError, match=named):
        parse_costs(content(**changes), "costs x.json")


@pytest.mark.parametrize(
    "changes", [{"t_iter_s": 0}, {"format_version": 2}, {"methods": {}}, {"t_iter_s": "4 s"}]
)
def test_a_wrong_file_is_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        parse_costs(content() | changes, "costs x.json")


def test_a_file_that_is_none_is_one_error(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        load_costs(str(tmp_path / "broken.json"))
    with pytest.raises(ConfigError, match="No such file"):
        load_costs(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="holds no run"):
        load_costs(str(tmp_path))


def test_the_paper_preset_is_labelled_and_has_its_mean_interval():
    costs = load_costs("paper")
    assert {cost.source for cost in costs.methods.values()} == {"paper"}
    assert costs.matched_interval_steps == 106
    assert sum(layer.numel for layer in costs.methods["layercheck"].layers) == pytest.approx(7.6e9, rel=0.01)


# ---------------------------------------------------------------- a run folder


class TimedRun(RealRun):
    """Every shard took 0.5 s to copy and 1.5 s to be durable; rank 1 twice that."""

    def _write(self, event, rank, layers, reason):
        times = {"snapshot_s": 0.5 * (rank + 1), "write_s": 1.5 * (rank + 1)}
        return tuple(row.model_copy(update=times) for row in super()._write(event, rank, layers, reason))


def open_run(folder):
    run = TimedRun(folder)
    run.beat(0)
    for step in (0, 2, 4):
        run.save(step)
    run.train(4)
    return run


def finished_run(folder, resumed=(RESUMED,), last=14):
    return finish(open_run(folder), folder, resumed, last)


def finish(run, folder, resumed=(RESUMED,), last=14):
    run.save(8, "layers.0")
    run.save(10, "norm")
    run.save(12, "layers.0", reason="age")
    run.train(last, since=4)
    run.coordinator.close()
    metrics = PartWriter(LocalStorage(str(folder)), "metrics", 1, 60, METRICS)
    for step in range(1, last + 1):
        stall_s = 0.5 if step in (8, 10, 12) else 0.1
        step_s = 50.0 if step <= 4 else 2.0 + stall_s
        metrics.add({"step": step, "lr": 1e-4, "step_s": step_s, "stall_s": stall_s})
    metrics.close()
    summary = {
        "run": "r1",
        "world_size": 2,
        "resumed": list(resumed),
        "bytes_written": 1,
        "events": 6,
        "layer_writes": 12,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


def test_a_run_folder_gives_its_measured_costs(tmp_path):
    costs = load_costs(finished_run(tmp_path))
    ours = costs.methods["layercheck"]
    assert costs.t_iter_s == pytest.approx(2.0)
    assert (ours.source, ours.commits) == ("measured", "every_step")
    assert ours.stall_s == pytest.approx((3 * 0.5 + 7 * 0.1) / 10)
    assert ours.stall_fixed_s == pytest.approx(0.1)
    assert ours.recovery.model_dump() == {
        "detect_s": 1.0,
        "restart_s": 20.0,
        "load_s": 3.0,
        "reconstruct_s": 1.25,
    }
    intervals = {layer.name: layer.interval_steps for layer in ours.layers}
    assert intervals == {"embed_tokens": 10.0, "layers.0": 5.0, "norm": 10.0}
    assert set(intervals) == set(LAYERS)
    assert ours.mean_interval_steps == pytest.approx(60 / (10 / 10 + 20 / 5 + 30 / 10))
    assert costs.full_bytes == 60 * 4


def test_intervals_count_versions_by_drift_and_age_alone(tmp_path):
    before = load_costs(finished_run(tmp_path / "a")).methods["layercheck"]
    run = open_run(tmp_path / "b")
    run.save(5, "layers.0", "norm", reason="residual")
    run.save(6)
    run.save(7, "norm", reason="preemption")
    found = load_costs(finish(run, tmp_path / "b")).methods["layercheck"]
    assert found.layers == before.layers
    assert "2 residuals are not in the intervals" in found.note
    assert "residuals" not in before.note


def test_full_copies_are_derived_from_the_slowest_rank_of_the_newest_full_event(tmp_path):
    methods = load_costs(finished_run(tmp_path)).methods
    sync, behind = methods["full_sync"], methods["full_async"]
    assert (sync.source, behind.source) == ("derived", "derived")
    assert (sync.stall_s, behind.stall_s) == (4.0, 1.0)
    assert (behind.min_interval_steps, behind.commit_delay_s) == (2, 3.0)


def test_a_run_that_shows_no_cost_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="recovered from no failure"):
        load_costs(finished_run(tmp_path / "a", resumed=()))
    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"summary\.json"):
        load_costs(str(tmp_path / "a"))


def test_two_recoveries_give_their_mean_and_spread(tmp_path):
    slower = RESUMED | {"reschedule_s": 30.0}
    ours = load_costs(finished_run(tmp_path, resumed=(RESUMED, slower))).methods["layercheck"]
    assert ours.recovery.restart_s == 25.0
    assert ours.spread["recovery_s"] == pytest.approx(7.0711, abs=1e-3)


# ---------------------------------------------------------------- a larger cluster


def test_costs_grow_with_the_cluster_as_stated():
    costs = Costs.model_validate(content(min_interval_steps=3) | {"gpus": 8})
    grown = Scaling(storage_exponent=1.0, restart_per_doubling_s=RESTARTS["requeue"]).costs(costs, 64)
    one = grown.methods["one"]
    assert grown.gpus == 64
    assert (one.stall_s, one.recovery.load_s, one.min_interval_steps) == (8.0, 24.0, 24)
    assert one.recovery.restart_s == pytest.approx(2 + 3 * (768 - 454) / 3)
    assert one.recovery.detect_s == 1.0
    assert Scaling().costs(costs, 8).methods["one"] == costs.methods["one"]


def test_mixes_and_rates_are_names_or_numbers():
    assert parse_mix("0.5,0.3,0.2") == (0.5, 0.3, 0.2)
    assert parse_rate("4.5") == 4.5
    for text in ("all", "0.5,0.5", "a,b,c"):
        with pytest.raises(ConfigError, match="mix="):
            parse_mix(text)
    for text in ("rsc9", "0", "-1", "nan"):
        with pytest.raises(ConfigError, match="rate="):
            parse_rate(text)
