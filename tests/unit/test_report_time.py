"""Where the seconds of a run went, on the page: booked once, drawn to scale, and readable without looking."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from layercheck.coordination import journal
from layercheck.persistence.storage import LocalStorage
from layercheck.receipt import Receipt
from layercheck.report import spans
from layercheck.report.numbers import heat_table, stretches
from layercheck.report.page import page
from layercheck.report.seconds import AROUND, CAUSES, OUTAGE, USEFUL
from tests.conftest import ROOT
from tests.report_runs import RECEIPT, Page, log_steps, look, recovered_run
from tests.stores import real_run

STEP_S, STALL_S = 2.0, 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recovered_run(tmp_path / "r1")


# ---------------------------------------------------------------- seconds


def test_every_second_is_booked_once(folder: Path) -> None:
    seconds = look(folder).seconds
    first, second = seconds.attempts
    assert first.by_cause[USEFUL] == pytest.approx(14 * STEP_S - STALL_S), "two steps died with their worker"
    assert first.estimated_steps == 2
    assert second.by_cause[USEFUL] == pytest.approx(6 * STEP_S)
    assert (first.outage_s, second.outage_s) == (0.0, 9.5 + 0.25 + 0.5 + 0.125)
    assert seconds.by_cause["stall"] == STALL_S
    assert seconds.total_s == pytest.approx(20 * STEP_S + 10.375)
    assert seconds.ettr == pytest.approx((20 * STEP_S - STALL_S) / seconds.total_s)
    assert sum(seconds.by_cause.values()) == pytest.approx(seconds.total_s)


def test_a_phase_that_nobody_timed_is_said_and_not_taken_for_zero(folder: Path) -> None:
    report = look(folder)
    assert report.seconds.untimed == {"detect": 1}
    assert report.seconds.attempts[0].untimed == (), "a fresh start recovers nothing"
    shown = " ".join(" ".join(Page(page(report)).text).split())
    assert "Recoveries of which nobody timed a phase: detect of 1." in shown
    assert "detect at least 0 0 %" in shown
    assert "outages at least 10.4 s" in shown


def test_a_wait_for_another_submission_is_an_outage_and_older_receipts_have_it_in_their_plan(
    folder: Path,
) -> None:
    before = look(folder).seconds.attempts[1]
    assert (before.by_cause["wait"], before.untimed) == (0.0, ("detect",))
    journal.write_receipt(LocalStorage(str(folder / "layercheck")), 2, RECEIPT | {"wait_s": 30.0})
    after = look(folder).seconds.attempts[1]
    assert after.by_cause["wait"] == after.outage_s - before.outage_s == 30.0


def test_steps_that_were_taken_back_are_no_useful_time(folder: Path) -> None:
    before = look(folder).seconds
    log_steps(folder, 1, 13, 17)  # in the place of the first part: attempt 1 has rows 13 to 17 alone
    seconds = look(folder).seconds
    assert seconds.by_cause["taken back"] == pytest.approx(3 * STEP_S)
    assert seconds.by_cause[USEFUL] == pytest.approx(before.by_cause[USEFUL] + STALL_S), "12 by the median"
    assert seconds.total_s == pytest.approx(before.total_s + 3 * STEP_S)


def test_the_first_step_of_an_attempt_counts_as_a_median_one_and_the_rest_as_start(folder: Path) -> None:
    metrics = folder / "metrics/attempt-002-00000.parquet"
    table = pq.read_table(metrics)
    slow = [STEP_S + 3.0, *[STEP_S] * (table.num_rows - 1)]
    place = table.column_names.index("step_s")
    pq.write_table(table.set_column(place, "step_s", pa.array(slow)), metrics)
    assert look(folder).seconds.by_cause["first step"] == pytest.approx(3.0)
    assert look(folder).seconds.by_cause[USEFUL] == pytest.approx(20 * STEP_S - STALL_S)


def test_the_wall_time_of_the_only_submission_tells_what_was_around_the_steps(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"wall_s": 100.0, "ettr": 0.4}))
    seconds = look(folder).seconds
    assert seconds.around_s == pytest.approx(100.0 - 50.375)
    assert seconds.total_s == pytest.approx(100.0)
    assert seconds.by_cause[AROUND] == seconds.around_s
    assert "summary.json, by median steps: 40 %" in page(look(folder))


def test_the_wall_time_of_one_of_several_submissions_tells_nothing(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"wall_s": 100.0}))
    store = LocalStorage(str(folder / "layercheck"))
    second = journal.load_facts(store).attempts[2].model_copy(update={"submission": "s2"})
    store.delete("attempts/a002.json")
    store.write("attempts/a002.json", [journal.dump(second)])
    seconds = look(folder).seconds
    assert seconds.around_s is None
    assert AROUND not in seconds.by_cause
    assert "no store knows them" in page(look(folder))


def test_a_run_without_a_known_second_has_no_such_section(tmp_path: Path) -> None:
    real_run(tmp_path / "r1")
    report = look(tmp_path / "r1")
    assert report.seconds.ettr is None
    text = page(report)
    Page(text)
    assert "Time and ETTR" not in text


# ---------------------------------------------------------------- drawn to scale


def test_the_timeline_is_to_scale_and_marks_each_failure() -> None:
    lives = [
        ("1", [(USEFUL, 30.0), ("stall", 10.0)], True),
        ("2", [("reschedule", 20.0), (USEFUL, 40.0)], False),
    ]
    drawn = spans.timeline("title", lives)
    widths = {
        kind: float(width)
        for kind, width in re.findall(r'<rect class="t-([\w-]+)"[^>]* width="([\d.]+)"', drawn)
    }
    whole = spans.WIDTH - spans.LEFT - spans.RIGHT
    assert widths["stall"] == pytest.approx(whole / 10, abs=0.1)
    assert widths["reschedule"] == pytest.approx(whole / 5, abs=0.1)
    crosses = re.findall(r'<path class="failed" d="M([\d.]+) ', drawn)
    assert [float(x) + 4 for x in crosses] == [pytest.approx(spans.LEFT + 0.4 * whole, abs=0.1)]
    marks = re.findall(r'<text class="step" x="([\d.]+)"[^>]*>([\d.]+ (?:s|min))</text>', drawn)
    assert [text for _, text in marks[:3]] == ["0 s", "20 s", "40 s"]
    assert [float(x) for x, _ in marks[:3]] == [
        pytest.approx(spans.LEFT + share * whole, abs=0.1) for share in (0.0, 0.2, 0.4)
    ]


def test_a_thousand_attempts_make_a_page_of_sensible_size() -> None:
    parts = [(cause, 1.0) for cause in CAUSES if cause != AROUND]
    drawn = spans.timeline("title", [(str(n), parts, True) for n in range(1000)])
    assert len(drawn) < 400_000


def test_what_is_drawn_of_the_seconds_is_also_a_table(folder: Path) -> None:
    report = look(folder)
    parsed = Page(page(report))
    shown = " ".join(" ".join(parsed.text).split())
    for cause, meaning in CAUSES.items():
        assert f"{cause} " in shown
        assert meaning in shown
    drawings = {a["id"] for a in parsed.all("svg") if "id" in a}
    assert {"timeline", "ettr", "phases-2"} <= drawings
    (label,) = [a["aria-label"] for a in parsed.all("svg") if a.get("id") == "timeline"]
    assert label is not None
    assert label.startswith("2 attempts and 1 failures over 50.4 s")


def test_every_cause_and_every_phase_has_a_colour_in_both_schemes() -> None:
    css = (ROOT / "layercheck/report/page.css").read_text()
    for cause in CAUSES:
        kind = spans.style_of(cause)
        assert re.search(rf"\.{kind} {{ fill: var\(--{kind.removeprefix('t-')}\)", css), kind
        assert len(re.findall(rf"--{kind.removeprefix('t-')}: #", css)) == 2, kind
    assert set(OUTAGE) < set(CAUSES)
    assert set(Receipt.model_fields) >= {f"{phase}_s" for phase in OUTAGE}


# ---------------------------------------------------------------- readable without looking


def test_every_drawing_over_the_steps_is_also_a_table(folder: Path) -> None:
    text = page(look(folder))
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    over_steps = [figure for figure in figures if 'class="steps"' in figure]
    assert len(over_steps) == 5
    for figure in over_steps:
        assert re.search(r"<details><summary>[^<]+, as a table</summary>.*<table>", figure, re.DOTALL)


def test_the_table_of_the_heat_map_has_its_numbers(folder: Path) -> None:
    report = look(folder)
    groups = stretches(report.curves, 10)
    assert [len(group) for group in groups] == [2] * 10
    rows = re.findall(r"<tr>(.*?)</tr>", heat_table(report))
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    assert cells[0] == ["layer", *(f"{first}-{first + 1}" for first in range(1, 21, 2))]
    (norm,) = [row for row in cells if row[0] == "norm"]
    assert norm[1:7] == ["0.5", "1", "1.5*", "0.5", "1", "1.5*"]
    assert norm[7] == "-", "rows that died with the worker"


def luminance(colour: str) -> float:
    """Of `#rrggbb`, by the definition of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out_from_their_ground(scheme: int) -> None:
    css = (ROOT / "layercheck/report/page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[scheme]))
    for ground in ("bg", "panel"):
        for text in ("ink", "soft", "bad", "good"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    marks = {"focus", "due", "saved", "drift", "age", "full", "preemption"}
    marks |= {cause.replace(" ", "-") for cause in CAUSES if cause != AROUND}
    assert [mark for mark in marks if contrast(colours[mark], colours["bg"]) < 3] == []


def test_a_report_of_names_with_markup_stays_text(folder: Path) -> None:
    evil = '"><script>alert(1)</script>'
    report = look(folder)
    attempts = tuple(replace(row, ended=evil, reason=evil, receipt=None) for row in report.attempts)
    text = page(replace(report, attempts=attempts, optimizer=evil))
    assert "<script>alert" not in text
    Page(text)
