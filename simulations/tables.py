"""Outcomes of a sweep as a table for people, as Parquet, and the MTBFs at which two methods change places."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simulations.protocols import Protocol
from simulations.sweep import Outcome

CAUSES = (
    "stall_s",
    "rework_s",
    "detect_s",
    "restart_s",
    "load_s",
    "reconstruct_s",
    "repair_s",
    "lost_progress",
)
"""Where time went that was not kept; `lost_progress` is what a composite had learnt since its versions."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Above `mtbf_s` the method `better` is ahead of `worse`; below it is the other way round."""

    protocol: Protocol
    charged: bool
    better: str
    worse: str
    mtbf_s: float


def row_of(outcome: Outcome) -> dict[str, Any]:
    """One row of `ettr.parquet`; hours and steps in the names, shares without unit."""
    point = outcome.point
    return {
        "protocol": point.protocol,
        "method": point.method.name,
        "source": point.source,
        "mtbf_h": outcome.mtbf_s / 3600,
        "gpus": point.gpus,
        "interval_steps": float(point.interval_steps),
        "stall_per_commit_s": point.method.stall_s,
        "ettr": outcome.ettr,
        "ettr_low": outcome.ettr - outcome.ettr_ci,
        "ettr_high": outcome.ettr + outcome.ettr_ci,
        "ettr_closed_form": outcome.closed_form,
        "ettr_charged": outcome.charged,
        "ettr_charged_low": outcome.charged - outcome.charged_ci,
        "ettr_charged_high": outcome.charged + outcome.charged_ci,
        "lost_steps_per_failure": outcome.lost_steps,
        "lost_failures_sampled": outcome.num_lost_sampled,
        "failures": outcome.num_failures,
        "seeds": outcome.seeds,
        **{f"share_{cause.removesuffix('_s')}": share for cause, share in outcome.shares.items()},
    }


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows of equal keys, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    temporary.replace(path)


def table(outcomes: Sequence[Outcome], protocol: Protocol) -> str:
    """ETTR of each method by MTBF; charged with lost progress in brackets where a method has any."""
    names = list(dict.fromkeys(one.point.method.name for one in outcomes))
    by_place = {
        (one.mtbf_s, one.point.method.name): one for one in outcomes if one.point.protocol == protocol
    }
    lines = [f"  {'MTBF':>10}{'GPUs':>8}  " + "".join(f"{name:>26}" for name in names)]
    for mtbf_s in sorted({mtbf_s for mtbf_s, _ in by_place}):
        cells = "".join(f"{_cell(by_place[mtbf_s, name]):>26}" for name in names)
        gpus = by_place[mtbf_s, names[0]].point.gpus
        lines.append(f"  {in_words(mtbf_s):>10}{gpus:>8}  {cells}")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    text = f"{100 * outcome.ettr:.2f} +- {100 * outcome.ettr_ci:.2f}"
    charged = f" ({100 * outcome.charged:.1f})" if outcome.point.tiers else ""
    return f"{text}{charged} /{outcome.point.interval_steps:.0f}"


def in_words(seconds: float) -> str:
    """A time between failures with its unit."""
    return f"{seconds:.0f} s" if seconds < 300 else f"{seconds / 3600:.3g} h"


def crossovers(outcomes: Sequence[Outcome]) -> list[Crossover]:
    """Every change of order between two neighbouring MTBFs, its place interpolated on the logarithm."""
    found = []
    names = list(dict.fromkeys(one.point.method.name for one in outcomes))
    for protocol in dict.fromkeys(one.point.protocol for one in outcomes):
        mine = sorted((one for one in outcomes if one.point.protocol == protocol), key=lambda one: one.mtbf_s)
        for charged in (False, True):
            value = _charged if charged else _plain
            curves = {n: [(o.mtbf_s, value(o)) for o in mine if o.point.method.name == n] for n in names}
            for one, other in combinations(names, 2):
                for better, worse, mtbf_s in _changes(one, other, curves):
                    found.append(Crossover(protocol, charged, better, worse, mtbf_s))
    return found


_Curve = list[tuple[float, float]]


def _changes(one: str, other: str, curves: dict[str, _Curve]) -> list[tuple[str, str, float]]:
    found = []
    gaps = [(m, a - b) for (m, a), (_, b) in zip(curves[one], curves[other], strict=True)]
    for (low_s, before), (high_s, after) in pairwise(gaps):
        if before * after < 0:
            part = before / (before - after)
            mtbf_s = exp(log(low_s) + part * (log(high_s) - log(low_s)))
            found.append((one, other, mtbf_s) if after > 0 else (other, one, mtbf_s))
    return found


def _plain(outcome: Outcome) -> float:
    return outcome.ettr


def _charged(outcome: Outcome) -> float:
    return outcome.charged


def crossovers_in_words(found: Sequence[Crossover]) -> str:
    """One line for each change of order."""
    if not found:
        return "  none in this range"
    return "\n".join(
        f"  {one.protocol}{', lost progress charged' if one.charged else ''}: above {in_words(one.mtbf_s)} "
        f"{one.better} is ahead of {one.worse}"
        for one in found
    )
