"""From costs to methods at their operating points: `matched` and `own_optimum`, side by side.

`matched` gives every interval method the mean persist interval of the composite one (paper 4.4).
`own_optimum` gives each method the interval that maximises its ETTR at this MTBF; for a composite, whose
stall falls with the interval for ever, the ETTR with its lost progress charged, and with memory also its
`memory.k_ratio`. Methods that commit at
every step stay as they are. LayerCheck's K is held fixed (`failure_aware: false`): the optimum stands for
what it adapts.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
import numpy.typing as npt

from simulations.copies import Tier, expected_lost_steps
from simulations.costs import Costs
from simulations.failures import FailureModel
from simulations.far import destroyed_ettr
from simulations.methods import Method
from simulations.model import daly_interval_s, empirical_ettr, ettr
from simulations.tiers import MAX_EVENT_SHARE, STORAGE, TierSet, composite

Floats = npt.NDArray[np.float64]
Protocol = Literal["matched", "own_optimum"]
PROTOCOLS: tuple[Protocol, ...] = ("matched", "own_optimum")
_COARSE, _ROUNDS, _STORED = 24, 4, 12
_K_RATIOS = np.geomspace(0.01, 0.95, 16)
"""Thresholds of memory that are tried, as parts of K."""
_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.05, 20.0


@dataclass(frozen=True, slots=True)
class Point:
    """A method as it is simulated.

    Attributes:
        interval_steps: steps per commit; for a composite its mean persist interval.
        gpus: devices that the costs are of.
        tiers: where a composite has its copies; none for a method that loses nothing but what it does again.
    """

    protocol: Protocol
    method: Method
    source: str
    interval_steps: float
    gpus: int
    tiers: tuple[Tier, ...] = ()


def operating_point(
    name: str, costs: Costs, protocol: Protocol, failures: FailureModel, tiers: TierSet = STORAGE
) -> Point:
    """One method of the costs under one protocol at one MTBF; `tiers` are those of a composite."""
    cost = costs.methods[name]
    method = cost.method(name, costs.t_iter_s)
    if cost.layers:
        if protocol == "own_optimum":
            return best_composite(name, costs, failures, tiers)
        return composite_at(name, costs, 1.0, protocol, tiers)
    if cost.commits == "interval":
        if protocol == "own_optimum":
            method = best_method(method, costs, failures, cost.min_interval_steps)
        else:
            method = method.at(max(costs.matched_interval_steps, cost.min_interval_steps))
    return Point(protocol, method, cost.source, method.interval_steps, costs.gpus)


def closed_form(method: Method, failures: FailureModel) -> float:
    """ETTR of the closed forms: mean recovery of the mix, exponential law for what dies with nodes."""
    return _kept(method, failures) - destroyed_ettr(method, failures)


def _kept(method: Method, failures: FailureModel) -> float:
    recovery_s = method.recovery_s(failures.mix)
    if failures.repair is not None:
        recovery_s += failures.repair.mean_s
    law, given = failures.law, failures.in_recovery
    if law.name == "bootstrap":
        gaps_s = np.asarray(law.unit_gaps) * failures.mtbf_s
        return empirical_ettr(method.tau_s, method.stall_s, recovery_s, gaps_s, given, method.delay_s)
    return ettr(
        method.tau_s,
        method.stall_s,
        recovery_s,
        failures.mtbf_s,
        law=law.name,
        shape=law.shape,
        failures_in_recovery=given,
        commit_delay_s=method.delay_s,
    )


# ---------------------------------------------------------------- optima


def best_method(method: Method, costs: Costs, failures: FailureModel, smallest: int = 1) -> Method:
    """An interval method at its optimum, which is also over how often it stores what it keeps in memory."""
    best = [each.at(best_interval(each, failures, smallest)) for each in _stored_otherwise(method, costs)]
    return max(best, key=lambda each: closed_form(each, failures))


def _stored_otherwise(method: Method, costs: Costs) -> list[Method]:
    """A method with copies in memory that stores one of them as soon as the write before has ended, or later.

    Where storing stalls nobody the first is the best. How long such a write takes is known from a method that
    writes full states beside training; else the method stores as often as it was measured.
    """
    delays_s = [cost.commit_delay_s for cost in costs.methods.values() if not (cost.layers or cost.far_every)]
    if not method.far_every or not any(delays_s):
        return [method]
    least = max(1, ceil(max(delays_s) / method.t_iter_s / method.interval_steps))
    if not method.far_stall_s:
        return [method.stored(least)]
    tried = np.geomspace(least, max(least, method.far_every), _STORED).round().astype(int)
    return [method.stored(int(each)) for each in np.unique(tried)]


def best_interval(method: Method, failures: FailureModel, smallest: int = 1) -> int:
    """The interval in steps with the largest ETTR: a search around Daly's, by the law of the failures."""
    daly = daly_interval_s(method.stall_s, failures.mtbf_s) / method.t_iter_s
    low, high = smallest, max(smallest + 1, round(8 * daly) + 2)
    best = smallest
    for _ in range(_ROUNDS):
        tried = np.unique(np.geomspace(low, high, _COARSE).round().astype(int))
        values = [closed_form(method.at(int(steps)), failures) for steps in tried]
        at = int(np.argmax(values))
        best = int(tried[at])
        low, high = int(tried[max(at - 1, 0)]), int(tried[min(at + 1, len(tried) - 1)])
        if high - low <= 2:
            break
    return best


def composite_at(
    name: str,
    costs: Costs,
    factor: float,
    protocol: Protocol = "own_optimum",
    tiers: TierSet = STORAGE,
) -> Point:
    """A composite method with all its intervals stretched by `factor`: the stall falls as less is written."""
    method, places = composite(name, costs, factor, tiers)
    source = costs.methods[name].source if tiers == STORAGE else "derived"
    return Point(protocol, method, source, 1 / places[0].schedule.per_step, costs.gpus, places)


def charged_closed_form(point: Point, failures: FailureModel) -> float:
    """ETTR minus the progress that a composite loses; its lost steps by the exponential law."""
    plain = closed_form(point.method, failures)
    if not point.tiers:
        return plain
    recovery_s, mtbf_s = point.method.recovery_s(failures.mix), failures.mtbf_s
    between_s, spared_s = (mtbf_s, recovery_s) if failures.in_recovery else (mtbf_s + recovery_s, 0.0)
    lost = expected_lost_steps(point.tiers, point.method.cycle_s, spared_s, mtbf_s, failures.mix)
    return plain - lost * point.method.t_iter_s / between_s


def best_composite(name: str, costs: Costs, failures: FailureModel, tiers: TierSet) -> Point:
    """The stretch and, where there is one, the threshold of memory with the largest charged ETTR."""
    if tiers.memory_k_ratio:
        # All thresholds at all stretches: by turns the search ends at optima that are only local.
        ratios = (tiers.memory_k_ratio, *_K_RATIOS)
        choices = [replace(tiers, memory_k_ratio=float(ratio)) for ratio in ratios]
        stretches = _stretches(name, costs, tiers)
        tiers = max(choices, key=lambda each: max(_values(name, costs, failures, each, stretches)))
    return composite_at(name, costs, best_factor(name, costs, failures, tiers), tiers=tiers)


def _stretches(name: str, costs: Costs, tiers: TierSet) -> Floats:
    """Stretches to begin with; none that would copy more than `max_event_share` of the state at a step."""
    least = tiers.staged_part / MAX_EVENT_SHARE
    low = max(_SMALLEST_FACTOR, least / costs.methods[name].mean_interval_steps)
    return np.geomspace(low, max(_LARGEST_FACTOR, low), _COARSE)


def _values(name: str, costs: Costs, failures: FailureModel, tiers: TierSet, factors: Floats) -> list[float]:
    """Charged ETTR at each stretch."""
    points = [composite_at(name, costs, float(factor), tiers=tiers) for factor in factors]
    return [charged_closed_form(point, failures) for point in points]


def best_factor(name: str, costs: Costs, failures: FailureModel, tiers: TierSet = STORAGE) -> float:
    """The stretch of all persist intervals with the largest charged ETTR."""
    tried = _stretches(name, costs, tiers)
    best = 1.0
    for _ in range(_ROUNDS):
        at = int(np.argmax(_values(name, costs, failures, tiers, tried)))
        best = float(tried[at])
        tried = np.geomspace(tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)], _COARSE)
    return best
