"""What rank 0 writes down of every step: the `metrics/` and `drift/` of a run."""

import time
from collections.abc import Callable
from typing import Any

from layercheck.config import ResidualConfig
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerMap
from layercheck.manifest import TrainerState
from layercheck.persistence.storage import Storage
from layercheck.step_report import StepReport
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.metrics_log import DRIFT, METRICS, PartWriter


class RunLog:
    """Rows of one attempt, flushed to Parquet parts. A failed flush never reaches training.

    Args:
        run_folder: the storage of `<storage>/<run>`.
        attempt: number of the attempt, part of the file names.
        flush_s: seconds between two parts.
        layer_map: the layers, for their sizes.
        layer_nbytes: layer -> bytes of one version, all ranks.
        residual: what a residual takes of that.
    """

    def __init__(
        self,
        run_folder: Storage,
        attempt: int,
        flush_s: float,
        layer_map: LayerMap,
        layer_nbytes: Callable[[str], int],
        residual: ResidualConfig,
    ) -> None:
        self._metrics = PartWriter(run_folder, "metrics", attempt, flush_s, METRICS)
        self._drift = PartWriter(run_folder, "drift", attempt, flush_s, DRIFT)
        self._numel = {layer.name: layer.numel for layer in layer_map.layers}
        self._nbytes = layer_nbytes
        self._residual = residual
        self._last = time.monotonic()
        self._reports: dict[int, DriftReport] = {}
        self._decisions: dict[int, PersistDecision] = {}
        self._done = 0

    def observed(self, report: DriftReport, ledger: Ledger) -> None:
        """The ledger has taken in a report; only the first one of a step has its movement."""
        if report.step > self._done:
            self._reports.setdefault(report.step, report)
            self._add_drift(report.step, ledger)

    def step(self, costs: StepReport, state: TrainerState, decision: PersistDecision, ledger: Ledger) -> None:
        """Adds the row of one step, and its drift rows once its report is known too."""
        now = time.monotonic()
        self._metrics.add(
            {
                "step": costs.step,
                "loss": state.get("loss"),
                "lr": ledger.lr,
                "step_s": now - self._last,
                "stall_s": costs.stall_s,
                "layers_written": costs.layers_written,
                "bytes_written": sum(map(self._bytes_of, decision.writes)),
                "max_age": costs.max_age,
                "weighted_age": costs.weighted_age,
            }
        )
        self._last = now
        self._decisions[costs.step] = decision
        self._add_drift(costs.step, ledger)

    def _add_drift(self, step: int, ledger: Ledger) -> None:
        """With a lag the decision of a step comes before its report, else after it."""
        if step not in self._decisions or step not in self._reports:
            return
        decision, report = self._decisions.pop(step), self._reports.pop(step)
        self._done = step
        written = {write.layer: write for write in decision.versions}
        thresholds = ledger.thresholds(report.lr)
        ages, drift = ledger.ages(report.step), ledger.drift
        for name, delta in report.delta.items():
            row = {
                "step": report.step,
                "layer": name,
                "delta": delta,
                "drift": drift[name],
                "threshold": thresholds[name],
                "age": ages[name],
                "numel": self._numel[name],
                "nbytes": 0,
            }
            self._drift.add(row | self._written(written.get(name)))

    def _bytes_of(self, write: LayerWrite) -> int:
        if write.base is None:
            return self._nbytes(write.layer)
        return self._residual.nbytes(self._numel[write.layer])

    def _written(self, write: LayerWrite | None) -> dict[str, Any]:
        """For a layer that was chosen: what made it due, not what is left after the choice."""
        if write is None:
            return {}
        return {
            "drift": write.drift,
            "threshold": write.threshold,
            "age": write.age,
            "nbytes": self._nbytes(write.layer),
        }

    def close(self) -> None:
        """Flushes what is left."""
        self._metrics.close()
        self._drift.close()
