"""`python -m simulations.ettr --costs FILE|RUN_DIR|paper --out DIR`: ETTR against MTBF.

Writes `ettr.parquet` (one row a point), `ettr.json` (settings, crossovers), and the pictures `ettr` and
`breakdown` (.png, .svg). Where RAY_ADDRESS names a cluster, as inside a Ray job, each (method, MTBF, block of
seeds) is one task of it; without one all runs in this process. The numbers are the same.
"""

# ruff: noqa: T201
import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from layercheck.errors import LayerCheckError
from simulations.checks import positive
from simulations.costs import Costs, load_costs
from simulations.failures import FailureModel, Repair, parse_law
from simulations.pictures import draw_breakdown, draw_curves
from simulations.progress import ProgressBar
from simulations.ray_tasks import has_cluster, run_on_ray
from simulations.sweep import Outcome, Plan, run_here, sweep
from simulations.tables import crossovers, crossovers_in_words, row_of, table, write_parquet


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input."""
    options = _parser().parse_args(argv)
    try:
        plan = _plan(options)
        _run(plan, options)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.ettr", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--costs", required=True, help="a costs.json, the folder of a run, or `paper`")
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    add_failure_options(parser)
    parser.add_argument("--mtbf-h", nargs=2, type=float, default=(0.01, 3.0), metavar=("FROM", "TO"))
    parser.add_argument("--points", type=int, default=13, help="MTBFs in that range, evenly on the logarithm")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--days", type=float, default=30.0, help="simulated time of one seed")
    parser.add_argument("--no-pictures", action="store_true", help="tables only; needs no matplotlib")
    parser.add_argument("--here", action="store_true", help="in this process, whatever RAY_ADDRESS says")
    return parser


def add_failure_options(parser: argparse.ArgumentParser) -> None:
    """The options that `failure_model` reads."""
    parser.add_argument("--law", default="exponential", help="exponential, weibull:K, or bootstrap:FILE.csv")
    parser.add_argument(
        "--mix", default="process", help="process, llama3, or three parts such as 0.5,0.4,0.1"
    )
    parser.add_argument("--repair", type=float, nargs=2, metavar=("MEAN_S", "SIGMA"), help="lognormal repair")
    parser.add_argument("--spare-recoveries", action="store_true", help="no failures during recoveries")


def failure_model(options: argparse.Namespace, mtbf_s: float = 1.0) -> FailureModel:
    """Law, mix and repair of the command line.

    Raises:
        ConfigError: one of them is wrong.
    """
    from simulations.cluster_view import parse_mix

    repair = None
    if options.repair is not None:
        repair = Repair(positive("repair mean_s", options.repair[0]), positive("sigma", options.repair[1]))
    return FailureModel(
        mtbf_s=mtbf_s,
        law=parse_law(options.law),
        in_recovery=not options.spare_recoveries,
        repair=repair,
        mix=parse_mix(options.mix),
    )


def _plan(options: argparse.Namespace) -> Plan:
    low, high = (positive("mtbf_h", hours) * 3600 for hours in options.mtbf_h)
    points = int(positive("points", options.points))
    return Plan(
        costs=load_costs(options.costs),
        mtbf_s=tuple(float(mtbf_s) for mtbf_s in np.geomspace(low, high, points)),
        failures=failure_model(options),
        seeds=int(positive("seeds", options.seeds)),
        horizon_s=positive("days", options.days) * 86400,
    )


def _run(plan: Plan, options: argparse.Namespace) -> None:
    on_ray = has_cluster() and not options.here
    options.out.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    outcomes = sweep(plan, run_on_ray if on_ray else run_here, ProgressBar("simulating"))
    seconds = time.monotonic() - began_s
    write_parquet([row_of(one) for one in outcomes], options.out / "ettr.parquet")
    content = _settings(plan, options) | {"crossovers": [asdict(one) for one in crossovers(outcomes)]}
    (options.out / "ettr.json").write_text(json.dumps(content, indent=2) + "\n")
    if not options.no_pictures:
        draw_curves(outcomes, options.out / "ettr", paper=options.costs == "paper")
        draw_breakdown(outcomes, options.out / "breakdown")
    print(describe(plan.costs, outcomes))
    total = sum(one.num_failures for one in outcomes)
    where = "as Ray tasks" if on_ray else "in one process"
    print(
        f"\n{len(outcomes)} points, {plan.seeds} seeds of {options.days:g} days: {total / 1e6:.1f} million "
        f"failures in {seconds:.1f} s {where} ({total / seconds / 1e6:.2f} million failures a second)"
    )
    print(
        f"written to {options.out}: ettr.parquet, ettr.json" + ("" if options.no_pictures else ", pictures")
    )


def _settings(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "costs": options.costs,
        "title": plan.costs.title,
        "law": options.law,
        "mix": list(plan.failures.mix),
        "failures_in_recovery": plan.failures.in_recovery,
        "seeds": plan.seeds,
        "days": options.days,
    }


def describe(costs: Costs, outcomes: list[Outcome]) -> str:
    """What a person reads at the end: a table for each protocol, and the crossovers."""
    sources = ", ".join(f"{name} {cost.source}" for name, cost in costs.methods.items())
    lines = [f"costs: {costs.title}; {sources}", ""]
    lines += ["ETTR in % with its 95 % interval (with lost progress charged) / interval in steps", ""]
    for protocol in dict.fromkeys(one.point.protocol for one in outcomes):
        lines += [f"{protocol.replace('_', ' ')}:", table(outcomes, protocol), ""]
    return "\n".join([*lines, "crossovers:", crossovers_in_words(crossovers(outcomes))])


if __name__ == "__main__":
    sys.exit(main())
