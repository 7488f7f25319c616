"""`layercheck status --watch`: what a failure now would cost, on a terminal and in a pipe."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from layercheck.cli import main
from layercheck.commands.store import open_both
from layercheck.commands.watch import screen, view, watch
from tests.stores import RealRun, real_run


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


def shown_by(run: RealRun):
    return view(open_both(str(run.folder)).facts())


def text_of(run: RealRun, max_rows: int = 9, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(screen(shown_by(run), max_rows))
    return console.file.getvalue()


def test_it_says_what_a_failure_now_would_cost(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(run.folder), "--json"])
    plan = json.loads(capsys.readouterr().out)
    cost = shown_by(run).cost
    assert f"goes on at step {plan['resume_step']} ({plan['mode']})" in cost
    assert f"oldest layer {plan['max_age']} steps of at most 40" in cost
    assert f"lost progress {plan['lost_steps']:.3g} steps of the whole model" in cost


def test_lost_progress_is_not_the_age(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    again = RealRun(run.folder.parent, token="t2")
    again.beat(17)
    again.coordinator.close()
    main(["plan", str(run.folder), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["lost_steps"] < plan["weighted_age"]
    cost = shown_by(run).cost
    assert (
        f"size-weighted age {plan['weighted_age']:.3g}, lost progress {plan['lost_steps']:.3g} steps" in cost
    )


def test_each_layer_has_its_age_against_s_max_and_its_drift_against_k(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status", str(run.folder), "--json"])
    said = {row["name"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    rows = shown_by(run).rows
    assert {row.name for row in rows} == said.keys()
    for row in rows:
        assert (row.step, row.age, row.nbytes) == tuple(
            said[row.name][key] for key in ("step", "age", "nbytes")
        )
        assert row.age_share == row.age / 40
        assert row.drift_ratio == said[row.name]["drift"] / said[row.name]["threshold"]


def test_the_layers_nearest_to_their_next_save_come_first_and_the_rest_is_counted(run: RealRun) -> None:
    run.beat(15, drift=0.01)  # so little that the ages decide
    run.coordinator.close()
    urgency = [max(row.age_share, row.drift_ratio or 0) for row in shown_by(run).rows]
    assert urgency == sorted(urgency, reverse=True)
    assert len(set(urgency)) == 3
    text = text_of(run, max_rows=1)
    assert "and 2 more layers" in text
    assert sum(name in text for name in ("embed_tokens", "layers.0", "norm")) == 1


def test_a_store_that_cannot_be_recovered_says_so(run: RealRun) -> None:
    for commit in run.folder.glob("events/*/commit.parquet"):
        commit.write_bytes(b"broken")
    shown = shown_by(run)
    assert not shown.is_recoverable
    assert "NOT recoverable" in shown.cost
    assert "note: " in text_of(run)


def test_a_fresh_run_has_nothing_to_lose(tmp_path: Path) -> None:
    shown = shown_by(RealRun(tmp_path / "r1"))
    assert shown.is_recoverable
    assert "starts at step 1" in shown.cost


def test_on_a_terminal_one_screen_is_drawn_again_in_place(run: RealRun) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100, height=30)
    looks = iter([lambda: None, run.end])
    assert watch(open_both(str(run.folder)), None, console, lambda _: next(looks)()) == 0
    output = console.file.getvalue()
    assert output.count("attempt 1, step 14, 2 ranks, not ended") == 2
    assert "\x1b[1A" in output  # up, over the screen before
    assert "2 ranks, completed" in output


def test_ctrl_c_ends_it_well(run: RealRun) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    console = Console(file=StringIO(), width=100)
    assert watch(open_both(str(run.folder)), None, console, interrupt) == 0
    assert "a failure now" in console.file.getvalue()


def test_with_json_each_look_is_one_line(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.end()
    assert main(["status", str(run.folder), "--watch", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["run"] == "r1"


def test_the_words_fit_a_narrow_terminal(run: RealRun) -> None:
    assert max(map(len, text_of(run, width=60).splitlines())) <= 60
