"""Figures of a validation: from steps and kills to costs, to the measured ETTR and the simulated one."""

import json

import pytest

from app.measure.failing import SETTLE_STEPS, Failed
from app.step_log import LoggedStep, StepLog, read_lives
from layercheck.errors import LayerCheckError
from simulations import validate
from simulations.failures import FailureModel, failures_at
from simulations.validation import figures
from simulations.validation.arms import NEVER, Arm, arm_of
from simulations.validation.figures import calibrate, measure, simulate_kills
from simulations.validation.result import Row, describe, write_json

EVERY_STEP = Arm("layercheck", (), 1, 10)
EVERY_5 = Arm("deepspeed", (), 5, 10)
STEP_S, STALL_S, RECOVERY_S = 2.0, 0.5, 7.0


def life(first: int, begin_s: float, count: int, arm: Arm = EVERY_STEP) -> tuple[LoggedStep, ...]:
    """Steps of 2 s, 0.5 s of stall at each commit."""
    steps = []
    for step in range(first, first + count):
        stall_s = 0.0 if step % arm.interval_steps else STALL_S
        steps.append(LoggedStep(step, begin_s, begin_s + STEP_S + stall_s, stall_s))
        begin_s = steps[-1].end_s
    return tuple(steps)


def run_of(
    arm: Arm, kills_s: tuple[float, ...], begin_s: float = 1000.0, recovery_s: float = RECOVERY_S
) -> Failed:
    """A run without any scatter: it loses what was not committed, and recovers in `recovery_s`."""
    # So long that the watch, from the end of step `begin_step` on, begins at `begin_s`.
    warmup = life(1, 0.0, arm.begin_step, arm)
    shift_s = begin_s - (warmup[-1].end_s if warmup else 0.0)
    lives, first, at_s = [], 1, shift_s
    for kill_s in (*(begin_s + kill for kill in kills_s), float("inf")):
        steps = [step for step in life(first, at_s, 400, arm) if step.end_s <= kill_s]
        lives.append(tuple(steps[: None if kill_s < float("inf") else SETTLE_STEPS]))
        done = steps[-1].step if steps else first - 1
        first, at_s = max(first, done - done % arm.interval_steps + 1), kill_s + recovery_s
    return Failed(
        tuple(one for one in lives if one), tuple(begin_s + kill for kill in kills_s), arm.begin_step
    )


# ---------------------------------------------------------------- the log


def test_a_log_gives_back_the_steps_of_each_process_in_the_order_of_their_lives(tmp_path, monkeypatch):
    for pid, steps in ((30, life(1, 5.0, 3)), (20, life(3, 50.0, 2)), (10, life(4, 90.0, 1))):
        monkeypatch.setattr("app.step_log.os.getpid", lambda pid=pid: pid)
        log = StepLog.of(str(tmp_path), 0)
        for step in steps:
            log.note(step)
    (tmp_path / "40.jsonl").write_text("")
    with open(tmp_path / "10.jsonl", "a") as file:
        file.write("[5, 92.5, 9")
    assert read_lives(tmp_path) == [life(1, 5.0, 3), life(3, 50.0, 2), life(4, 90.0, 1)]


def test_only_rank_0_of_a_run_with_a_folder_writes_a_log(tmp_path):
    assert StepLog.of(None, 0) is None
    assert StepLog.of(str(tmp_path / "log"), 1) is None
    assert not (tmp_path / "log").exists()


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("arm", [EVERY_STEP, EVERY_5], ids=["every_step", "interval"])
def test_calibration_finds_the_costs_that_the_run_had(arm):
    costs = calibrate(run_of(arm, (60.5, 90.0, 120.0)), arm)
    cost = costs.methods[arm.name]
    assert costs.t_iter_s == pytest.approx(STEP_S)
    assert cost.stall_s == pytest.approx(STALL_S)
    assert cost.recovery.restart_s == pytest.approx(RECOVERY_S, abs=STALL_S)
    assert (cost.source, cost.interval_steps, cost.measured["recoveries"]) == (
        "measured",
        arm.interval_steps,
        3,
    )


def test_steps_that_are_slow_after_a_restart_belong_to_the_recovery():
    seen = run_of(EVERY_STEP, (60.0, 100.0))
    late = tuple(LoggedStep(s.step, s.begin_s + 3.0, s.end_s + 3.0, s.stall_s) for s in seen.lives[-1][1:])
    slow = LoggedStep(seen.lives[-1][0].step, seen.lives[-1][0].begin_s, late[0].begin_s, STALL_S)
    seen = Failed((*seen.lives[:-1], (slow, *late)), seen.kills_s, seen.begin_step)
    cost = calibrate(seen, EVERY_STEP).methods["layercheck"]
    assert cost.recovery.restart_s == pytest.approx(RECOVERY_S + 3.0 / 2)
    assert cost.spread["recovery_s"] == pytest.approx(3.0 / 2**0.5)


def test_a_kill_that_was_followed_by_another_before_a_step_times_no_recovery():
    seen = run_of(EVERY_STEP, (60.0, 62.0, 100.0))
    assert calibrate(seen, EVERY_STEP).methods["layercheck"].measured["recoveries"] == 2
    with pytest.raises(LayerCheckError, match="1 recoveries were timed"):
        calibrate(run_of(EVERY_STEP, (60.0, 62.0)), EVERY_STEP)
    with pytest.raises(LayerCheckError, match="0 steps were timed without a failure"):
        calibrate(run_of(EVERY_STEP, (2.0, 90.0)), EVERY_STEP)


# ---------------------------------------------------------------- ETTR


@pytest.mark.parametrize(
    ("arm", "kept"), [(EVERY_STEP, (24, 0, 17)), (EVERY_5, (25, 0, 20))], ids=["every_step", "interval"]
)
def test_the_measured_ratio_is_that_of_the_engine_where_nothing_scatters(arm, kept):
    """Three kills, the second of them in a recovery: the run and the engine lose the same steps."""
    seen = run_of(arm, (61.0, 65.0, 116.0))
    measured = measure(seen)
    assert measured.kept_steps == kept
    assert measured.kills_s == (61.0, 65.0, 116.0)
    assert measured.ettr == pytest.approx(sum(kept) * STEP_S / 116.0)
    costs = calibrate(run_of(arm, (60.5, 90.0, 120.0)), arm)
    # Recoveries of the calibration hold up to half a second of stall that fell into their first steps.
    exact = costs.methods[arm.name].model_copy(
        update={"recovery": costs.methods[arm.name].recovery.model_copy(update={"restart_s": RECOVERY_S})}
    )
    costs = costs.model_copy(update={"methods": {arm.name: exact}})
    assert simulate_kills(costs, arm, measured.kills_s).ettr == pytest.approx(measured.ettr)


def test_the_standard_error_is_that_of_a_ratio_of_sums():
    """Two cycles of 40 and 60 s that keep 10 and 20 steps of 2 s: by hand."""
    first, second, third = life(11, 0.0, 10), life(21, 45.0, 20), life(41, 105.0, SETTLE_STEPS)
    seen = Failed((life(10, -2.5, 1) + first, second, third), (40.0, 100.0), 10)
    measured = measure(seen)
    assert measured.kept_steps == (10, 20)
    assert measured.ettr == pytest.approx(0.6)
    rest = (20 - 0.6 * 40, 40 - 0.6 * 60)
    assert measured.standard_error == pytest.approx((2 * (rest[0] ** 2 + rest[1] ** 2)) ** 0.5 / 100)


def test_a_step_that_the_other_rank_still_ended_after_the_kill_is_no_new_life():
    seen = run_of(EVERY_STEP, (61.0, 116.0))
    last = seen.lives[0][-1]
    late = LoggedStep(last.step + 1, last.end_s, seen.kills_s[0] + 0.2)
    with_late = Failed(((*seen.lives[0], late), *seen.lives[1:]), seen.kills_s, seen.begin_step)
    assert measure(with_late).kept_steps == measure(seen).kept_steps == (24, 19)


def test_a_method_that_commits_nothing_keeps_nothing():
    arm = Arm("none", (), NEVER, 0)
    seen = run_of(arm, (60.0, 100.0))
    assert measure(seen).kept_steps == (0, 0)
    costs = calibrate(seen, arm)
    assert simulate_kills(costs, arm, (60.0, 100.0)).ettr == measure(seen).ettr == 0.0


def test_one_kill_has_no_standard_error():
    with pytest.raises(LayerCheckError, match="1 kills hit the run"):
        measure(run_of(EVERY_STEP, (60.0,)))


def test_the_simulated_error_is_what_another_recovery_would_change():
    """By the engine itself, with steps so short that it moves smoothly."""
    arm, kills_s = Arm("m", (), 1, 0), (100.0, 180.0, 300.0)
    seen = run_of(EVERY_STEP, (60.0, 90.0, 120.0))
    costs = calibrate(seen, Arm("m", (), 1, 10))
    cost = costs.methods["m"].model_copy(
        update={"stall_s": 0.00025, "spread": {"recovery_s": 3.0}, "measured": {"recoveries": 9.0}}
    )
    low, high = (
        simulate_kills(
            costs.model_copy(
                update={
                    "t_iter_s": 0.001,
                    "methods": {
                        "m": cost.model_copy(update={"recovery": cost.recovery.model_copy(update=r)})
                    },
                }
            ),
            arm,
            kills_s,
        )
        for r in ({"restart_s": 7.0}, {"restart_s": 8.0})
    )
    assert low.ettr - high.ettr == pytest.approx(low.standard_error, rel=0.01)


# ---------------------------------------------------------------- the command


def test_the_kills_are_the_failures_that_the_simulation_draws():
    times_s = validate.failure_times_s(validate.USUAL, seed=0)
    assert len(times_s) >= 2
    assert (
        times_s
        == validate.failure_times_s(validate.USUAL, seed=0)
        != validate.failure_times_s(validate.USUAL, 1)
    )
    assert failures_at(times_s, 900.0, FailureModel(90.0)).gaps_s.sum() == pytest.approx(900.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "layerchuck"], "layerchuck"),
        (["--minutes", "0"], "minutes=0"),
        (["--minutes", "nan"], "minutes=nan"),
        (["--mtbf-s", "-5"], "mtbf_s=-5"),
        (["--mtbf-s", "3600"], "mtbf_s=3600 have 0 failures"),
        (["--recoveries", "1"], "recoveries=1"),
        (["--interval-steps", "0"], "interval_steps=0"),
        (["--set", "train.stepz=5"], "train.stepz"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_value(tmp_path, capsys, arguments, named):
    assert validate.main(["--out", str(tmp_path / "new"), *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert named in said
    assert "\n" not in said


def test_a_folder_that_holds_another_validation_is_refused(tmp_path, capsys):
    (tmp_path / "validation.json").touch()
    assert validate.main(["--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_each_method_is_configured_so_that_its_commits_fall_where_its_arm_says():
    uniform = arm_of("layercheck_uniform", 15)
    assert uniform.begin_step % 15 == 10, "full events follow the warm-up of 10 steps"
    assert "checkpoint.settings.full_every=15" in uniform.settings
    assert arm_of("none", 20).interval_steps == NEVER


def test_the_whole_validation_over_runs_that_only_pretend(tmp_path, monkeypatch, capsys):
    """Both runs of each method, its costs, the table and the exit code; the real ones are in tests/e2e."""
    monkeypatch.setattr(validate, "FailingRun", PretendedRun)
    arguments = ["--methods", "layercheck", "none", "--out", str(tmp_path), "--minutes", "5"]
    assert validate.main(arguments) == 0
    content = json.loads((tmp_path / "validation.json").read_text())
    assert list(content["methods"]) == ["layercheck", "none"]
    ours = content["methods"]["layercheck"]
    assert ours["measured"]["kills_s"] == pytest.approx(content["planned_s"])
    assert 0.5 < ours["measured"]["ettr"] < 1
    assert abs(ours["difference_points"]) < 3
    assert json.loads((tmp_path / "layercheck" / "costs.json").read_text())["methods"]["layercheck"]["source"]
    assert "layercheck" in capsys.readouterr().out


def test_a_simulation_that_is_off_ends_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr(validate, "FailingRun", SlowToRecover)
    arguments = ["--methods", "layercheck", "--out", str(tmp_path), "--minutes", "5"]
    assert validate.main(arguments) == 1


class PretendedRun:
    """Steps of 2 s; recoveries take as long in the run with failures as in the one that gives the costs."""

    failing_recovery_s = RECOVERY_S

    def __init__(self, folder, config, settings, begin_step, seed):
        folder.mkdir(parents=True)
        arm = arm_of("none" if "checkpoint.method=none" in settings else "layercheck", 20)
        self._arm = arm
        self._recovery_s = self.failing_recovery_s if folder.name == "failures" else RECOVERY_S

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def time_recoveries(self, steady_steps, kills, steps_between, say):
        first_s = steady_steps * 2.5
        return self.kill_at([first_s + 40 * number for number in range(kills)], say)

    def kill_at(self, times_s, say):
        say(f"{len(times_s)} kills")
        return run_of(self._arm, tuple(times_s), recovery_s=self._recovery_s)


class SlowToRecover(PretendedRun):
    """The run with failures recovers much more slowly than the one that gave the costs."""

    failing_recovery_s = 20.0


def test_the_table_says_ratio_error_and_difference(tmp_path):
    measured = figures.Measured(0.7, 0.02, 2.0, (60.0, 120.0), (20, 22))
    row = Row(measured, figures.Simulated(0.725, 0.01), calibrated_t_iter_s=1.9)
    assert row.is_within(3.0)
    assert not row.is_within(2.0)
    said = describe({"layercheck": row})
    assert "70.00 +- 2.00" in said
    assert "+2.50" in said
    assert "run this again" not in said
    slowed = Row(measured, figures.Simulated(0.725, 0.01), calibrated_t_iter_s=1.7)
    assert "layercheck: a step took 1.700 s" in describe({"layercheck": slowed})
    write_json(tmp_path / "v.json", validate.QUICK, (60.0,), 3, {"layercheck": row})
    content = json.loads((tmp_path / "v.json").read_text())
    assert (content["mtbf_s"], content["seed"]) == (60, 3)
    assert content["methods"]["layercheck"]["difference_points"] == pytest.approx(2.5)
