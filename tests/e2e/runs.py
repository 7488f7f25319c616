"""Real runs of the app on a private head, as a person would start them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cluster.head import PrivateHead

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "train.steps": 30,
    "train.lr_warmup_steps": 2,
    "checkpoint.settings.warmup_steps": 8,
    "checkpoint.settings.warmup_full_every": 4,
    "checkpoint.settings.target_interval": 5,
    "checkpoint.settings.s_max": 16,
    "checkpoint.settings.metrics_flush_s": 0.2,
    "report_every_s": 1,
}


def start_app(
    head: PrivateHead, storage: Path, run: str, *more: str, **settings: Any
) -> subprocess.Popen[str]:
    """Submits `python -m app --config tiny` with the SMALL settings; output goes to the returned process."""
    changed = [f"{key}={value}" for key, value in {**SMALL, **settings}.items()]
    args = ["--config", "tiny", "--run-name", run, "--storage", str(storage), *more, "--set", *changed]
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.submit", "train", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **head.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], limit_s: float = 240) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=limit_s)
    return process.returncode, output


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def progress_step(folder: Path, attempt: int) -> int:
    """Journaled step of an attempt, 0 before the first."""
    path = folder / "layercheck" / "attempts" / f"a{attempt:03d}.progress.json"
    return int(json.loads(path.read_text())["step"]) if path.is_file() else 0


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of all attempts, as (attempt, ...) dicts in the order of the files."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "metrics").glob("attempt-*.parquet")):
        attempt = int(path.name.split("-")[1])
        rows += [{**row, "attempt": attempt} for row in pq.read_table(path).to_pylist()]
    return rows


def committed_versions(folder: Path) -> set[tuple[str, int, int]]:
    """(layer, step, attempt) of every version that was ever committed, deleted ones included."""
    store = folder / "layercheck"
    files = [*(store / "history").glob("*.parquet"), *(store / "events").glob("*/commit.parquet")]
    return {
        (row["layer"], row["step"], row["attempt"])
        for path in files
        for row in pq.read_table(path, columns=["layer", "step", "attempt"]).to_pylist()
    }


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 180) -> None:
    """Waits while `process` lives."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}: {process.stdout.read()[-3000:]}"
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.2)
