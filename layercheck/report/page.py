"""The page: one HTML file with its style, its drawings, its numbers and a small script inside.

Nothing is fetched (a policy in the page forbids it), every fact is text or can be reached by keyboard, and
without the script the drawings and tables are still there.
"""

import json
import math
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from layercheck.commands.answer import number, size
from layercheck.report import charts
from layercheck.report.data import REASONS, AttemptRow, RunReport
from layercheck.report.pieces import box, figure, html_table, legend, stroke
from layercheck.report.receipts import receipt_section

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(report: RunReport) -> str:
    """The whole file, ASCII only."""
    body = [
        _head(report),
        _tiles(report),
        _looker(report),
        _heat(report),
        _ages(report),
        _bytes(report),
        _stall(report),
        _loss(report),
        _attempts(report),
        *(receipt_section(row.receipt) for row in report.attempts if row.receipt is not None),
        _layers(report),
        _notes(report),
    ]
    data = json.dumps(_data(report), separators=(",", ":"), allow_nan=False)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.run)}: LayerCheck report</title>\n"
        f"<style>\n{_asset('page.css')}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in body if part)}\n</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{_asset('page.js')}</script>\n</body></html>\n"
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _asset(name: str) -> str:
    return files("layercheck.report").joinpath(name).read_text(encoding="ascii")


_BREAK_KEY = ('<path class="break" d="M13 0V13"/>', "a new attempt began")


def _breaks(report: RunReport) -> list[int]:
    """Columns at which a later attempt took over."""
    return sorted({report.curves.column(row.r_b + 1) for row in report.attempts[1:]})


# ---------------------------------------------------------------- top


def _head(report: RunReport) -> str:
    last = report.attempts[-1] if report.attempts else None
    how = "running, or cut off without a word"
    if last is not None and last.ended is not None:
        how = f"{last.ended}: {last.reason}" if last.reason else last.ended
    ettr = (
        "" if report.totals.ettr is None else f" Effective training time ratio: {share(report.totals.ettr)}."
    )
    recoverable = (
        '<span class="good">recoverable</span>'
        if report.status["recoverable"]
        else '<span class="bad">not recoverable</span>'
    )
    return (
        f"<h1>Run {escape(report.run)}</h1>\n"
        f'<p class="soft">Step {report.totals.steps}, attempt {report.status["attempt"]} of '
        f"{report.status['world_size']} ranks, {escape(report.optimizer)}; {escape(how)}; now {recoverable}, "
        f"{size(report.status['read_bytes'])} to read.{ettr}</p>"
    )


def _tiles(report: RunReport) -> str:
    totals, s_max = report.totals, report.settings.get("s_max")
    reasons = ", ".join(
        f"{totals.by_reason[reason]} {reason}" for reason in REASONS if totals.by_reason.get(reason)
    )
    target = report.settings.get("target_interval")
    tiles = [
        (
            "Mean interval",
            _steps(totals.mean_interval),
            f"{number(totals.interval_after_warmup)} after the warm-up, target {number(target)}; full events "
            "aside",
        ),
        ("Oldest layer", _steps(totals.max_age), f"bound s_max {number(s_max)}"),
        ("Size-weighted age", _steps(totals.mean_weighted_age), f"largest {number(totals.max_weighted_age)}"),
        (
            "Stall share",
            share(totals.stall_share),
            f"{number(totals.stall_s)} s of {number(totals.train_s)} s",
        ),
        ("Committed", size(totals.nbytes), f"{totals.events} events; full state {size(totals.full_bytes)}"),
        ("Layer writes", str(totals.layer_writes), reasons or "none"),
        ("Attempts", str(totals.attempts), f"failures: {totals.failures}, recoveries: {totals.recoveries}"),
        (
            "Lost steps",
            number(totals.lost_steps),
            f"size-weighted, all recoveries; steps taken back: {totals.taken_back}",
        ),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _steps(value: float | None) -> str:
    return "unknown" if value is None else f"{number(value)} steps"


def share(value: float | None) -> str:
    """A part of one, in percent."""
    return "unknown" if value is None else f"{number(100 * value)} %"


def _looker(report: RunReport) -> str:
    """The one control: a step and a layer. Arrow keys move it, so nothing has to be hovered."""
    options = "".join(f"<option>{escape(name)}</option>" for name in report.drifting)
    last = len(report.curves.first) - 1
    return (
        '<div class="looker" role="group" aria-label="Look at one step and one layer">'
        f'<label for="look-step">Step</label><input id="look-step" type="range" min="0" max="{last}" '
        f'value="{last}"><select id="look-layer" aria-label="Layer">{options}</select>'
        '<output id="look-out" for="look-step look-layer" aria-live="polite"></output></div>'
    )


# ---------------------------------------------------------------- drawings


def _heat(report: RunReport) -> str:
    width = report.curves.width
    binned = f"A column is {width} steps and shows its largest value. " if width > 1 else ""
    text = (
        "Accumulated drift D over its threshold K, one row a layer. It grows until the layer is saved and "
        f"starts again at zero there. {binned}"
        "No colour: no row was kept, or K is not calibrated yet."
    )
    shades = "".join(
        f'<rect class="h{i}" x="{i * 13}" width="13" height="13"/>' for i in range(charts.LEVELS)
    )
    ramp = f'<li>0 <svg viewBox="0 0 104 13" width="104" aria-hidden="true">{shades}</svg> 1</li>'
    saved = '<path class="saved" d="M13 1V12"/>'
    key = legend([(box("due"), "due (above 1)"), (box("none"), "unknown"), (saved, "saved"), _BREAK_KEY])
    key = key.replace('<ul class="key">', f'<ul class="key">{ramp}')
    return figure("Drift", text, charts.heat_map(report.curves, report.drifting, _breaks(report)), key)


def _ages(report: RunReport) -> str:
    s_max = report.settings.get("s_max")
    text = "Steps since the newest committed version: of the oldest layer, and the mean weighted by size."
    key = legend([(stroke("line"), "oldest layer"), (stroke("line second"), "size-weighted"), _BREAK_KEY])
    curves = report.curves
    drawing = charts.lines(
        "ages",
        "Ages over the steps",
        curves,
        [("first", curves.max_age), ("second", curves.weighted_age)],
        _breaks(report),
        bound=(float(s_max), f"s_max {s_max}") if s_max else None,
    )
    return figure("Ages", text, drawing, key)


def _bytes(report: RunReport) -> str:
    text = f"Committed bytes as a part of the full state ({size(report.totals.full_bytes)}), by reason."
    key = legend([*((box(f"r-{r}"), r) for r in REASONS if report.curves.nbytes[r].any()), _BREAK_KEY])
    drawing = charts.bars(
        "bytes", "Committed bytes", report.curves, report.totals.full_bytes, _breaks(report)
    )
    return figure("Bytes and events", text, drawing, key)


def _stall(report: RunReport) -> str:
    text = (
        f"Visible stall over step time; {share(report.totals.stall_share)} over the whole run. Writing "
        "itself goes on in the background and is not in here."
    )
    series = [("first", report.curves.stall_share)]
    drawing = charts.lines("stall", "Stall share", report.curves, series, _breaks(report), percent=True)
    return figure("Stall share", text, drawing)


def _loss(report: RunReport) -> str:
    text = "Training loss as the application reported it; steps that were taken back are left out."
    series = [("first", report.curves.loss)]
    drawing = charts.lines("loss", "Loss", report.curves, series, _breaks(report), from_zero=False)
    return figure("Loss", text, drawing)


# ---------------------------------------------------------------- tables


def _attempts(report: RunReport) -> str:
    def row(attempt: AttemptRow) -> list[str]:
        end = attempt.ended or ("cut off" if attempt is not report.attempts[-1] else "running or cut off")
        mode = "fresh start" if attempt.receipt is None else str(attempt.receipt.get("mode"))
        first = str(attempt.r_b + 1)
        return [
            str(attempt.number),
            mode,
            first,
            str(attempt.reached),
            str(attempt.world_size),
            end,
            attempt.reason,
        ]

    header = ("attempt", "recovery", "first step", "last step", "ranks", "end", "reason")
    table = html_table("Lives of the worker group", header, map(row, report.attempts), text=(1, 5, 6))
    return f"<h2>Attempts, failures, recoveries</h2>\n{table}"


def _layers(report: RunReport) -> str:
    rows = []
    for layer in report.layers:
        reasons = ", ".join(f"{layer.by_reason[r]} {r}" for r in REASONS if layer.by_reason.get(r))
        newest = "none" if layer.step is None else f"{layer.step} (attempt {layer.attempt})"
        age = "frozen" if not layer.trainable else "-" if layer.age is None else str(layer.age)
        rows.append(
            [layer.name, f"{layer.numel:,}", newest, age, str(layer.writes), size(layer.nbytes), reasons]
        )
    header = ("layer", "parameters", "newest version", "age", "writes", "committed", "by reason")
    return f"<h2>Layers</h2>\n{html_table('What was written of each layer', header, rows, text=(6,))}"


def _notes(report: RunReport) -> str:
    missing = report.totals.steps - report.totals.steps_with_rows
    notes = list(report.notes)
    if missing > 0:
        flush = number(report.settings.get("metrics_flush_s"))
        notes.append(
            f"{missing} of {report.totals.steps} steps have no row in metrics/: they are flushed every "
            f"{flush} s, and a killed worker takes its last ones along"
        )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Notes</h2>\n<ul>{items}</ul>" if notes else ""


# ---------------------------------------------------------------- numbers for the script


def _data(report: RunReport) -> dict[str, Any]:
    """Numbers alone: a name from the store could end the script element that holds them."""
    curves = report.curves
    return {
        "left": charts.LEFT,
        "right": charts.WIDTH - charts.RIGHT,
        "row": charts.row_height(len(report.drifting)),
        "steps": report.totals.steps,
        "width": curves.width,
        "first": curves.first.tolist(),
        "loss": _rounded(curves.loss),
        "max_age": _rounded(curves.max_age),
        "weighted_age": _rounded(curves.weighted_age),
        "stall": _rounded(curves.stall_share),
        "bytes": {reason: curves.nbytes[reason].astype(int).tolist() for reason in REASONS},
        "events": curves.events.tolist(),
        "ratio": [_rounded(row, 3) for row in curves.ratio],
        "saved": [[i for i, saved in enumerate(row) if saved] for row in curves.written.tolist()],
    }


def _rounded(values: Iterable[float], digits: int = 4) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
