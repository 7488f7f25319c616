"""The arithmetic of `memory.json` and `overhead.json`, on recoveries and samples that are known by hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.measure import regime
from app.measure.arms import Samples, bursts, steps_inside
from app.measure.memory.killed import CONFIG, settings_of
from app.measure.memory.overhead import EVERY_STEP, USUAL
from app.measure.memory.spec import Outcome, Recovered
from app.measure.regime import CHECKPOINT, Regime
from layercheck.config import MemoryConfig, parse_config
from layercheck.errors import ConfigError
from simulations.comparison import arms as comparison
from simulations.measure import main
from simulations.memory.arms import (
    CASCADE,
    CLUSTER,
    EVERY,
    FULL,
    LATE,
    NODE,
    QUICK,
    UNDISTURBED,
    WORKER,
    Extent,
    kill_steps,
    killed_runs,
)
from simulations.memory.figures import arm_figures, by_layer, verdicts
from simulations.memory.overhead import content_of as overhead_of
from simulations.memory.peers import IDLE, USUAL_PEERS, peers_of
from simulations.memory.result import markdown, overhead_markdown
from simulations.memory.run import content_of
from simulations.memory.tuned import WITHIN_NOISE
from simulations.saving.written import Written
from tests.recoveries import STATE, outcome, pairs, recovered


def outcomes(changed: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    """One of each run, all as it should be but for what is changed."""
    runs = killed_runs(QUICK)
    good = {
        UNDISTURBED: outcome(runs[UNDISTURBED]),
        WORKER: outcome(runs[WORKER], recovered(), recovered(40, lost_steps=6.0), losses=(2.0, 1.006)),
        EVERY: outcome(runs[EVERY], recovered(max_age=1, lost_steps=0.5)),
        CASCADE: outcome(runs[CASCADE], *[recovered(step, max_age=0, lost_steps=0.0) for step in (1, 2, 3)]),
        NODE: outcome(runs[NODE], recovered(source="peer", lost_steps=9.0)),
        CLUSTER: outcome(runs[CLUSTER], recovered(source="storage", residuals=("a",))),
    }
    return good | (changed or {})


def found(changed: dict[str, Outcome] | None = None) -> dict[str, bool]:
    runs = outcomes(changed)
    return verdicts({name: arm_figures(run, runs[UNDISTURBED]) for name, run in runs.items()}, runs)


# ---------------------------------------------------------------- figures


def test_an_arm_is_the_mean_and_the_largest_of_its_recoveries() -> None:
    runs = outcomes()
    arm = arm_figures(runs[WORKER], runs[UNDISTURBED])
    assert (arm.kills, arm.lost_mean, arm.lost_max, arm.max_age) == (2, 4.5, 6.0, 4)
    assert arm.sources == {"memory": 4, "residual": 0}
    assert arm.loss_ratio == pytest.approx(3.006 / 3.0)
    assert not arm.is_exact
    assert by_layer(runs[WORKER]) == {"a": {"mean": 4.0, "max": 4.0}, "b": {"mean": 2.0, "max": 2.0}}


def test_steps_run_again_are_counted_and_steps_known_from_elsewhere_are_not() -> None:
    runs = outcomes()
    again = outcome(runs[WORKER].run, recovered(20, resume_step=18), recovered(40, resume_step=42))
    assert arm_figures(again, runs[UNDISTURBED]).again_steps == 3


@pytest.mark.parametrize("change", [{"losses": (2.0, 1.0 + 1e-15)}, {"state": STATE | {"b/0": "23"}}])
def test_exact_means_every_bit(change: dict[str, Any]) -> None:
    runs = outcomes()
    same = outcome(runs[CASCADE].run)
    assert arm_figures(same, runs[UNDISTURBED]).is_exact
    assert not arm_figures(same.model_copy(update=change), runs[UNDISTURBED]).is_exact


def test_all_verdicts_hold_where_all_is_as_it_should_be() -> None:
    assert all(found().values())


RUNS = killed_runs(QUICK)
BROKEN = {
    "killed worker costs": {WORKER: outcome(RUNS[WORKER], recovered(lost_steps=5.1))},
    "copied at every step": {EVERY: outcome(RUNS[EVERY], recovered(max_age=2))},
    "lost node costs": {NODE: outcome(RUNS[NODE], recovered(source="peer", lost_steps=10.1))},
    "by its replica": {NODE: outcome(RUNS[NODE], recovered(source="storage"))},
    "killed cluster has": {CLUSTER: outcome(RUNS[CLUSTER], recovered(residuals=("a",)))},
    "with residuals": {CLUSTER: outcome(RUNS[CLUSTER], recovered(source="storage"))},
    "bit-identical": {CASCADE: outcome(RUNS[CASCADE], recovered(max_age=1))},
    "end bit-identical": {CASCADE: outcome(RUNS[CASCADE], recovered(max_age=0), losses=(2.0, 1.1))},
    "no checksum": {WORKER: outcome(RUNS[WORKER], recovered(bad=1))},
    "nothing is left": {NODE: outcome(RUNS[NODE], recovered(source="peer"), left=1)},
}


@pytest.mark.parametrize("words", BROKEN)
def test_each_verdict_sees_what_it_is_about(words: str) -> None:
    failed = [text for text, held in found(BROKEN[words]).items() if not held]
    assert len(failed) == 1, failed
    assert words in failed[0]


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("extent", [FULL, QUICK])
def test_kills_come_after_the_base_apart_and_leave_the_run_time(extent: Extent) -> None:
    for kills in (extent.kills, extent.few, 3):
        steps = kill_steps(extent, kills)
        assert len(steps) == kills
        assert extent.warmup_steps + 3 < steps[0]
        assert steps[-1] < extent.steps - extent.gap // 2
        assert all(later - earlier >= extent.gap // 2 for earlier, later in pairwise(steps))


def test_at_least_six_workers_are_killed_and_three_in_a_cascade() -> None:
    for extent, least in ((FULL, 6), (QUICK, 3)):
        runs = killed_runs(extent)
        assert len(runs[WORKER].kills) >= least
        assert len(runs[CASCADE].kills) == 3
        assert runs[CASCADE].moment == LATE
        assert next(iter(runs)) == UNDISTURBED


@pytest.mark.parametrize("name", killed_runs(FULL))
def test_the_settings_of_every_run_are_those_of_the_app(name: str, tmp_path: Path) -> None:
    spec = killed_runs(FULL)[name]
    config = load_config(CONFIG, settings_of(spec, tmp_path / "steps"))
    settings = config.checkpoint.settings
    assert config.train.steps == spec.steps
    assert settings.memory.enabled == (name != UNDISTURBED)
    assert settings.residual.enabled == (name == CLUSTER)
    assert settings.memory.replicas == (name == NODE)
    ratio = 0.0 if name in (EVERY, CASCADE) else MemoryConfig().k_ratio
    assert settings.memory.k_ratio == ratio


def test_a_receipt_becomes_a_recovery() -> None:
    layers = [
        {"name": "a", "age": 4, "lost": 3.0, "source": "peer", "residual": None},
        {"name": "b", "age": 9, "lost": 1.0, "residual": 19},
    ]
    known = recovered(20)
    receipt = {**known.model_dump(), **known.seconds, "layers": layers, "bad": [{}], "lost_steps": 2.5}
    one = Recovered.of(22, receipt)
    assert (one.killed_at, one.t_fail, one.lost_steps, one.bad) == (22, 20, 2.5, 1)
    assert one.sources == {"a": "peer", "b": "storage"}
    assert (one.ages, one.lost, one.residuals) == ({"a": 4, "b": 9}, {"a": 3.0, "b": 1.0}, ("b",))


# ---------------------------------------------------------------- pages


def test_the_page_has_a_row_for_each_run_and_each_recovery() -> None:
    content = content_of(outcomes(), pairs(), QUICK)
    page = markdown(json.loads(json.dumps(content)))
    assert "| worker | 2 | 4.50 | 6.00 | 4 |" in page
    assert "peer 1, memory 1" in page
    assert "storage 2, residual 1" in page
    assert set(content["verdicts"]) == {*found(), WITHIN_NOISE}
    assert page.count("- yes: ") == len(content["verdicts"])
    assert "| a | 30 | 4.0 | 4 |" in page
    assert "## Fine-tuning that is killed three times" in page


@pytest.mark.parametrize("part", ["arms", "pairs"])
def test_a_wrong_checksum_of_any_run_is_seen(part: str) -> None:
    bad = recovered(bad=1)
    arms = outcomes({WORKER: outcome(RUNS[WORKER], bad)} if part == "arms" else None)
    tuned = pairs() if part == "arms" else pairs(recoveries=(bad,))
    failed = [text for text, held in content_of(arms, tuned, QUICK)["verdicts"].items() if not held]
    assert failed == ["no checksum was wrong"]


def _samples(step_s: float) -> Samples:
    return Samples([step_s] * 4, [0.1] * 4, [0.05] * 4, [0.0] * 4, [0.0] * 4, thread_cpu_s=0.8, max_age=7)


def test_the_overhead_is_that_of_the_slower_rank_beside_saving_alone() -> None:
    arms = {name: [_samples(0.4), _samples(0.9)] for name in USUAL}
    stores = {name: Written(4_000_000, 12_000, {}, {}, 0) for name in USUAL}
    arms["saving+memory"] = [_samples(1.1), _samples(0.2)]
    content = overhead_of(arms, Regime(4, 0), USUAL, {}, stores)
    assert content["conditions"]["parameters"] == 1000
    memory = content["arms"]["saving+memory"]
    assert memory["ratio"] == pytest.approx(1.2 / 1.0)
    assert memory["step_s"] == pytest.approx(1.2)
    assert (memory["stall_s"], memory["threads_s"]) == (pytest.approx(0.05), pytest.approx(0.2))
    assert content["arms"]["saving"]["ratio"] == pytest.approx(1.0)
    page = overhead_markdown(content)
    ratio = "1.200 (1.200 to 1.200)"
    row = f"| saving+memory | saving | 1.200 | {ratio} | {ratio} | - | 1.3846 | 50.0 | 200.0 | 1.00 | 7 |"
    assert row in page


def _idle(train_s: list[float]) -> Samples:
    zeros = [0.0] * len(train_s)
    return Samples(train_s, zeros, zeros, zeros, zeros, max_age=1, bytes_written=12_000_000)


def test_each_arm_is_beside_one_with_its_own_groups_that_saves_nothing() -> None:
    """And once more without the steps beside which the arm before still works."""
    peers = peers_of(["gemini"])
    steps_s = {"nothing saved": 1.0, "versions": 1.1, "memory": 1.2, "residuals": 1.3, IDLE: 2.0}
    arms = {name: [_idle([step_s] * 6)] * 2 for name, step_s in steps_s.items()}
    arms |= {"none": [Samples([4.0] * 6)] * 2, "gemini": [_idle([18.0, 2.0, 2.0, 6.0, 6.0, 18.0])] * 2}
    stores = {name: Written(4_000_000, 12_000, {}, {}, 0) for name in EVERY_STEP}
    content = overhead_of(arms, Regime(6, 0), EVERY_STEP, peers, stores)
    bases = {name: arm["base"] for name, arm in content["arms"].items()}
    assert {name for name, base in bases.items() if base == "nothing saved"} == EVERY_STEP.keys()
    assert {name: bases[name] for name in peers} == {IDLE: IDLE, "none": "none", "gemini": IDLE}
    gemini, memory = content["arms"]["gemini"], content["arms"]["memory"]
    assert [gemini[name] for name in ("ratio", "ratio_inside", "ratio_to_none")] == [3.0, 2.0, 1.5]
    assert (memory["ratio"], memory["ratio_to_none"]) == (pytest.approx(1.2), pytest.approx(0.3))
    assert (gemini["max_age"], content["arms"]["none"]["max_age"]) == (1, None)
    assert "overhead_ratio" in memory
    assert "overhead_ratio" not in gemini  # nobody knows the seconds of all its threads
    assert content["conditions"]["methods"] == {name: list(items) for name, items in peers.items()}
    page = overhead_markdown(json.loads(json.dumps(content)))
    assert f"| gemini | {IDLE} | 6.000 | 3.000 (" in page
    assert "| - | 0.0 | - | 2.00 | 1 |" in page
    assert "| none | none | 4.000 | 1.000 (1.000 to 1.000) |" in page


def test_arms_take_turns_of_some_steps_and_the_warm_up_ends_with_one() -> None:
    assert bursts(7, 18) == [range(1, 6), range(6, 8), range(8, 13), range(13, 18), range(18, 19)]
    assert steps_inside(7, 18) == [1, 2, 3, 4, 6, 7, 8, 9]


def test_arms_of_every_step_differ_from_the_first_in_what_they_save_alone() -> None:
    """The first saves nothing; no other saves by age."""
    first, *others = EVERY_STEP.values()
    assert first["k0"] > 1000
    assert {own["s_max"] for own in (first, *others)} == {first["s_max"]}
    for name, own in EVERY_STEP.items():
        config = parse_config(CHECKPOINT | own)
        saves = [config.k0 < 1e-9, config.memory.enabled, config.residual.enabled]
        assert sum(saves) == (name != "nothing saved"), name


def test_other_methods_save_as_they_do_in_the_comparison_at_every_step() -> None:
    peers = peers_of(comparison.METHODS)
    found = {name: regime.config("/x", "layer", 1, items=items) for name, items in peers.items()}
    there = {
        arm.method: regime.config("/x", "layer", 1, items=arm.settings)
        for arm in comparison.steady_arms(comparison.METHODS, comparison.FULL)
        if "every_step" in arm.regimes and arm.method != "layercheck"
    }
    assert {name: config for name, config in found.items() if name != IDLE} == there
    own = {name: config.checkpoint.baseline for name, config in found.items()}
    assert own["gemini"].gemini.interval_steps == 1
    assert own["deepspeed"].deepspeed.interval_steps == own["dcp_async"].dcp_async.interval_steps == 1
    assert (own["checkfreq"].checkfreq.mode, own["checkfreq"].checkfreq.interval_steps) == ("manual", 1)
    dense = own["lowdiff_dense"].lowdiff
    assert (dense.mode, dense.batch, dense.base_every) == ("dense", 1, 100)
    assert found["none"].train.groups == "stock"


def test_the_arm_that_others_are_compared_with_has_a_session_that_never_saves() -> None:
    assert list(peers_of(USUAL_PEERS)) == [IDLE, "none", "checkfreq", "gemini", "lowdiff_dense"]
    idle = regime.config("/x", "layer", 1, items=peers_of(USUAL_PEERS)[IDLE])
    assert (idle.checkpoint.method, idle.train.groups) == ("checkfreq", "layer")
    tuning = idle.checkpoint.baseline.checkfreq
    assert tuning.mode == "manual"
    assert tuning.interval_steps > regime.FULL.last_step


def test_items_of_one_arm_are_not_those_of_the_next() -> None:
    other = regime.config("/x", "layer", 1, items=("checkpoint.settings.s_max=77",))
    assert other.checkpoint.settings.s_max == 77
    assert regime.config("/x", "layer", 1).checkpoint.settings.s_max == CHECKPOINT["s_max"] != 77


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods", "gemini"], "but for --every-step"),
        (["--overhead", "--methods", "gemini"], "but for --every-step"),
        (["--every-step", "--methods", "gemeni"], "--methods 'gemeni' is none of"),
    ],
)
def test_methods_are_those_of_the_comparison_and_of_every_step_alone(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")  # what is not refused cannot begin there
    assert main(["memory", "--out", str(tmp_path / "file" / "out"), *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("what", ["residuals", "saving"])
@pytest.mark.parametrize("flag", ["--overhead", "--every-step"])
def test_the_overhead_flags_are_of_memory_alone(
    what: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([what, "--out", "/tmp/never", flag]) == 2
    assert f"{flag} means nothing" in capsys.readouterr().err


def test_two_measurements_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--out", "/tmp/never", "--overhead", "--every-step"]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    from simulations.memory.run import measure_memory

    with pytest.raises(ConfigError, match="cannot make the folder"):
        measure_memory(tmp_path / "file", True, print)
