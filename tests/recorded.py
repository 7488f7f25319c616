"""A run without a model that leaves what a real one leaves: run.json, attempts, drift/ and metrics/."""

from dataclasses import dataclass, field
from pathlib import Path

from layercheck.config import LayerCheckConfig
from layercheck.coordination.coordinator import Coordinator
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerMap
from layercheck.manifest import RunRecord
from layercheck.persistence.storage import LocalStorage
from layercheck.step_report import StepReport
from layercheck.tracking.run_log import RunLog
from tests.fakes import Clock
from tests.unit.simulated_run import SimulatedRun, config, transformer

LAYERS = transformer(6)
SETTINGS = {"warmup_steps": 20, "warmup_full_every": 10, "target_interval": 12, "s_max": 48, "full_every": 60}


def moved(step: int, layer: str) -> float:
    """Uneven, like real layers: later blocks move more, and all of them less as time goes by."""
    place = sum(layer.encode()) % 7
    return (1.0 + place / 4 + 0.3 * ((step * (place + 2)) % 5)) * (1 + 20 / (step + 10)) * 1e-5


@dataclass
class RecordedRun(SimulatedRun):
    """Steps a ledger and writes down what a session's rank 0 writes down."""

    log: RunLog | None = None
    last: DriftReport = field(default_factory=lambda: DriftReport(0, {}, 0.0))

    def _report(self, step: int) -> DriftReport:
        self.last = super()._report(step)
        return self.last

    def step(self, step: int) -> None:
        before = len(self.decisions)
        super().step(step)
        if step > 0 and self.log is not None:
            mine = self.decisions[before:]
            decision = next((one for one in mine if one.writes), mine[-1])
            costs = StepReport(step, layers_written=len(decision.writes))
            self.log.observed(self.last, self.ledger)
            self.log.step(costs, {"loss": 1.0}, decision, self.ledger)


def record_run(
    folder: Path, steps: int = 160, layer_map: LayerMap = LAYERS, **settings: object
) -> LayerCheckConfig:
    """Runs `steps` steps into `folder`; commits are heard of one to three steps after their event."""
    chosen = config(**(SETTINGS | settings))
    storage = LocalStorage(str(folder / "layercheck"))
    clock = Clock()
    coordinator = Coordinator(storage, chosen, clock, clock.sleep)
    storage.write("probe", [b"x"])
    record = RunRecord(
        run_id="id",
        name=folder.name,
        layer_map=layer_map,
        optimizer="AdamW",
        config={"checkpoint": chosen.model_dump()},
    )
    coordinator.open_run(record, "probe")
    storage.delete("probe")
    attempt = coordinator.begin_attempt("t1", "s1", 2, "composite").attempt
    log = RunLog(
        LocalStorage(str(folder)),
        attempt,
        1e9,
        layer_map,
        lambda name: 12 * layer_map.by_name[name].numel,
        chosen.residual,
    )
    run = RecordedRun(
        layer_map,
        chosen,
        moved,
        delay=lambda step: 1 + step % 3,
        lr=lambda step: 1e-4 * min(1.0, (step + 1) / 10) * (1 - step / (2 * steps)),
        log=log,
    )
    run.run(0, steps)
    log.close()
    coordinator.close()
    return chosen
