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
from layercheck.report.compare import Pair, compare_section
from layercheck.report.data import REASONS, RunReport
from layercheck.report.deaths import deaths_section
from layercheck.report.figures import figures
from layercheck.report.lives import AttemptRow
from layercheck.report.pieces import html_table, seconds_text, share, steps
from layercheck.report.receipts import receipt_section
from layercheck.report.seconds import AttemptSeconds
from layercheck.report.timeline import time_section

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(report: RunReport, beside: Pair | None = None) -> str:
    """The whole file, ASCII only; `beside` puts another run next to this one."""
    body = [
        _head(report),
        _tiles(report),
        time_section(report),
        _attempts(report),
        _looker(report),
        *figures(report),
        _receipts(report),
        _layers(report),
        deaths_section(report.status),
        compare_section(beside) if beside is not None else "",
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


# ---------------------------------------------------------------- top


def _head(report: RunReport) -> str:
    last = report.attempts[-1] if report.attempts else None
    how = "running, or cut off without a word"
    if last is not None and last.ended is not None:
        how = f"{last.ended}: {last.reason}" if last.reason else last.ended
    recoverable = (
        '<span class="good">recoverable</span>'
        if report.status["recoverable"]
        else '<span class="bad">not recoverable</span>'
    )
    return (
        f"<h1>Run {escape(report.run)}</h1>\n"
        f'<p class="soft">Step {report.totals.steps}, attempt {report.status["attempt"]} of '
        f"{report.status['world_size']} ranks, {escape(report.optimizer)}; {escape(how)}; now {recoverable}, "
        f"{size(report.status['read_bytes'])} to read.</p>"
    )


def _tiles(report: RunReport) -> str:
    totals, s_max = report.totals, report.settings.get("s_max")
    reasons = ", ".join(
        f"{totals.by_reason[reason]} {reason}" for reason in REASONS if totals.by_reason.get(reason)
    )
    residuals = f"; {totals.residual_writes} residuals beside them" if totals.residual_writes else ""
    target = report.settings.get("target_interval")
    outages_s = seconds_text(sum(attempt.outage_s for attempt in report.seconds.attempts))
    least = "at least " if report.seconds.untimed else ""
    tiles = [
        (
            "Mean interval",
            steps(totals.mean_interval),
            f"{number(totals.interval_after_warmup)} after the warm-up, target {number(target)}; full events "
            "aside",
        ),
        (
            "ETTR so far",
            share(report.seconds.ettr),
            f"of {seconds_text(report.seconds.total_s)} known; outages {least}{outages_s}",
        ),
        ("Oldest layer", steps(totals.max_age), f"bound s_max {number(s_max)}"),
        ("Size-weighted age", steps(totals.mean_weighted_age), f"largest {number(totals.max_weighted_age)}"),
        (
            "Stall share",
            share(totals.stall_share),
            f"{number(totals.stall_s)} s of {number(totals.train_s)} s",
        ),
        ("Committed", size(totals.nbytes), f"{totals.events} events; full state {size(totals.full_bytes)}"),
        ("Layer writes", str(totals.layer_writes), f"{reasons or 'none'}{residuals}"),
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


# ---------------------------------------------------------------- tables


def _attempts(report: RunReport) -> str:
    spent = {attempt.number: attempt for attempt in report.seconds.attempts}

    def row(attempt: AttemptRow) -> list[str]:
        end = attempt.ended or ("cut off" if attempt is not report.attempts[-1] else "running or cut off")
        mine = spent[attempt.number]
        return [
            str(attempt.number),
            _recovery(attempt),
            str(attempt.r_b + 1),
            str(attempt.reached),
            str(attempt.world_size),
            _outage(mine) if attempt.r_b else "-",
            seconds_text(mine.total_s - mine.outage_s),
            end,
            attempt.reason,
        ]

    header = (
        "attempt",
        "recovery",
        "first step",
        "last step",
        "ranks",
        "outage before",
        "ran",
        "end",
        "reason",
    )
    table = html_table("Lives of the worker group", header, map(row, report.attempts), text=(1, 7, 8))
    return f"<h2>Attempts and failures</h2>\n{table}"


def _recovery(attempt: AttemptRow) -> str:
    if attempt.receipt is not None:
        return str(attempt.receipt.get("mode"))
    return "not finished" if attempt.r_b else "fresh start"


def _outage(attempt: AttemptSeconds) -> str:
    return ("at least " if attempt.untimed else "") + seconds_text(attempt.outage_s)


def _receipts(report: RunReport) -> str:
    receipts = [
        receipt_section(row.receipt, row.loss_before) for row in report.attempts if row.receipt is not None
    ]
    return "\n".join(["<h2>Recoveries</h2>", *receipts]) if receipts else ""


def _layers(report: RunReport) -> str:
    rows = []
    for layer in report.layers:
        counts = layer.by_reason | {"residual": layer.residuals}
        reasons = ", ".join(f"{counts[r]} {r}" for r in REASONS if counts.get(r))
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
