"""`python -m simulations.validate --out DIR`: is the simulated ETTR the one that a real run comes to?

For each method two real runs on this machine, each on a private Ray head. The first gives the costs: a
stretch without failures, then some kills in a row. The second loses workers at random times, the same for all
methods; the engine then simulates the very kills that were delivered, with the costs of the first. Writes
`validation.json`, and below `<method>/` the costs and the logs. Needs the machine to itself: what else runs
on it slows one of the two runs. Linux, where the clocks of all processes agree.
"""

# ruff: noqa: T201
import argparse
import signal
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np

from app.config import load_config
from app.measure.failing import FailingRun
from layercheck.errors import ConfigError, LayerCheckError
from simulations.checks import positive
from simulations.failures import FailureModel, draw_failures
from simulations.validation.arms import CONFIG, Arm, arm_of
from simulations.validation.figures import MIN_KILLS, MIN_RECOVERIES, calibrate, measure, simulate_kills
from simulations.validation.result import Row, describe, write_json

METHODS = ("layercheck", "deepspeed", "dcp_async")
TOLERANCE_POINTS = 3.0
"""Largest difference between the simulated and the measured ETTR, in points of 100."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long the runs are.

    Attributes:
        minutes: of each run with failures.
        mtbf_s: mean time between them.
        recoveries: kills in a row for the costs of a recovery.
        steady_steps: steps without a failure for the costs of a step.
    """

    minutes: float
    mtbf_s: float
    recoveries: int
    steady_steps: int


USUAL = Length(minutes=15, mtbf_s=90, recoveries=6, steady_steps=121)
QUICK = Length(minutes=4, mtbf_s=60, recoveries=3, steady_steps=61)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: the arms, and the seconds at which each of them is to lose a worker."""

    arms: tuple[Arm, ...]
    length: Length
    times_s: tuple[float, ...]
    seed: int
    settings: tuple[str, ...]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 all within the tolerance, 1 not, or a run failed, 2 wrong input."""
    options = _parser().parse_args(argv)
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _leave)
    try:
        return _run(_plan(options), options.out)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.validate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", required=True, type=Path, help="folder for the results; new or empty")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help="`layercheck_uniform`, or any of the app"
    )
    parser.add_argument("--interval-steps", type=int, default=10, help="of methods that save at intervals")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} in place of {USUAL}")
    parser.add_argument("--minutes", type=float, help="of each run with failures")
    parser.add_argument("--mtbf-s", type=float, help="mean seconds between kills")
    parser.add_argument("--recoveries", type=int, help="kills in a row for the costs of one")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="key.path=value", help="settings of the run"
    )
    return parser


# ---------------------------------------------------------------- before anything starts


def _plan(options: argparse.Namespace) -> Plan:
    """Everything that was asked for, checked.

    Raises:
        ConfigError: names the value and the option.
    """
    if options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"out={options.out} is not empty: steps that lie there would be counted as well")
    length = _length(options)
    steps = int(positive("interval_steps", options.interval_steps))
    arms = tuple(arm_of(name, steps) for name in dict.fromkeys(options.methods))
    for arm in arms:
        load_config(CONFIG, (*arm.settings, *options.set))
    return Plan(arms, length, failure_times_s(length, options.seed), options.seed, tuple(options.set))


def _length(options: argparse.Namespace) -> Length:
    usual = QUICK if options.quick else USUAL
    given = {name: getattr(options, name) for name in ("minutes", "mtbf_s", "recoveries")}
    length = replace(usual, **{name: value for name, value in given.items() if value is not None})
    for name in given:
        positive(name, getattr(length, name))
    if length.recoveries < MIN_RECOVERIES:
        raise ConfigError(f"recoveries={length.recoveries} must be at least {MIN_RECOVERIES}, for a spread")
    return length


def failure_times_s(length: Length, seed: int) -> tuple[float, ...]:
    """Seconds at which workers are to be killed.

    Raises:
        ConfigError: there are fewer than two.
    """
    horizon_s = length.minutes * 60
    drawn = draw_failures(FailureModel(mtbf_s=length.mtbf_s), horizon_s, seed)
    times_s = tuple(float(second) for second in np.cumsum(drawn.gaps_s)[:-1])
    if len(times_s) < MIN_KILLS:
        raise ConfigError(
            f"minutes={length.minutes:g} at mtbf_s={length.mtbf_s:g} have {len(times_s)} failures with "
            f"seed={seed}, at least {MIN_KILLS} are needed: raise --minutes or take another --seed"
        )
    return times_s


# ---------------------------------------------------------------- the runs


def _run(plan: Plan, out: Path) -> int:
    print(f"{len(plan.times_s)} kills in {plan.times_s[-1] / 60:.1f} minutes for each method", flush=True)
    rows: dict[str, Row] = {}
    for arm in plan.arms:
        rows[arm.name] = _validate(arm, plan, out / arm.name)
        # After each method: what was measured outlives a failure of the next one.
        write_json(out / "validation.json", plan.length, plan.times_s, plan.seed, rows)
    print(describe(rows))
    return 0 if all(row.is_within(TOLERANCE_POINTS) for row in rows.values()) else 1


def _validate(arm: Arm, plan: Plan, folder: Path) -> Row:
    say, settings, length = partial(_say, arm.name), (*arm.settings, *plan.settings), plan.length
    with FailingRun(folder / "calibration", CONFIG, settings, arm.begin_step, plan.seed) as run:
        seen = run.time_recoveries(length.steady_steps, length.recoveries, arm.steps_between_kills, say)
    costs = calibrate(seen, arm)
    (folder / "costs.json").write_text(costs.model_dump_json(indent=2) + "\n")
    with FailingRun(folder / "failures", CONFIG, settings, arm.begin_step, plan.seed) as run:
        measured = measure(run.kill_at(plan.times_s, say))
    return Row(measured, simulate_kills(costs, arm, measured.kills_s), costs.t_iter_s)


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Lets the runs end their heads on a signal that would otherwise just end this process."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
