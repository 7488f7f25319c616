"""[pure] From outcomes to the figures of `fidelity.json`.

The final loss of a run is the mean held-out loss of its last evaluations. `final_loss_deviation` = final loss
of the run that recovered / that of the run of the same seed that never failed, minus 1: above 0 is worse.
`fraction_of_improvement_lost` = difference of both / (loss before fine-tuning - final loss of the latter).
`seed_spread` = standard deviation of the final loss over the seeds, without failures / its mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

import numpy as np
import numpy.typing as npt

from app.measure.fidelity.spec import Outcome

PAPER_DEVIATION = 0.0054
AIM_DEVIATION = 0.0025
MOST_LOST = 0.03
LEAST_IMPROVEMENT = 0.10


@dataclass(frozen=True, slots=True)
class Reference:
    """The runs without a failure, one for each seed.

    Attributes:
        start_loss: mean held-out loss before fine-tuning.
        final_loss, accuracy: of each seed.
        improvement: (start - mean final loss) / start.
        seed_spread, seed_range: standard deviation, and largest minus smallest, over the mean final loss.
    """

    start_loss: float
    final_loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    improvement: float
    seed_spread: float
    seed_range: float
    accuracy_spread: float


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm against its reference; tuples have one entry for each seed.

    Attributes:
        final_loss_deviation: relative, paired by seed.
        fraction_of_improvement_lost: mean of `fractions_lost`.
        lost_steps: size-weighted optimizer steps lost, summed over the recoveries of a run.
        weighted_age: mean over recoveries and seeds.
        jump: mean rise of the held-out loss by a recovery, relative to the loss before it.
        accuracy_deviation: paired by seed, absolute.
    """

    failures: tuple[tuple[int, ...], ...]
    final_loss: tuple[float, ...]
    final_loss_deviation: tuple[float, ...]
    mean_deviation: float
    largest_deviation: float
    deviation_error: float
    fractions_lost: tuple[float, ...]
    fraction_of_improvement_lost: float
    lost_steps: tuple[float, ...]
    weighted_age: float
    max_age: int
    jump: float
    accuracy: tuple[float, ...]
    accuracy_deviation: tuple[float, ...]
    bytes_written: float


def final_loss(outcome: Outcome) -> float:
    """Mean held-out loss of the last evaluations."""
    return mean(loss for _, loss in outcome.evaluations[-outcome.spec.length.num_last :])


def spread_of(losses: Sequence[float]) -> float:
    """Standard deviation of final losses of several seeds over their mean; at least two."""
    return stdev(losses) / mean(losses)


def reference_of(free: Sequence[Outcome]) -> Reference:
    """Figures of the runs without a failure; at least two, of different seeds."""
    losses = tuple(final_loss(one) for one in free)
    accuracy = tuple(one.accuracy for one in free)
    start = mean(one.evaluations[0][1] for one in free)
    return Reference(
        start_loss=start,
        final_loss=losses,
        accuracy=accuracy,
        improvement=(start - mean(losses)) / start,
        seed_spread=spread_of(losses),
        seed_range=(max(losses) - min(losses)) / mean(losses),
        accuracy_spread=stdev(accuracy),
    )


def arm_figures(recovered: Sequence[Outcome], free: Sequence[Outcome]) -> ArmFigures:
    """Figures of one arm.

    Args:
        recovered: its runs, in the order of the seeds.
        free: those without a failure, of the same seeds.
    """
    pairs = list(zip(recovered, free, strict=True))
    losses = [(final_loss(one), final_loss(other)) for one, other in pairs]
    starts = [other.evaluations[0][1] for _, other in pairs]
    deviation = tuple(one / other - 1 for one, other in losses)
    lost = tuple((one - other) / (start - other) for (one, other), start in zip(losses, starts, strict=True))
    recoveries = [recovery for one in recovered for recovery in one.recoveries]
    return ArmFigures(
        failures=tuple(tuple(recovery.step for recovery in one.recoveries) for one in recovered),
        final_loss=tuple(one for one, _ in losses),
        final_loss_deviation=deviation,
        mean_deviation=mean(deviation),
        largest_deviation=max(abs(value) for value in deviation),
        deviation_error=stdev(deviation) / sqrt(len(deviation)),
        fractions_lost=lost,
        fraction_of_improvement_lost=mean(lost),
        lost_steps=tuple(sum(recovery.lost_steps for recovery in one.recoveries) for one in recovered),
        weighted_age=mean(recovery.weighted_age for recovery in recoveries),
        max_age=max(recovery.max_age for recovery in recoveries),
        jump=mean(recovery.loss_after / recovery.loss_before - 1 for recovery in recoveries),
        accuracy=tuple(one.accuracy for one in recovered),
        accuracy_deviation=tuple(one.accuracy - other.accuracy for one, other in pairs),
        bytes_written=mean(one.bytes_written for one in recovered),
    )


def is_worse(arm: ArmFigures, than: ArmFigures) -> bool:
    """True if the paired difference of final losses is above 0 by more than two standard errors."""
    gaps = [
        one - other for one, other in zip(arm.final_loss_deviation, than.final_loss_deviation, strict=True)
    ]
    return mean(gaps) > 2 * stdev(gaps) / sqrt(len(gaps))


def verdicts(reference: Reference, arm: ArmFigures) -> dict[str, bool]:
    """What is asked of an arm, and whether it holds."""
    return {
        f"fine-tuning lowers the held-out loss by {LEAST_IMPROVEMENT:.0%}": (
            reference.improvement >= LEAST_IMPROVEMENT
        ),
        f"no deviation above {PAPER_DEVIATION:.2%} (the paper)": arm.largest_deviation <= PAPER_DEVIATION,
        f"no deviation above {AIM_DEVIATION:.2%} (the aim)": arm.largest_deviation <= AIM_DEVIATION,
        f"at most {MOST_LOST:.0%} of the improvement lost": arm.fraction_of_improvement_lost <= MOST_LOST,
        "no deviation above the seed spread": arm.largest_deviation <= reference.seed_spread,
        "benchmark scores within their seed spread": (
            abs(mean(arm.accuracy_deviation)) <= reference.accuracy_spread
        ),
    }


def accumulated(delta: npt.NDArray[np.float64], written: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Drift of each layer since its newest version (paper, figure 2).

    Args:
        delta: shape (steps, layers), normalised update of each step.
        written: shape (steps, layers), the layer was saved after this step.

    Returns:
        Shape (steps, layers): the sum up to each step; it starts again at 0 after a save.
    """
    drift = np.empty_like(delta)
    total = np.zeros(delta.shape[1])
    for step, (moved, saved) in enumerate(zip(delta, written, strict=True)):
        total = total + moved
        drift[step] = total
        total = np.where(saved, 0.0, total)
    return drift
