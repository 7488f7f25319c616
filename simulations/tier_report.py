"""LayerCheck with its tiers beside every other method: `ettr-tiers.json`, the same as tables, and a picture.

All figures have lost progress charged, and events once by their visible stall, once by all that training
loses to them, where that is known. Three comparisons of each: who is ahead, everybody at the own optimum;
LayerCheck's variants at theirs against the best interval method at its own; and as they were measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulations.charges import MEANING, Charge, event_costs, unknown
from simulations.comparison.result import table
from simulations.costs import Costs
from simulations.pictures import draw_lines
from simulations.protocols import Protocol
from simulations.sweep import Outcome
from simulations.tiers import TierSet, name_of
from simulations.winners import standings, winners


def our_names(costs: Costs, tiers: Sequence[TierSet]) -> list[str]:
    """Names of the composite methods with each of their tiers."""
    return [name_of(name, each) for name, cost in costs.methods.items() if cost.layers for each in tiers]


def content(
    costs: Costs, tiers: Sequence[TierSet], by_charge: Mapping[Charge, Sequence[Outcome]]
) -> dict[str, Any]:
    """What `ettr-tiers.json` holds; `costs` with stalls as they are seen."""
    missing = unknown(costs)
    return {
        "tiers": [asdict(each) for each in tiers],
        "interval_methods": _interval_methods(costs),
        "events": [] if missing else [asdict(one) for one in event_costs(costs)],
        "unknown_ratios": missing,
        "charges": {charge: _comparisons(costs, tiers, outcomes) for charge, outcomes in by_charge.items()},
    }


def _interval_methods(costs: Costs) -> list[str]:
    return [name for name, cost in costs.methods.items() if cost.commits == "interval"]


def _comparisons(costs: Costs, tiers: Sequence[TierSet], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ours, interval = our_names(costs, tiers), _interval_methods(costs)
    own = _of(outcomes, "own_optimum")
    as_measured = [one for one in _of(outcomes, "matched") if one.point.method.name in ours]
    others = [one for one in own if one.point.method.name not in ours]
    return {
        "points": [_point(one) for one in outcomes],
        "winners": [asdict(one) for one in winners(own)],
        "against_interval_methods": [asdict(one) for one in standings(own, ours, interval)],
        "as_measured_against_interval_methods": [
            asdict(one) for one in standings([*as_measured, *others], ours, interval)
        ],
    }


def _of(outcomes: Sequence[Outcome], protocol: Protocol) -> list[Outcome]:
    return [one for one in outcomes if one.point.protocol == protocol]


def _point(outcome: Outcome) -> dict[str, Any]:
    return {
        "method": outcome.point.method.name,
        "protocol": outcome.point.protocol,
        "source": outcome.point.source,
        "mtbf_h": outcome.mtbf_s / 3600,
        "interval_steps": outcome.point.interval_steps,
        "stall_per_commit_s": outcome.point.method.stall_s,
        "steps_between_copies": {tier.name: 1 / tier.schedule.per_step for tier in outcome.point.tiers},
        "steps_between_stored_copies": outcome.point.method.far_every * outcome.point.method.interval_steps,
        "ettr": outcome.ettr,
        "charged": outcome.charged,
        "charged_ci": outcome.charged_ci,
        "lost_steps_per_failure": outcome.lost_steps,
    }


def write(out: Path, found: Mapping[str, Any], about: str) -> None:
    """Writes `ettr-tiers.json` and `ettr-tiers.md`."""
    (out / "ettr-tiers.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "ettr-tiers.md").write_text(markdown(found, about))


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Charged ETTR of every method at its own optimum against MTBF."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for one in sorted(_of(outcomes, "own_optimum"), key=lambda one: one.mtbf_s):
        x, y = curves.setdefault(one.point.method.name, ([], []))
        x.append(one.mtbf_s / 3600)
        y.append(one.charged)
    labels = ("mean time between failures (h)", "effective training time ratio, lost progress charged")
    draw_lines(curves, path, labels, "x")


# ---------------------------------------------------------------- for people


def markdown(found: Mapping[str, Any], about: str) -> str:
    """Tables of the curves and of the three comparisons, for each charge."""
    lines = [
        "# ETTR with lost progress charged: LayerCheck's tiers beside the other methods",
        "",
        about,
        "",
        *_events(found),
    ]
    for charge, mine in found["charges"].items():
        lines += ["", f"# Charge: {charge}", "", MEANING[charge], "", *_tables(mine)]
    return "\n".join(lines) + "\n"


def _tables(found: Mapping[str, Any]) -> list[str]:
    return [
        "## At the own optimum",
        "",
        "Charged ETTR in % (plain), steps between two saves.",
        "",
        *_curves(found["points"], "own_optimum"),
        "",
        "## LayerCheck as measured, not stretched",
        "",
        *_curves(found["points"], "matched"),
        "",
        "## Who is ahead, everybody at the own optimum",
        "",
        *_standings(found["winners"]),
        "",
        "## Against the best interval method at its own optimum",
        "",
        *_verdicts(found["against_interval_methods"]),
        "",
        *_standings(found["against_interval_methods"]),
        "",
        "## The same, LayerCheck as measured",
        "",
        *_verdicts(found["as_measured_against_interval_methods"]),
    ]


def _events(found: Mapping[str, Any]) -> list[str]:
    """What each event is charged by `slowdown`, or why there is no such table."""
    if missing := found["unknown_ratios"]:
        names = ", ".join(missing)
        return [
            f"Charged by visible stalls alone: no ratio of step times of {names} is known (`--step-ratio`)."
        ]
    head = ("event", "visible stall (ms)", "step time ratio", "charged by slowdown (ms)", "that is")
    body = [
        (
            one["name"],
            f"{1000 * one['stall_s']:.2f}",
            "-" if one["ratio"] is None else f"{one['ratio']:.3f}",
            f"{1000 * one['charged_s']:.2f}",
            one["basis"],
        )
        for one in found["events"]
    ]
    return ["## What an event is charged", "", *table(head, body)]


def _curves(points: Sequence[Mapping[str, Any]], protocol: Protocol) -> list[str]:
    mine = [one for one in points if one["protocol"] == protocol]
    names = list(dict.fromkeys(one["method"] for one in mine))
    cells = {(one["mtbf_h"], one["method"]): one for one in mine}
    body = [
        (f"{mtbf_h:.3g}", *(_cell(cells[mtbf_h, name]) for name in names))
        for mtbf_h in sorted({one["mtbf_h"] for one in mine})
    ]
    return table(("MTBF (h)", *names), body)


def _cell(point: Mapping[str, Any]) -> str:
    return f"{100 * point['charged']:.2f} ({100 * point['ettr']:.2f}), {point['interval_steps']:.0f}"


def _standings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = (
        "MTBF (h)",
        "method",
        "charged %",
        "against",
        "charged %",
        "ahead",
        "times",
        "decides",
        "by",
    )
    body = [
        (
            f"{row['mtbf_h']:.3g}",
            row["method"],
            f"{100 * row['charged']:.2f}",
            row["rival"],
            f"{100 * row['rival_charged']:.2f}",
            f"{100 * row['ahead']:+.2f} +- {100 * row['ahead_ci']:.2f}",
            "-" if row["times"] is None else f"{row['times']:.3f}",
            row["decides"],
            ", ".join(f"{name} {100 * value:+.2f}" for name, value in row["by"].items()),
        )
        for row in rows
    ]
    note = "Ahead, by: points of the elapsed time; by: how much more of it the rival spends on that."
    return [*table(head, body), "", note]


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each method where it is ahead, and of where it is not which cost decides."""
    return [f"- {name}: {_verdict([row for row in rows if row['method'] == name])}" for name in _names(rows)]


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    behind = [row for row in rows if row["ahead"] <= 0]
    if not behind:
        least = min(rows, key=lambda row: row["ahead"])
        return (
            f"ahead at all {len(rows)} MTBFs, least at {least['mtbf_h']:.3g} h "
            f"({100 * least['ahead']:+.2f} points against {least['rival']})"
        )
    places = ", ".join(
        f"{row['mtbf_h']:.3g} h ({100 * row['ahead']:+.2f} points, {row['rival']}: {row['decides']})"
        for row in behind
    )
    return f"ahead at {len(rows) - len(behind)} of {len(rows)} MTBFs, behind at {places}"


def in_words(found: Mapping[str, Any]) -> str:
    """What a person reads at the end of a sweep."""
    lines = []
    for charge, mine in found["charges"].items():
        lines += [
            f"charged by {charge}, lost progress too, against the best interval method at its own optimum:",
            *(f"  {line}" for line in _verdicts(mine["against_interval_methods"])),
            "the same, as measured:",
            *(f"  {line}" for line in _verdicts(mine["as_measured_against_interval_methods"])),
        ]
    return "\n".join(lines)
