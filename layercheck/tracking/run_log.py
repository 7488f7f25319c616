"""What rank 0 writes down of every step: the `metrics/` and `drift/` of a run."""

import time
from collections.abc import Callable
from typing import Any

from layercheck.layers import LayerMap
from layercheck.manifest import DriftReport, LayerWrite, PersistDecision, StepReport, TrainerState
from layercheck.persistence.storage import Storage
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
    """

    def __init__(
        self,
        run_folder: Storage,
        attempt: int,
        flush_s: float,
        layer_map: LayerMap,
        layer_nbytes: Callable[[str], int],
    ) -> None:
        self._metrics = PartWriter(run_folder, "metrics", attempt, flush_s, METRICS)
        self._drift = PartWriter(run_folder, "drift", attempt, flush_s, DRIFT)
        self._numel = {layer.name: layer.numel for layer in layer_map.layers}
        self._nbytes = layer_nbytes
        self._last = time.monotonic()

    def step(
        self,
        costs: StepReport,
        state: TrainerState,
        report: DriftReport,
        decision: PersistDecision,
        ledger: Ledger,
    ) -> None:
        """Adds the rows of one step."""
        now = time.monotonic()
        self._metrics.add(
            {
                "step": costs.step,
                "loss": state.get("loss"),
                "lr": report.lr,
                "step_s": now - self._last,
                "stall_s": costs.stall_s,
                "layers_written": costs.layers_written,
                "bytes_written": sum(self._nbytes(write.layer) for write in decision.writes),
                "max_age": costs.max_age,
                "weighted_age": costs.weighted_age,
            }
        )
        self._last = now
        written = {write.layer: write for write in decision.writes}
        ages, drift = ledger.ages(report.step), ledger.drift
        for name, delta in report.delta.items():
            self._drift.add(
                self._drift_row(report.step, name, delta, drift[name], ages[name], written.get(name))
            )

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
            "numel": self._numel[layer],
            "nbytes": self._nbytes(layer) if write else 0,
        }

    def close(self) -> None:
        """Flushes what is left."""
        self._metrics.close()
        self._drift.close()
