"""`python -m simulations.regret --out DIR`: what composite recoveries do to Adam's regret.

Writes `regret.json`, `regret.parquet` and a picture: average regret against T without recoveries, with a
fixed number of them, and with a number that grows as sqrt(T); the term they add against its bound. See
`online_adam.py` for the problem and the bound (paper, section 3.6).
"""

# ruff: noqa: T201
import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layercheck.errors import LayerCheckError
from simulations.checks import positive
from simulations.online_adam import SCENARIOS, Problem, RegretCurves, run
from simulations.pictures import draw_lines
from simulations.progress import ProgressBar
from simulations.tables import write_parquet


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input."""
    options = _parser().parse_args(argv)
    try:
        problem = Problem(
            steps=int(positive("steps", options.steps)),
            s_max=int(positive("s_max", options.s_max)),
            num_failures=int(positive("failures", options.failures)),
            seed=options.seed,
        )
        curves = run(problem, ProgressBar("learning"))
        _write(problem, curves, options)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.regret", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--steps", type=int, default=100_000, help="T")
    parser.add_argument(
        "--s-max", type=int, default=50, help="largest age of a layer at a recovery, in steps"
    )
    parser.add_argument("--failures", type=int, default=10, help="of the scenario with a fixed number")
    parser.add_argument("--seed", type=int, default=0, help="of the failures")
    parser.add_argument("--no-pictures", action="store_true", help="tables only; needs no matplotlib")
    return parser


def _write(problem: Problem, curves: RegretCurves, options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    rows = curves.rows()
    write_parquet(rows, options.out / "regret.parquet")
    content = {"problem": asdict(problem), "failures": curves.num_failures, "rows": rows}
    (options.out / "regret.json").write_text(json.dumps(content, indent=2) + "\n")
    if not options.no_pictures:
        _draw(rows, options.out / "regret")
    print(describe(rows, curves.num_failures))
    print(f"written to {options.out}")


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    at = [row["step"] for row in rows]
    lines = {f"regret / T, {name}": (at, [row[f"average_{name}"] for row in rows]) for name in SCENARIOS}
    for name in SCENARIOS[1:]:
        lines[f"bound of the added term / T, {name}"] = (
            at,
            [row[f"bound_{name}"] / row["step"] for row in rows],
        )
    draw_lines(lines, path, ("T (steps)", "average regret"), log="xy")


def describe(rows: list[dict[str, Any]], num_failures: dict[str, int]) -> str:
    """A table for people."""
    lines = [f"recoveries: {num_failures['fixed']} (fixed), {num_failures['sqrt']} (sqrt T)", ""]
    titles = ("T", "avg none", "avg fixed", "avg sqrt", "added fixed", "its bound", "added sqrt", "its bound")
    lines.append("".join(f"{title:>13}" for title in titles))
    for row in rows:
        values = [row["average_none"], row["average_fixed"], row["average_sqrt"]]
        for name in SCENARIOS[1:]:
            values += [row[f"added_{name}"], row[f"bound_{name}"]]
        lines.append(f"{row['step']:>13}" + "".join(f"{value:>13.4g}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
