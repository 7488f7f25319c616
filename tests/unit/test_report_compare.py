"""Two runs on one page: `layercheck report RUN --against OTHER`."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layercheck.cli import main
from layercheck.commands.report import _pair
from layercheck.commands.store import open_both
from layercheck.report.compare import MEASURES, Pair, differences, ratio_text, so_far
from layercheck.report.page import page
from tests.report_runs import Page, log_steps, look, recovered_run
from tests.stores import RealRun, real_run


@pytest.fixture
def recovered(tmp_path: Path) -> Path:
    return recovered_run(tmp_path / "r1")


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A run of 14 steps without a failure, with another bound and more events."""
    real_run(tmp_path / "other", s_max=50)
    log_steps(tmp_path / "other", 1, 1, 14)
    return tmp_path / "other"


def pair_of(this: Path, other: Path) -> Pair:
    return _pair(look(this), open_both(str(this)), open_both(str(other)))


def shown(text: str) -> str:
    return " ".join(" ".join(Page(text).text).split())


def test_the_page_of_two_runs_shows_the_results_of_both(recovered: Path, short: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    assert main(["report", str(recovered), "--against", str(short), "--out", str(out)]) == 0
    text = out.read_text(encoding="ascii")
    said = shown(text)
    assert "Two runs: r1 beside r1" in said
    assert "measure this: r1 other: r1 other / this" in said
    assert "steps 20 14 0.7" in said
    assert "failures 1 0 -" in said
    assert "median step, s, without stall 2 2 1" in said
    assert "stall share 1.39 % 1.79 %" in said
    assert "s_max" in said[said.index("Settings that differ") :][:120]
    assert {a["id"] for a in Page(text).all("svg") if "id" in a} >= {
        "this-ettr", "other-ettr", "both-loss", "both-age", "both-bytes",
    }  # fmt: skip


def test_the_page_of_one_run_has_nothing_of_another(recovered: Path) -> None:
    assert 'class="beside"' not in page(look(recovered))


@pytest.mark.parametrize("swapped", [False, True])
def test_both_curves_have_the_columns_of_the_longer_run(recovered: Path, short: Path, swapped: bool) -> None:
    this, other = (short, recovered) if swapped else (recovered, short)
    pair = pair_of(this, other)
    assert len(pair.this.curves.first) == len(pair.other.curves.first) == 20
    shorter = pair.this if swapped else pair.other
    assert np.isnan(shorter.curves.loss[14:]).all()
    assert shorter.totals.steps == 14
    drawn = re.search(r'<svg id="both-bytes".*?</svg>', page(pair.this, pair))
    assert drawn is not None
    paths = dict(re.findall(r'<path class="line (first|second)" d="([^"]*)"', drawn[0]))
    assert paths["first" if swapped else "second"].count("L") == 13, "the shorter run ends where it ends"
    assert paths["second" if swapped else "first"].count("L") == 19


def test_the_own_drawings_of_a_run_keep_its_own_length(short: Path, recovered: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    assert main(["report", str(short), "--against", str(recovered), "--out", str(out)]) == 0
    alone = page(look(short))
    for name in ("heat", "ages", "bytes", "stall", "loss"):
        drawing = re.compile(rf'<svg id="{name}".*?</svg>', re.DOTALL)
        assert drawing.findall(out.read_text()) == drawing.findall(alone)


def test_only_the_drawings_of_this_run_follow_the_control(recovered: Path, short: Path) -> None:
    pair = pair_of(recovered, short)
    drawings = re.findall(r'<svg id="([\w-]+)"([^>]*)>', page(pair.this, pair))
    assert {name for name, more in drawings if 'class="steps"' in more} == {
        "heat", "ages", "bytes", "stall", "loss",
    }  # fmt: skip


def test_a_run_against_itself_has_no_difference(recovered: Path) -> None:
    pair = pair_of(recovered, recovered)
    text = page(pair.this, pair)
    assert "Same optimizer, ranks, layers and settings." in text
    for measure in MEASURES:
        assert measure.of(pair.this) == measure.of(pair.other)


def test_committed_bytes_add_up(recovered: Path) -> None:
    report = look(recovered)
    total = so_far(report.curves)
    assert total[-1] == pytest.approx(report.totals.nbytes / 1e6)
    assert (np.diff(total) >= 0).all()


def test_settings_that_differ_are_named_with_their_path() -> None:
    this = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": True}
    other = {"a": 1, "b": {"c": 3, "d": [1]}, "new": None}
    assert list(differences(this, other)) == [("b.c", "2", "3"), ("gone", "True", "-"), ("new", "-", "None")]


@pytest.mark.parametrize(
    ("this", "other", "text"),
    [(2.0, 3.0, "1.5"), (0.0, 3.0, "-"), (2.0, 0.0, "-"), (None, 1.0, "-"), (-1.0, 2.0, "-")],
)
def test_a_ratio_is_told_where_it_says_something(this: float | None, other: float | None, text: str) -> None:
    assert ratio_text(this, other) == text


def test_names_of_the_other_run_cannot_become_code(recovered: Path, short: Path) -> None:
    evil = '"><script>alert(1)</script>'
    pair = pair_of(recovered, short)
    layers = tuple(replace(layer, name=evil) for layer in pair.other.layers)
    other = replace(pair.other, run=evil, optimizer=evil, settings={evil: evil}, layers=layers)
    text = page(pair.this, Pair(pair.this, other))
    assert "<script>alert" not in text
    Page(text)


def test_runs_without_rows_can_be_put_side_by_side(tmp_path: Path, recovered: Path) -> None:
    real_run(tmp_path / "bare")
    pair = pair_of(tmp_path / "bare", recovered)
    said = shown(page(pair.this, pair))
    assert "last loss - " in said
    assert "ETTR so far unknown" in said


def test_another_run_that_is_none_is_wrong_usage(
    recovered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["report", str(recovered), "--out", str(tmp_path / "x.html"), "--against", str(tmp_path / "none")]
    assert main(args) == 2
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_runs_that_grow_between_two_looks_still_get_equal_columns(recovered: Path, short: Path) -> None:
    stale = look(short)
    more = RealRun(short, token="t9")
    more.beat(40)
    more.coordinator.close()
    for first, this, other in ((stale, short, recovered), (look(recovered), recovered, short)):
        pair = _pair(first, open_both(str(this)), open_both(str(other)))
        assert len(pair.this.curves.first) == len(pair.other.curves.first) == 40
