"""Which method, and at which interval, for one MTBF: candidates, their choice, and the reason in words.

A method is a candidate at the interval that maximises its ETTR among those that lose at most `max_lost_share`
of the trained steps. Only a composite loses any: others do again what a failure took, and their ETTR says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import numpy as np

from simulations.copies import Tier
from simulations.costs import Costs
from simulations.failures import FailureModel
from simulations.protocols import (
    Point,
    charged_closed_form,
    closed_form,
    composite_at,
    operating_point,
)
from simulations.replay_policy import COMMIT_DELAY_STEPS, Replayed, figures, replay, with_settings
from simulations.schedules import schedule_of_writes
from simulations.tiers import MAX_EVENT_SHARE
from simulations.trace import Trace

FULL_EVENT_SHARE = 0.001
"""What full events may cost: they are a fallback that shortens no recovery."""
_FACTORS = np.geomspace(0.02, 30, 80)
_TARGETS = (0.25, 0.5, 1.0, 2.0, 4.0)
_LIMITS = (2, 4, 8)
S_MAX_RATIO = 4
"""s_max / target interval where no trace says what it costs: the ratio of the defaults."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One method at one operating point.

    Attributes:
        charged: ETTR with lost progress charged; equal to `ettr` for a method that loses none.
        lost_share: part of the trained steps that was lost.
        within: `lost_share` is within the limit.
        settings: what to configure, for LayerCheck.
    """

    method: str
    source: str
    interval_steps: float
    ettr: float
    charged: float
    lost_share: float
    within: bool
    settings: dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """`best` is the candidate to take; all of them in order; the reason in one paragraph."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    reason: str


def advise(costs: Costs, failures: FailureModel, max_lost_share: float, trace: Trace | None = None) -> Advice:
    """Chooses for the MTBF of `failures`.

    Args:
        costs: of all methods.
        failures: law, mix and MTBF.
        max_lost_share: limit of lost progress, part of the trained steps.
        trace: a recorded run: LayerCheck's schedule is then what its policy does there, not a stretch of its
            mean intervals.
    """
    found = []
    for name, cost in costs.methods.items():
        if cost.layers:
            points = list(_composites(name, costs, trace))
            rated = [_rate(point, settings, failures, max_lost_share) for point, settings in points]
            found.append(max(rated, key=_preference))
        else:
            point = operating_point(name, costs, "own_optimum", failures)
            found.append(_rate(point, {}, failures, max_lost_share))
    ranked = tuple(sorted(found, key=_preference, reverse=True))
    return Advice(ranked[0], ranked, _reason(ranked, costs, failures, max_lost_share))


def _preference(candidate: Candidate) -> tuple[bool, float]:
    """Within the limit first, then by ETTR; outside of it by how little is lost."""
    return candidate.within, candidate.ettr if candidate.within else -candidate.lost_share


def _rate(
    point: Point, settings: dict[str, float | int | None], failures: FailureModel, limit: float
) -> Candidate:
    plain, charged = closed_form(point.method, failures), charged_closed_form(point, failures)
    lost_share = (plain - charged) / plain if plain > 0 else 0.0
    return Candidate(
        method=point.method.name,
        source=point.source,
        interval_steps=point.interval_steps,
        ettr=plain,
        charged=charged,
        lost_share=lost_share,
        within=lost_share <= limit,
        settings=settings,
    )


# ---------------------------------------------------------------- LayerCheck's settings


def _composites(
    name: str, costs: Costs, trace: Trace | None
) -> Iterable[tuple[Point, dict[str, float | int | None]]]:
    if trace is not None:
        yield from _replayed(name, costs, trace)
        return
    cost = costs.methods[name]
    for factor in _FACTORS:
        point = composite_at(name, costs, float(factor))
        if point.interval_steps < 1 / MAX_EVENT_SHARE:
            continue
        target = max(1, round(point.interval_steps))
        limit = min(S_MAX_RATIO * target, cost.s_max_steps or S_MAX_RATIO * target)
        yield point, _settings(target, limit, None, costs, cost.full_stall_s)


def _replayed(name: str, costs: Costs, trace: Trace) -> Iterable[tuple[Point, dict[str, float | int | None]]]:
    """The production policy over the trace, for a grid of target intervals and age limits."""
    usual, cost = trace.config.target_interval, costs.methods[name]
    for target in (usual * ratio for ratio in _TARGETS):
        for limit in (max(4, round(target * ratio)) for ratio in _LIMITS):
            full_every = min(trace.config.warmup_full_every, int(0.75 * limit))
            done = replay(
                trace,
                with_settings(
                    trace.config,
                    target_interval=target,
                    s_max=limit,
                    selection="drift",
                    full_every=0,
                    warmup_full_every=max(1, full_every),
                ),
            )
            interval = figures(done)["mean_interval_steps"]
            if interval is None:
                continue
            point = _point_of(name, costs, done, interval)
            yield point, _settings(target, limit, done.k0, costs, cost.full_stall_s)


def _point_of(name: str, costs: Costs, done: Replayed, interval_steps: float) -> Point:
    cost, after = costs.methods[name], done.trace.steps > done.config.warmup_steps
    numel = tuple(layer.numel for layer in done.trace.layer_map.trainable)
    more = cost.mean_interval_steps / interval_steps
    stall_s = cost.stall_fixed_s + (cost.stall_s - cost.stall_fixed_s) * more
    method = cost.method(name, costs.t_iter_s).at(1, stall_s)
    versions = Tier("storage", schedule_of_writes(done.written[after], numel, COMMIT_DELAY_STEPS))
    return Point("own_optimum", method, cost.source, interval_steps, costs.gpus, (versions,))


def _settings(
    target: float, s_max: int, k0: float | None, costs: Costs, full_stall_s: float | None
) -> dict[str, float | int | None]:
    full_every = None
    if full_stall_s is not None:
        full_every = max(2 * s_max, ceil(full_stall_s / (FULL_EVENT_SHARE * costs.t_iter_s)))
    return {"target_interval": target, "k0": k0, "s_max": s_max, "full_every": full_every}


# ---------------------------------------------------------------- in words


def _reason(ranked: tuple[Candidate, ...], costs: Costs, failures: FailureModel, limit: float) -> str:
    best, names = ranked[0], {name for name, cost in costs.methods.items() if cost.layers}
    composite = next((one for one in ranked if one.method in names), None)
    hours = failures.mtbf_s / 3600
    lines = [_verdict(best, composite, hours)]
    if composite is not None:
        lines.append(_about(composite, limit))
    rest = [one for one in ranked if one is not best and one is not composite]
    if rest:
        others = ", ".join(f"{one.method} {100 * one.ettr:.1f} % ({_every(one)})" for one in rest)
        lines.append(f"The others come to {others}.")
    charged = max(ranked, key=lambda one: one.charged)
    if charged.method != best.method:
        lines.append(
            f"Charged with the progress it loses, {best.method} comes to {100 * best.charged:.1f} %, behind "
            f"{charged.method} with {100 * charged.charged:.1f} %: if lost steps count like lost time, take "
            f"{charged.method}."
        )
    return " ".join(lines)


def _verdict(best: Candidate, composite: Candidate | None, hours: float) -> str:
    figure = f"an effective training time ratio of {100 * best.ettr:.1f} % ({best.source} costs)"
    if composite is None or best is composite:
        return f"Use {best.method}: with a failure every {hours:.3g} h it gives {figure}."
    return (
        f"Use something else than {composite.method}: {best.method} ({_every(best)}) "
        f"gives {figure} with a failure every {hours:.3g} h."
    )


def _every(candidate: Candidate) -> str:
    steps = round(candidate.interval_steps)
    return "every step" if steps == 1 else f"every {steps} steps"


def _about(composite: Candidate, limit: float) -> str:
    settings = composite.settings
    text = (
        f"{composite.method} at target_interval {settings['target_interval']:.3g}, s_max {settings['s_max']}"
        + (f", full_every {settings['full_every']}" if settings["full_every"] else "")
        + (f" (K0 = {settings['k0']:.3g})" if settings["k0"] else "")
        + f" gives {100 * composite.ettr:.1f} % and loses {100 * composite.lost_share:.2f} % of the steps"
    )
    if composite.within:
        return f"{text}, within the limit of {100 * limit:.3g} %."
    return f"{text}, more than the limit of {100 * limit:.3g} %; no setting loses less."
