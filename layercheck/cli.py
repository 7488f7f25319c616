"""The `layercheck` command: looks at the store of a run. Storage alone: no Ray, no torch, no live process.

Exit codes: 0 good; 1 damage, no plan, or refused; 2 usage.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from layercheck import __version__
from layercheck.commands.answer import DAMAGE, GOOD, USAGE, Answer
from layercheck.commands.export import ExportOptions, export
from layercheck.commands.gc import gc
from layercheck.commands.plan import PlanOptions, plan
from layercheck.commands.report import report
from layercheck.commands.status import status
from layercheck.commands.store import Store, open_both
from layercheck.commands.verify import verify
from layercheck.errors import ConfigError, LayerCheckError

Command = Callable[[Store, argparse.Namespace], Answer]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse itself exits with 2 on wrong usage."""
    args = _parser().parse_args(argv)
    try:
        store = open_both(args.store)
        if getattr(args, "watch", False):
            return _watch(store, args)
        return _say(args.command(store, args), args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return DAMAGE
    except BrokenPipeError:
        sys.stderr.close()  # `layercheck status | head`: the reader has seen enough
        return GOOD


def _say(answer: Answer, args: argparse.Namespace) -> int:
    for note in answer.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(_plain(answer.value), allow_nan=False) if args.json else answer.text, flush=True)
    return answer.code


def _plain(value: Any) -> Any:
    """JSON knows no infinity: the drift of a layer that is due whatever it did becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _watch(store: Store, args: argparse.Namespace) -> int:
    """With --json one line each time."""
    from layercheck.commands.watch import watch  # the other commands need no terminal library

    return watch(store, partial(_say, args=args) if args.json else None)


# ---------------------------------------------------------------- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("layercheck", description="Looks at the store of a run.")
    parser.add_argument("--version", action="version", version=f"layercheck {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Command) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "store", metavar="STORE", help="run folder or the layercheck folder in it, or a URI"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(command=run)
        return command

    watched = add("status", "newest version and age of every layer", lambda store, _: status(store))
    watched.add_argument("--watch", action="store_true", help="a live view, until the run has completed")
    _plan_flags(
        add("plan", "dry run of the next recovery", lambda store, args: plan(store, _plan_options(args)))
    )
    add("verify", "read and check every live shard", lambda store, _: verify(store))
    collects = add("gc", "delete what no plan can need", lambda store, args: gc(store, args.dry_run))
    collects.add_argument("--dry-run", action="store_true", help="delete nothing, say what would go and why")
    shown = add("report", "write a page about the run", _report)
    shown.add_argument("--out", required=True, metavar="FILE.html", help="where the page goes")
    shown.add_argument("--against", metavar="STORE", help="another run, to be put beside this one")
    _export_flags(
        add(
            "export",
            "write the composite as a DeepSpeed or Hugging Face checkpoint",
            lambda store, args: export(store, _export_options(args)),
        )
    )
    return parser


def _report(store: Store, args: argparse.Namespace) -> Answer:
    return report(store, args.out, None if args.against is None else open_both(args.against))


def _plan_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--mode", choices=("composite", "uniform", "strict"), help="default: as the run would"
    )
    command.add_argument("--at-step", type=_count(0), metavar="N", help="as if the run had failed at step N")
    command.add_argument("--max-age", type=_count(0), metavar="N", help="no plan with an older layer")
    command.add_argument(
        "--without", nargs="+", action="extend", default=[], metavar="FILE", help="shards to do without"
    )
    command.add_argument("--world-size", type=_count(1), metavar="W", help="ranks that will recover")


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    return PlanOptions(args.mode, args.at_step, args.max_age, tuple(args.without), args.world_size)


def _export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--to", required=True, choices=("deepspeed", "hf"), help="who will read it")
    command.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
    command.add_argument("--at-step", type=_count(0), metavar="N", help="as if the run had failed at step N")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of hf; default float32")
    command.add_argument(
        "--groups", metavar="layer|stock|FILE", help="optimizer groups of deepspeed; default layer"
    )
    command.add_argument("--world-size", type=_count(1), metavar="W", help="ranks that will load deepspeed")
    command.add_argument(
        "--sub-group-size", type=_count(1), metavar="N", help="of deepspeed's zero_optimization; default 1e9"
    )


def _export_options(args: argparse.Namespace) -> ExportOptions:
    return ExportOptions(
        args.to, args.out, args.at_step, args.dtype, args.groups, args.world_size, args.sub_group_size
    )


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return parse


if __name__ == "__main__":
    sys.exit(main())
