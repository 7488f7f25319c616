"""[pure] Vectorised engine: all stretches between failures of one seed at once.

A stretch of length u that begins with a recovery R holds n = floor((u - R - d)+ / c) commits that count,
which they do from d after their stall on, and (u - R)+ - n c seconds that are thrown away. Nothing else
carries over from stretch to stretch, but for commits that die with a node: a failure that destroys commits
takes (commits since the last such failure) mod `far_every` of them, because each such failure leaves the
count at a multiple.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulations.engines.booked import Booked
from simulations.failures import KINDS, Failures
from simulations.methods import Method

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches between failures.

    Attributes:
        booked: seconds by cause.
        commits: shape (failures + 1,), commits of each stretch in order; the last one ends at the horizon.
    """

    booked: Booked
    commits: Floats


def simulate(method: Method, failures: Failures, horizon_s: float, in_recovery: bool = True) -> Booked:
    """The numbers of `reference.simulate`, for the same arguments."""
    return simulate_segments(method, failures, horizon_s, in_recovery).booked


def simulate_segments(
    method: Method, failures: Failures, horizon_s: float, in_recovery: bool = True
) -> Segments:
    """The same, with the commits of every stretch."""
    recovery_s = _recovery_s(method, failures)
    length_s = failures.gaps_s
    if not in_recovery:
        length_s, recovery_s = _with_recoveries(length_s, recovery_s, horizon_s)
    count = len(length_s) - 1
    training_s = np.maximum(length_s - recovery_s, 0.0)
    commits = np.floor(np.maximum(training_s - method.delay_s, 0.0) / method.cycle_s)
    training_s -= commits * method.cycle_s
    num_commits, gone = int(commits.sum()), _gone(method, failures.kind[:count], commits)
    booked = Booked(
        useful_s=(num_commits - gone) * method.tau_s,
        stall_s=(num_commits - gone) * method.stall_s,
        rework_s=float(training_s[:-1].sum()) + gone * method.cycle_s,
        open_s=float(training_s[-1]),
        num_failures=count,
        num_commits=num_commits - gone,
        **_phases(method, failures, length_s, recovery_s),
    )
    return Segments(booked.check(horizon_s), commits)


def _recovery_s(method: Method, failures: Failures) -> Floats:
    """Repair and recovery at the beginning of each stretch; the first one has none."""
    recovery_s = np.zeros(len(failures.kind) + 1)
    total_s = np.array([recovery.total_s for recovery in method.recovery])
    np.add(total_s[failures.kind], failures.repair_s, out=recovery_s[1:])
    return recovery_s


def _with_recoveries(gaps_s: Floats, recovery_s: Floats, horizon_s: float) -> tuple[Floats, Floats]:
    """Productive gaps as wall-clock stretches, cut at the horizon."""
    length_s = gaps_s + recovery_s
    ends_s = np.cumsum(length_s)
    count = int(np.searchsorted(ends_s[:-1], horizon_s))
    length_s = length_s[: count + 1]
    length_s[-1] = horizon_s - (ends_s[count - 1] if count else 0.0)
    return length_s, recovery_s[: count + 1]


def _gone(method: Method, kind: npt.NDArray[np.int8], commits: Floats) -> int:
    """Commits that failures destroyed."""
    destroys = [index for index, name in enumerate(KINDS) if name in method.far_kinds]
    if not method.far_every or not destroys:
        return 0
    ends = np.flatnonzero(np.isin(kind, destroys)) + 1
    if not len(ends):
        return 0
    starts = np.concatenate([[0], ends[:-1]])
    return int((np.add.reduceat(commits[: ends[-1]], starts) % method.far_every).sum())


def _phases(method: Method, failures: Failures, length_s: Floats, recovery_s: Floats) -> dict[str, float]:
    """Seconds of all recoveries by phase; a recovery that is cut off gets as far as it gets."""
    count = len(length_s) - 1
    kind, repair_s, length_s = failures.kind[:count], failures.repair_s[:count], length_s[1:]
    is_cut = length_s < recovery_s[1:]
    whole = np.bincount(kind[~is_cut], minlength=len(KINDS))
    cut_kind, cut_s = kind[is_cut], length_s[is_cut]
    cut_repair_s = np.minimum(repair_s[is_cut], cut_s)
    seconds = {"repair_s": float(repair_s[~is_cut].sum() + cut_repair_s.sum())}
    left_s = cut_s - cut_repair_s
    for phase in ("detect_s", "restart_s", "load_s", "reconstruct_s"):
        phase_s = np.array([getattr(recovery, phase) for recovery in method.recovery])
        spent_s = np.minimum(phase_s[cut_kind], left_s)
        left_s = left_s - spent_s
        seconds[phase] = float(whole @ phase_s + spent_s.sum())
    return seconds
