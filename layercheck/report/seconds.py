"""Where the seconds of a run went, attempt by attempt, from its metrics and receipts alone.

Every second is booked once, and the sum of all causes is the whole. A step whose row died with its worker
counts as a median one. What passed before the first step and after the last is in no store; `summary.json`
tells it for a run of one submission.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layercheck.receipt import RECOVERY_PHASES
from layercheck.report.lives import AttemptRow
from layercheck.report.tables import Columns

FIRST_STEP, USEFUL, AROUND = "first step", "useful", "around"
CAUSES = {
    "detect": "from the last sign of life to the news of the failure",
    "reschedule": "until the workers ran again",
    "wait": "another submission was watched before it was taken over",
    "plan": "the recovery plan",
    "fetch": "versions read and checked",
    "install": "put into the engine",
    FIRST_STEP: "what the first step of an attempt took beyond a median one",
    USEFUL: "steps that count, outside of stalls",
    "stall": "training waited for copies or for the storage",
    "taken back": "steps that a later attempt took back",
    AROUND: "before the first step and after the last: start, model, data, end",
}
"""Cause -> what it is. Of one attempt they pass in this order."""
OUTAGE = tuple(
    cause for phase in RECOVERY_PHASES if (cause := phase.removesuffix("_s").replace("_", " ")) != FIRST_STEP
)
"""Causes that a receipt tells; its first step is among the rows of the metrics, too."""


_ABSENT = {"wait": 0.0}
"""What a receipt means that does not have a phase: older ones have the wait in `plan_s`."""


@dataclass(frozen=True, slots=True)
class AttemptSeconds:
    """One attempt.

    Attributes:
        by_cause: seconds of every cause but `around`; 0 for one that is not known.
        estimated_steps: steps that had no row.
        untimed: phases of its recovery that nobody timed, as when the coordinator was lost as well.
    """

    number: int
    by_cause: dict[str, float]
    estimated_steps: int
    untimed: tuple[str, ...]

    @property
    def total_s(self) -> float:
        """From the failure before this attempt to its own end."""
        return sum(self.by_cause.values())

    @property
    def outage_s(self) -> float:
        """From the failure before it to its first step."""
        return sum(self.by_cause[cause] for cause in OUTAGE)


@dataclass(frozen=True, slots=True)
class Seconds:
    """The whole run. `around_s` and `median_s` are None where they are not known."""

    attempts: tuple[AttemptSeconds, ...]
    median_s: float | None
    around_s: float | None

    @property
    def by_cause(self) -> dict[str, float]:
        """Seconds of each cause that is known, in order."""
        sums = {name: sum(a.by_cause[name] for a in self.attempts) for name in CAUSES if name != AROUND}
        return sums if self.around_s is None else {**sums, AROUND: self.around_s}

    @property
    def total_s(self) -> float:
        """All seconds known."""
        return sum(self.by_cause.values())

    @property
    def ettr(self) -> float | None:
        """Useful over all seconds known: the effective training time ratio so far; None without any."""
        return self.by_cause[USEFUL] / self.total_s if self.total_s > 0 else None

    @property
    def estimated_steps(self) -> int:
        """Steps without a row."""
        return sum(attempt.estimated_steps for attempt in self.attempts)

    @property
    def untimed(self) -> dict[str, int]:
        """Phase -> recoveries of which it is not known; its seconds are in no sum."""
        return dict(Counter(phase for attempt in self.attempts for phase in attempt.untimed))


def book(
    lives: Sequence[AttemptRow], metrics: Columns, kept: Columns, limits: dict[int, int], wall_s: float | None
) -> Seconds:
    """Books the seconds of a run.

    Args:
        lives: its attempts, in order.
        metrics: `step`, `step_s`, `stall_s` of every step that was run.
        kept: the rows among them that no later attempt took back.
        limits: attempt -> newest step of it that counts.
        wall_s: seconds of the one submission there was; None if it is not known, or there were several.
    """
    median_s = float(np.nanmedian(kept["step_s"] - kept["stall_s"])) if len(kept) else None
    attempts = tuple(_attempt(life, metrics, kept, limits[life.number], median_s or 0.0) for life in lives)
    known_s = sum(attempt.total_s for attempt in attempts)
    return Seconds(attempts, median_s, None if wall_s is None else max(0.0, wall_s - known_s))


def _attempt(
    life: AttemptRow, metrics: Columns, kept: Columns, limit: int, median_s: float
) -> AttemptSeconds:
    ran = metrics.where(metrics.attempt == life.number)
    mine = kept.where(kept.attempt == life.number)
    net_s = np.nan_to_num(mine["step_s"] - mine["stall_s"])
    is_first = mine["step"] == life.r_b + 1
    extra_s = float(np.maximum(net_s[is_first] - median_s, 0.0).sum())
    missing = max(0, min(life.reached, limit) - life.r_b - len(mine))
    receipt = life.receipt or {}
    return AttemptSeconds(
        life.number,
        {
            **{cause: float(receipt.get(f"{cause}_s") or 0.0) for cause in OUTAGE},
            FIRST_STEP: extra_s,
            USEFUL: float(net_s.sum()) - extra_s + missing * median_s,
            "stall": float(np.nansum(mine["stall_s"])),
            "taken back": float(np.nansum(ran["step_s"]) - np.nansum(mine["step_s"])),
        },
        missing,
        tuple(
            cause for cause in OUTAGE if life.r_b and receipt.get(f"{cause}_s", _ABSENT.get(cause)) is None
        ),
    )
