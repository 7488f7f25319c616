"""One session for all baselines: attempts, steps, reports, the watchdog. What differs is a `Baseline`."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from app.baselines.attempts import AttemptBook, Before, MethodReceipt, outage_s, read_before, receipt_of
from app.baselines.protocol import Baseline, StepCost
from layercheck.errors import LayerCheckError, NonFiniteStateError
from layercheck.manifest import TrainerState
from layercheck.partition import SubGroup
from layercheck.persistence.storage import Storage
from layercheck.receipt import ResumePoint
from layercheck.recovery.collectives import on_rank_zero
from layercheck.step_report import StepReport
from layercheck.watchdog import Watchdog
from layercheck.zero3 import Zero3Engine

log = logging.getLogger("app")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run is kept and what its limits are.

    Attributes:
        storage: the folder of the run; `folder` is its path or URI, `method` the method's own folder in it.
        submission: the same for all restarts of one submission.
        hang_s: seconds without a step after which a process ends itself.
        wait_s: limit of a wait for the storage.
        flush_s: seconds between two parts of the metrics.
    """

    storage: Storage
    folder: str
    method: str
    submission: str
    hang_s: float
    wait_s: float
    flush_s: float


class BaselineSession:
    """Drives one method over the life of a worker; see `MethodSession` for the calls.

    A node that is taken away with notice is like one that dies: none of the methods has a last save.
    """

    def __init__(self, method: Baseline, zero3: Zero3Engine, place: RunPlace) -> None:
        self.method = method
        self.watchdog = Watchdog(place.hang_s)
        self._zero3, self._place = zero3, place
        self._book: AttemptBook | None = None
        self._receipt: MethodReceipt | None = None
        self._step = -1
        self._waited_s = 0.0
        # Any listener spares the optimizer its loop over all groups: for all methods, as for LayerCheck.
        self._leave = zero3.on_update(self._before_update, lambda group: None)
        self._saved: dict[str, float] = {"stall_s": 0.0, "events": 0, "bytes": 0, "layer_writes": 0}

    # ------------------------------------------------------------------ resume

    def resume(self) -> ResumePoint:
        """Rolls the run back to the newest state that the method has, or starts it.

        Raises:
            NoPlanError, StoreMismatchError, StorageError: do not train.
        """
        place, zero3 = self._place, self._zero3
        before = on_rank_zero(lambda: read_before(place.storage, place.method))
        found = self.method.recover()
        attempt, step = before.number + 1, 0 if found is None else found.step
        if found is not None:
            zero3.set_global_state(step, found.trainer_state)
            self._receipt = receipt_of(found, before, attempt, zero3.layer_map, zero3.world_size)
        elif before.number and zero3.rank == 0:
            log.warning("%s: nothing was saved before the end: beginning anew", place.method)
        self._receipt = on_rank_zero(lambda: self._open_book(before, attempt, step))
        self.method.begin(attempt, step)
        self._step = step
        self.watchdog.start(step)
        state: TrainerState = {} if found is None else found.trainer_state
        return ResumePoint(step + 1, state, self._receipt, attempt)

    def _open_book(self, before: Before, attempt: int, step: int) -> MethodReceipt | None:
        place, receipt = self._place, self._receipt
        if receipt is not None:
            outage = outage_s(before, place.folder, place.submission)
            receipt = receipt.model_copy(update=outage)
            log.warning("%s", in_words(place.method, receipt))
        began = {"submission": place.submission, "world_size": self._zero3.world_size, "r_b": step}
        self._book = AttemptBook(place.storage, place.method, attempt, began, receipt, place.flush_s)
        return receipt

    # ------------------------------------------------------------------ steps

    def after_step(self, step: int, trainer_state: TrainerState | None = None) -> StepReport:
        """Tells the method of a step; a no-op off the accumulation boundary.

        Raises:
            NonFiniteStateError: the loss is not finite; nothing of this step was saved.
        """
        if self._zero3.step == self._step:
            return StepReport(step)
        if step != self._zero3.step:
            raise LayerCheckError(f"after_step(step={step}): engine.global_steps is {self._zero3.step}")
        state = self._state(step, trainer_state)
        started = time.monotonic()
        with self.watchdog.phase(f"saving by {self._place.method}", self._place.wait_s):
            self.method.after_step(step, state)
        waited_s, self._waited_s = self._waited_s + time.monotonic() - started, 0.0
        self.watchdog.beat(step)
        self._step = step
        cost = self._take()
        stall_s = waited_s + cost.stall_s
        self._saved["stall_s"] += stall_s
        report = StepReport(
            step=step,
            stall_s=stall_s,
            layers_written=cost.layer_writes,
            bytes_written=cost.nbytes,
            max_age=step - cost.protected_step,
            weighted_age=float(step - cost.protected_step),
            alerts=cost.alerts,
        )
        if self._book is not None:
            self._book.stepped(report, state, float(self._zero3.optimizer.param_groups[0]["lr"]))
        return report

    def _state(self, step: int, trainer_state: TrainerState | None) -> TrainerState:
        state = {**(trainer_state or {}), "step": step, **self._zero3.global_state()}
        loss = state.get("loss")
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteStateError(f"step {step}: the loss is {loss}; it was not saved", step=step)
        return state

    def _before_update(self, group: SubGroup, lr: float) -> None:
        started = time.monotonic()
        self.method.before_update(group, lr)
        self._waited_s += time.monotonic() - started

    def _take(self) -> StepCost:
        cost = self.method.take_cost()
        self._saved["events"] += cost.events
        self._saved["bytes"] += cost.nbytes
        self._saved["layer_writes"] += cost.layer_writes
        return cost

    # ------------------------------------------------------------------ the end

    def save_now(self, trainer_state: TrainerState | None = None) -> None:
        """Saves the newest step and waits until it is durable.

        Raises:
            StorageError: it could not be saved.
        """
        with self.watchdog.phase("saving now", self._place.wait_s):
            self.method.save_now(self._step, self._state(self._step, trainer_state))
        self._take()

    def preempt(self, grace_s: float | None = None) -> None:
        """Changes nothing, see the class."""

    def close(self, how: str = "completed") -> None:
        """Waits for what is being saved, unless the group has ended in an error; safe to call twice."""
        try:
            with self.watchdog.phase("ending the saves", self._place.wait_s):
                self.method.close(wait=how == "completed")
                self._leave()  # last: what the method had replaced on top of it goes first
                self._take()
                book, self._book = self._book, None
                if book is not None:
                    self._receipt = book.receipt
                    book.close(how, self.costs())
        finally:
            self.watchdog.close()

    def costs(self) -> dict[str, float]:
        """What this attempt cost: sums over its steps, the phases of its recovery, the method's own figures.

        `events`, `bytes` (all ranks) and `layer_writes` are of commits that became durable; `stall_s` is of
        the steps. `replay_s` and `first_step_s` are known to rank 0 alone.
        """
        events, receipt = self._saved["events"], self._receipt if self._book is None else self._book.receipt
        mean = self._saved["bytes"] / events if events else 0.0
        costs = {**self._saved, "mean_event_bytes": mean, **self.method.facts()}
        return costs if receipt is None else {**costs, **_phases(receipt)}


def _phases(receipt: MethodReceipt) -> dict[str, float]:
    found: dict[str, Any] = {
        "detect_s": receipt.detect_s,
        "reschedule_s": receipt.reschedule_s,
        "plan_s": receipt.plan_s,
        "load_s": receipt.fetch_s,
        "reconstruct_s": receipt.install_s,
        "replay_s": receipt.replay_s,
        "first_step_s": receipt.first_step_s,
    }
    return {key: value for key, value in found.items() if value is not None}


def in_words(method: str, receipt: MethodReceipt) -> str:
    """The line that tells a person what came back."""
    return (
        f"recovered by {method} from {receipt.source}: going on at step {receipt.resume_step}, "
        f"{receipt.t_fail + 1 - receipt.resume_step} steps run again; {receipt.nbytes} bytes, "
        f"load {receipt.fetch_s:.2f} s, reconstruct {receipt.install_s:.2f} s"
    )
