"""`python -m simulations.fidelity EXPERIMENT --out DIR`: is a recovered run as good as one without failures?

A small model is trained from scratch by the app, then fine-tuned on other text: without failures, and with
recoveries from real composites, seed by seed. Writes `fidelity.json`, a table and pictures.
`heatmap`: drift of each layer over a run; `cascade`: three recoveries where versions are oldest in a run of
the first seed, at the same steps for all seeds, and a control with ages ten times larger; `thresholds`: one
such recovery at three K; `benchmarks`: scores; `selection`: drift, round-robin, random at equal bytes;
`moments`: keep, scale or zero a stale first moment. Nothing is downloaded. With one `--runs` folder the
experiments share the runs that they have in common.
"""

# ruff: noqa: T201
import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from layercheck.errors import ConfigError, LayerCheckError
from simulations.fidelity.experiments import FULL, QUICK, QUICK_SEEDS, SEEDS
from simulations.fidelity.run import EXPERIMENTS, Order, run_experiment


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a run failed, 2 wrong input."""
    options = _parser().parse_args(arguments)
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _leave)
    usual = QUICK_SEEDS if options.quick else SEEDS
    order = Order(
        experiment=options.experiment,
        out=options.out,
        runs=options.runs or options.out / "runs",
        seeds=usual if options.seeds is None else options.seeds,
        length=QUICK if options.quick else FULL,
        pictures=not options.no_pictures,
    )
    try:
        run_experiment(order, lambda text: print(text, file=sys.stderr, flush=True))
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    table = order.out / "fidelity.md"
    print(table.read_text() if table.exists() else f"written to {order.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.fidelity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: OUT/runs")
    parser.add_argument("--seeds", type=int, help=f"how many; default {SEEDS}, quick {QUICK_SEEDS}")
    parser.add_argument("--quick", action="store_true", help="shorter runs: shows that it works, no more")
    parser.add_argument("--no-pictures", action="store_true", help="tables only; needs no matplotlib")
    return parser


def _leave(signum: int, frame: FrameType | None) -> None:
    """Ends the child process as well, which a signal would otherwise leave running."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
