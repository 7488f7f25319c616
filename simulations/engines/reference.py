"""[pure] Event-driven reference engine: one event after the other, to check the fast one against.

States, in the order in which a recovery walks through them:
1. repair (only if the failure model draws one), 2. detect, 3. restart, 4. load, 5. reconstruct,
6. training: whole steps, `interval_steps` of them and one stall make a commit, which counts after its delay.
A failure in any state ends it, throws away what was done since the last commit, and begins again at 1.
"""

from dataclasses import dataclass, field

from simulations.engines.booked import Booked
from simulations.failures import KINDS, Failures
from simulations.methods import Method

_PHASES = ("repair_s", "detect_s", "restart_s", "load_s", "reconstruct_s")


@dataclass(slots=True)
class _Clock:
    """Books seconds by cause."""

    seconds: dict[str, float] = field(default_factory=dict)

    def book(self, cause: str, seconds: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


def simulate(method: Method, failures: Failures, horizon_s: float, in_recovery: bool = True) -> Booked:
    """Runs one method through one list of failures.

    Args:
        method: the method.
        failures: gaps, repair times and kinds; see `Failures`.
        horizon_s: seconds simulated.
        in_recovery: gaps are wall-clock times; else they count productive seconds only.
    """
    clock, now_s = _Clock(), 0.0
    commits = far = committed_now = num_failures = 0
    for index, gap_s in enumerate(failures.gaps_s):
        phases = _phases(method, failures, index - 1) if index else []
        recovery_s = sum(seconds for _, seconds in phases)
        end_s = min(horizon_s, now_s + gap_s + (0.0 if in_recovery or not index else recovery_s))
        is_failure = index < len(failures.kind) and end_s < horizon_s
        committed_now = _segment(clock, method, phases, end_s - now_s, is_failure)
        commits += committed_now
        now_s = end_s
        if not is_failure:
            break
        num_failures += 1
        if method.far_every and KINDS[failures.kind[index]] in method.far_kinds:
            # Commits since the far copy are gone: the steps were done for nothing.
            gone = (commits - far) % method.far_every
            commits -= gone
            far = commits
            clock.book("useful_s", -gone * method.tau_s)
            clock.book("stall_s", -gone * method.stall_s)
            clock.book("rework_s", gone * method.cycle_s)
    booked = Booked(**clock.seconds, num_failures=num_failures, num_commits=commits)
    return booked.check(horizon_s)


def _phases(method: Method, failures: Failures, failure: int) -> list[tuple[str, float]]:
    recovery = method.recovery[failures.kind[failure]]
    seconds = (
        float(failures.repair_s[failure]),
        recovery.detect_s,
        recovery.restart_s,
        recovery.load_s,
        recovery.reconstruct_s,
    )
    return list(zip(_PHASES, seconds, strict=True))


def _segment(
    clock: _Clock, method: Method, phases: list[tuple[str, float]], length_s: float, is_failure: bool
) -> int:
    """One stretch between two failures; returns its commits."""
    left_s = length_s
    for cause, seconds in phases:
        spent_s = min(seconds, left_s)
        clock.book(cause, spent_s)
        left_s -= spent_s
    training_s, commits = left_s, 0
    while training_s >= (commits + 1) * method.cycle_s + method.delay_s:
        for _ in range(method.interval_steps):
            clock.book("useful_s", method.t_iter_s)
        clock.book("stall_s", method.stall_s)
        commits += 1
    clock.book("rework_s" if is_failure else "open_s", training_s - commits * method.cycle_s)
    return commits
