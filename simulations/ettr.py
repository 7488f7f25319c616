"""`python -m simulations.ettr --costs FILE|RUN_DIR|paper --out DIR`: ETTR against MTBF.

Writes `ettr.parquet` (one row a point), `ettr.json` (settings, crossovers), and the pictures `ettr` and
`ettr-breakdown` (.png, .svg); with `--cluster` the same as `cluster`, over 8 to 131,072 GPUs. With `--tiers`
LayerCheck is simulated with each of its tiers, too (residuals, memory, both), kinds of failure are Llama 3's,
and `ettr-tiers.json`, `.md` and pictures say who is ahead where and why, lost progress charged; where ratios
of step times are known, once with visible stalls and once with all that training loses (`--charge`). Where
RAY_ADDRESS names a cluster, as inside a Ray job, each (method, MTBF, block of seeds) is one task of it;
without one all runs in this process. The numbers are the same.
"""

# ruff: noqa: T201
import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from layercheck.errors import ConfigError, LayerCheckError
from simulations import tier_report
from simulations.charges import CHARGES, COPIES, Charge, charged, unknown, with_step_ratios
from simulations.checks import positive
from simulations.cluster_view import (
    CLUSTER_GPUS,
    GPUS_PER_NODE,
    add_cluster_options,
    mtbf_of_cluster,
    parse_rate,
    scaling,
)
from simulations.costs import Costs, load_costs, with_same_restart
from simulations.failures import KINDS
from simulations.options import USUAL_MIX, add_failure_options, failure_model
from simulations.pictures import draw_breakdown, draw_curves
from simulations.progress import ProgressBar
from simulations.ray_tasks import has_cluster, run_on_ray
from simulations.sweep import Outcome, Plan, run_here, sweep
from simulations.tables import crossovers, crossovers_in_words, row_of, table, write_parquet
from simulations.tiers import STORAGE, TierSet, tier_sets

_TIERS_MIX = "llama3"
"""The only published causes that tell processes, nodes and switches apart (`cluster_view.LLAMA3_CAUSES`)."""
_LEGEND = (
    "cells: ETTR in % +- half its 95 % interval (with lost progress charged) /steps between two saves",
    "matched: every interval method takes LayerCheck's mean interval, as in the paper",
    "own optimum: each takes the interval that is best for it at this MTBF",
    "derived: computed from what was measured",
)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input."""
    options = _parser().parse_args(argv)
    try:
        costs = _costs(options)
        plans = {one: _plans(options, charged(costs, one)) for one in _charges(options, costs)}
        _run(plans, costs, options)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.ettr", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--costs", required=True, help="a costs.json, the folder of a run, or `paper`")
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--same-restart", action="store_true", help="detection and restart of all methods are their mean"
    )
    add_failure_options(parser, f"{USUAL_MIX}, with --tiers {_TIERS_MIX}")
    _add_tier_options(parser)
    parser.add_argument(
        "--cluster", action="store_true", help="8 to 131,072 GPUs in place of a range of MTBFs"
    )
    add_cluster_options(parser)
    parser.add_argument(
        "--mtbf-h", nargs=2, type=float, default=(0.01, 3.0), metavar=("FROM", "TO"), help="range, in hours"
    )
    parser.add_argument("--points", type=int, default=13, help="MTBFs in that range, evenly on the logarithm")
    parser.add_argument("--seeds", type=int, default=200, help="simulated runs of each cell")
    parser.add_argument("--days", type=float, default=30.0, help="simulated time of one seed")
    parser.add_argument("--no-pictures", action="store_true", help="tables only; needs no matplotlib")
    parser.add_argument("--here", action="store_true", help="in this process, whatever RAY_ADDRESS says")
    return parser


def _add_tier_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiers", action="store_true", help="LayerCheck with residuals and memory, too")
    parser.add_argument("--no-replicas", action="store_true", help="of `--tiers`: no copies on other nodes")
    parser.add_argument(
        "--charge",
        choices=CHARGES,
        default="stalls",
        help="an event costs its visible stall, or all that training loses to it",
    )
    parser.add_argument(
        "--step-ratio",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=R",
        help="measured step time with an event of that method at every step / without, as gemini=1.07; for "
        f"LayerCheck with a full state copied as {', '.join(COPIES)}; default: the costs' own",
    )


def _tiers(options: argparse.Namespace, costs: Costs) -> tuple[TierSet, ...]:
    """What LayerCheck is simulated with.

    Raises:
        ConfigError: an option means nothing without `--tiers`, or no method has layers.
    """
    if not options.tiers:
        if options.no_replicas:
            raise ConfigError(
                "--no-replicas means nothing without --tiers: add it, or leave --no-replicas out"
            )
        return (STORAGE,)
    if not any(cost.layers for cost in costs.methods.values()):
        raise ConfigError(f"--tiers: costs {options.costs} have no method that restores layers")
    return tier_sets(not options.no_replicas)


def _costs(options: argparse.Namespace) -> Costs:
    """The costs as they were measured, stalls as they are seen.

    Raises:
        ConfigError: they cannot be read, or a ratio is wrong.
    """
    costs = load_costs(options.costs)
    if options.same_restart:
        costs = with_same_restart(costs)
    ratios = {}
    for text in options.step_ratio:
        name, _, value = text.partition("=")
        try:
            ratios[name] = float(value)
        except ValueError:
            raise ConfigError(f"step-ratio {text!r} must be like gemini=1.07") from None
    if ratios and options.charge == "stalls" and not options.tiers:
        raise ConfigError("--step-ratio means nothing with --charge stalls but for --tiers: take slowdown")
    return with_step_ratios(costs, ratios)


def _charges(options: argparse.Namespace, costs: Costs) -> tuple[Charge, ...]:
    """What is swept: the charge that is asked for first, with `--tiers` also the other, if it can be."""
    others = [one for one in CHARGES if one != options.charge and (one == "stalls" or not unknown(costs))]
    return (options.charge, *(others if options.tiers else ()))


def _plans(options: argparse.Namespace, costs: Costs) -> list[Plan]:
    """One plan for a range of MTBFs; with `--cluster` one for each size, each with costs of its own."""
    tiers = _tiers(options, costs)
    failures = failure_model(options, usual_mix=_TIERS_MIX if options.tiers else USUAL_MIX)
    seeds, horizon_s = int(positive("seeds", options.seeds)), positive("days", options.days) * 86400
    if options.cluster:
        rate, scaled = parse_rate(options.rate), scaling(options)
        sizes = {gpus: mtbf_of_cluster(gpus / GPUS_PER_NODE, rate) for gpus in CLUSTER_GPUS}
        return [
            Plan(scaled.costs(costs, gpus), (mtbf_s,), failures, seeds, horizon_s=horizon_s, tiers=tiers)
            for gpus, mtbf_s in sizes.items()
        ]
    low, high = (positive("mtbf_h", hours) * 3600 for hours in options.mtbf_h)
    points = int(positive("points", options.points))
    mtbf_s = tuple(float(one) for one in np.geomspace(low, high, points))
    return [Plan(costs, mtbf_s, failures, seeds, horizon_s=horizon_s, tiers=tiers)]


def _run(plans: Mapping[Charge, list[Plan]], costs: Costs, options: argparse.Namespace) -> None:
    on_ray = has_cluster() and not options.here
    options.out.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    runner = run_on_ray if on_ray else run_here
    by_charge = {one: sweep(each, runner, ProgressBar(f"simulating, {one}")) for one, each in plans.items()}
    plan, outcomes = plans[options.charge][0], by_charge[options.charge]
    seconds = time.monotonic() - began_s
    name = "cluster" if options.cluster else "ettr"
    write_parquet([row_of(one) for one in outcomes], options.out / f"{name}.parquet")
    content = _settings(plan, options) | {"crossovers": [asdict(one) for one in crossovers(outcomes)]}
    (options.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    if not options.no_pictures:
        draw_curves(outcomes, options.out / name, options.cluster, paper=options.costs == "paper")
        draw_breakdown(outcomes, options.out / f"{name}-breakdown")
    print(describe(plan.costs, outcomes))
    if options.tiers:
        _report_tiers(replace(plan, costs=costs), by_charge, options)
    simulated = [one for each in by_charge.values() for one in each]
    total = sum(one.num_failures for one in simulated)
    where = "as Ray tasks" if on_ray else "in one process"
    print(
        f"\n{len(simulated)} points, {options.seeds} seeds of {options.days:g} days: {total / 1e6:.1f} "
        f"million failures in {seconds:.1f} s {where} ({total / seconds / 1e6:.2f} million failures a second)"
    )
    print(
        f"written to {options.out}: {name}.parquet, {name}.json"
        + ("" if options.no_pictures else ", pictures")
    )


def _report_tiers(plan: Plan, by_charge: Mapping[Charge, list[Outcome]], options: argparse.Namespace) -> None:
    found = tier_report.content(plan.costs, plan.tiers, by_charge)
    parts = ", ".join(
        f"{kind} {100 * part:.1f} %" for kind, part in zip(KINDS, plan.failures.mix, strict=True)
    )
    about = (
        f"Costs: {plan.costs.title} ({plan.costs.machine}; {plan.costs.model})"
        + (", detection and restart of all their mean" if options.same_restart else "")
        + f". Failures: {parts}, {options.law}. {options.seeds} seeds of {options.days:g} days."
    )
    tier_report.write(options.out, found, about)
    if not options.no_pictures:
        for charge, outcomes in by_charge.items():
            tier_report.draw(outcomes, options.out / f"ettr-tiers-{charge}")
    print(f"\n{tier_report.in_words(found)}")


def _settings(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    content = {
        "costs": options.costs,
        "title": plan.costs.title,
        "same_restart": options.same_restart,
        "charge": options.charge,
        "law": options.law,
        "mix": list(plan.failures.mix),
        "failures_in_recovery": plan.failures.in_recovery,
        "seeds": plan.seeds,
        "days": options.days,
    }
    if options.cluster:
        content |= {"rate": options.rate, "scaling": asdict(scaling(options))}
    return content


def describe(costs: Costs, outcomes: list[Outcome]) -> str:
    """What a person reads at the end: a table for each protocol, and the crossovers."""
    sources = ", ".join(f"{name} {cost.source}" for name, cost in costs.methods.items())
    lines = [f"costs: {costs.title}; {sources}", ""]
    lines += [*_LEGEND, ""]
    for protocol in dict.fromkeys(one.point.protocol for one in outcomes):
        lines += [f"{protocol.replace('_', ' ')}:", table(outcomes, protocol), ""]
    return "\n".join([*lines, "crossovers:", crossovers_in_words(crossovers(outcomes))])


if __name__ == "__main__":
    sys.exit(main())
