"""What rank 0 notes of a run that a baseline protects: attempts, progress, receipts and metrics.

The files have the names and keys of LayerCheck's own, below the method's folder, so that one summary reads
the runs of all methods. The times of an outage come from two clocks, that of rank 0's machine and that of Ray
Train's controller.
"""

import json
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

from app.baselines.protocol import Recovered
from app.failure_notes import failure_times_s
from app.runfiles import RunFiles
from layercheck.errors import StorageError
from layercheck.layers import LayerMap
from layercheck.manifest import TrainerState
from layercheck.persistence.storage import Storage
from layercheck.receipt import Receipt
from layercheck.step_report import StepReport
from layercheck.tracking.metrics_log import METRICS, PartWriter

log = logging.getLogger("app")
PROGRESS_S = 1.0


class MethodReceipt(Receipt):
    """What a roll-back did: `fetch_s` is the load, `install_s` the reconstruction.

    Attributes:
        replay_s: seconds of the steps that had to be run again; None until they are.
        source: where the state came from.
    """

    replay_s: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Before:
    """The attempt before this one: its number, the newest step it noted, and when (epoch seconds)."""

    number: int = 0
    step: int = 0
    time_s: float | None = None


def read_before(storage: Storage, method: str) -> Before:
    """The newest attempt in the storage."""
    folder = f"{method}/attempts"
    matches = [re.fullmatch(r"a(\d{3,})\.json", name) for name in storage.list(folder)]
    numbers = [int(match[1]) for match in matches if match]
    if not numbers:
        return Before()
    name = f"{folder}/a{max(numbers):03d}"
    began, progress = _json(storage, f"{name}.json"), _json(storage, f"{name}.progress.json")
    step = max(int(began.get("r_b", 0)), int(progress.get("step", 0)))
    return Before(max(numbers), step, progress.get("time_s"))


def _json(storage: Storage, path: str) -> dict[str, Any]:
    """Empty if the file is missing or was cut off: then less is known of how far that attempt came."""
    try:
        found = json.loads(storage.read(path)) if storage.size(path) is not None else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def receipt_of(
    found: Recovered, before: Before, attempt: int, layer_map: LayerMap, world_size: int
) -> MethodReceipt:
    """The receipt of one recovery; every layer is of the same step, so none is older than another."""
    t_fail = max(before.step, found.step)
    return MethodReceipt(
        attempt=attempt,
        mode="uniform",
        t_fail=t_fail,
        t_fail_source="journal" if before.step >= found.step else "commit",
        resume_step=found.step + 1,
        world_size=world_size,
        max_age=0,
        weighted_age=0.0,
        lost_steps=0.0,
        nbytes=found.nbytes,
        layers=tuple({"name": layer.name, "step": found.step, "age": 0} for layer in layer_map.layers),
        plan_s=found.plan_s,
        fetch_s=found.load_s,
        install_s=found.reconstruct_s,
        source=found.source,
    )


class AttemptBook:
    """Notes of one attempt on rank 0. Training waits for the storage in `__init__` and `close` alone.

    Args:
        storage: the folder of the run.
        method: the folder below it.
        number: of the attempt.
        began: what `aNNN.json` says: submission, world_size, r_b.
        receipt: of the recovery that it began with, None for a fresh start.
        flush_s: seconds between two parts of the metrics.
    """

    def __init__(
        self,
        storage: Storage,
        method: str,
        number: int,
        began: dict[str, Any],
        receipt: MethodReceipt | None,
        flush_s: float,
    ) -> None:
        self._storage = storage
        self._name = f"{method}/attempts/a{number:03d}"
        self._receipt = receipt
        self._noted_receipt: MethodReceipt | None = None
        self._metrics = PartWriter(storage, "metrics", number, flush_s, METRICS)
        self._since = self._last = time.monotonic()
        self._step: dict[str, Any] = {"step": began["r_b"], "time_s": time.time()}
        self._ending = threading.Event()
        storage.write(f"{self._name}.json", [json.dumps(began).encode()])
        self._note_receipt()
        self._thread = threading.Thread(target=self._note, name="app-progress", daemon=True)
        self._thread.start()

    def stepped(self, report: StepReport, state: TrainerState, lr: float) -> None:
        """One step has ended."""
        now = time.monotonic()
        self._step = {"step": report.step, "time_s": time.time()}
        self._metrics.add(
            {
                "step": report.step,
                "loss": state.get("loss"),
                "lr": lr,
                "step_s": now - self._last,
                "stall_s": report.stall_s,
                "layers_written": report.layers_written,
                "bytes_written": report.bytes_written,
                "max_age": report.max_age,
                "weighted_age": report.weighted_age,
            }
        )
        self._last = now
        self._complete_receipt(report.step, now - self._since)

    def _complete_receipt(self, step: int, since_s: float) -> None:
        """Adds what only the steps after a recovery show, once each."""
        receipt = self._receipt
        if receipt is None:
            return
        update: dict[str, float] = {}
        if receipt.first_step_s is None:
            update["first_step_s"] = since_s
        if receipt.replay_s is None and step >= receipt.t_fail:
            update["replay_s"] = since_s if step == receipt.t_fail else 0.0
        if update:
            self._receipt = receipt.model_copy(update=update)

    @property
    def receipt(self) -> MethodReceipt | None:
        """As far as it is complete."""
        return self._receipt

    def close(self, how: str, costs: dict[str, Any]) -> None:
        """Notes how the attempt ended and what it cost."""
        self._ending.set()
        self._thread.join()
        self._note_receipt()
        self._put("progress", {**self._step, "ended": how, "costs": costs})
        self._metrics.close()

    def _note_receipt(self) -> None:
        """Writes the receipt as it is now, unless that is noted already."""
        receipt = self._receipt
        if receipt is not None and receipt is not self._noted_receipt:
            self._put("receipt", receipt.model_dump(mode="json"))
            self._noted_receipt = receipt

    def _put(self, what: str, content: dict[str, Any]) -> None:
        try:
            self._storage.write(f"{self._name}.{what}.json", [json.dumps(content).encode()])
        except StorageError as error:
            log.error("attempts say less of this run: %s", error)

    # ------------------------------------------------------------------ progress thread

    def _note(self) -> None:
        noted: dict[str, Any] = {}
        while not self._ending.wait(PROGRESS_S):
            self._note_receipt()
            if noted != self._step:
                noted = dict(self._step)
                self._put("progress", noted)


def outage_s(before: Before, folder: str, submission: str) -> dict[str, float]:
    """`detect_s` and `reschedule_s` of the failure before this attempt; empty if nobody noted it.

    Args:
        before: the attempt that failed.
        folder: of the run.
        submission: a failure of another one is not ours: a person restarted.
    """
    times_s = failure_times_s(RunFiles(folder), submission)
    if before.time_s is None or not times_s or times_s[-1] < before.time_s:
        return {}
    return {"detect_s": times_s[-1] - before.time_s, "reschedule_s": time.time() - times_s[-1]}
