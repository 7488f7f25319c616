"""The one object that an application holds: resume, after_step, save_now, close.

Saving goes tracking -> persistence -> coordination, recovering goes coordination -> recovery; only this file
knows both. All methods are collectives: every rank calls them at the same step.
"""

import logging
import math
import time
import uuid
from dataclasses import replace
from typing import Any, Literal

from layercheck.attempt import Attempt, start_attempt
from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.in_process import RankZeroClient, in_process_client
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.errors import AgeBoundError, FencedError, LayerCheckError, NonFiniteStateError, StorageError
from layercheck.manifest import (
    AttemptGrant,
    DriftReport,
    EventId,
    LayerWrite,
    PersistDecision,
    Receipt,
    ResumePoint,
    TrainerState,
)
from layercheck.persistence.shard_file import RngState
from layercheck.persistence.storage import Storage, open_run_folder, open_storage
from layercheck.recovery import rng as random_state
from layercheck.recovery.begin import Submission, begin
from layercheck.recovery.restore import in_words, restore
from layercheck.step_report import StepReport
from layercheck.tracking.drift import DriftMeter
from layercheck.tracking.policy import decide
from layercheck.watchdog import Watchdog
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
POLL_S = 0.05
ANSWER_S = 1.0
CLOSE_S = 60.0
RngPolicy = Literal["keyed", "captured"]


def attach(
    engine: Any,
    storage: str,
    run: str,
    config: LayerCheckConfig | dict[str, Any] | None = None,
    coordinator: CoordinatorClient | None = None,
    *,
    submission: str | None = None,
    takeover: bool = False,
    run_info: dict[str, Any] | None = None,
    rng: RngPolicy = "keyed",
    store: Storage | None = None,
) -> "Session":
    """Binds a session to a DeepSpeed ZeRO-3 engine whose optimizer was given `layer_groups`.

    Args:
        engine: what `deepspeed.initialize` returned.
        storage: folder or URI that every rank sees; the run lives in `<storage>/<run>/layercheck/`.
        run: name of the run; the same name continues it.
        config: settings, or their dict; None for the defaults.
        coordinator: where the manifest is kept; None runs it inside rank 0.
        submission: the same for all restarts of one submission; another one has to take over.
        takeover: fence off another submission of this run even if it is alive.
        run_info: `config` and `tokenizer_files` to be kept in run.json.
        rng: `captured` for a loop that draws from the global generators: each rank's states ride with the
            events and come back by `resume`; `keyed` for one whose draws are functions of the step.
        store: the run's `layercheck` folder if it is not to be opened from `storage`.

    Raises:
        ConfigError: a setting is unknown or out of range.
        EngineRefusedError: the engine is of an unsupported kind, or its groups mix layers.
        StorageError: `storage` is no path or URI that can be opened.
    """
    settings = parse_config(config)
    zero3 = Zero3Engine(engine)
    store = store or open_storage(storage, run)
    client = coordinator or in_process_client(store, settings, zero3.rank, zero3.world_size)
    who = Submission(run, submission or uuid.uuid4().hex, takeover, run_info or {})
    return Session(zero3, store, open_run_folder(storage, run), settings, client, who, rng)


class Session:
    """See `attach`. Call `resume` first, `after_step` after every `engine.step()`, `close` at the end."""

    def __init__(
        self,
        zero3: Zero3Engine,
        storage: Storage,
        run_folder: Storage,
        config: LayerCheckConfig,
        coordinator: CoordinatorClient,
        submission: Submission,
        rng: RngPolicy = "keyed",
    ) -> None:
        self._zero3 = zero3
        self._storage = storage
        self._run_folder = run_folder
        self._config = config
        self._coordinator = coordinator
        self._submission = submission
        self._rng: RngPolicy = rng
        self._recovered_rng: RngState | None = None
        self.meter = DriftMeter(zero3, config.drift)
        self.watchdog = Watchdog(config.hang_s)
        self._open: Attempt | None = None

    # ------------------------------------------------------------------ resume

    def resume(self) -> ResumePoint:
        """Starts the run, or recovers the newest version of every layer. Call once, before training.

        Returns:
            The first step to run and the trainer state that belongs to the step before it.

        Raises:
            StoreMismatchError, NoPlanError, RunIsLiveError, RestartLoopError, StorageError: all is as before.
        """
        try:
            grant, receipt = self._recover()
        except BaseException:
            self._close_own_coordinator()
            raise
        self._open = opened = start_attempt(
            self._zero3, self._storage, self._run_folder, self._coordinator, self._config, grant, receipt
        )
        self.watchdog.start(grant.r_b)
        plan = grant.plan
        if plan is None:
            self._step_zero()
            return ResumePoint(step=1, attempt=opened.number)
        self._zero3.set_global_state(plan.resume_step - 1, plan.trainer_state)
        opened.step, opened.skipped = self._zero3.step, self._zero3.skipped
        self.meter.take(opened.step, self._zero3.slices)
        self._announce(opened, plan.trainer_state)
        if opened.link is not None and receipt is not None:
            opened.link.note_receipt(receipt)
            log.warning("%s", in_words(receipt))
        self.restore_rng()
        return ResumePoint(plan.resume_step, plan.trainer_state, receipt, opened.number)

    def restore_rng(self) -> None:
        """Puts the recovered generators back; `resume` does it. Again for a loop that draws before step 1."""
        if self._recovered_rng is not None:
            random_state.restore(self._recovered_rng)

    def _recover(self) -> tuple[AttemptGrant, Receipt | None]:
        started = time.monotonic()
        grant = begin(self._zero3, self._storage, self._coordinator, self._config, self._submission)
        if grant.plan is None:
            return grant, None
        plan_s = time.monotonic() - started
        grant, receipt = restore(self._zero3, self._storage, self._coordinator, grant, plan_s)
        if self._rng == "captured" and grant.plan is not None:
            said, self._recovered_rng = random_state.find(self._zero3, self._storage, grant.plan)
            receipt = receipt.model_copy(update={"rng": said})
        return grant, receipt

    def _step_zero(self) -> None:
        opened = self._need_open()
        decision = decide(opened.ledger.facts(0, 0.0), self._config)
        self._save(opened, decision, {"step": 0})
        self._announce(opened, {"step": 0})
        self._wait_for_commits(opened, {"step": 0}, 0.0)
        self.meter.reset()

    # ------------------------------------------------------------------ after every step

    def after_step(self, step: int, trainer_state: TrainerState | None = None) -> StepReport:
        """Measures, decides, copies; a no-op off the accumulation boundary.

        Args:
            step: number of the optimizer step just taken; must equal `engine.global_steps`.
            trainer_state: JSON values that the next step depends on; `loss` is checked to be finite.

        Raises:
            FencedError: a newer attempt has taken over; return from training without being retried.
            NonFiniteStateError: the state is poisoned; nothing of it was committed.
            AgeBoundError: a layer is `s_max` steps old and the storage did not commit in time.
        """
        opened = self._need_open()
        if self._zero3.step == opened.step:
            return StepReport(step)
        if step != self._zero3.step:
            raise LayerCheckError(
                f"after_step(step={step}): engine.global_steps is {self._zero3.step}; pass that"
            )
        started = time.monotonic()
        opened.step, opened.step_s = step, started - opened.ended
        state: TrainerState = {**(trainer_state or {}), "step": step, **self._zero3.global_state()}
        opened.state = state
        report = self._exchange(opened, step, self._is_poisoned(opened, state))
        self._refuse_poison(opened, report)
        self._observe(opened, report)
        decision = decide(opened.ledger.facts(step, report.lr), self._config)
        tracked = time.monotonic()
        nbytes = self._save(opened, decision, state)
        self._announce(opened, state)
        if decision.must_wait:
            self._wait_for_commits(opened, state, report.lr)
        finished = time.monotonic()
        result = StepReport(
            step=step,
            stall_s=finished - tracked,
            tracking_s=tracked - started,
            layers_written=len(decision.writes),
            bytes_written=nbytes,
            max_age=opened.ledger.max_age(step),
            weighted_age=opened.ledger.weighted_age(step),
            still_layers=opened.ledger.still.layers,
            alerts=opened.take_alerts(),
        )
        if opened.run_log is not None:
            opened.run_log.step(result, state, report, decision, opened.ledger)
            opened.note(result, report)
        opened.complete_receipt(step, state)
        opened.stall_s, opened.ended = result.stall_s, time.monotonic()
        return result

    def _exchange(self, opened: Attempt, step: int, error: bool = False) -> DriftReport:
        report = self.meter.reduce(step, replace(opened.notices(), error=error))
        self.watchdog.beat(step)
        if report.fenced:
            raise FencedError(
                f"attempt {opened.number} of run {self._submission.run} was taken over at step {step}",
                step=step,
            )
        return report

    def _observe(self, opened: Attempt, report: DriftReport) -> None:
        events = opened.ledger.observe(report)
        self.meter.settle(events.committed, events.lost)
        if events.still and opened.link is not None:
            log.warning("not moving by step %d: %s; are their updates seen?", report.step, events.still)

    def _is_poisoned(self, opened: Attempt, state: TrainerState) -> bool:
        if self._zero3.skipped > opened.skipped:
            opened.skipped = self._zero3.skipped
            return False
        values = (state.get("loss"), self._zero3.grad_norm())
        return any(value is not None and not math.isfinite(value) for value in values)

    def _refuse_poison(self, opened: Attempt, report: DriftReport) -> None:
        layer = opened.ledger.non_finite(report)
        if layer is None and not report.errors:
            return
        what = (
            f"layer {layer} moved by a non-finite amount"
            if layer
            else "the loss or gradient norm is not finite"
        )
        reason = f"step {report.step}: {what}; nothing of this step was saved, collection is frozen"
        self.close("failed", reason)
        raise NonFiniteStateError(reason, step=report.step, layer=layer)

    def _save(self, opened: Attempt, decision: PersistDecision, state: TrainerState, part: int = 0) -> int:
        """Copies the chosen layers and hands them to the writer; returns this rank's bytes."""
        if not decision.writes:
            return 0
        if part == 0:
            opened.ledger.select(decision)
            self.meter.take(decision.step, [write.layer for write in decision.writes])
        state = {**state, "layercheck": opened.ledger.to_state()}
        event = EventId(step=decision.step, attempt=opened.number, part=part)
        try:
            rng = random_state.capture() if self._rng == "captured" else None
            with self.watchdog.phase("copying a snapshot", self._config.storage_wait_s):
                snapshot = opened.taker.take(event, decision, state, opened.writer.submit, rng)
        except StorageError as error:
            # The writer reports this event as lost; its drift comes back by the notice (I9).
            opened.alert(f"event {event.folder} is lost: {error}")
            return 0
        if snapshot.stream.streaming:
            opened.alert(
                f"event {event.folder} of {snapshot.layout.total} bytes on rank {self._zero3.rank} is larger "
                f"than the staging memory: training waited {snapshot.stream.copy_s:.2f} s; raise "
                f"staging_bytes={self._config.staging_bytes}"
            )
        return snapshot.layout.total

    def _announce(self, opened: Attempt, state: TrainerState) -> None:
        if opened.link is not None:
            state = {**state, "layercheck": opened.ledger.to_state() | {"costs": opened.costs}}
            opened.link.post(state["step"], state, opened.ledger.drift)

    def _wait_for_commits(self, opened: Attempt, state: TrainerState, lr: float) -> None:
        """Blocks all ranks while a layer is at its limit (I1); the repeated all-reduce brings the commits."""
        step = state["step"]
        deadline = time.monotonic() + self._config.storage_wait_s
        while (decision := decide(opened.ledger.facts(step, lr), self._config)).must_wait:
            # Not empty only if the event of an earlier step was lost while we waited.
            self._save(opened, decision, state)
            if self._config.on_bound == "continue" and step > 0:
                opened.alert(f"the age bound s_max={self._config.s_max} is broken at step {step}")
                return
            if not opened.ledger.versions.in_flight or self._poll(opened, step, deadline).errors:
                raise AgeBoundError(
                    f"step {step}: a layer is s_max={self._config.s_max} steps old and nothing newer was "
                    f"committed within storage_wait_s={self._config.storage_wait_s:g}, or its save was lost",
                    step=step,
                )

    def _poll(self, opened: Attempt, step: int, deadline: float) -> DriftReport:
        """One look of waiting ranks at the news; `errors` tells all of them alike that time is up."""
        if opened.link is not None:
            time.sleep(POLL_S)
            opened.link.wait_for_answer(ANSWER_S)
        is_late = opened.link is not None and time.monotonic() > deadline
        report = self._exchange(opened, step, error=is_late)
        self._observe(opened, report)
        return report

    # ------------------------------------------------------------------ save now, close

    def save_now(self, trainer_state: TrainerState | None = None) -> None:
        """Takes a full event of the current step and waits until it is committed (I10).

        Raises:
            StorageError: it was not committed within `storage_wait_s`.
        """
        opened = self._need_open()
        step = opened.step
        state: TrainerState = {**(trainer_state or opened.state), "step": step, **self._zero3.global_state()}
        drift, ages = opened.ledger.drift, opened.ledger.ages(step)
        decision = PersistDecision(
            step=step,
            writes=tuple(
                LayerWrite(name, "full", drift.get(name, 0.0), 0.0, ages.get(name, 0))
                for name in opened.ledger.full_set
            ),
        )
        opened.part += 1
        self._save(opened, decision, state, part=opened.part)
        self._announce(opened, state)
        deadline = time.monotonic() + self._config.storage_wait_s
        while True:
            report = self._poll(opened, step, deadline)
            if (report.committed_step, report.committed_part) >= (step, opened.part):
                opened.ledger.saved_now(step)
                self.meter.take(step, opened.ledger.full_set)
                self.meter.settle((step,), ())
                return
            if step in report.lost_steps or report.errors:
                raise StorageError(
                    f"the full event of step {step} was not committed; see the log above", step=step
                )

    def close(self, how: str = "completed", reason: str = "") -> None:
        """Waits for the writer and ends the attempt. Safe to call twice, and after any error.

        Args:
            how: `completed`, `failed` or `fenced`.
            reason: for people, if it did not complete.
        """
        self.meter.close()
        self.watchdog.close()
        opened, self._open = self._open, None
        if opened is None:
            return
        if not opened.writer.close(CLOSE_S):
            log.error("%d bytes were not durable %g s after the end", opened.writer.backlog_bytes, CLOSE_S)
        if opened.run_log is not None:
            opened.run_log.close()
        if opened.link is not None:
            opened.link.close(CLOSE_S)
            self._end_attempt(opened, how, reason)
        self._close_own_coordinator()

    def _end_attempt(self, opened: Attempt, how: str, reason: str) -> None:
        try:
            self._coordinator.end_attempt(opened.number, how, reason)
        except LayerCheckError as error:
            # The store says less of how this attempt ended; nothing that was saved depends on it.
            log.error("the end of attempt %d could not be noted: %s", opened.number, error)

    def _close_own_coordinator(self) -> None:
        if isinstance(self._coordinator, RankZeroClient):
            self._coordinator.close()

    def _need_open(self) -> Attempt:
        if self._open is None:
            raise LayerCheckError("the session is not open: call session.resume() once before training")
        return self._open
