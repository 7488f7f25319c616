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
        after_memory_steps: None, or copies are differences from a version: after a recovery from memory each
            layer has a version after so many steps, and none of these copies before that or a usual version.
    """

    name: str
    schedule: Schedule
    survives: tuple[Kind, ...] = KINDS
    after_memory_steps: int | None = None


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
        if tier.after_memory_steps is not None:
            residuals.append((tier, tier.after_memory_steps, row))
        else:
            newest = _newer(newest, _newest(tier, ends, begins, kinds, row))
    # From memory, as far as versions go: a residual may be newer still, then nothing would be missing.
    from_memory = np.zeros(first.step.shape, dtype=bool)
    from_memory[:, 1:] = (newest.step > first.step)[:, :-1]
    has_version = ~from_memory | (first.stretch == np.arange(len(ends)))
    for tier, steps, row in residuals:
        allowed_from = np.where(has_version, begins, begins + steps)
        newest = _newer(newest, _newest(tier, ends, begins, kinds, row, allowed_from))
        known = from_memory & (begins + steps <= ends - versions.schedule.delay_steps)
        newest = _newer(newest, _soon(known, begins, steps))
    return newest


def _soon(known: npt.NDArray[np.bool_], begins: Floats, steps: int) -> _Copies:
    """Versions that are written `steps` after the begin of each stretch in which they are `known`."""
    stretch = np.maximum.accumulate(np.where(known, np.arange(known.shape[1]), -1), axis=1)
    return _Copies(np.where(stretch >= 0, begins[stretch] + steps, begins[0]), stretch)


def _newest(
    tier: Tier,
    ends: Floats,
    begins: Floats,
    kinds: npt.NDArray[np.int8],
    shifts: Floats,
    allowed_from: Floats | None = None,
) -> _Copies:
    """The newest copies of one tier; `allowed_from`: (layers, stretches), the step of the first one."""
    step, index = ends - tier.schedule.ages(ends, shifts), np.arange(len(ends))
    is_made = step > begins
    if allowed_from is not None:
        is_made &= step >= allowed_from
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
        steps = tiers[at].after_memory_steps
        if steps is not None and worse < 1:
            places = tiers[at].schedule, tiers[0].schedule.delay_steps
            lost = _steps_beside_memory(*places, steps, both / step, step, 1 - worse)
        total += parts[at] * max(0.0, 1 - total / steps_per_failure) * lost
        worse -= parts[at]
    return total


def _older_steps(schedule: Schedule, again: float) -> float:
    """sum_k P(age >= k) again^(k-1), weighted over the layers."""
    total = 0.0
    for weight, period, writes in schedule.kinds:
        older = age_survival(period, writes, schedule.delay_steps)
        total += weight * float(older @ again ** np.arange(len(older), dtype=np.float64))
    return total


def _steps_beside_memory(
    residuals: Schedule, delay_steps: int, after_memory_steps: int, begun: float, step: float, spared: float
) -> float:
    """Mean lost steps where the storage has to do, and other failures are recovered from memory.

    A stretch has at least j steps with P(T >= j) = a x^j. With W steps from a recovery from memory to
    versions that count d later, r the age of the newest residual, and l the part of failures that memory
    survives: the stretch before the failure began with such a one with probability l. Then min(r, T - W)
    steps are lost if T >= n = W + d, else T and what a failure at its begin would have lost; else min(r, T).
    E = (l (A + B) + (1 - l) a sum_k P(r >= k) x^k) / (1 - l P(T < n)), A = a x^W sum_k P(r >= k) x^max(k, d),
    B = E[T; T < n] = a (sum_{0<k<n} x^k - (n - 1) x^n). That usual versions are written, too, is left out.

    Args:
        residuals: their schedule.
        delay_steps: d.
        after_memory_steps: W.
        begun: a, for a recovery without a failure.
        step: x, for a step without one.
        spared: l.
    """
    at_once = at_last = 0.0
    for weight, period, writes in residuals.kinds:
        older = age_survival(period, writes, residuals.delay_steps)
        ages = np.arange(1, len(older) + 1, dtype=np.float64)
        at_once += weight * begun * float(older @ step**ages)
        at_last += (
            weight * begun * float(older @ step ** (after_memory_steps + np.maximum(ages, delay_steps)))
        )
    least = after_memory_steps + delay_steps
    short = begun * float(np.sum(step ** np.arange(1, least)) - (least - 1) * step**least)
    lost = spared * (at_last + short) + (1 - spared) * at_once
    return lost / (1 - spared * (1 - begun * step**least))


def _mean_age(schedule: Schedule) -> float:
    return _older_steps(schedule, 1.0)
