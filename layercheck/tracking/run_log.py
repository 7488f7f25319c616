"""What rank 0 writes down of every step: `metrics/` and `drift/` of the run, read by `report` and by people."""

import time
from typing import Any

from layercheck.manifest import DriftReport, LayerWrite, PersistDecision, TrainerState
from layercheck.persistence.storage import Storage
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.metrics_log import PartWriter


class RunLog:
    """Rows of one attempt, flushed to Parquet parts. A failed flush never reaches training.

    Args:
        run_folder: the storage of `<storage>/<run>`.
        attempt: number of the attempt, part of the file names.
        flush_s: seconds between two parts.
        layer_nbytes: layer -> bytes of one version, all ranks.
    """

    def __init__(
        self, run_folder: Storage, attempt: int, flush_s: float, layer_nbytes: dict[str, int]
    ) -> None:
        self._metrics = PartWriter(run_folder, "metrics", attempt, flush_s)
        self._drift = PartWriter(run_folder, "drift", attempt, flush_s)
        self._nbytes = layer_nbytes
        self._last = time.monotonic()

    def step(
        self,
        costs: dict[str, Any],
        state: TrainerState,
        report: DriftReport,
        decision: PersistDecision,
        ledger: Ledger,
    ) -> None:
        """Adds the rows of one step. `costs` are the fields of its StepReport."""
        now = time.monotonic()
        self._metrics.add({**costs, "loss": state.get("loss"), "lr": report.lr, "step_s": now - self._last})
        self._last = now
        written = {write.layer: write for write in decision.writes}
        ages, drift = ledger.ages(report.step), ledger.drift
        for name, delta in report.delta.items():
            self._drift.add(self._drift_row(report.step, name, delta, drift[name], ages[name], written.get(name)))

    def _drift_row(
        self, step: int, layer: str, delta: float, drift: float, age: int, write: LayerWrite | None
    ) -> dict[str, Any]:
        """`drift` and `age` are those at the decision; for a written layer what made it due."""
        return {
            "step": step,
            "layer": layer,
            "delta": delta,
            "drift": write.drift if write else drift,
            "threshold": write.threshold if write else None,
            "age": write.age if write else age,
            "nbytes": self._nbytes[layer] if write else 0,
            "reason": write.reason if write else None,
        }

    def close(self) -> None:
        """Flushes what is left."""
        self._metrics.close()
        self._drift.close()
