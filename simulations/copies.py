"""Where the newest copy of each layer is after a failure, and what a composite recovery from it loses.

Tiers are places for copies: the storage, its residuals, the memory of a node, that of a peer. A failure takes
away what lies in tiers that do not survive its kind; each layer comes back from the newest copy that is left.

Progress of a layer is the number of steps that its weights carry. A step adds one. A recovery gives back what
the copy carried when it was taken, which is less than its step number where earlier recoveries had lost some.
What a failure loses is the difference, so all failures together lose no more than was run, and what memory
gave back is lost after all if a larger failure comes before the storage has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
import numpy.typing as npt

from simulations.failures import KINDS, Kind
from simulations.schedules import Schedule, age_survival

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_PHASES, _SAMPLE = 10, 11
"""Streams of a seed, apart from those of the failures."""
_LEAD = 32
"""Failures before a sample that are simulated with it: the copies of its first ones are from there."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Copies in one place.

    Attributes:
        name: of the place.
        schedule: when each layer is copied there.
        survives: kinds of failure that leave the copies there.
        counts_from_storage: a copy is a difference from what the storage gave back. After a recovery from
            memory there are none of a layer before its next version (`docs/explanation/memory-tier.md`).
    """

    name: str
    schedule: Schedule
    survives: tuple[Kind, ...] = KINDS
    counts_from_storage: bool = False


@dataclass(frozen=True, slots=True)
class _Copies:
    """The newest copy at each failure. Both of shape (layers, failures).

    Attributes:
        step: of the copy.
        stretch: in which it was made, counted from 0; -1 where there is only what the first one began with.
    """

    step: Floats
    stretch: Ints


def lost_steps(
    tiers: Sequence[Tier], stretches: Floats, kinds: npt.NDArray[np.int8], seed: int, most: int
) -> Floats:
    """Size-weighted lost steps of a sample of failures.

    Drift is carried over a recovery, so layers are written as in a run without failures: schedules count
    steps and know of no failure. A copy that did not count yet when a failure came never does.

    Args:
        tiers: the first one keeps the versions and survives everything.
        stretches: shape (n,), steps run between two recoveries, each ended by a failure.
        kinds: shape (n,), of those failures, index into `KINDS`.
        seed: of the places in the schedules, and of the sample.
        most: size of the sample, which is a row of failures; all of them if there are fewer.

    Returns:
        shape (min(n, most),).
    """
    ends = np.cumsum(stretches)
    begin, lead = _sample(len(stretches), seed, most)
    taken = slice(begin - lead, begin + most)
    ends, stretches, kinds = ends[taken], stretches[taken], kinds[taken]
    if not len(ends):
        return np.empty(0)
    newest = _newest_of_all(tiers, ends, ends - stretches, kinds, _shifts(tiers, seed))
    lost = _lost(newest, ends - stretches, stretches)
    weighted: Floats = np.asarray(tiers[0].schedule.weights) @ lost
    return weighted[lead:]


def _sample(count: int, seed: int, most: int) -> tuple[int, int]:
    """Where the sample begins, and how many failures before it are looked at, too."""
    if count <= most:
        return 0, 0
    begin = int(np.random.default_rng([seed, _SAMPLE]).integers(count - most + 1))
    return begin, min(begin, _LEAD)


def _shifts(tiers: Sequence[Tier], seed: int) -> Floats:
    """Where in its period each layer begins, shape (tiers, layers)."""
    shifts = np.random.default_rng([seed, _PHASES]).random((len(tiers), len(tiers[0].schedule.weights)))
    for row, tier in zip(shifts, tiers, strict=True):
        if tier.schedule.together:
            row[:] = row[0]
    return shifts


def _newest_of_all(
    tiers: Sequence[Tier], ends: Floats, begins: Floats, kinds: npt.NDArray[np.int8], shifts: Floats
) -> _Copies:
    versions, *others = tiers
    first = newest = _newest(versions, ends, begins, kinds, shifts[0])
    residuals = []
    for tier, row in zip(others, shifts[1:], strict=True):
        if tier.counts_from_storage:
            residuals.append((tier, row))
        else:
            newest = _newer(newest, _newest(tier, ends, begins, kinds, row))
    # From memory, as far as versions go: a residual may be newer still, then nothing would be missing.
    from_memory = np.zeros(first.step.shape, dtype=bool)
    from_memory[:, 1:] = (newest.step > first.step)[:, :-1]
    is_allowed = ~from_memory | (first.stretch == np.arange(len(ends)))
    for tier, row in residuals:
        newest = _newer(newest, _newest(tier, ends, begins, kinds, row, is_allowed))
    return newest


def _newest(
    tier: Tier,
    ends: Floats,
    begins: Floats,
    kinds: npt.NDArray[np.int8],
    shifts: Floats,
    is_allowed: npt.NDArray[np.bool_] | None = None,
) -> _Copies:
    """The newest copies of one tier; `is_allowed`: layers and stretches in which there may be any."""
    step, index = ends - tier.schedule.ages(ends, shifts), np.arange(len(ends))
    is_made = step > begins
    if is_allowed is not None:
        is_made &= is_allowed
    stretch = np.maximum.accumulate(np.where(is_made, index, -1), axis=1)
    survived = [KINDS.index(kind) for kind in tier.survives]
    destroyed = np.maximum.accumulate(np.where(np.isin(kinds, survived), -1, index))
    stretch = np.where(stretch > destroyed, stretch, -1)
    step = np.take_along_axis(step, np.maximum(stretch, 0), axis=1)
    return _Copies(np.where(stretch >= 0, step, begins[0]), stretch)


def _newer(one: _Copies, other: _Copies) -> _Copies:
    is_other = other.step > one.step
    return _Copies(np.where(is_other, other.step, one.step), np.where(is_other, other.stretch, one.stretch))


def _lost(newest: _Copies, begins: Floats, stretches: Floats) -> Floats:
    """Lost steps by layer and failure.

    Progress after a failure = progress where the stretch of its copy began + steps from there to the copy.
    The sums along these chains are made by doubling: after k rounds each holds its last 2^k links.
    """
    layers, count = newest.step.shape
    link = np.zeros((layers, count + 1), dtype=np.int64)
    progress = np.zeros((layers, count + 1))
    link[:, 1:] = np.maximum(newest.stretch, 0)
    progress[:, 1:] = newest.step - begins[link[:, 1:]]
    for _ in range(count.bit_length()):
        progress = progress + np.take_along_axis(progress, link, axis=1)
        link = np.take_along_axis(link, link, axis=1)
    lost: Floats = progress[:, :-1] + stretches - progress[:, 1:]
    return lost


# ---------------------------------------------------------------- expected


def expected_lost_steps(
    tiers: Sequence[Tier],
    cycle_s: float,
    recovery_s: float,
    mtbf_s: float,
    mix: tuple[float, float, float] = (1.0, 0.0, 0.0),
) -> float:
    """Mean lost steps of a failure, exponential law.

    A failure finds a layer at an age drawn evenly from its schedule. A step k before it is lost by it if the
    copy is at least k steps old, no failure that is as bad came since, and no lesser one had lost it before.
    With x = exp(-c / M) for a step and a = exp(-R / M) for a recovery without a failure, q the part of
    failures that are as bad: after a failure the next step comes before such a one with
    w = a x / (1 - (1 - a x) (1 - q)), after a step with p = x + (1 - x) (1 - q) w. So E = (1 - lost before)
    sum_k P(age >= k) w p^(k-1), and with one tier sum_k P(age >= k) exp(-(R + k c) / M). Exact for one tier;
    with several the part lost before is a mean.
    """
    step, both = exp(-cycle_s / mtbf_s), exp(-(recovery_s + cycle_s) / mtbf_s)
    if both == 0.0 or step == 1.0:
        return 0.0
    steps_per_failure = both / (1 - step)
    parts: dict[int, float] = {}
    for kind, part in zip(KINDS, mix, strict=True):
        best = min(
            (at for at, tier in enumerate(tiers) if kind in tier.survives),
            key=lambda at: _mean_age(tiers[at].schedule),
        )
        parts[best] = parts.get(best, 0.0) + part
    total, worse = 0.0, 1.0
    for at in sorted(parts, key=lambda at: _mean_age(tiers[at].schedule)):
        next_step = both / (1 - (1 - both) * (1 - worse)) if worse > 0 else 1.0
        after_step = step + (1 - step) * (1 - worse) * next_step
        lost = _older_steps(tiers[at].schedule, after_step) * next_step
        if tiers[at].counts_from_storage and worse < 1:
            lost = next_step * _steps_beside_memory(tiers[0], tiers[at], after_step, both, step)
        total += parts[at] * max(0.0, 1 - total / steps_per_failure) * lost
        worse -= parts[at]
    return total


def _older_steps(schedule: Schedule, again: float) -> float:
    """sum_k P(age >= k) again^(k-1), weighted over the layers."""
    total = 0.0
    for weight, period, writes in zip(schedule.weights, schedule.periods, schedule.writes, strict=True):
        older = age_survival(period, writes, schedule.delay_steps)
        total += weight * float(older @ again ** np.arange(len(older), dtype=np.float64))
    return total


def _steps_beside_memory(versions: Tier, residuals: Tier, again: float, both: float, step: float) -> float:
    """The same of residuals where other failures are recovered from memory.

    A layer whose version is n steps old has one if no failure came since: with probability a x^(n+1). Else
    the version is taken, though an older residual may be left: an upper bound.
    """
    total = 0.0
    old, new = versions.schedule, residuals.schedule
    for at, weight in enumerate(old.weights):
        older = age_survival(old.periods[at], old.writes[at], old.delay_steps)
        newer = age_survival(new.periods[at], new.writes[at], new.delay_steps)
        exactly = np.diff(np.concatenate([[1.0], older, [0.0]])) * -1.0
        has_residual = exactly * both * step ** np.arange(len(exactly), dtype=np.float64)
        without = np.cumsum((exactly - has_residual)[::-1])[::-1][1:]
        powers = again ** np.arange(max(len(older), len(newer)), dtype=np.float64)
        total += weight * float(without @ powers[: len(without)])
        total += weight * float(has_residual.sum() * (newer @ powers[: len(newer)]))
    return total


def _mean_age(schedule: Schedule) -> float:
    return _older_steps(schedule, 1.0)
