"""Figures of a comparison on blocks whose figures are known by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from layercheck.errors import ConfigError, LayerCheckError
from simulations.comparison import arms, figures, run
from simulations.comparison.arms import QUICK, REGIMES, Length
from simulations.comparison.as_costs import costs_of
from simulations.comparison.block import Block, LayerInterval, Recovered, Written
from simulations.comparison.pictures import draw
from simulations.comparison.read import recovery_of
from simulations.comparison.result import comparison, markdown
from simulations.costs import load_costs
from simulations.failures import FailureModel
from simulations.protocols import operating_point

P = 1000
FULL = 12 * P
KEYS = {
    "end_to_end_ratio", "bytes_written", "events", "mean_event_bytes", "layer_writes",
    "recovery_s", "recovery_without_restart_s", "reconstruct_s",
}  # fmt: skip
ABOUT: dict[str, Any] = {"machine": "a machine", "model": "a model", "seed": 0}


def block(method: str, cycle_s: float, number: int = 0, stall_s: float = 0.0, **more: Any) -> Block:
    """Ten equal steps."""
    values = {"arm": method, "regimes": REGIMES, "full_bytes": 0 if method == "none" else FULL, **more}
    return Block(
        method=method,
        number=number,
        step_s=(cycle_s,) * 10,
        stall_s=(stall_s,) * 10,
        elapsed_s=10 * cycle_s,
        **values,
    )


def recovered(load_s: float, replay_s: float = 0.0, reconstruct_s: float = 0.5) -> Recovered:
    return Recovered(1.0, 8.0, load_s, reconstruct_s, replay_s, 0.25, round(replay_s))


def killed(method: str, one: Recovered) -> Block:
    return block(method, 1.0, arm=f"{method}-killed", regimes=(), recovered=one)


def ours(number: int, nbytes: int = FULL // 2) -> Block:
    """Half the state in ten steps: every layer each 20 steps on average."""
    layers = (LayerInterval("layers.0", 400, 1), LayerInterval("layers.1", 600, 0))
    written = Written(10, nbytes, 5, 5, aside_bytes=2 * FULL, aside_events=2)
    return block("layercheck", 1.02 + number, number, 0.01, written=written, layers=layers, mean_age=8.0)


BLOCKS = [
    block("none", 1.0, 0),
    block("none", 2.0, 1),
    ours(0),
    replace(ours(1), step_s=(2.04,) * 10, elapsed_s=20.4),
    block(
        "deepspeed",
        1.5,
        0,
        0.4,
        regimes=("own",),
        written=Written(10, 2 * FULL, 2, 4),
        facts={"interval_steps": 5.0, "commit_s": 0.3},
    ),
    block(
        "deepspeed",
        3.2,
        1,
        0.4,
        regimes=("own",),
        written=Written(10, 2 * FULL, 2, 4),
        facts={"interval_steps": 5.0, "commit_s": 0.3},
    ),
    block(
        "lowdiff_dense",
        1.1,
        0,
        0.05,
        written=Written(20, 20 * 2 * P, 20, 40, aside_bytes=FULL, aside_events=1),
        facts={"batch_steps": 1.0},
    ),
    block(
        "gemini",
        1.2,
        0,
        0.1,
        written=Written(10, 0, 0, 0),
        facts={
            "interval_steps": 1.0,
            "storage_every_steps": 1000.0,
            "copy_s": 0.05,
            "exchange_s": 0.3,
        },
    ),
    killed("none", Recovered(0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0)),
    killed("layercheck", recovered(0.5)),
    killed("deepspeed", recovered(1.0, replay_s=10.0)),
    killed("lowdiff_dense", recovered(1.5, reconstruct_s=2.5)),
    killed("gemini", recovered(0.25, replay_s=10.0)),
]


# ---------------------------------------------------------------- figures


def test_each_block_is_compared_with_the_undisturbed_one_of_its_own_repeat() -> None:
    found = figures.regime(BLOCKS, "own")
    assert found["layercheck"].end_to_end_ratio.value == pytest.approx(1.02)
    assert found["layercheck"].end_to_end_ratio.stdev == pytest.approx(0.0, abs=1e-12)
    # 1.5 of 1.0 and 3.2 of 2.0: not 4.7 of 3.
    assert found["deepspeed"].end_to_end_ratio.value == pytest.approx(1.55)


def test_a_block_without_its_reference_is_refused() -> None:
    with pytest.raises(LayerCheckError, match="repeat 7 has no block of 'none'"):
        figures.regime([*BLOCKS, block("gemini", 1.0, 7)], "own")


def test_a_method_appears_only_in_its_regimes() -> None:
    assert "deepspeed" not in figures.regime(BLOCKS, "every_step")
    assert "gemini" in figures.regime(BLOCKS, "every_step")


def test_the_step_without_checkpointing_is_the_median_of_all_steps() -> None:
    step = figures.step_time([*BLOCKS, block("none", 2.0, 2)])
    assert (step.value, step.stdev) == (2.0, pytest.approx(0.577, abs=1e-3))


def test_a_killed_run_of_the_reference_gives_no_step_time() -> None:
    with pytest.raises(LayerCheckError, match="no block of 'none'"):
        figures.step_time([killed("none", recovered(0))])


def test_the_stall_of_an_event_is_that_of_the_measured_steps() -> None:
    found = figures.regime(BLOCKS, "own")
    assert found["deepspeed"].stall_per_event_s == pytest.approx(10 * 0.4 / 2)
    # Twenty differentials in twenty steps, of which ten were timed.
    assert found["lowdiff_dense"].stall_per_event_s == pytest.approx(0.05)
    assert found["gemini"].stall_per_event_s is None
    assert found["deepspeed"].stall_share == pytest.approx(8 / 47)


def test_the_mean_interval_leaves_full_events_aside() -> None:
    found = figures.regime(BLOCKS, "own")["layercheck"]
    assert found.mean_interval == pytest.approx(20)
    assert (found.bytes_written, found.aside_bytes) == (FULL, 4 * FULL)
    assert figures.matched_interval(BLOCKS) == 20
    assert figures.matched_interval([block("none", 1.0), ours(0, nbytes=FULL * 10)]) == 2


def test_a_run_that_wrote_nothing_has_no_interval() -> None:
    with pytest.raises(LayerCheckError, match="its interval is unknown"):
        figures.matched_interval([ours(0, nbytes=0)])


def test_the_expected_ratio_of_lowdiff_stands_beside_the_measured_one() -> None:
    found = figures.lowdiff_bytes(figures.regime(BLOCKS, "own"))
    assert list(found) == ["lowdiff_dense"]
    # 2 bytes a parameter and step against 12 in twenty steps.
    assert found["lowdiff_dense"].expected_ratio == pytest.approx(2 * 20 / 12)
    assert found["lowdiff_dense"].measured_ratio == pytest.approx(2 * 20 / 12)


def test_ratios_are_those_of_bytes_a_step_and_of_mean_events() -> None:
    found = figures.ratios_to_ours(figures.regime(BLOCKS, "own"))
    assert set(found) == {"deepspeed", "lowdiff_dense", "gemini"}
    assert found["deepspeed"]["bytes"] == pytest.approx(4)
    assert found["deepspeed"]["mean_event_bytes"] == pytest.approx(10)
    assert found["gemini"] == {"end_to_end": pytest.approx(1.2 / 1.02)}


# ---------------------------------------------------------------- recoveries


RESUMED = {
    "t_fail": 18, "resume_step": 13, "detect_s": 0.3, "reschedule_s": 9.0, "plan_s": 0.1, "fetch_s": 0.2,
    "install_s": 0.4, "replay_s": 8.5, "first_step_s": 3.5,
}  # fmt: skip


def test_what_a_first_step_takes_longer_is_not_counted_as_replay() -> None:
    found = recovery_of(RESUMED, t_iter_s=1.0)
    assert (found.first_step_s, found.replay_s, found.replayed_steps) == (2.5, 6.0, 6)
    assert found.without_restart_s == pytest.approx(0.3 + 0.4 + 6.0)
    assert found.total_s == pytest.approx(0.3 + 9.0 + 0.3 + 0.4 + 8.5)


def test_a_composite_replays_nothing() -> None:
    found = recovery_of({**RESUMED, "resume_step": 19, "replay_s": None}, t_iter_s=1.0)
    assert (found.replay_s, found.replayed_steps) == (0.0, 0)
    assert found.total_s == pytest.approx(0.3 + 9.0 + 0.3 + 0.4 + 2.5)


def test_recoveries_are_averaged_phase_by_phase() -> None:
    found = figures.recovery_figures([recovered(1.0), recovered(3.0, replay_s=4.0)])
    assert (found["load_s"], found["replay_s"], found["recoveries"]) == (2.0, 2.0, 2)
    assert found["recovery_s_stdev"] == pytest.approx(6 / 2**0.5)


# ---------------------------------------------------------------- results


def test_the_comparison_has_the_keys_that_scripts_rely_on() -> None:
    content = comparison(BLOCKS, 20, ABOUT)
    for name in REGIMES:
        for row in content["regimes"][name].values():
            assert set(row) >= KEYS
    assert content["recovery"]["matched_interval_steps"] == 20
    ratios = content["recovery_ratios_to_layercheck"]
    assert ratios["lowdiff_dense"]["recovery_without_restart_s"] == pytest.approx(4.0 / 1.0)
    assert ratios["lowdiff_dense"]["recovery_s"] == pytest.approx((4.0 + 9.25) / (1.0 + 9.25))
    assert content["paper"]["bytes"]["mean"] == 17.1


def test_a_method_that_was_not_killed_has_no_recovery() -> None:
    left = [one for one in BLOCKS if not (one.recovered and one.method == "gemini")]
    row = comparison(left, 20, ABOUT)["regimes"]["own"]["gemini"]
    assert (row["recovery_s"], row["reconstruct_s"]) == (None, None)


def test_the_tables_name_every_method_once_a_table() -> None:
    text = markdown(comparison(BLOCKS, 20, ABOUT))
    lines = text.splitlines()
    assert sum(line.startswith("| gemini |") for line in lines) == 3
    assert sum(line.startswith("| deepspeed |") for line in lines) == 2
    assert (
        "- bytes of lowdiff_dense: 2 a parameter and step x 20.0 / 12 = 3.33 expected, 3.33 measured" in lines
    )


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    draw(comparison(BLOCKS, 20, ABOUT), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "end-to-end.png", "end-to-end.svg", "recovery.png", "recovery.svg"
    }  # fmt: skip


def test_blocks_survive_json() -> None:
    for one in BLOCKS:
        assert Block.of(json.loads(json.dumps(one.content()))) == one


# ---------------------------------------------------------------- costs


@pytest.fixture
def costs(tmp_path: Path) -> Any:
    regimes = (figures.regime(BLOCKS, name) for name in ("own", "every_step"))
    found = costs_of(BLOCKS, *regimes, figures.recoveries(BLOCKS), figures.step_time(BLOCKS), "m", "x")
    (tmp_path / "costs.json").write_text(found.model_dump_json())
    return load_costs(str(tmp_path))


def test_the_simulation_reads_the_costs(costs: Any) -> None:
    assert set(costs.methods) == {"layercheck", "deepspeed", "lowdiff_dense", "gemini"}
    assert (costs.t_iter_s, costs.full_bytes) == (1.5, FULL)
    for name in costs.methods:
        point = operating_point(name, costs, "matched", FailureModel(mtbf_s=1800.0))
        assert point.source == "measured"


def test_stalls_are_told_per_commit(costs: Any) -> None:
    stalls_s = {name: cost.stall_s for name, cost in costs.methods.items()}
    assert stalls_s["deepspeed"] == pytest.approx(5 * 0.4)
    assert stalls_s["layercheck"] == pytest.approx(0.01)
    assert stalls_s["gemini"] == pytest.approx(0.1)
    assert costs.methods["deepspeed"].interval_steps == 5


def test_a_slowdown_is_what_an_event_at_every_step_makes_a_step_longer(costs: Any) -> None:
    found = figures.regime(BLOCKS, "every_step")
    expected = {name: (found[name].end_to_end_ratio.value - 1) * 1.5 for name in found if name != "none"}
    slowdowns_s = {name: cost.slowdown_s for name, cost in costs.methods.items()}
    assert slowdowns_s.pop("deepspeed") is None, "it was measured at its own interval alone"
    assert slowdowns_s == pytest.approx(expected)


def test_a_layer_that_was_not_written_is_as_old_as_the_steps_are_many(costs: Any) -> None:
    intervals = {layer.name: layer.interval_steps for layer in costs.methods["layercheck"].layers}
    assert intervals == {"layers.0": 10, "layers.1": 20}


def test_the_recovery_of_the_costs_has_no_replay(costs: Any) -> None:
    phases = costs.methods["deepspeed"].recovery
    assert (phases.detect_s, phases.restart_s, phases.load_s, phases.reconstruct_s) == (1.0, 8.0, 1.0, 0.75)


def test_gemini_comes_back_from_the_storage_only_after_the_loss_of_all(costs: Any) -> None:
    assert (costs.methods["gemini"].far_every, costs.methods["gemini"].far_kinds) == (1000, ("cluster",))
    assert costs.methods["deepspeed"].far_kinds == ()
    delays_s = {name: costs.methods[name].commit_delay_s for name in ("gemini", "deepspeed")}
    assert delays_s == pytest.approx({"gemini": 0.35, "deepspeed": 0.0}), "when the peer has it; at once"


# ---------------------------------------------------------------- arms


def test_every_arm_is_a_configuration_of_the_app() -> None:
    steady = arms.steady_arms(arms.METHODS, QUICK)
    for arm in [*steady, *arms.killed_arms(arms.METHODS, QUICK, 24)]:
        config = load_config("campaign", (*arm.settings, f"train.steps={arm.steps}"))
        assert arm.method.startswith(config.checkpoint.method)
        if arm.kill_step is not None:
            assert config.faults.kill == ({"rank": 1, "step": arm.kill_step},)
    assert {(regime, arm.method) for arm in steady for regime in arm.regimes} == {
        (regime, method) for regime in REGIMES for method in arms.METHODS
    }


def test_in_the_regime_of_every_step_everything_saves_at_every_step() -> None:
    for arm in arms.steady_arms(arms.METHODS, QUICK):
        baseline = load_config("campaign", arm.settings).checkpoint.baseline
        if "every_step" not in arm.regimes or arm.method in arms.NEEDED:
            continue
        section = getattr(baseline, arm.method.partition("_")[0] if "lowdiff" in arm.method else arm.method)
        assert getattr(section, "batch", getattr(section, "interval_steps", None)) == 1
        assert getattr(section, "mode", "manual") != "auto"


def test_a_roll_back_is_killed_in_the_middle_of_an_interval() -> None:
    for arm in arms.killed_arms(arms.METHODS, QUICK, 24):
        assert arm.kill_step is not None
        if arm.method not in arms.NEEDED:
            assert arm.kill_step % 24 == 12, arm.method
        assert arm.steps > arm.kill_step


def test_a_method_is_at_most_once_in_a_pass_and_the_first_has_no_kill() -> None:
    length = Length(settle=1, window=1, target_interval=4, profile=1, rounds=3, kill_rounds=2)
    order = arms.passes(length, ["a", "b", "c"], ["a-killed", "b-killed"], seed=3)
    assert [sorted(each) for each in order] == [
        [("a", 0), ("b", 0), ("c", 0)],
        [("a", 1), ("a-killed", 0), ("b", 1), ("b-killed", 0), ("c", 1)],
        [("a", 2), ("a-killed", 1), ("b", 2), ("b-killed", 1), ("c", 2)],
    ]
    assert order == arms.passes(length, ["a", "b", "c"], ["a-killed", "b-killed"], seed=3)
    assert any(
        order != arms.passes(length, ["a", "b", "c"], ["a-killed", "b-killed"], seed) for seed in range(5)
    )


def test_more_kills_than_repeats_make_more_passes() -> None:
    length = replace(QUICK, rounds=1, kill_rounds=2)
    assert arms.passes(length, ["a"], ["k"], 0) == [[("a", 0)], [("k", 0)], [("k", 1)]]


def test_the_reference_and_ours_are_always_measured() -> None:
    assert arms.check_methods(["gemini"]) == ("none", "layercheck", "gemini")
    with pytest.raises(ConfigError, match="--methods 'checkfrequency' is none of none, layercheck"):
        arms.check_methods(["checkfrequency"])


# ---------------------------------------------------------------- what was measured before


def _measured_before(out: Path, **order: Any) -> None:
    """A folder with one block of the quick order of one method."""
    key = run.order_of(out, ["gemini"], quick=True, seed=0).key
    out.mkdir()
    content = {"order": {**key, **order}, "blocks": [BLOCKS[0].content()]}
    (out / "blocks.json").write_text(json.dumps(content))


def test_blocks_that_were_measured_before_are_taken_over(tmp_path: Path) -> None:
    _measured_before(tmp_path / "m")
    assert run.order_of(tmp_path / "m", ["gemini"], quick=True, seed=0, resume=True).done == (BLOCKS[0],)


def test_blocks_of_another_order_are_refused(tmp_path: Path) -> None:
    _measured_before(tmp_path / "m", seed=4)
    with pytest.raises(ConfigError, match="is of seed=4, asked for is 0"):
        run.order_of(tmp_path / "m", ["gemini"], quick=True, seed=0, resume=True)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    _measured_before(tmp_path / "m")
    with pytest.raises(ConfigError, match="is not empty"):
        run.order_of(tmp_path / "m", ["gemini"], quick=True, seed=0)


def test_nothing_can_be_resumed_where_nothing_was_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        run.order_of(tmp_path, ["gemini"], quick=True, seed=0, resume=True)


def test_more_rounds_may_follow_and_their_number_is_checked(tmp_path: Path) -> None:
    _measured_before(tmp_path / "m")
    order = run.order_of(tmp_path / "m", ["gemini"], quick=True, seed=0, resume=True, rounds=5)
    assert (order.length.rounds, order.length.kill_rounds, order.done) == (5, 5, (BLOCKS[0],))
    with pytest.raises(ConfigError, match="--rounds 0 must be at least 1"):
        run.order_of(tmp_path / "n", ["gemini"], quick=True, seed=0, rounds=0)
