"""[pure] Fine-tuning runs in pairs, without a failure and killed, and whether the two end alike.

Final loss: mean held-out loss of the model that a run leaves. The noise is its standard deviation over the
seeds of the runs without a failure, relative to their mean, as in `simulations.fidelity`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from app.measure.memory.spec import KilledRun, Outcome
from simulations.fidelity.figures import spread_of
from simulations.memory.arms import checkpoint_of
from simulations.memory.figures import NO_BAD, NOTHING_LEFT

KILLS = 3
GAP = 10
"""Steps from one kill to the next: the run has just got beyond where it was."""
_FROM, _UNTIL = 0.3, 2 / 3
"""Parts of the run between which it is killed; then it ends as one that nobody disturbs."""
WITHIN_NOISE = (
    "killed three times at the default threshold, a fine-tuned model ends within the noise of the runs "
    "without a failure"
)
Pairs = Sequence[tuple[Outcome, Outcome]]
"""Without a failure, and killed; of one seed each."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How long the runs are; `seeds` of the order of the data, one pair of runs for each.

    Of three seeds the spread is known badly: the fidelity experiments have five, too.
    """

    base_steps: int
    warmup_steps: int
    steps: int
    seeds: int


FULL = Extent(base_steps=1000, warmup_steps=40, steps=400, seeds=5)
QUICK = Extent(base_steps=60, warmup_steps=16, steps=120, seeds=2)


def tuned_pairs(extent: Extent) -> list[tuple[KilledRun, KilledRun]]:
    """The runs; those of a pair differ in nothing but the kills."""
    return [
        (_run(extent, seed, ()), _run(extent, seed, cascade(extent, seed))) for seed in range(extent.seeds)
    ]


def cascade(extent: Extent, seed: int) -> tuple[int, ...]:
    """The steps after which a worker is killed, at a random moment of the next one."""
    latest = int(_UNTIL * extent.steps) - (KILLS - 1) * GAP
    first = random.Random(seed).randint(round(_FROM * extent.steps), latest)
    return tuple(first + number * GAP for number in range(KILLS))


def _run(extent: Extent, seed: int, kills: tuple[int, ...]) -> KilledRun:
    return KilledRun(
        name=f"tuned-{seed}-{'killed' if kills else 'undisturbed'}",
        kills=kills,
        steps=extent.steps,
        checkpoint=checkpoint_of(extent.warmup_steps) | {"memory": {"enabled": True}},
        seed=seed,
        run_seed=seed,
        base_steps=extent.base_steps,
    )


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Both runs of one seed.

    Attributes:
        undisturbed, killed: final loss.
        deviation: killed / undisturbed - 1.
        killed_after, lost_steps, weighted_age, max_age: of each kill; lost steps and ages are size-weighted.
        bad: checksums that were wrong.
        left: segment folders of both in shared memory after the end.
    """

    seed: int
    undisturbed: float
    killed: float
    deviation: float
    killed_after: tuple[int, ...]
    lost_steps: tuple[float, ...]
    weighted_age: tuple[float, ...]
    max_age: tuple[int, ...]
    bad: int
    left: int
    median_step_s: float


@dataclass(frozen=True, slots=True)
class TunedFigures:
    """All pairs.

    Attributes:
        base_loss: held-out loss before the fine-tuning.
        spread: standard deviation of the final loss over the seeds without a failure, relative.
        largest_deviation: of one pair, without its sign.
    """

    base_loss: float
    final_loss: float
    pairs: tuple[PairFigures, ...]
    mean_deviation: float
    largest_deviation: float
    spread: float


def tuned_figures(pairs: Pairs) -> TunedFigures:
    """Figures of at least two pairs of different seeds."""
    rows = tuple(_pair_figures(*pair) for pair in pairs)
    losses = [row.undisturbed for row in rows]
    return TunedFigures(
        base_loss=_held_out(pairs[0][0])[0],
        final_loss=mean(losses),
        pairs=rows,
        mean_deviation=mean(row.deviation for row in rows),
        largest_deviation=max(abs(row.deviation) for row in rows),
        spread=spread_of(losses),
    )


def _pair_figures(undisturbed: Outcome, killed: Outcome) -> PairFigures:
    loss, after = _held_out(undisturbed)[1], _held_out(killed)[1]
    found = killed.recoveries
    return PairFigures(
        seed=killed.run.run_seed,
        undisturbed=loss,
        killed=after,
        deviation=after / loss - 1,
        killed_after=tuple(one.killed_at for one in found),
        lost_steps=tuple(one.lost_steps for one in found),
        weighted_age=tuple(one.weighted_age for one in found),
        max_age=tuple(one.max_age for one in found),
        bad=sum(one.bad for one in found),
        left=undisturbed.left + killed.left,
        median_step_s=undisturbed.median_step_s,
    )


def _held_out(outcome: Outcome) -> tuple[float, float]:
    assert outcome.held_out is not None, "a fine-tuning is evaluated"
    return outcome.held_out


def tuned_verdicts(figures: TunedFigures) -> dict[str, bool]:
    """What is asked for -> whether it holds."""
    return {
        WITHIN_NOISE: abs(figures.mean_deviation) <= figures.spread,
        NO_BAD: not any(pair.bad for pair in figures.pairs),
        NOTHING_LEFT: not any(pair.left for pair in figures.pairs),
    }
