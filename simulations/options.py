"""Options that several commands share."""

import argparse

from simulations.checks import positive
from simulations.cluster_view import parse_mix
from simulations.failures import FailureModel, Repair, parse_law

USUAL_MIX = "process"


def add_failure_options(parser: argparse.ArgumentParser, mix: str = USUAL_MIX) -> None:
    """The options that `failure_model` reads; `mix` says in words what its default is."""
    parser.add_argument("--law", default="exponential", help="exponential, weibull:K, or bootstrap:FILE.csv")
    parser.add_argument("--mix", help=f"process, llama3, or three parts such as 0.5,0.4,0.1; default: {mix}")
    parser.add_argument("--repair", type=float, nargs=2, metavar=("MEAN_S", "SIGMA"), help="lognormal repair")
    parser.add_argument("--spare-recoveries", action="store_true", help="no failures during recoveries")


def failure_model(
    options: argparse.Namespace, mtbf_s: float = 1.0, usual_mix: str = USUAL_MIX
) -> FailureModel:
    """Law, mix and repair of the command line; `usual_mix` where that gives none.

    Raises:
        ConfigError: one of them is wrong.
    """
    repair = None
    if options.repair is not None:
        repair = Repair(positive("repair mean_s", options.repair[0]), positive("sigma", options.repair[1]))
    return FailureModel(
        mtbf_s=mtbf_s,
        law=parse_law(options.law),
        in_recovery=not options.spare_recoveries,
        repair=repair,
        mix=parse_mix(usual_mix if options.mix is None else options.mix),
    )
