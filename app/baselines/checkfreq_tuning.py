"""[pure] How CheckFreq chooses the interval between two checkpoints, and widens it while training goes on."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured before the first overlapped checkpoint; seconds.

    Attributes:
        step_s: mean of a step without checkpoints (t_i).
        snapshot_s: the whole copy into host memory, whatever of it a step could hide (the stall, T_c).
        full_s: a whole checkpoint, from the copy to the durable commit (T_f).
    """

    step_s: float
    snapshot_s: float
    full_s: float


def shortest_interval(profile: Profile, max_overhead: float) -> int:
    """Steps k = max(ceil((T_f - stall) / t_i), ceil(stall / (p t_i)), 1) (FAST'21, section 4.3).

    The first term lets a checkpoint become durable before the next one begins; the second keeps the stall,
    at its worst, within the share `max_overhead` (p) of the steps between two.
    """
    hidden_s = profile.full_s - profile.snapshot_s
    budget_s = max_overhead * profile.step_s
    return max(ceil(hidden_s / profile.step_s), ceil(profile.snapshot_s / budget_s), 1)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The interval now, and whether it is still watched. The same on every rank: rank 0 decides.

    Attributes:
        interval_steps: k; it never falls.
        step_s: t_i that the overhead is measured against; 0 if it was never profiled.
        watching: whether the next window counts.
    """

    interval_steps: int
    step_s: float = 0.0
    watching: bool = False

    @classmethod
    def of(cls, profile: Profile, max_overhead: float) -> Self:
        """The interval that a profile gives; windows are watched from here on."""
        return cls(shortest_interval(profile, max_overhead), profile.step_s, watching=True)

    def after_window(self, window_s: float, max_overhead: float, dynamic: bool) -> Self:
        """After `interval_steps` steps that took `window_s`, checkpoints included.

        Over budget the interval grows by 2. Within it, watching ends unless `dynamic`.
        """
        if not self.watching:
            return self
        expected_s = self.interval_steps * self.step_s
        if (window_s - expected_s) / expected_s > max_overhead:
            return replace(self, interval_steps=self.interval_steps + 2)
        return replace(self, watching=dynamic)

    def to_state(self) -> dict[str, Any]:
        """JSON values for a commit: a run that is recovered does not profile again."""
        return {"interval_steps": self.interval_steps, "step_s": self.step_s, "watching": self.watching}
