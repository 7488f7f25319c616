"""Two runs side by side: what differed in the settings, what came of it, and both curves on one axis."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from layercheck.commands.answer import number, size
from layercheck.report import charts
from layercheck.report.data import REASONS, Curves, RunReport
from layercheck.report.numbers import largest, mean, name_of, stretches
from layercheck.report.pieces import as_table, figure, html_table, legend, share, stroke
from layercheck.report.spans import share_bar
from layercheck.report.tables import Floats

_ROWS = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs whose curves have the same columns: the one the page is about, and the other."""

    this: RunReport
    other: RunReport


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table of results; a ratio is told where both values are numbers above zero."""

    name: str
    of: Callable[[RunReport], float | None]
    text: Callable[[float | None], str] = number


MEASURES = (
    Measure("steps", lambda run: run.totals.steps, lambda n: f"{n:.0f}"),
    Measure("failures", lambda run: run.totals.failures, lambda n: f"{n:.0f}"),
    Measure("last loss", lambda run: last_known(run.curves.loss), lambda x: number(x, 5)),
    Measure("median step, s, without stall", lambda run: run.seconds.median_s),
    Measure("ETTR so far", lambda run: run.seconds.ettr, share),
    Measure("stall share", lambda run: run.totals.stall_share, share),
    Measure("mean interval, steps", lambda run: run.totals.mean_interval),
    Measure("oldest layer, steps", lambda run: run.totals.max_age),
    Measure("mean size-weighted age, steps", lambda run: run.totals.mean_weighted_age),
    Measure("lost steps, all recoveries", lambda run: run.totals.lost_steps),
    Measure("committed", lambda run: run.totals.nbytes, lambda n: size(n or 0)),
    Measure("full state", lambda run: run.totals.full_bytes, lambda n: size(n or 0)),
    Measure("events", lambda run: run.totals.events, lambda n: f"{n:.0f}"),
    Measure("layer writes", lambda run: run.totals.layer_writes, lambda n: f"{n:.0f}"),
    Measure("residuals", lambda run: run.totals.residual_writes, lambda n: f"{n:.0f}"),
)


def compare_section(pair: Pair) -> str:
    """Everything about the two."""
    names = f"{escape(pair.this.run)} beside {escape(pair.other.run)}"
    parts = [
        f'<section class="beside"><h2>Two runs: {names}</h2>',
        html_table("What came of it", _header(pair, "measure", "other / this"), _results(pair)),
        _settings(pair),
        _made_of(pair),
        *_curves(pair),
        _layers(pair),
        "</section>",
    ]
    return "\n".join(parts)


def _header(pair: Pair, first: str, *more: str) -> tuple[str, ...]:
    return (first, f"this: {pair.this.run}", f"other: {pair.other.run}", *more)


def _results(pair: Pair) -> Iterable[list[str]]:
    for measure in MEASURES:
        this, other = measure.of(pair.this), measure.of(pair.other)
        yield [measure.name, measure.text(this), measure.text(other), ratio_text(this, other)]


def ratio_text(this: float | None, other: float | None) -> str:
    """`other / this` where that says something."""
    return number(other / this) if this and other and this > 0 and other > 0 else "-"


def last_known(values: Floats) -> float | None:
    """The newest value of a curve; None if there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


# ---------------------------------------------------------------- settings


def _settings(pair: Pair) -> str:
    rows = [list(row) for row in differences(_told(pair.this), _told(pair.other))]
    if not rows:
        return "<p>Same optimizer, ranks, layers and settings.</p>"
    caption = "Settings that differ"
    return html_table(caption, _header(pair, "setting"), rows, text=(1, 2))


def _told(run: RunReport) -> dict[str, Any]:
    sizes = {layer.name: layer.numel for layer in run.layers}
    return {
        "optimizer": run.optimizer,
        "ranks": run.status["world_size"],
        "layers": f"{len(sizes)} with {sum(sizes.values()):,} parameters",
        **run.settings,
    }


def differences(
    this: dict[str, Any], other: dict[str, Any], path: str = ""
) -> Iterable[tuple[str, str, str]]:
    """(key path, value here, value there) of all that is not equal; `-` for a key that is missing."""
    for key in [*this, *(key for key in other if key not in this)]:
        mine, theirs = this.get(key, "-"), other.get(key, "-")
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from differences(mine, theirs, f"{path}{key}.")
        elif mine != theirs:
            yield f"{path}{key}", str(mine), str(theirs)


# ---------------------------------------------------------------- drawings


def _made_of(pair: Pair) -> str:
    drawn = "".join(
        share_bar(
            name, f"What the seconds of {run.run} were made of", label, list(run.seconds.by_cause.items())
        )
        for name, label, run in (("this-ettr", "this", pair.this), ("other-ettr", "other", pair.other))
    )
    text = "Seconds by cause, each run over its own whole; the colours are those of the section on time."
    rows = [
        [cause, *(number(run.seconds.by_cause.get(cause), 4) for run in (pair.this, pair.other))]
        for cause in pair.this.seconds.by_cause | pair.other.seconds.by_cause
    ]
    table = as_table("Seconds by cause of both", _header(pair, "cause"), rows)
    return figure("Time of both", text, drawn, table=table)


def _curves(pair: Pair) -> list[str]:
    return [
        _curve(pair, "loss", "Loss of both", lambda c: c.loss, from_zero=False),
        _curve(pair, "age", "Size-weighted age of both", lambda c: c.weighted_age),
        _curve(pair, "bytes", "Committed bytes of both so far", so_far, unit="MB, summed over the steps"),
    ]


def so_far(curves: Curves) -> Floats:
    """Committed bytes up to each column, in MB."""
    total: Floats = np.cumsum(np.sum([curves.nbytes[reason] for reason in REASONS], axis=0)) / 1e6
    return total


def _curve(
    pair: Pair,
    name: str,
    title: str,
    values: Callable[[Curves], Floats],
    unit: str = "",
    from_zero: bool = True,
) -> str:
    this, other = values(pair.this.curves), _until_its_end(pair.other, values(pair.other.curves))
    this = _until_its_end(pair.this, this)
    series = [("first", this), ("second", other)]
    drawing = charts.lines(
        f"both-{name}", title, pair.this.curves, series, (), from_zero=from_zero, follows=False
    )
    key = legend(
        [(stroke("line"), f"this: {pair.this.run}"), (stroke("line second"), f"other: {pair.other.run}")]
    )
    summary = largest if name == "bytes" else mean
    longer = max((pair.this, pair.other), key=lambda run: run.totals.steps)
    rows = [
        [name_of(longer, picked), *(number(summary(series[picked]), 4) for series in (this, other))]
        for picked in stretches(pair.this.curves, _ROWS)
    ]
    table = as_table(f"{title} by steps", _header(pair, "steps"), rows)
    return figure(title, unit, drawing, key, table)


def _until_its_end(run: RunReport, values: Floats) -> Floats:
    """A run that is shorter than the other ends where it ends."""
    cut = np.array(values, dtype=np.float64)
    cut[run.curves.column(max(1, run.totals.steps)) + 1 :] = np.nan
    return cut


def _layers(pair: Pair) -> str:
    others = {layer.name: layer for layer in pair.other.layers}
    rows = [
        [mine.name, str(mine.writes), str(its.writes), size(mine.nbytes), size(its.nbytes)]
        for mine in pair.this.layers
        if (its := others.get(mine.name))
    ]
    header = ("layer", "writes: this", "writes: other", "committed: this", "committed: other")
    return as_table("Layers that both have", header, rows)
