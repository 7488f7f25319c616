"""From logged steps and kills to costs, to the measured ETTR, and to the simulated one. No clock, no files.

A step's useful time is its duration without the stall that its session told; everything else between two
steps of one life is overhead. Mean durations, not medians: how a machine scatters is no overhead of a method,
and no engine knows of it. ETTR = useful time of the steps that were kept / elapsed time, over the cycles from
kill to kill: at a kill it is decided what was kept, so nothing is left open at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from app.measure.failing import SETTLE_STEPS, Failed, Life
from app.step_log import LoggedStep
from layercheck.errors import LayerCheckError
from simulations.costs import Costs, MethodCosts, RecoveryCosts
from simulations.engines.segments import simulate
from simulations.failures import FailureModel, failures_at
from simulations.methods import Method
from simulations.validation.arms import Arm

MIN_KILLS = MIN_RECOVERIES = 2
"""With one there is no spread, hence no standard error."""
_AFTER_S = 1e-6
"""The simulated time ends so much after the last kill."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run with failures came to.

    Attributes:
        ettr: useful time of kept steps / elapsed time.
        standard_error: of `ettr`, as a ratio over the cycles between kills.
        t_iter_s: useful seconds of a step.
        kills_s: seconds after the watch began.
        kept_steps: steps of each cycle that the recovery after it kept.
    """

    ettr: float
    standard_error: float
    t_iter_s: float
    kills_s: tuple[float, ...]
    kept_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the engine says of the same kills; `standard_error` comes from the spread of the recoveries."""

    ettr: float
    standard_error: float


# ---------------------------------------------------------------- a calibration run


def calibrate(seen: Failed, arm: Arm) -> Costs:
    """Costs of one method from a run of its own.

    Recovery: from a kill to the end of the first `SETTLE_STEPS` steps, less what so many steps take else.

    Raises:
        LayerCheckError: there is no recovery, or no step without a failure near.
    """
    steady = _steady(seen)
    t_iter_s = _useful_s(steady)
    cycle_s = _cycle_s(steady, arm.interval_steps)
    recoveries_s = [
        life[SETTLE_STEPS - 1].end_s - kill_s - SETTLE_STEPS * cycle_s
        for kill_s, life in _recovered(seen)
        if len(life) >= SETTLE_STEPS
    ]
    if len(recoveries_s) < MIN_RECOVERIES:
        raise LayerCheckError(
            f"{arm.name}: {len(recoveries_s)} recoveries were timed, at least {MIN_RECOVERIES} are needed"
        )
    every_step = arm.interval_steps == 1
    return Costs(
        format_version=1,
        title=f"calibration of {arm.name}",
        t_iter_s=t_iter_s,
        methods={
            arm.name: MethodCosts(
                source="measured",
                commits="every_step" if every_step else "interval",
                stall_s=max(0.0, cycle_s - t_iter_s) * arm.interval_steps,
                interval_steps=arm.interval_steps,
                recovery=RecoveryCosts(restart_s=max(0.0, fmean(recoveries_s))),
                measured={"recoveries": float(len(recoveries_s)), "steady_steps": float(len(steady))},
                spread={"recovery_s": stdev(recoveries_s)},
                note="recovery in one piece, from the kill to a step that takes as long as others",
            )
        },
    )


def _steady(seen: Failed) -> Life:
    """Steps between the beginning of the watch and the first kill."""
    steps = tuple(
        step for step in seen.lives[0] if step.step > seen.begin_step and step.end_s < seen.kills_s[0]
    )
    if len(steps) < 2:
        raise LayerCheckError(f"{len(steps)} steps were timed without a failure, at least 2 are needed")
    return steps


def _cycle_s(steady: Life, interval_steps: int) -> float:
    """From a step's beginning to the next's, over whole intervals: each with its share of the stall."""
    count = len(steady) - 1
    count -= count % interval_steps if count > interval_steps else 0
    return (steady[count].begin_s - steady[0].begin_s) / count


def _useful_s(steps: Sequence[LoggedStep]) -> float:
    return fmean(step.end_s - step.begin_s - step.stall_s for step in steps)


def _recovered(seen: Failed) -> Iterator[tuple[float, Life]]:
    """Each kill with the life that it was followed by; a kill that another one followed sooner has none."""
    for kill_s, next_s in pairwise((*seen.kills_s, float("inf"))):
        for life in seen.lives:
            if kill_s < life[0].begin_s < next_s:
                yield kill_s, life
                break


# ---------------------------------------------------------------- a run with failures


def measure(seen: Failed) -> Measured:
    """The measured ETTR of a run that made a step after its last kill.

    Standard error of a ratio of sums: sqrt(n / (n - 1) sum (u_i - ETTR d_i)^2) / sum d_i over n cycles.

    Raises:
        LayerCheckError: fewer than two kills.
    """
    if len(seen.kills_s) < MIN_KILLS:
        raise LayerCheckError(f"{len(seen.kills_s)} kills hit the run, at least {MIN_KILLS} are needed")
    edges_s = np.array([seen.begin_s, *seen.kills_s])
    begun = [seen.begin_step + 1, *(_first_step_after(seen, kill_s) for kill_s in seen.kills_s)]
    kept = tuple(int(step) for step in np.diff(begun))
    t_iter_s = _useful_s(_settled(seen))
    useful_s, elapsed_s = np.array(kept) * t_iter_s, np.diff(edges_s)
    ettr = float(useful_s.sum() / elapsed_s.sum())
    rest_s, n = useful_s - ettr * elapsed_s, len(kept)
    error = sqrt(n / (n - 1) * float(rest_s @ rest_s)) / float(elapsed_s.sum())
    kills_s = tuple(float(kill_s) - seen.begin_s for kill_s in seen.kills_s)
    return Measured(ettr, error, t_iter_s, kills_s, kept)


def _settled(seen: Failed) -> list[LoggedStep]:
    """Steps under watch that take as long as others; all of them if no life got so far."""
    watched = [[step for step in life if step.begin_s >= seen.begin_s] for life in seen.lives]
    settled = [step for life in watched for step in life[SETTLE_STEPS:]]
    return settled or [step for life in watched for step in life]


def _first_step_after(seen: Failed, kill_s: float) -> int:
    """The step at which training went on: what lies before it was kept."""
    return next(life[0].step for life in seen.lives if life[0].begin_s > kill_s)


# ---------------------------------------------------------------- the same kills, simulated


def simulate_kills(costs: Costs, arm: Arm, kills_s: Sequence[float]) -> Simulated:
    """ETTR of the engine with calibrated costs for kills at these seconds; it ends with the last kill."""
    cost = costs.methods[arm.name]
    method = cost.method(arm.name, costs.t_iter_s)
    horizon_s = kills_s[-1] + _AFTER_S
    failures = failures_at(np.asarray(kills_s), horizon_s, FailureModel(mtbf_s=horizon_s / len(kills_s)))
    ettr = simulate(method, failures, horizon_s).ettr
    recovery_error_s = cost.spread["recovery_s"] / sqrt(cost.measured["recoveries"])
    return Simulated(ettr, _recovery_share(method, kills_s) * recovery_error_s)


def _recovery_share(method: Method, kills_s: Sequence[float]) -> float:
    """ETTR that a second of recovery costs: one in each cycle but the first, less the stall's part."""
    return (len(kills_s) - 1) / kills_s[-1] * method.tau_s / method.cycle_s
