"""The section on time: attempts and failures one after the other, and what became of every second."""

from layercheck.commands.answer import number
from layercheck.report.data import RunReport
from layercheck.report.pieces import box, figure, html_table, legend, seconds_text, share
from layercheck.report.seconds import AROUND, CAUSES
from layercheck.report.spans import share_bar, style_of, timeline


def time_section(report: RunReport) -> str:
    """The timeline, the ETTR so far and its causes; empty for a run of which no second is known."""
    seconds = report.seconds
    if seconds.ettr is None:
        return ""
    failed = {row.number for row in report.attempts if row.failed}
    lives = [(str(a.number), list(a.by_cause.items()), a.number in failed) for a in seconds.attempts]
    title = (
        f"{len(lives)} attempts and {len(failed)} failures over {seconds_text(seconds.total_s)}; "
        f"effective training time ratio {share(seconds.ettr)}"
    )
    drawn = timeline(title, lives) + share_bar(
        "ettr", f"What {seconds_text(seconds.total_s)} were made of", "all", list(seconds.by_cause.items())
    )
    present = [cause for cause, spent_s in seconds.by_cause.items() if spent_s > 0]
    marks = [(box(style_of(cause)), cause) for cause in present]
    cross = '<path class="failed" d="M9 2.5l8 8m0 -8l-8 8"/>'
    key = legend([*marks, *([(cross, "a failure")] if failed else [])])
    return figure("Time and ETTR", _text(report), drawn, key) + _table(report)


def _text(report: RunReport) -> str:
    seconds = report.seconds
    known = (
        "Start and end of the run are not in any of this: no store knows them."
        if seconds.around_s is None
        else "The whole is the wall time of the submission."
    )
    guessed = (
        f" Steps without a row, since it died with its worker: {seconds.estimated_steps}, each counted as a "
        f"median one ({seconds_text(seconds.median_s or 0.0)})."
        if seconds.estimated_steps
        else ""
    )
    untimed = ", ".join(f"{phase} of {times}" for phase, times in seconds.untimed.items())
    lost = f" Recoveries of which nobody timed a phase: {untimed}." if untimed else ""
    told = (
        "" if report.totals.ettr is None else f" (summary.json, by median steps: {share(report.totals.ettr)})"
    )
    return (
        f"ETTR so far: {share(seconds.ettr)}{told}, the useful part of {seconds_text(seconds.total_s)}. "
        f"{known}{guessed}{lost} Above, the attempts one after the other; below, the same seconds by cause."
    )


def _table(report: RunReport) -> str:
    seconds = report.seconds

    def row(cause: str, spent_s: float) -> list[str]:
        least = "at least " if cause in seconds.untimed else ""
        return [cause, least + number(spent_s, 4), share(spent_s / seconds.total_s), CAUSES[cause]]

    rows = [row(cause, spent_s) for cause, spent_s in seconds.by_cause.items()]
    if seconds.around_s is None:
        rows.append([AROUND, "-", "unknown", CAUSES[AROUND]])
    header = ("cause", "seconds", "share", "what it is")
    return html_table("What became of every second", header, rows, text=(3,))
