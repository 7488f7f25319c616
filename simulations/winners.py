"""Which method is ahead at each MTBF, by how much, and which cost decides it.

Compared is the ETTR with lost progress charged; the plain one stands beside it. A method's time is: useful
and kept, stalls, work done again, recoveries, and progress that a composite lost. The cost that decides
between two methods is the one by which the better is ahead most.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from simulations.sweep import Outcome

_PARTS = {
    "stalls": ("stall_s",),
    "work done again": ("rework_s",),
    "recoveries": ("detect_s", "restart_s", "load_s", "reconstruct_s", "repair_s"),
    "lost progress": ("lost_progress",),
}


@dataclass(frozen=True, slots=True)
class Standing:
    """One method against the best of those it is compared with. Ratios are of the elapsed time.

    Attributes:
        method, rival: names; `interval_steps` of both, and their `..charged` and plain ETTR.
        ahead: charged ETTR of the method - that of the rival; `ahead_ci`: half of its 95 % interval, both
            taken as independent, though they meet the same failures: it is too wide rather than too narrow.
        times: charged ETTR of the method / that of the rival; None if the rival's is 0.
        decides: the cost by which the one that is ahead is ahead most.
        by: cost -> part of the time that the rival spends on it more than the method.
    """

    method: str
    rival: str
    mtbf_h: float
    charged: float
    ettr: float
    interval_steps: float
    rival_charged: float
    rival_ettr: float
    rival_interval_steps: float
    ahead: float
    ahead_ci: float
    times: float | None
    decides: str
    by: Mapping[str, float]


def costs_of_time(outcome: Outcome) -> dict[str, float]:
    """Cost -> part of the elapsed time; with the charged ETTR they add up to 1."""
    return {name: sum(outcome.shares[cause] for cause in causes) for name, causes in _PARTS.items()}


def standing(one: Outcome, rivals: Sequence[Outcome]) -> Standing:
    """`one` against the best of `rivals`, of which there is at least one, at the same MTBF."""
    rival = max(rivals, key=lambda other: other.charged)
    mine, theirs = costs_of_time(one), costs_of_time(rival)
    by = {name: theirs[name] - mine[name] for name in _PARTS}
    ahead = one.charged - rival.charged
    return Standing(
        method=one.point.method.name,
        rival=rival.point.method.name,
        mtbf_h=one.mtbf_s / 3600,
        charged=one.charged,
        ettr=one.ettr,
        interval_steps=one.point.interval_steps,
        rival_charged=rival.charged,
        rival_ettr=rival.ettr,
        rival_interval_steps=rival.point.interval_steps,
        ahead=ahead,
        ahead_ci=(one.charged_ci**2 + rival.charged_ci**2) ** 0.5,
        times=one.charged / rival.charged if rival.charged > 0 else None,
        decides=max(by, key=lambda name: by[name] if ahead >= 0 else -by[name]),
        by=by,
    )


def winners(outcomes: Sequence[Outcome]) -> list[Standing]:
    """For each MTBF the best method of all against the second, outcomes being of one protocol."""
    found = []
    for mine in _by_mtbf(outcomes):
        best = max(mine, key=lambda one: one.charged)
        others = [one for one in mine if one is not best]
        if others:
            found.append(standing(best, others))
    return found


def standings(outcomes: Sequence[Outcome], ours: Collection[str], rivals: Collection[str]) -> list[Standing]:
    """For each MTBF each method of `ours` against the best of `rivals`, outcomes being of one protocol."""
    found = []
    for mine in _by_mtbf(outcomes):
        against = [one for one in mine if one.point.method.name in rivals]
        if against:
            found += [standing(one, against) for one in mine if one.point.method.name in ours]
    return found


def _by_mtbf(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    groups: dict[float, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: one.mtbf_s):
        groups.setdefault(one.mtbf_s, []).append(one)
    return list(groups.values())
