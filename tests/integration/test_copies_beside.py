"""Copies in host memory are made beside the next step, of the right one; one that comes too late is lost."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, assert_live_bytes, note_state, train

STEPS, SLOW_FROM = 20, 10
PATIENCE_S = 0.5


def _late_copies(session: Any, pause_s: float) -> list[int]:
    """From now on copies begin `pause_s` after an update asked for them, or after `PATIENCE_S` if none does.

    Returns:
        A list that gets the step of every update which asked.
    """
    opened, asked, held_back = session._open, threading.Event(), list[int]()
    copier = opened.taker._copier
    mark, hold_back = copier.mark, copier.hold_back

    def begin() -> None:
        asked.wait(PATIENCE_S)
        time.sleep(pause_s)

    def late() -> Any:
        copier._thread.submit(begin)
        return mark()

    def ask() -> None:
        if copier._newest is not None:
            held_back.append(opened.step)
        asked.set()
        hold_back()
        asked.clear()

    copier.mark, copier.hold_back = late, ask
    return held_back


def _train(storage: str, shadow: str, wait_s: float, pause_s: float) -> dict[str, Any]:
    """Two ranks with late copies; rank 0 waits for one no longer than `wait_s`."""
    held_back: list[list[int]] = []

    def each_step(session: Any, step: int) -> None:
        note_state(shadow, session, step)
        if step == SLOW_FROM:
            held_back.append(_late_copies(session, pause_s))
            if session._zero3.rank == 0:
                session._open.taker._copier._wait_s = wait_s

    return train(storage, STEPS, each_step=each_step) | {"held_back": held_back[0]}


def _run(tmp_path: Path, wait_s: float, pause_s: float) -> list[dict[str, Any]]:
    (tmp_path / "shadow").mkdir()
    places = str(tmp_path / "store"), str(tmp_path / "shadow")
    return run_ranks(2, tmp_path, _train, *places, wait_s, pause_s)


def test_i4_a_copy_beside_the_step_holds_the_bytes_of_its_step_and_the_update_waits_for_it(
    tmp_path: Path,
) -> None:
    for result in _run(tmp_path, wait_s=60.0, pause_s=0.0):
        reports = [result["reports"][step] for step in range(SLOW_FROM + 1, STEPS + 1)]
        saves = [report.step for report in reports if report.bytes_written]
        assert len(saves) >= 3
        assert set(saves) <= set(result["held_back"])
        assert not any(report.alerts for report in reports)
    assert assert_live_bytes(tmp_path / "store", tmp_path / "shadow", SLOW_FROM + 1) > 30


def test_i9_a_copy_that_comes_too_late_is_lost_with_an_alert_and_training_goes_on(tmp_path: Path) -> None:
    first, second = _run(tmp_path, wait_s=0.001, pause_s=0.05)
    assert first["losses"].keys() == second["losses"].keys() == set(range(1, STEPS + 1))
    assert first["losses"] == second["losses"]
    alerts = [text for report in first["reports"].values() for text in report.alerts]
    assert any("not made before the next update of the optimizer" in text for text in alerts)
    committed = {int(path.parent.name[5:13]) for path in (tmp_path / "store").rglob("commit.parquet")}
    assert committed
    assert not {step for step in committed if SLOW_FROM < step < STEPS}
    assert all(np.isfinite(loss) for loss in first["losses"].values())
    assert first["reports"][STEPS].max_age <= CONFIG["s_max"]
