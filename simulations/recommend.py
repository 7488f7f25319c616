"""`python -m simulations.recommend --costs ... [--trace DIR] --mtbf-h M`: method, interval, and the reason.

Instead of `--mtbf-h`, a cluster: `--nodes N --rate rsc1|rsc2|llama3|FAILURES_PER_1000_NODE_DAYS`; the costs
are then scaled to it (see `cluster_view.py`). With `--out` the candidates are also written to
`recommend.json`.
"""

# ruff: noqa: T201
import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from layercheck.errors import ConfigError, LayerCheckError
from simulations.advise import Advice, advise
from simulations.checks import not_negative, positive
from simulations.cluster_view import GPUS_PER_NODE, add_cluster_options, mtbf_of_cluster, parse_rate, scaling
from simulations.costs import Costs, load_costs
from simulations.failures import FailureModel
from simulations.options import add_failure_options, failure_model
from simulations.trace import read_trace


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input."""
    options = _parser().parse_args(argv)
    try:
        costs, failures = _situation(options)
        trace = read_trace(options.trace) if options.trace else None
        limit = not_negative("max_lost_percent", options.max_lost_percent) / 100
        advice = advise(costs, failures, limit, trace)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            content = {"mtbf_s": failures.mtbf_s, "gpus": costs.gpus, **asdict(advice)}
            (options.out / "recommend.json").write_text(json.dumps(content, indent=2) + "\n")
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(costs, failures, advice))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.recommend", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--costs", required=True, help="a costs.json, the folder of a run, or `paper`")
    parser.add_argument("--trace", help="folder of a run whose drift is replayed for LayerCheck's settings")
    parser.add_argument("--mtbf-h", type=float, help="mean time between failures in hours")
    parser.add_argument("--nodes", type=int, help=f"nodes of {GPUS_PER_NODE} GPUs, in place of --mtbf-h")
    add_cluster_options(parser)
    add_failure_options(parser)
    parser.add_argument(
        "--max-lost-percent", type=float, default=1.0, help="limit of lost progress, of the trained steps"
    )
    parser.add_argument("--out", type=Path, help="folder for recommend.json")
    return parser


def _situation(options: argparse.Namespace) -> tuple[Costs, FailureModel]:
    costs = load_costs(options.costs)
    if (options.mtbf_h is None) == (options.nodes is None):
        raise ConfigError("give either --mtbf-h, or --nodes with --rate")
    if options.mtbf_h is not None:
        return costs, failure_model(options, positive("mtbf_h", options.mtbf_h) * 3600)
    mtbf_s = mtbf_of_cluster(options.nodes, parse_rate(options.rate))
    return scaling(options).costs(costs, options.nodes * GPUS_PER_NODE), failure_model(options, mtbf_s)


def describe(costs: Costs, failures: FailureModel, advice: Advice) -> str:
    """A table of the candidates and the reason."""
    lines = [
        f"costs: {costs.title}; MTBF {failures.mtbf_s / 3600:.3g} h",
        "",
        f"  {'method':<14}{'source':<10}{'interval':>10}{'ETTR %':>9}{'charged %':>11}{'lost %':>8}",
    ]
    for one in advice.candidates:
        mark = "" if one.within else "  loses more than the limit"
        lines.append(
            f"  {one.method:<14}{one.source:<10}{one.interval_steps:>10.4g}{100 * one.ettr:>9.2f}"
            f"{100 * one.charged:>11.2f}{100 * one.lost_share:>8.2f}{mark}"
        )
    return "\n".join([*lines, "", advice.reason])


if __name__ == "__main__":
    sys.exit(main())
