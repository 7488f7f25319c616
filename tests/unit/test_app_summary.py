import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config import Config, load_config
from app.failure_notes import FailureNotes
from app.records import read_steps, read_writes
from app.runfiles import RunFiles
from app.summary import Observed, describe_resumed, describe_summary, write_summary
from app.train_result import TrainResult
from layercheck.errors import StorageError

KEYS = {
    *("run", "status", "config", "world_size", "steps", "final_loss", "attempts", "failures", "injected"),
    *("resumed", "bytes_written", "events", "layer_writes", "layer_writes_by_reason", "residual_writes"),
    *("stall_s", "train_s"),
    *("wall_s", "ettr", "method", "method_costs", "model"),
}
RESUMED_KEYS = {
    *("attempt", "mode", "t_fail", "t_fail_source", "resume_step", "max_age", "weighted_age", "lost_steps"),
    *("detect_s", "reschedule_s", "wait_s", "plan_s", "fetch_s", "install_s", "replay_s", "first_step_s"),
    "ages",
}
RECEIPT = {
    "attempt": 2,
    "mode": "composite",
    "t_fail": 4,
    "t_fail_source": "live",
    "resume_step": 5,
    "world_size": 2,
    "max_age": 3,
    "weighted_age": 1.5,
    "lost_steps": 1.5,
    "nbytes": 100,
    "layers": [{"name": "layers.0", "age": 3}, {"name": "norm", "age": 0}],
    "detect_s": 0.5,
    "reschedule_s": 9.5,
    "wait_s": 30.0,
    "plan_s": 0.1,
    "fetch_s": 0.2,
    "install_s": 0.3,
    "first_step_s": 1.0,
}


def _json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _table(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def _row(layer: str, step: int, attempt: int, rank: int, reason: str, nbytes: int) -> dict[str, Any]:
    return {
        "layer": layer, "step": step, "attempt": attempt, "rank": rank, "reason": reason, "nbytes": nbytes
    }  # fmt: skip


def _metrics(*rows: tuple[int, float, float]) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss, "step_s": s, "stall_s": 0.25} for step, loss, s in rows]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run of two attempts by one submission: killed after step 4, complete at step 6."""
    store = tmp_path / "tiny" / "layercheck"
    for number, r_b, ended in ((1, 0, None), (2, 4, "completed")):
        name = f"attempts/a{number:03d}"
        _json(store / f"{name}.json", {"submission": "mine", "world_size": 2, "r_b": r_b})
        _json(store / f"{name}.progress.json", {"ended": ended})
    _json(store / "attempts/a002.receipt.json", RECEIPT)
    _table(
        tmp_path / "tiny/metrics/attempt-001-00000.parquet",
        _metrics((1, 9.0, 2.0), (2, 8.0, 2.0), (5, 0.1, 99.0)),
    )
    _table(tmp_path / "tiny/metrics/attempt-002-00000.parquet", _metrics((5, 5.0, 2.0), (6, 4.0, 4.0)))
    full = [_row("layers.0", 0, 1, rank, "full", 10) for rank in (0, 1)]
    drift = [_row("norm", 4, 1, rank, "drift", 3) for rank in (0, 1)]
    _table(store / "history/attempt-001-00000.parquet", [row | {"part": 0} for row in full + drift])
    _table(store / "events/step-00000004.a001/commit.parquet", drift)
    _table(store / "events/step-00000006.a002.p01/commit.parquet", [_row("norm", 6, 2, 0, "full", 5)])
    (store / "events/step-00000006.a002").mkdir()
    return load_config("tiny", [f"run.storage={tmp_path}"])


OBSERVED = Observed("mine", TrainResult("completed", 6, 4.0, 2, 3.0), 20.0, [{"rank": 1, "step": 4}])


def test_the_summary_has_the_promised_keys_and_is_written(config: Config) -> None:
    summary = write_summary(config, OBSERVED)
    assert set(summary) == KEYS
    assert set(summary["resumed"][0]) == RESUMED_KEYS
    assert json.loads(Path(config.run.folder, "summary.json").read_text()) == summary
    assert "ETTR" in describe_summary(summary)
    assert "t_fail 4 (live)" in describe_resumed(summary["resumed"][0])


def test_the_summary_counts_attempts_failures_and_committed_writes_once(config: Config) -> None:
    summary = write_summary(config, OBSERVED)
    assert (summary["attempts"], summary["failures"], len(summary["resumed"])) == (2, 1, 1)
    assert summary["resumed"][0]["ages"] == {"layers.0": 3, "norm": 0}
    # The event of step 4 is in the history and still on disk; the one without a commit does not count.
    assert (summary["events"], summary["layer_writes"], summary["bytes_written"]) == (3, 3, 31)
    assert summary["layer_writes_by_reason"] == {"full": 2, "drift": 1}
    assert (summary["steps"], summary["final_loss"], summary["world_size"]) == (6, 4.0, 2)


def test_residuals_are_no_layer_writes(config: Config) -> None:
    path = Path(config.run.folder, "layercheck/events/step-00000005.a002/commit.parquet")
    _table(path, [_row("norm", 5, 2, rank, "residual", 1) for rank in (0, 1)])
    summary = write_summary(config, OBSERVED)
    assert (summary["events"], summary["layer_writes"], summary["bytes_written"]) == (4, 3, 33)
    assert summary["layer_writes_by_reason"] == {"full": 2, "drift": 1}
    assert summary["residual_writes"] == 1
    assert "1 residuals, 3 layer writes" in describe_summary(summary)


def test_ettr_is_the_median_step_times_the_steps_kept_over_the_wall_time(config: Config) -> None:
    summary = write_summary(config, OBSERVED)
    assert summary["ettr"] == pytest.approx(2.0 * 6 / 20)
    later = write_summary(config, replace(OBSERVED, submission="later"))
    assert later["ettr"] == pytest.approx(3.0 * 6 / 20), "without own metrics the result's own median counts"


def test_a_step_that_ran_twice_counts_as_the_later_attempt_ran_it(config: Config) -> None:
    rows = read_steps(RunFiles(config.run.folder))
    assert [(row.step, row.attempt, row.loss) for row in rows] == [
        (1, 1, 9.0),
        (2, 1, 8.0),
        (5, 2, 5.0),
        (6, 2, 4.0),
    ]


def test_a_submission_that_finds_the_run_complete_leaves_its_summary(config: Config) -> None:
    first = write_summary(config, OBSERVED)
    idle = Observed("later", TrainResult("completed", 6, 4.0), 9.0, [])
    assert write_summary(config, idle) == first
    assert json.loads(Path(config.run.folder, "summary.json").read_text()) == first


def test_a_failed_run_counts_its_last_attempt_as_a_failure(config: Config) -> None:
    summary = write_summary(config, replace(OBSERVED, result=TrainResult("failed")))
    assert (summary["status"], summary["failures"], summary["final_loss"]) == ("failed", 2, 4.0)


def test_a_run_that_was_cut_off_before_its_metrics_were_written_says_how_far_it_came(config: Config) -> None:
    _json(Path(config.run.folder, "layercheck/attempts/a002.progress.json"), {"ended": None, "step": 9})
    assert write_summary(config, replace(OBSERVED, result=TrainResult("failed")))["steps"] == 9


def test_a_damaged_commit_is_left_out(config: Config) -> None:
    path = Path(config.run.folder, "layercheck/events/step-00000006.a002.p01/commit.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    assert len(read_writes(RunFiles(config.run.folder))) == 2


def test_a_run_without_a_coordinator_counts_the_failures_of_its_submission(tmp_path: Path) -> None:
    config = load_config("tiny", [f"run.storage={tmp_path}", "checkpoint.method=none"])
    for submission in ("mine", "mine", "earlier"):
        FailureNotes(config.run.folder, submission).after_exception(None, {1: ValueError("boom")})
    summary = write_summary(config, OBSERVED)
    assert (summary["attempts"], summary["failures"]) == (3, 2)


def test_a_storage_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/run.*run\.storage"):
        RunFiles(str(tmp_path / "file" / "run")).check_writable()
    files = RunFiles(str(tmp_path / "good"))
    files.check_writable()
    assert files.paths("") == []
