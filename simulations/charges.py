"""[pure] What an event is charged: the stall that is seen, or all that training loses to it.

Work in the background takes cores and memory bandwidth from training, so charging only what blocks the
training thread favours whoever hides the most. `slowdown` charges (R - 1) x t_iter_s for an event, R being
the measured ratio of step times with an event at every step / without any, and never less than the visible
stall. A ratio below 1 is noise: then the visible stall is all that is known.

Of a composite R is that of the full state, copied at every step as versions, residuals, or to memory; where
the last two are unknown, their work beside training counts as that of versions. What its steps were slower
than its versions explain, at its own rhythm, is paid at every step. A far copy of a method that keeps commits
in memory costs what writing beside training costs the cheapest method that does so, less what its commit
costs: its copy is there already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Literal, get_args

from layercheck.config import ResidualConfig
from layercheck.errors import ConfigError
from simulations.checks import positive
from simulations.costs import Copied, Costs, MethodCosts

Charge = Literal["stalls", "slowdown"]
CHARGES: tuple[Charge, ...] = get_args(Charge)
COPIES: tuple[Copied, ...] = get_args(Copied)
MEANING: Mapping[Charge, str] = {
    "stalls": "An event costs its visible stall: what blocks the training thread. Work beside it is free.",
    "slowdown": "An event costs what a measured step with one took longer than a step without, never less "
    "than its visible stall: work beside the training thread is charged, too.",
}
STAGED = ResidualConfig().staged_share
"""Bytes that a residual copies inside a step / those of a version."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """What one event is charged by `slowdown`.

    Attributes:
        name: of the method; of a composite, of the step of its own rhythm, or of what is copied.
        stall_s: that is seen.
        ratio: of step times, as measured; None: unknown.
        charged_s: by `slowdown`.
        basis: what that is, in words.
    """

    name: str
    stall_s: float
    ratio: float | None
    charged_s: float
    basis: str


def with_step_ratios(costs: Costs, ratios: Mapping[str, float]) -> Costs:
    """The costs with measured ratios of step times in the place of their own.

    Args:
        costs: of all methods.
        ratios: method, or what a composite copies -> seconds of a step with such an event at every step /
            without any.

    Raises:
        ConfigError: there is no such method or copy, or a ratio is not positive.
    """
    names = [*costs.methods, *(COPIES if any(cost.layers for cost in costs.methods.values()) else ())]
    added_s = {}
    for name, ratio in ratios.items():
        if name not in names:
            raise ConfigError(f"step-ratio {name!r} is none of {', '.join(names)}")
        added_s[name] = (positive(f"step-ratio {name}", ratio) - 1) * costs.t_iter_s
    methods = {name: _with_slowdowns(name, cost, added_s) for name, cost in costs.methods.items()}
    return costs.model_copy(update={"methods": methods})


def _with_slowdowns(name: str, cost: MethodCosts, added_s: Mapping[str, float]) -> MethodCosts:
    copies = {copied: added_s[copied] for copied in COPIES if cost.layers and copied in added_s}
    return cost.model_copy(
        update={
            "slowdown_s": added_s.get(name, cost.slowdown_s),
            "copy_slowdown_s": cost.copy_slowdown_s | copies,
        }
    )


def unknown(costs: Costs) -> list[str]:
    """Ratios without which no event can be charged by `slowdown`, by the names of `with_step_ratios`."""
    found = [
        "versions" if cost.layers else name
        for name, cost in costs.methods.items()
        if (cost.copy_slowdown_s.get("versions") if cost.layers else cost.slowdown_s) is None
    ]
    return list(dict.fromkeys(found))


def charged(costs: Costs, charge: Charge) -> Costs:
    """The costs with what an event is charged as its stall.

    Raises:
        ConfigError: of `slowdown`, where a ratio is unknown.
    """
    if charge == "stalls":
        return costs
    if missing := unknown(costs):
        raise ConfigError(
            f"--charge slowdown: no measured step ratio of {', '.join(missing)}: "
            f"give --step-ratio {missing[0]}=R"
        )
    methods = {
        name: _composite(cost) if cost.layers else cost.model_copy(update={"stall_s": _event_s(cost)})
        for name, cost in costs.methods.items()
    }
    beside_s = [
        _event_s(cost)
        for cost in costs.methods.values()
        if not (cost.layers or cost.far_every) and cost.commit_delay_s
    ]
    for name, cost in methods.items():
        if cost.far_every and beside_s:
            more_s = max(cost.far_stall_s, min(beside_s) - cost.stall_s)
            methods[name] = cost.model_copy(update={"far_stall_s": more_s})
    return costs.model_copy(update={"methods": methods})


def _event_s(cost: MethodCosts) -> float:
    return max(cost.stall_s, cost.slowdown_s or 0.0)


def _composite(cost: MethodCosts) -> MethodCosts:
    states_s = {copied: state_s for copied, (_, state_s) in _states_s(cost).items()}
    versions_s = states_s["versions"] / cost.mean_interval_steps
    fixed_s = max(cost.stall_fixed_s, (cost.slowdown_s or 0.0) - versions_s)
    return cost.model_copy(
        update={
            "stall_s": fixed_s + versions_s,
            "stall_fixed_s": fixed_s,
            "full_stall_s": states_s["memory"],
            "residual_stall_s": states_s["residuals"],
        }
    )


def _states_s(cost: MethodCosts) -> dict[Copied, tuple[float, float]]:
    """What is copied -> visible stall of the full state, and what it is charged."""
    seen_s = {copied: copy_stall_s(cost, copied) for copied in COPIES}
    hidden_s = cost.copy_slowdown_s["versions"] - seen_s["versions"]
    return {
        copied: (stall_s, max(stall_s, cost.copy_slowdown_s.get(copied, stall_s + hidden_s)))
        for copied, stall_s in seen_s.items()
    }


def copy_stall_s(cost: MethodCosts, copied: Copied) -> float:
    """Stall of the full state copied so, in one event or in many."""
    versions_s = (cost.stall_s - cost.stall_fixed_s) * cost.mean_interval_steps
    if copied == "memory":
        return versions_s if cost.full_stall_s is None else cost.full_stall_s
    if copied == "residuals":
        return versions_s * STAGED if cost.residual_stall_s is None else cost.residual_stall_s
    return versions_s


def event_costs(costs: Costs) -> list[EventCost]:
    """What each event is charged by `slowdown`; of costs of which `unknown` is empty."""
    found = []
    for name, cost in charged(costs, "slowdown").methods.items():
        before = costs.methods[name]
        of_rhythm = "its versions and what is fixed" if cost.layers else "visible stall"
        found.append(_event(name, before.stall_s, before.slowdown_s, cost.stall_s, costs.t_iter_s, of_rhythm))
        if cost.layers:
            for copied, (seen_s, state_s) in _states_s(before).items():
                added_s = before.copy_slowdown_s.get(copied)
                otherwise = (
                    "visible stall"
                    if added_s is not None or state_s == seen_s
                    else "hides as much as versions"
                )
                found.append(_event(f"{name}: {copied}", seen_s, added_s, state_s, costs.t_iter_s, otherwise))
        if cost.far_stall_s:
            stored = EventCost(
                f"{name}: a stored copy",
                before.far_stall_s,
                None,
                cost.far_stall_s,
                "as copies beside training",
            )
            found.append(stored)
    return found


def _event(
    name: str,
    stall_s: float,
    added_s: float | None,
    charged_s: float,
    t_iter_s: float,
    otherwise: str = "visible stall",
) -> EventCost:
    if added_s is None:
        return EventCost(name, stall_s, None, charged_s, otherwise)
    if added_s < 0:
        basis = f"a ratio below 1 is noise: {otherwise}"
    else:
        basis = "ratio" if isclose(added_s, charged_s) else f"{otherwise}, which is more"
    return EventCost(name, stall_s, 1 + added_s / t_iter_s, charged_s, basis)
