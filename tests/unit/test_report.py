"""The report page: right numbers from a real store, and a page that any parser reads and no network feeds."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layercheck.cli import main
from layercheck.commands.store import open_both
from layercheck.coordination import history, journal
from layercheck.persistence.storage import LocalStorage
from layercheck.report import charts
from layercheck.report.data import MAX_COLUMNS
from layercheck.report.page import page
from layercheck.report.receipts import receipt_section
from tests.report_runs import Page, log_steps, look, recovered_run
from tests.runs import LAYERS, coordinator, run_record
from tests.stores import RealRun, real_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recovered_run(tmp_path / "r1")


# ---------------------------------------------------------------- numbers


def test_a_recovery_shows_the_loss_before_it_where_it_is_known(folder: Path) -> None:
    row = look(folder).attempts[1]
    assert row.receipt is not None
    assert row.loss_before is None, "this loop kept none"
    assert "loss before: unknown, 20 steps later: not reached" in receipt_section(
        row.receipt, row.loss_before
    )
    store = open_both(str(folder)).layercheck
    record = journal.load_facts(store).attempts[2]
    for kept, expected in ((5.75, 5.75), ("<b>", None)):
        state = record.trainer_state | {"loss": kept}
        store.delete("attempts/a002.json")
        store.write("attempts/a002.json", [journal.dump(record.model_copy(update={"trainer_state": state}))])
        assert look(folder).attempts[1].loss_before == expected
    text = receipt_section(row.receipt | {"loss_20_steps_later": 5.5}, 5.75)
    assert "loss before: 5.75, 20 steps later: 5.5;" in text


def test_the_sums_are_those_of_the_store(folder: Path) -> None:
    totals = look(folder).totals
    full, norm, layer0 = 4 * 60, 4 * 30, 4 * 20
    assert (totals.steps, totals.steps_with_rows, totals.taken_back) == (20, 18, 0)
    assert (totals.attempts, totals.failures, totals.recoveries) == (2, 1, 1)
    assert totals.full_bytes == full
    assert totals.nbytes == 3 * full + 2 * layer0 + 2 * norm
    assert totals.events == 7
    assert totals.by_reason == {"full": 9, "drift": 2, "age": 2}
    assert totals.mean_interval == pytest.approx(20 * full / (2 * layer0 + 2 * norm))
    assert totals.interval_after_warmup == pytest.approx(16 * full / (2 * layer0 + 2 * norm))
    assert totals.stall_share == pytest.approx(0.5 / (18 * 2.0))
    assert totals.max_age == 8
    assert totals.lost_steps == 4.25


def test_residuals_are_counted_beside_the_versions(tmp_path: Path) -> None:
    before = look(recovered_run(tmp_path / "a")).totals
    run = RealRun(tmp_path / "a", token="later")
    run.save(21, "norm", reason="residual")
    run.coordinator.close()
    report = look(tmp_path / "a")
    assert report.totals.events == before.events + 1
    assert report.totals.layer_writes == before.layer_writes == sum(before.by_reason.values())
    assert (report.totals.by_reason, report.totals.residual_writes) == (before.by_reason, 1)
    norm = next(layer for layer in report.layers if layer.name == "norm")
    assert (norm.residuals, norm.writes) == (1, sum(norm.by_reason.values()))
    assert "1 residuals beside them" in page(report)
    assert "1 residual<" in page(report)


def test_versions_that_were_collected_still_count_and_none_counts_twice(folder: Path) -> None:
    store = open_both(str(folder))
    assert not (folder / "layercheck/events/step-00000000.a001").exists(), "collected by the coordinator"
    before = look(folder).totals
    assert before.events == 7
    rows = [row for commit in store.facts().commits for row in commit.records]
    history.append_history(store.layercheck, 2, rows)  # as after a crash between history and deletion
    assert look(folder).totals == before
    store.layercheck.delete("history")
    assert look(folder).totals.events == 6


def test_the_heat_map_is_drift_over_threshold_and_falls_where_a_layer_was_saved(folder: Path) -> None:
    report = look(folder)
    row = report.drifting.index("norm")
    curves = report.curves
    assert curves.width == 1
    assert curves.ratio[row][:7].tolist() == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 0.25]
    assert np.isnan(curves.ratio[row][12:14]).all(), "rows that died with the worker are unknown, not zero"
    assert np.flatnonzero(curves.written[row]).tolist() == [5, 11, 17]
    assert not curves.written[report.drifting.index("layers.0")].any()


def test_before_calibration_there_is_no_ratio(tmp_path: Path) -> None:
    real_run(tmp_path / "r1")
    log_steps(tmp_path / "r1", 1, 1, 14, threshold=None)
    assert np.isnan(look(tmp_path / "r1").curves.ratio).all()


def test_steps_that_a_later_attempt_took_back_are_paid_for_but_not_drawn(folder: Path) -> None:
    log_steps(folder, 1, 13, 17)  # a zombie's rows beyond r_b = 14, in the first part's place
    log_steps(folder, 1, 1, 17)
    report = look(folder)
    assert (report.totals.steps_with_rows, report.totals.taken_back) == (20, 3)
    assert report.totals.train_s == pytest.approx(2.0 * 23)
    assert report.curves.loss[15] == pytest.approx(10 - 1.6 - 0.02), "step 16 is that of attempt 2"


def test_committed_bytes_stand_at_their_step_by_reason(folder: Path) -> None:
    curves = look(folder).curves
    found = {reason: np.flatnonzero(values).tolist() for reason, values in curves.nbytes.items()}
    assert found == {"full": [0, 1, 3], "drift": [7, 9], "age": [11, 17], "preemption": [], "residual": []}
    assert curves.nbytes["age"][17] == 120
    assert curves.events[[0, 7, 17]].tolist() == [1, 1, 1]


def test_a_long_run_is_shown_in_few_columns_that_keep_the_largest_value(folder: Path) -> None:
    run = RealRun(folder, token="t3")
    run.beat(5000)
    run.coordinator.close()
    log_steps(folder, 3, 21, 5000)
    curves = look(folder).curves
    assert len(curves.first) <= MAX_COLUMNS
    assert curves.width * len(curves.first) >= 5000
    assert curves.ratio[2].max() == 1.5
    assert np.nanmin(curves.ratio[2][:-1]) == 1.5, "each column of 21 steps holds a whole saw-tooth"
    assert curves.last(len(curves.first) - 1) >= 5000


def test_a_damaged_part_costs_its_rows_and_leaves_a_note(folder: Path) -> None:
    part = folder / "metrics/attempt-001-00000.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    report = look(folder)
    assert report.totals.steps_with_rows == 6
    assert any(note.startswith("metrics/attempt-001-00000.parquet is left out") for note in report.notes)


def test_a_run_without_any_rows_has_a_page(tmp_path: Path) -> None:
    real_run(tmp_path / "r1")
    report = look(tmp_path / "r1")
    assert report.totals.stall_share is None
    assert report.totals.max_age is None
    Page(page(report))


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    coordinator(LocalStorage(str(tmp_path / "r1/layercheck"))).open_run(run_record(), _probe(tmp_path))
    report = look(tmp_path / "r1")
    assert (report.totals.steps, report.totals.attempts, report.totals.mean_interval) == (0, 0, None)
    Page(page(report))


def _probe(folder: Path) -> str:
    LocalStorage(str(folder / "r1/layercheck")).write("probe", [b"x"])
    return "probe"


def test_the_training_time_ratio_comes_from_the_summary_of_the_application(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"ettr": 0.5}))
    assert look(folder).totals.ettr == 0.5


# ---------------------------------------------------------------- the page


def test_the_page_parses_and_shows_the_numbers(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    text = out.read_text(encoding="ascii")
    parsed = Page(text)
    shown = " ".join(" ".join(parsed.text).split())
    for fact in (
        "Run r1",
        "Mean interval 12 steps 9.6 after the warm-up",
        "Stall share 1.39 %",
        "failures: 1, recoveries: 1",
        "t_fail 14 (from journal), resumed at step 15",
        "reschedule 9.5 s, plan 0.25 s, fetch 0.5 s, install 0.125 s, first step 1.5 s",
        "checksum <b>wrong</b>",
        "not its newest save: that is damaged",
        "2 of 20 steps have no row",
    ):
        assert fact in shown
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert data["ratio"][2][:3] == [0.25, 0.5, 0.75]
    assert data["ratio"][2][12] is None
    assert data["saved"][2] == [5, 11, 17]


def test_the_page_reaches_for_nothing_outside_itself(folder: Path) -> None:
    text = page(look(folder))
    parsed = Page(text)
    assert {tag for tag, _ in parsed.elements} & {"link", "img", "iframe", "object", "embed"} == set()
    assert not any({"src", "href", "action"} & attrs.keys() for _, attrs in parsed.elements)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|import\(", text)
    policy = [a["content"] for a in parsed.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'")


def test_every_fact_can_be_reached_by_keyboard(folder: Path) -> None:
    parsed = Page(page(look(folder)))
    assert [a["type"] for a in parsed.all("input")] == ["range"]
    assert len(parsed.all("option")) == len(LAYERS)
    assert any(a.get("for") == "look-step" for a in parsed.all("label"))
    drawings = [a for a in parsed.all("svg") if "id" in a]
    assert {a["id"] for a in drawings if a.get("class") == "steps"} == {
        "heat",
        "ages",
        "bytes",
        "stall",
        "loss",
    }
    assert all(a["role"] == "img" and a["aria-label"] for a in drawings)
    scrolls = [a for a in parsed.all("div") if a.get("class") == "scroll"]
    assert all(a.get("tabindex") == "0" and a.get("aria-label") for a in scrolls)
    assert not any("title" in attrs or "onmouseover" in attrs for _, attrs in parsed.elements)


def test_names_from_the_store_cannot_become_code(folder: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    report = look(folder)
    layers = (replace(report.layers[0], name=evil), *report.layers[1:])
    text = page(replace(report, run=evil, layers=layers, notes=(evil,)))
    assert "<script>alert" not in text
    Page(text)


@pytest.mark.parametrize(
    ("ratio", "kind"),
    [(0.0, "h0"), (0.49, "h3"), (0.999, "h7"), (1.0, "h7"), (1.001, "due"), (np.nan, "none")],
)
def test_a_layer_is_due_only_above_its_threshold(ratio: float, kind: str) -> None:
    assert charts.level(ratio) == kind


def test_equal_neighbours_of_the_heat_map_are_one_rectangle(folder: Path) -> None:
    curves = look(folder).curves
    flat = replace(curves, ratio=np.full_like(curves.ratio, 0.3))
    drawing = charts.heat_map(flat, LAYERS, [])
    cells = re.findall(r'<path class="h2" d="([^"]*)"', drawing)
    assert [path.count("M") for path in cells] == [1] * len(LAYERS)


def test_a_page_that_cannot_be_written_is_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder), "--out", str(folder / "no" / "page.html")]) == 2
    assert "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(folder)])
