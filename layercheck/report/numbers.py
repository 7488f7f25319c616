"""The drawings once more as tables: for whoever reads better than looks, or wants a number."""

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from layercheck.commands.answer import number, size
from layercheck.report.data import REASONS, Curves, RunReport
from layercheck.report.pieces import as_table, share
from layercheck.report.tables import Floats

_ROWS, _COLUMNS = 20, 10
Picked = npt.NDArray[np.intp]


def stretches(curves: Curves, at_most: int) -> list[Picked]:
    """The columns of the drawings in at most so many groups of equal size, the last one maybe smaller."""
    count = len(curves.first)
    wide = math.ceil(count / at_most)
    return [np.arange(begin, min(begin + wide, count)) for begin in range(0, count, wide)]


def name_of(report: RunReport, picked: Picked) -> str:
    """The steps of a stretch: `7` or `7-12`."""
    first = int(report.curves.first[picked[0]])
    last = max(first, min(report.curves.last(int(picked[-1])), report.totals.steps))
    return str(first) if first == last else f"{first}-{last}"


def over_steps(
    report: RunReport, caption: str, columns: Sequence[tuple[str, Callable[[Picked], str]]]
) -> str:
    """A row for each stretch of steps. A column is (its name, the text for a stretch)."""
    rows = [
        [name_of(report, picked), *(text(picked) for _, text in columns)]
        for picked in stretches(report.curves, _ROWS)
    ]
    return as_table(caption, ("steps", *(name for name, _ in columns)), rows)


def heat_table(report: RunReport) -> str:
    """The heat map: the largest D/K of each layer in each stretch, with a star where it was saved."""
    groups = stretches(report.curves, _COLUMNS)
    rows = [
        [
            layer,
            *(number(largest(ratio[picked])) + ("*" if written[picked].any() else "") for picked in groups),
        ]
        for layer, ratio, written in zip(
            report.drifting, report.curves.ratio, report.curves.written, strict=True
        )
    ]
    header = ("layer", *(name_of(report, picked) for picked in groups))
    return as_table("Largest D/K of each layer by steps; * saved there", header, rows)


def bytes_table(report: RunReport) -> str:
    """Committed bytes by reason, and events."""
    curves = report.curves
    shown = [reason for reason in REASONS if curves.nbytes[reason].any()]
    columns = [(reason, _bytes_of(curves.nbytes[reason])) for reason in shown]
    events = ("events", lambda picked: str(int(curves.events[picked].sum())))
    return over_steps(report, "Committed bytes by steps", [*columns, events])


def _bytes_of(values: Floats) -> Callable[[Picked], str]:
    return lambda picked: size(float(values[picked].sum()))


def mean_text(values: Floats, digits: int = 3) -> Callable[[Picked], str]:
    """Means of the known columns of a stretch."""
    return lambda picked: number(mean(values[picked]), digits)


def largest_text(values: Floats) -> Callable[[Picked], str]:
    """The largest known value of a stretch."""
    return lambda picked: number(largest(values[picked]))


def share_text(values: Floats) -> Callable[[Picked], str]:
    """A mean part of one, in percent."""
    return lambda picked: share(mean(values[picked]))


def mean(values: Floats) -> float | None:
    """Of what is known; None if nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nothing but unknown values
        found = float(np.nanmean(values)) if len(values) else math.nan
    return found if math.isfinite(found) else None


def largest(values: Floats) -> float | None:
    """Of what is known; None if nothing is."""
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None
