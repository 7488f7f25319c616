"""What a run shows at its end: receipts, the comparison with a run without failure, the checks."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq

from layercheck.commands.answer import NOT_THE_NEWEST
from layercheck.coordination import journal
from layercheck.errors import LayerCheckError
from layercheck.lost import in_words
from layercheck.persistence.storage import open_storage
from layercheck.receipt import RECOVERY_PHASES, Receipt


def read_summary(run: Path) -> dict[str, Any]:
    """`summary.json` of a run.

    Raises:
        LayerCheckError: the run wrote none.
    """
    path = run / "summary.json"
    if not path.is_file():
        raise LayerCheckError(f"{path} is missing: the run did not come to its end", path=str(path))
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def read_receipts(run: Path) -> list[Receipt]:
    """The receipts of all recoveries of a run, oldest first."""
    storage = open_storage(str(run.parent), run.name)
    found = (journal.read_receipt(storage, attempt) for attempt in journal.attempt_numbers(storage))
    return [Receipt.model_validate(receipt) for receipt in found if receipt is not None]


def read_losses(run: Path) -> dict[int, float]:
    """Step -> loss of every step whose row was written and had one."""
    rows = pq.read_table(run / "metrics", columns=["step", "loss"]).to_pylist()
    return {row["step"]: row["loss"] for row in rows if row["loss"] is not None}


def loss_before(run: Path, attempt: int) -> float | None:
    """Loss of the step before the one at which an attempt went on, as it found it."""
    record = journal.read_attempt(open_storage(str(run.parent), run.name), attempt)
    return record.trainer_state.get("loss") if record is not None else None


def show_receipt(
    receipt: Receipt, before: float | None = None, undisturbed: Mapping[int, float] = MappingProxyType({})
) -> str:
    """One recovery in words: where it went on, every layer's version, bytes and seconds, the loss around it.

    Args:
        receipt: what is told.
        before: loss of the step before the one at which it went on.
        undisturbed: step -> loss of the same run without a failure.
    """
    residuals = any(layer.get("residual") is not None for layer in receipt.layers)
    phases = {name: getattr(receipt, name) for name in RECOVERY_PHASES}
    lines = [
        f"recovery by attempt {receipt.attempt} ({receipt.mode}, {receipt.world_size} workers)",
        f"  last complete step {receipt.t_fail} (known from: {receipt.t_fail_source}), "
        f"went on at step {receipt.resume_step}",
        f"  {'layer':<16}{'version':>8}{'age':>6}{'lost':>6}  reason",
        *(
            f"  {layer['name']:<16}{layer['step']:>8}{layer['age']:>6}{layer['lost']:>6}  {layer['reason']}"
            + (f"  ({NOT_THE_NEWEST})" if layer["fallback"] else "")
            for layer in receipt.layers
        ),
        f"  lost steps {receipt.lost_steps:.2f} (size-weighted), movement "
        f"{in_words(receipt.lost_drift, receipt.measure, residuals)}, age {receipt.weighted_age:.2f} "
        f"(size-weighted), {receipt.max_age} (oldest)",
        f"  read {_megabytes(receipt.nbytes)}, {len(receipt.bad)} bad shards",
        "  " + ", ".join(f"{name[:-2]} {s:.2f} s" for name, s in phases.items() if s is not None),
    ]
    if receipt.loss_20_steps_later is not None:
        done, later = receipt.resume_step - 1, receipt.resume_step + 19
        lines.append(
            f"  loss {_beside(before, undisturbed.get(done))} at step {done}, before; "
            f"{_beside(receipt.loss_20_steps_later, undisturbed.get(later))} at step {later}, 20 steps later"
        )
    return "\n".join(lines)


def _beside(loss: float | None, undisturbed: float | None) -> str:
    own = "unknown" if loss is None else f"{loss:.4f}"
    return own if undisturbed is None else f"{own} (without the failure {undisturbed:.4f})"


def show_comparison(killed: dict[str, Any], without: dict[str, Any], full_bytes: int) -> str:
    """A run with a failure beside the same run without one; bytes beside full checkpoints at every step."""
    every_step = full_bytes * killed["steps"]
    lines = [f"  {'':<28}{'with the failure':>18}{'without':>12}"]
    for key, title, form in (
        ("final_loss", "final loss", ".4f"),
        ("steps", "steps", "d"),
        ("attempts", "attempts", "d"),
        ("wall_s", "seconds from start to end", ".1f"),
        ("train_s", "of these in training steps", ".1f"),
        ("stall_s", "of these waiting for saves", ".2f"),
        ("ettr", "effective training time", ".3f"),
    ):
        lines.append(f"  {title:<28}{killed[key]:>18{form}}{without[key]:>12{form}}")
    lines.append(
        "  effective training time: median step x steps kept / seconds from start to end. What the run\n"
        "  without a failure lacks is its start and end (Ray, workers, model), which a short run feels most"
    )
    written = killed["bytes_written"]
    lines.append(
        f"  written {_megabytes(written)}; full checkpoints of {_megabytes(full_bytes)} at every step are "
        f"{_megabytes(every_step)}, {every_step / max(written, 1):.1f} times as much"
    )
    reasons = ", ".join(f"{name} {count}" for name, count in killed["layer_writes_by_reason"].items())
    lines.append(f"  layer writes by reason: {reasons}")
    return "\n".join(lines)


def failed_checks(summary: dict[str, Any], kill_step: int) -> list[str]:
    """What is wrong with the summary of a run whose rank 1 was killed at `kill_step`; empty for nothing."""
    wrong = []
    if summary["status"] != "completed":
        wrong.append(f"status is {summary['status']!r}, not completed")
    if {"rank": 1, "step": kill_step} not in summary["injected"]:
        wrong.append(f"injected is {summary['injected']}, without the kill of rank 1 at step {kill_step}")
    if not summary["resumed"]:
        return [*wrong, "no recovery took place"]
    resumed = summary["resumed"][0]
    if resumed["t_fail"] not in (kill_step, kill_step - 1):
        wrong.append(f"t_fail is {resumed['t_fail']}, not {kill_step} or {kill_step - 1}")
    if resumed["resume_step"] != resumed["t_fail"] + 1:
        wrong.append(
            f"training went on at {resumed['resume_step']}, not at t_fail + 1 = {resumed['t_fail'] + 1}"
        )
    ages = sorted(set(resumed["ages"].values()))
    if len(ages) < 3:
        wrong.append(f"the ages are {ages}: fewer than three different ones, this shows nothing")
    if not summary["layer_writes_by_reason"].get("drift"):
        wrong.append(f"no layer was written because of its drift: {summary['layer_writes_by_reason']}")
    return wrong


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
