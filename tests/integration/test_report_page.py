"""The report of a run that really trained, died and recovered, seen by a real browser."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from html import unescape
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from layercheck.cli import main
from layercheck.commands.store import open_both
from layercheck.report.data import gather
from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, train

KILL_AT, STEPS = 27, 50
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on this machine: install it (apt-get install chromium) or set CHROMIUM to its path",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, killed after step 27, recovered, trained to the end."""
    tmp = tmp_path_factory.mktemp("report")
    store, flush = str(tmp / "store"), {"metrics_flush_s": 0.2}
    assert run_ranks(2, tmp, partial(train, kill_at=KILL_AT, settings=flush), store, STEPS) == [None, None]
    assert run_ranks(2, tmp, partial(train, settings=flush), store, STEPS)[0]["receipt"]
    return tmp / "store" / "run"


@pytest.fixture(scope="module")
def written(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    return out


def test_the_report_of_a_real_run_has_the_numbers_of_its_store(trained: Path) -> None:
    store = open_both(str(trained))
    report = gather(store.layercheck, store.run, store.facts())
    totals = report.totals
    assert (totals.steps, totals.attempts, totals.failures, totals.recoveries) == (STEPS, 2, 1, 1)
    rows = pq.read_table(trained / "drift").to_pylist()
    last = {row["layer"]: row for row in rows if row["step"] == STEPS}
    for index, name in enumerate(report.drifting):
        ratio = last[name]["drift"] / last[name]["threshold"]
        assert report.curves.ratio[index][STEPS - 1] == pytest.approx(ratio)
    receipt = report.attempts[1].receipt
    assert receipt is not None
    assert receipt["t_fail"] <= KILL_AT
    assert 0 < totals.max_age <= CONFIG["s_max"]  # type: ignore[operator]
    written = [row for row in rows if row["nbytes"]]
    assert totals.by_reason["drift"] + totals.by_reason.get("age", 0) > 0
    assert totals.layer_writes >= len({(row["layer"], row["step"]) for row in written if row["step"] >= 30})
    assert totals.mean_interval is not None
    assert 1 < totals.mean_interval < STEPS


def test_the_heartbeat_carries_what_only_the_ranks_know(trained: Path) -> None:
    # Of the second attempt's own parts: the first may have flushed rows of steps after r_b before it died.
    parts = sorted((trained / "metrics").glob("attempt-002-*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    costs = open_both(str(trained)).facts().progress[2].trainer_state["layercheck"]["costs"]
    assert costs.keys() == {
        "stall_s", "inflight_bytes", "max_age", "weighted_age", "drift_ratio", "lost_steps", "lost_drift",
        "skipped_copies",
    }  # fmt: skip
    assert costs["stall_s"] == pytest.approx(sum(row["stall_s"] for row in rows))
    assert costs["max_age"] == rows[-1]["max_age"]
    assert costs["drift_ratio"] > 0


def test_i6_verify_finds_a_real_run_whole(trained: Path) -> None:
    assert main(["verify", str(trained)]) == 0


# ---------------------------------------------------------------- in a browser


def _chromium(page: Path, tmp: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-background-networking", f"--user-data-dir={tmp / 'profile'}", *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@pytest.mark.slow
@needs_browser
def test_the_control_reaches_every_drawing(written: Path, tmp_path: Path) -> None:
    choose = """<script>
      document.getElementById("look-layer").selectedIndex = 1;
      document.getElementById("look-layer").dispatchEvent(new Event("change"));
      document.getElementById("look-step").value = 19;
      document.getElementById("look-step").dispatchEvent(new Event("input"));
    </script></body>"""
    page = tmp_path / "chosen.html"
    page.write_text(written.read_text().replace("</body>", choose))
    dom = _chromium(page, tmp_path, "--dump-dom")
    (said,) = re.findall(r"<output[^>]*>(.*?)</output>", dom)
    assert unescape(said).startswith("Step 20: loss ")
    assert "layers.0: D/K " in said
    drawings = re.findall(r'<line class="cursor" x1="([^"]*)"', dom)
    assert len(drawings) == 5
    assert len(set(drawings)) == 1
    assert float(drawings[0]) > 0, "the cursor left its place beside the drawing"


@pytest.mark.slow
@needs_browser
def test_light_and_dark_are_two_pictures(written: Path, tmp_path: Path) -> None:
    pictures = []
    for name, scheme in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{name}.png"
        flag = f"--blink-settings=preferredColorScheme={scheme}"
        _chromium(written, tmp_path, f"--screenshot={shot}", "--window-size=1120,1400", flag)
        assert _png_size(shot) == (1120, 1400)
        assert shot.stat().st_size > 50_000, "an empty page makes a small file"
        pictures.append(shot.read_bytes())
    assert pictures[0] != pictures[1]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("scheme", [1, 0], ids=["light", "dark"])
def test_the_keyboard_reaches_everything_in_the_order_of_the_page_and_shows_where_it_is(
    trained: Path, tmp_path: Path, scheme: int
) -> None:
    """The page of two runs, with every table opened: what takes the focus, in order, and how it shows it."""
    page = tmp_path / "two.html"
    assert main(["report", str(trained), "--against", str(trained), "--out", str(page)]) == 0
    look = """<script>
      for (const closed of document.querySelectorAll("details")) closed.open = true;
      const able = [...document.querySelectorAll("summary, input, select, button, a[href], [tabindex]")];
      const seen = able.map((element) => {
        element.focus();
        const style = getComputedStyle(element);
        return {
          name: element.tagName, order: element.tabIndex, top: element.getBoundingClientRect().top + scrollY,
          focused: document.activeElement === element,
          ring: parseFloat(style.outlineWidth), ringColour: style.outlineColor, style: style.outlineStyle,
          wide: element.scrollWidth > element.clientWidth + 1,
        };
      });
      const all = [...document.querySelectorAll("*")];
      const outside = all.filter((one) => !one.parentElement?.closest("svg") && !one.closest(".scroll") &&
        one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 80));
      const report = document.createElement("pre");
      report.id = "seen";
      report.textContent = JSON.stringify({seen, outside});
      document.body.append(report);
    </script></body>"""
    page.write_text(page.read_text().replace("</body>", look))
    flags = ("--dump-dom", f"--blink-settings=preferredColorScheme={scheme}", "--window-size=520,900")
    dom = _chromium(page, tmp_path, *flags)
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    found = json.loads(unescape(text))
    seen = found["seen"]
    assert len(seen) > 30
    assert {one["name"] for one in seen} == {"SUMMARY", "INPUT", "SELECT", "DIV"}
    assert [one for one in seen if not one["focused"]] == []
    assert {one["order"] for one in seen} == {0}, "the order of the page is the order of the keyboard"
    assert {(one["ring"], one["style"]) for one in seen} == {(3, "solid")}
    assert {one["ringColour"] for one in seen} == {"rgb(11, 95, 255)" if scheme else "rgb(138, 180, 255)"}
    assert any(one["wide"] for one in seen), "on a narrow screen something has to be scrolled"
    assert found["outside"] == [], "nothing but what can be scrolled is wider than the screen"
