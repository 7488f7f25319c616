"""`summary.json`: what a run did, what protected it, what failed, in numbers."""

import json
import os
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from app.baselines.commits import read_tallies
from app.config import Config
from app.failure_notes import count_failures
from app.records import Attempt, StepRow, Write, read_attempts, read_steps, read_writes
from app.runfiles import RunFiles
from app.train_result import TrainResult
from layercheck.manifest import ENDED_WELL
from layercheck.persistence.storage import open_run_folder
from layercheck.redact import without_secrets

_SECONDS = (
    "detect_s", "reschedule_s", "wait_s", "plan_s", "fetch_s", "install_s", "replay_s", "first_step_s",
)  # fmt: skip
_RECEIPT_KEYS = (
    "attempt", "mode", "t_fail", "t_fail_source", "resume_step", "max_age", "weighted_age", "lost_steps",
    *_SECONDS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observed:
    """What the driver knows of its own submission."""

    submission: str
    result: TrainResult
    wall_s: float
    injected: list[dict[str, int]]


def write_summary(config: Config, observed: Observed) -> dict[str, Any]:
    """Builds the summary from storage, writes `<run>/summary.json` and returns it.

    A submission that found the run complete changes nothing: the summary is that of the work.
    """
    files = RunFiles(config.run.folder)
    if observed.result.status == "completed" and not observed.result.ran and files.exists("summary.json"):
        before: dict[str, Any] = json.loads(files.read("summary.json"))
        if before["status"] == "completed":
            return before
    method = config.checkpoint.method
    attempts, steps = read_attempts(files, method), read_steps(files)
    resumed = [_resumed(attempt.receipt) for attempt in attempts if attempt.receipt]
    failed_groups = count_failures(files, observed.submission)
    summary = {
        "run": config.run.name,
        "method": method,
        "status": observed.result.status,
        "config": without_secrets(config.resolved(), os.environ),
        "world_size": attempts[-1].world_size if attempts else config.cluster.workers,
        **_progress(observed, attempts, steps),
        "attempts": len(attempts) or 1 + failed_groups,
        "failures": _failures(attempts, observed) if attempts else failed_groups,
        "injected": observed.injected,
        "resumed": resumed,
        **(_writes(read_writes(files)) if method == "layercheck" else _tallied(config)),
        **_seconds(observed, attempts, steps),
        "model": observed.result.model,
        "method_costs": attempts[-1].costs if attempts else {},
    }
    files.write("summary.json", json.dumps(summary, indent=2).encode())
    return summary


def _resumed(receipt: dict[str, Any]) -> dict[str, Any]:
    found = {key: receipt.get(key) for key in _RECEIPT_KEYS}
    return {**found, "ages": {layer["name"]: layer["age"] for layer in receipt["layers"]}}


def _progress(observed: Observed, attempts: list[Attempt], steps: list[StepRow]) -> dict[str, Any]:
    result = observed.result
    last = steps[-1] if steps else None
    final_loss = result.final_loss if result.final_loss is not None or last is None else last.loss
    reached = max([result.steps, *(attempt.reached for attempt in attempts), last.step if last else 0])
    return {"steps": reached, "final_loss": final_loss}


def _failures(attempts: list[Attempt], observed: Observed) -> int:
    """Attempts that were cut off. The newest counts only if this submission ended without success."""
    past = [attempt for attempt in attempts[:-1] if attempt.ended not in ENDED_WELL]
    return len(past) + (observed.result.status == "failed")


def _writes(writes: list[Write]) -> dict[str, Any]:
    """Bytes and events of all; a layer write is a version, as in the metrics."""
    versions = [write for write in writes if write.reason != "residual"]
    return {
        "bytes_written": sum(write.nbytes for write in writes),
        "events": len({write.event for write in writes}),
        "layer_writes": len(versions),
        "layer_writes_by_reason": dict(Counter(write.reason for write in versions)),
        "residual_writes": len(writes) - len(versions),
    }


def _tallied(config: Config) -> dict[str, Any]:
    """The same of a baseline, from the newest commit that it left: each one counts on from the one before."""
    storage = open_run_folder(config.run.storage_root, config.run.name)
    tallies = read_tallies(storage, config.checkpoint.method)
    return {
        "bytes_written": sum(tally.nbytes for tally in tallies.values()),
        "events": sum(tally.events for tally in tallies.values()),
        "layer_writes": sum(tally.layer_writes for tally in tallies.values()),
        "layer_writes_by_reason": {kind: tally.layer_writes for kind, tally in tallies.items()},
        "residual_writes": 0,
    }


def _seconds(observed: Observed, attempts: list[Attempt], steps: list[StepRow]) -> dict[str, Any]:
    """ETTR counts this submission alone: nobody was at work between two of them."""
    mine = [attempt for attempt in attempts if attempt.submission == observed.submission]
    before = mine[0].r_b if mine else 0
    numbers = {attempt.number for attempt in mine}
    step_s = [row.step_s for row in steps if row.attempt in numbers]
    median_s = statistics.median(step_s) if step_s else observed.result.step_s
    kept = max(0, max([observed.result.steps, *(row.step for row in steps)]) - before)
    useful_s = (median_s or 0.0) * kept
    return {
        "stall_s": sum(row.stall_s for row in steps),
        "train_s": sum(row.step_s for row in steps) if steps else useful_s,
        "wall_s": observed.wall_s,
        "ettr": min(1.0, useful_s / observed.wall_s) if observed.wall_s > 0 else 0.0,
    }


def describe_summary(summary: dict[str, Any]) -> str:
    """The line for a person at the end of a run."""
    model = f"\nmodel: {summary['model']}" if summary.get("model") else ""
    rest = "" if summary["failures"] else " (no failures: the rest is start, end and stalls)"
    count = summary.get("residual_writes", 0)
    residuals = f"{count} residuals, " if count else ""
    loss = "unknown" if summary["final_loss"] is None else f"{summary['final_loss']:.4f}"
    return (
        f"run {summary['run']} {summary['status']}: step {summary['steps']}, final loss {loss}, "
        f"{summary['failures']} failures, {residuals}{summary['layer_writes']} layer writes "
        f"({summary['bytes_written'] / 1e6:.1f} MB) {summary['layer_writes_by_reason']}, "
        f"stall {summary['stall_s']:.2f} s of {summary['train_s']:.1f} s in steps, {summary['wall_s']:.1f} s "
        f"from start to end, ETTR {summary['ettr']:.3f}{rest}{model}"
    )


def describe_resumed(resumed: dict[str, Any]) -> str:
    """One recovery for a person."""
    seconds = ", ".join(
        f"{key.removesuffix('_s')} {resumed[key]:.2f} s" for key in _SECONDS if resumed[key] is not None
    )
    return (
        f"recovery (attempt {resumed['attempt']}, {resumed['mode']}): t_fail {resumed['t_fail']} "
        f"({resumed['t_fail_source']}), resume step {resumed['resume_step']}, max age {resumed['max_age']}, "
        f"weighted age {resumed['weighted_age']:.2f}, lost steps {resumed['lost_steps']:.2f}; {seconds}\n"
        f"  ages {resumed['ages']}"
    )
