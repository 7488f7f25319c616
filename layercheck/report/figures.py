"""The drawings over the steps, each with its legend and once more as a table."""

from layercheck.commands.answer import size
from layercheck.report import charts
from layercheck.report.data import REASONS, RunReport
from layercheck.report.numbers import (
    bytes_table,
    heat_table,
    largest_text,
    mean_text,
    over_steps,
    share_text,
)
from layercheck.report.pieces import box, figure, legend, share, stroke

_BREAK_KEY = ('<path class="break" d="M13 0V13"/>', "a new attempt began")


def figures(report: RunReport) -> list[str]:
    """All of them, from drift to loss."""
    breaks = sorted({report.curves.column(row.r_b + 1) for row in report.attempts[1:]})
    return [make(report, breaks) for make in (_heat, _ages, _bytes, _stall, _loss)]


def _heat(report: RunReport, breaks: list[int]) -> str:
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
    drawing = charts.heat_map(report.curves, report.drifting, breaks)
    return figure("Drift", text, drawing, key, heat_table(report))


def _ages(report: RunReport, breaks: list[int]) -> str:
    s_max = report.settings.get("s_max")
    text = "Steps since the newest committed version: of the oldest layer, and the mean weighted by size."
    key = legend([(stroke("line"), "oldest layer"), (stroke("line second"), "size-weighted"), _BREAK_KEY])
    curves = report.curves
    drawing = charts.lines(
        "ages",
        "Ages over the steps",
        curves,
        [("first", curves.max_age), ("second", curves.weighted_age)],
        breaks,
        bound=(float(s_max), f"s_max {s_max}") if s_max else None,
    )
    columns = [
        ("oldest layer", largest_text(curves.max_age)),
        ("size-weighted mean", mean_text(curves.weighted_age)),
    ]
    return figure("Ages", text, drawing, key, over_steps(report, "Ages by steps", columns))


def _bytes(report: RunReport, breaks: list[int]) -> str:
    text = f"Committed bytes as a part of the full state ({size(report.totals.full_bytes)}), by reason."
    key = legend([*((box(f"r-{r}"), r) for r in REASONS if report.curves.nbytes[r].any()), _BREAK_KEY])
    drawing = charts.bars("bytes", "Committed bytes", report.curves, report.totals.full_bytes, breaks)
    return figure("Bytes and events", text, drawing, key, bytes_table(report))


def _stall(report: RunReport, breaks: list[int]) -> str:
    text = (
        f"Visible stall over step time; {share(report.totals.stall_share)} over the whole run. Writing "
        "itself goes on in the background and is not in here."
    )
    series = [("first", report.curves.stall_share)]
    drawing = charts.lines("stall", "Stall share", report.curves, series, breaks, percent=True)
    columns = [("stall share", share_text(report.curves.stall_share))]
    return figure("Stall share", text, drawing, table=over_steps(report, "Stall share by steps", columns))


def _loss(report: RunReport, breaks: list[int]) -> str:
    text = "Training loss as the application reported it; steps that were taken back are left out."
    series = [("first", report.curves.loss)]
    drawing = charts.lines("loss", "Loss", report.curves, series, breaks, from_zero=False)
    columns = [("mean loss", mean_text(report.curves.loss, 5))]
    return figure("Loss", text, drawing, table=over_steps(report, "Loss by steps", columns))
