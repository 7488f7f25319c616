"""[pure] From the recoveries of killed runs to figures: the truth, its ratio to the run without residuals.

Distance: mean |weight lost - weight restored| over all parameters, at one kill. All runs are killed after the
same steps, so ratios are of means over the kills, and their standard error is that of paired differences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

from app.measure.residuals.spec import Recovered

LOST, LOST_LESS = 0.20, 0.12
"""What is asked for at either limit of bytes: distance over that of the run without residuals."""


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes that a run committed after its base, full events aside."""

    versions: int
    residuals: int

    @property
    def total(self) -> int:
        """Both."""
        return self.versions + self.residuals


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One run; means are over its kills, ratios to the run without residuals.

    Attributes:
        distances: at each kill.
        distance_error: standard error of `distance_ratio`.
        bytes_ratio: of versions and residuals together.
        lost_steps, lost_drift: what the receipts say; the latter is None if one of them knows no movement.
        drift_over_distance: what they say over the truth.
        again_steps: steps that were run twice, over all kills.
    """

    distances: tuple[float, ...]
    distance: float
    distance_ratio: float
    distance_error: float
    bytes_versions: int
    bytes_residuals: int
    bytes_ratio: float
    lost_steps: float
    lost_steps_ratio: float
    lost_drift: float | None
    drift_over_distance: float | None
    max_age: int
    again_steps: int


def arm_figures(
    arm: Sequence[Recovered], written: Written, base: Sequence[Recovered], base_written: Written
) -> ArmFigures:
    """Figures of one run beside the one without residuals, kill by kill."""
    pairs = [(one.distance, other.distance) for one, other in zip(arm, base, strict=True)]
    assert [one.killed_at for one in arm] == [other.killed_at for other in base]
    ours, theirs = mean(one for one, _ in pairs), mean(other for _, other in pairs)
    ratio = ours / theirs
    rest = [one - ratio * other for one, other in pairs]
    steps, base_steps = mean(one.lost_steps for one in arm), mean(one.lost_steps for one in base)
    said = [one.lost_drift for one in arm if one.lost_drift is not None]
    drift = mean(said) if len(said) == len(arm) else None
    return ArmFigures(
        distances=tuple(one for one, _ in pairs),
        distance=ours,
        distance_ratio=ratio,
        distance_error=stdev(rest) / sqrt(len(rest)) / theirs,
        bytes_versions=written.versions,
        bytes_residuals=written.residuals,
        bytes_ratio=written.total / base_written.total,
        lost_steps=steps,
        lost_steps_ratio=steps / base_steps,
        lost_drift=drift,
        drift_over_distance=None if drift is None else drift / ours,
        max_age=max(one.max_age for one in arm),
        again_steps=sum(one.killed_at + 1 - one.resume_step for one in arm),
    )


def verdicts(arms: Mapping[str, ArmFigures], most_bytes: Mapping[float, float]) -> dict[str, bool]:
    """Whether any run has what is asked for.

    Args:
        arms: by name.
        most_bytes: limit of bytes -> largest part of the distance.
    """
    return {
        f"at most {lost:.0%} of the distance at no more than {limit:g} x the bytes": any(
            one.distance_ratio <= lost and one.bytes_ratio <= limit for one in arms.values()
        )
        for limit, lost in most_bytes.items()
    }


def needed(rows: Sequence[Mapping[str, Any]], lost: float) -> Mapping[str, Any] | None:
    """The cheapest point of the frontier that loses no more than a part, None if there is none."""
    enough = [row for row in rows if row["distance_share"] <= lost]
    return min(enough, key=lambda row: float(row["bytes_share"]), default=None)
