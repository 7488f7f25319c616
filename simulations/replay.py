"""`python -m simulations.replay --trace DIR --out DIR`: other settings over a recorded run, without a re-run.

First the run's own settings: the decisions must be those of the run (of a run with residuals this can't be
checked). Then a grid of target intervals (each gives its K) and s_max, and at each point the modes
`round_robin` and `random` with as many bytes as `drift`. Writes `replay.parquet`, `replay.json`, a picture.

With `--residuals`: bits, target intervals and `residual.k_ratio` instead; `residuals.parquet` and `.json`.
"""

# ruff: noqa: T201
import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import nan
from pathlib import Path
from typing import Any

from layercheck.errors import LayerCheckError
from simulations.checks import positive
from simulations.pictures import draw_lines
from simulations.progress import ProgressBar
from simulations.replay_policy import Comparison, compare, figures, incomparable, replay, with_settings
from simulations.replay_residuals import describe as describe_residuals
from simulations.replay_residuals import frontier
from simulations.tables import write_parquet
from simulations.trace import Trace, read_trace

OTHER_MODES = ("round_robin", "random")
_TRIES = 8
_CLOSE = 0.01
_DAMPING = 0.8


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 the replay decides otherwise than the run did, 2 wrong input."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations.replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", required=True, help="folder of a run")
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--targets", type=float, nargs="+", help="target intervals; default: the run's x 1/2, 1, 2"
    )
    parser.add_argument("--s-max", type=int, nargs="+", help="age limits; default: the run's x 1, 2")
    parser.add_argument("--residuals", action="store_true", help="bytes against lost progress with residuals")
    parser.add_argument(
        "--bits", type=int, nargs="+", default=[8, 4], choices=[4, 8], help="of residuals; default: 8 4"
    )
    parser.add_argument(
        "--k-ratios", type=float, nargs="+", default=[0.03, 0.1, 0.3], help="default: 0.03 0.1 0.3"
    )
    parser.add_argument("--no-pictures", action="store_true", help="tables only; needs no matplotlib")
    return parser


def _run(options: argparse.Namespace) -> int:
    trace = read_trace(options.trace)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.residuals:
        return _residuals(trace, options)
    why = incomparable(trace)
    same = Comparison(0, 0, why) if why else compare(trace)
    rows = grid(trace, _targets(trace, options), _limits(trace, options), ProgressBar("replaying"))
    write_parquet(rows, options.out / "replay.parquet")
    content = {"run": trace.run, "notes": trace.notes, "check": asdict(same), "rows": rows}
    (options.out / "replay.json").write_text(json.dumps(content, indent=2) + "\n")
    if not options.no_pictures:
        lines = {mode: _line(rows, mode) for mode in ("drift", *OTHER_MODES)}
        labels = ("mean persist interval (steps)", "size-weighted drift lost at a failure")
        draw_lines(lines, options.out / "replay", labels, log="")
    print(describe(trace, rows))
    print(f"check: not made: {why}" if why else _verdict(same.steps, same.different, same.first))
    return 1 if same.different else 0


def _residuals(trace: Trace, options: argparse.Namespace) -> int:
    rows = frontier(trace, _targets(trace, options), options.bits, options.k_ratios)
    write_parquet(rows, options.out / "residuals.parquet")
    content = {"run": trace.run, "notes": trace.notes, "rows": rows}
    (options.out / "residuals.json").write_text(json.dumps(content, indent=2) + "\n")
    print(describe_residuals(trace, rows))
    return 0


def _targets(trace: Trace, options: argparse.Namespace) -> list[float]:
    usual = trace.config.target_interval
    return [positive("targets", one) for one in options.targets or (usual / 2, usual, usual * 2)]


def _limits(trace: Trace, options: argparse.Namespace) -> list[int]:
    return list(options.s_max or (trace.config.s_max, 2 * trace.config.s_max))


def grid(
    trace: Trace, targets: list[float], limits: list[int], shown: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Figures of all modes at all points; a target above an age limit is left out, the limit would rule it.

    Raises:
        ConfigError: no point is left, or a setting is out of range.
    """
    points = [(target, limit) for limit in limits for target in targets if target <= limit]
    rows: list[dict[str, Any]] = []
    for done, (target, limit) in enumerate(points):
        drift = figures(replay(trace, with_settings(trace.config, target_interval=target, s_max=limit)))
        rows.append(drift | {"bytes_ratio": 1.0})
        for mode in OTHER_MODES:
            rows.append(_at_equal_bytes(trace, mode, limit, drift))
        if shown is not None:
            shown(done + 1, len(points))
    return rows


def _at_equal_bytes(trace: Trace, mode: str, limit: int, drift: dict[str, Any]) -> dict[str, Any]:
    """The mode at the target interval that writes as many bytes as `drift` did, as nearly as it can.

    Bytes fall with the interval, by steps: the search corrects by what was missed, and keeps the best try.
    """
    wanted = max(drift["bytes_written"], 1.0)
    target = drift["mean_interval_steps"] or float(limit)
    tries = []
    for _ in range(_TRIES):
        target = min(float(limit), max(1.0, target))
        found = figures(
            replay(trace, with_settings(trace.config, selection=mode, target_interval=target, s_max=limit))
        )
        ratio = found["bytes_written"] / wanted
        tries.append(found | {"bytes_ratio": ratio})
        if abs(ratio - 1) < _CLOSE or ratio == 0:
            break
        target *= ratio**_DAMPING
    return min(tries, key=lambda found: abs(found["bytes_ratio"] - 1))


def _line(rows: list[dict[str, Any]], mode: str) -> tuple[list[float], list[float]]:
    found = sorted(
        (row["mean_interval_steps"], row["drift_lost"])
        for row in rows
        if row["selection"] == mode and row["mean_interval_steps"]
    )
    return [x for x, _ in found], [y for _, y in found]


def describe(trace: Trace, rows: list[dict[str, Any]]) -> str:
    """A table of all points, and how the modes compare at equal bytes."""
    lines = [
        f"run {trace.run}: {len(trace.steps)} steps, {len(trace.names)} layers",
        *(f"note: {note}" for note in trace.notes),
        "",
        f"  {'mode':<12}{'target':>8}{'s_max':>7}{'interval':>10}{'MB':>9}{'events':>8}{'MB/event':>10}"
        f"{'writes':>8}{'by age':>8}{'age':>7}{'max age':>9}{'drift lost':>12}{'bytes/drift':>13}",
    ]
    for row in rows:
        interval = row["mean_interval_steps"]
        lines.append(
            f"  {row['selection']:<12}{row['target_interval']:>8.4g}{row['s_max']:>7}"
            f"{interval or nan:>10.1f}{row['bytes_written'] / 1e6:>9.1f}{row['events']:>8}"
            f"{row['mean_event_bytes'] / 1e6:>10.2f}{row['layer_writes']:>8}{row['writes_by_age']:>8}"
            f"{row['weighted_age']:>7.1f}{row['max_age']:>9}{row['drift_lost']:>12.3e}{row['bytes_ratio']:>13.3f}"
        )
    lines += ["", *(_against(rows, mode) for mode in OTHER_MODES)]
    return "\n".join(lines)


def _against(rows: list[dict[str, Any]], mode: str) -> str:
    """Drift lost by `drift` against another mode: each at its own bytes, made equal by proportion.

    Drift lost grows with the interval, hence as 1 / bytes: a mode that wrote 2 % more is charged 2 % more.
    """
    ratios = []
    for at, row in enumerate(rows):
        if row["selection"] == mode:
            drift = next(one for one in reversed(rows[:at]) if one["selection"] == "drift")
            lost = row["drift_lost"] * row["bytes_ratio"]
            ratios.append(drift["drift_lost"] / lost if lost > 0 else nan)
    text = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"drift lost by `drift` / by `{mode}`, same bytes, point by point: {text} (below 1: drift wins)"


def _verdict(steps: int, different: int, first: str) -> str:
    if not different:
        return f"check: the replay decides as the run did at all {steps} steps up to its first failure"
    return f"check: NOT as the run did at {different} of {steps} steps; {first}"


if __name__ == "__main__":
    sys.exit(main())
