"""[pure] From the recoveries of killed runs to figures, and whether what was asked for holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from app.measure.memory.spec import Outcome, Recovered
from simulations.memory.arms import CASCADE, CLUSTER, EVERY, NODE, WORKER

LOST_STEPS = 5.0
"""Size-weighted, after the death of a worker."""
MORE_FOR_A_NODE = 5.0
NO_BAD, NOTHING_LEFT = "no checksum was wrong", "nothing is left in shared memory"


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One run. Lost steps are size-weighted.

    Attributes:
        again_steps: steps that were run twice, over all kills.
        sources: tier -> layers that came from it, over all kills; `residual` those whose weights are newer.
        loss: mean over the last steps; `loss_ratio` to the run without a failure, at the same steps.
        is_exact: the same losses and the same state at the end, to the last bit.
        left: segment folders in shared memory after the end.
    """

    kills: int
    lost_steps: tuple[float, ...]
    lost_mean: float
    lost_max: float
    max_age: int
    weighted_age: float
    again_steps: int
    sources: dict[str, int]
    bad: int
    loss: float
    loss_ratio: float
    is_exact: bool
    left: int
    median_step_s: float


def arm_figures(run: Outcome, undisturbed: Outcome) -> ArmFigures:
    """Figures of one run beside the one without a failure."""
    found = run.recoveries
    lost = tuple(one.lost_steps for one in found)
    loss = mean(run.losses)
    return ArmFigures(
        kills=len(found),
        lost_steps=lost,
        lost_mean=mean(lost) if lost else 0.0,
        lost_max=max(lost, default=0.0),
        max_age=max((one.max_age for one in found), default=0),
        weighted_age=mean(one.weighted_age for one in found) if found else 0.0,
        again_steps=sum(max(0, one.killed_at + 1 - one.resume_step) for one in found),
        sources=_sources(found),
        bad=sum(one.bad for one in found),
        loss=loss,
        loss_ratio=loss / mean(undisturbed.losses),
        is_exact=(run.losses, run.state) == (undisturbed.losses, undisturbed.state),
        left=run.left,
        median_step_s=run.median_step_s,
    )


def _sources(found: Sequence[Recovered]) -> dict[str, int]:
    counts = Counter(source for one in found for source in one.sources.values())
    return dict(counts) | {"residual": sum(len(one.residuals) for one in found)}


def verdicts(arms: Mapping[str, ArmFigures], outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    """What is asked for -> whether it holds."""
    worker, every, node, cluster = arms[WORKER], arms[EVERY], arms[NODE], arms[CLUSTER]
    limit = LOST_STEPS + MORE_FOR_A_NODE
    has_peer = node.sources.get("peer", 0) > 0
    has_no_memory = set(cluster.sources) == {"storage", "residual"}
    is_fresh = all(one.max_age == 0 for one in outcomes[CASCADE].recoveries)
    return {
        f"a killed worker costs at most {LOST_STEPS:g} steps in the mean": worker.lost_mean <= LOST_STEPS,
        "copied at every step, no version is older than a step": every.max_age <= 1,
        f"a lost node costs at most {limit:g} steps, by its replica": has_peer and node.lost_max <= limit,
        "a killed cluster has the storage alone, with residuals": has_no_memory
        and cluster.sources["residual"] > 0,
        "three kills with all ages 0 end bit-identical": is_fresh and arms[CASCADE].is_exact,
        NO_BAD: not any(arm.bad for arm in arms.values()),
        NOTHING_LEFT: not any(arm.left for arm in arms.values()),
    }


def both(verdicts: Mapping[str, bool], others: Mapping[str, bool]) -> dict[str, bool]:
    """All of them; what both are about holds if it holds in both."""
    return {**verdicts, **{text: held and verdicts.get(text, True) for text, held in others.items()}}


def by_layer(run: Outcome) -> dict[str, dict[str, Any]]:
    """Layer -> mean and largest steps lost, over the kills of a run."""
    names = run.recoveries[0].lost if run.recoveries else {}
    lost = {name: [one.lost[name] for one in run.recoveries] for name in names}
    return {name: {"mean": mean(steps), "max": max(steps)} for name, steps in lost.items()}
