"""What the command lines of the benches share."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options of every bench: where the store lies, where the figures go."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", help="where the store lies meanwhile; default: the temp folder")
    parser.add_argument("--json", help="write the figures to this file too")
    return parser


def measure_and_print(args: argparse.Namespace, measure: Callable[[Path], dict[str, Any]]) -> None:
    """Calls `measure` with an empty folder that is gone afterwards; prints what it found."""
    folder = Path(tempfile.mkdtemp(prefix="lc-bench-", dir=args.folder))
    try:
        figures = measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text)
