"""`python -m simulations.measure saving|methods|... --out DIR`: what saving costs here, and what is lost.

- `saving`: LayerCheck beside stock DeepSpeed; writes `saving.json`.
- `methods`: every method in short blocks, in a shuffled order; writes `comparison.json`, `comparison.md`,
  pictures, and `costs.json`, which `python -m simulations.ettr --costs DIR` reads.
- `footprint`: LayerCheck's storage at three thresholds on several data sets; writes `footprint.json`.
- `sizes`: measures nothing; draws what `methods` came to for several model sizes side by side.
- `residuals`: bytes against lost progress in weight space, by replay and in killed runs; writes
  `residuals.json`.
- `memory`: what a killed worker, node or cluster loses with the memory tier; writes `memory.json`. With
  `--overhead` what the tier and residuals add to a step instead; writes `overhead.json`. With `--every-step`
  what saves at every step add to it, those of other methods too, for `ettr --step-ratio`; writes
  `every-step.json`. With `--tuned` only those of its runs that fine-tune a model; writes `tuned.json`.

`saving`, `methods`, `footprint`, `memory --overhead` and `--every-step` need the machine to themselves.
"""

# ruff: noqa: T201
import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from app.measure.regime import SIZES
from layercheck.errors import ConfigError, LayerCheckError
from simulations.comparison.arms import METHODS
from simulations.comparison.footprint import data_sets, measure_footprint
from simulations.comparison.run import measure_methods, order_of
from simulations.comparison.sizes import draw_sizes, read_comparisons


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 measured, 1 failed, 2 wrong input."""
    options = _parser().parse_args(arguments)
    # A signal would otherwise just end this process, and leave what it has started.
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _leave)
    try:
        _refuse_flags(options)
        result = _COMMANDS[options.what](options)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(json.dumps(result, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.measure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=list(_COMMANDS))
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="fewer steps, 10 to 15 minutes")
    parser.add_argument(
        "--methods", nargs="+", help=f"of `methods` and `--every-step`: some of {' '.join(METHODS)}"
    )
    parser.add_argument("--rounds", type=int, help="of `methods`: blocks of each arm (full: 3, quick: 1)")
    parser.add_argument("--size", choices=list(SIZES), help="of the model of `methods` and `footprint`")
    parser.add_argument("--data", nargs="*", help="of `footprint`: files beside the bundled data")
    parser.add_argument(
        "--from", nargs="*", type=Path, dest="folders", help="of `sizes`: folders of `methods`"
    )
    parser.add_argument("--resume", action="store_true", help="of `methods`: run the blocks that are missing")
    parser.add_argument(
        "--overhead", action="store_true", help="of `memory`: step times, interleaved, in place of kills"
    )
    parser.add_argument(
        "--every-step", action="store_true", help="of `memory`: the same for arms that save at every step"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="of `memory`: the fine-tuning runs, without all others"
    )
    parser.add_argument("--seed", type=int, help="of `methods`: of the order of the blocks")
    return parser


def _refuse_flags(options: argparse.Namespace) -> None:
    """A flag that would do nothing is refused; of `what` and `--out` all make use."""
    for name, value in vars(options).items():
        if name in ("what", "out") or name in _FLAGS[options.what] or value is None or value is False:
            continue
        flag = "--from" if name == "folders" else f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} means nothing with {options.what}: leave it out", flag=flag)


def _saving(options: argparse.Namespace) -> dict[str, Any]:
    from simulations.saving.run import measure_saving  # loads torch, which `methods` leaves to the workers

    return measure_saving(options.out, options.quick)


def _methods(options: argparse.Namespace) -> dict[str, Any]:
    order = order_of(
        options.out,
        options.methods or METHODS,
        options.quick,
        options.seed or 0,
        options.resume,
        options.rounds,
        options.size,
    )
    return measure_methods(order, _say)


def _footprint(options: argparse.Namespace) -> dict[str, Any]:
    data = data_sets(options.data or [])
    return measure_footprint(options.out, data, options.quick, options.size, _say)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    if not options.folders:
        raise ConfigError("--from names no folder of `methods`")
    contents = read_comparisons(options.folders)
    draw_sizes(contents, options.out)
    return {"sizes": [content["size"] for content in contents], "out": str(options.out)}


def _residuals(options: argparse.Namespace) -> dict[str, Any]:
    from simulations.residuals.run import measure_residuals

    return measure_residuals(options.out, options.quick, _say)


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    flags = {"--overhead": options.overhead, "--every-step": options.every_step, "--tuned": options.tuned}
    chosen = [flag for flag, is_given in flags.items() if is_given]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} are two measurements: leave one out")
    if options.methods and not options.every_step:
        raise ConfigError("--methods means nothing with memory but for --every-step: leave it out")
    if options.overhead or options.every_step:
        from simulations.memory.overhead import measure_overhead  # loads torch

        return measure_overhead(options.out, options.quick, options.every_step, options.methods)
    from simulations.memory.run import measure_memory, measure_tuned

    return (measure_tuned if options.tuned else measure_memory)(options.out, options.quick, _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_COMMANDS = {
    "saving": _saving,
    "methods": _methods,
    "footprint": _footprint,
    "sizes": _sizes,
    "residuals": _residuals,
    "memory": _memory,
}
_FLAGS = {
    "saving": {"quick"},
    "methods": {"quick", "methods", "rounds", "size", "resume", "seed"},
    "footprint": {"quick", "size", "data"},
    "sizes": {"folders"},
    "residuals": {"quick"},
    "memory": {"quick", "overhead", "every_step", "tuned", "methods"},
}


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
