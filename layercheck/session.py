"""The one object that an application holds: resume, after_step, save_now, close.

Saving goes tracking -> persistence -> coordination, recovering goes coordination -> recovery; only this file knows
both. All methods are collectives: every rank calls them at the same step.
"""

import logging
import math
import os
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch.distributed as dist

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.in_process import in_process_client
from layercheck.coordination.link import HeartbeatLink
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
    RunRecord,
    TrainerState,
)
from layercheck.persistence.snapshot import SnapshotTaker, StagingPool
from layercheck.persistence.storage import Storage, open_storage
from layercheck.persistence.writer import ShardWriter
from layercheck.recovery.restore import count_over_ranks, on_rank_zero, restore
from layercheck.tracking.drift import LOST_SLOTS, DriftMeter, RankNotices
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.policy import decide, must_wait
from layercheck.tracking.run_log import RunLog
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
POLL_S = 1.0
CLOSE_S = 60.0
LATER_STEPS = 20


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step cost and how fresh the store is. `stall_s` is the time training waited for a save."""

    step: int
    stall_s: float = 0.0
    tracking_s: float = 0.0
    layers_written: int = 0
    bytes_written: int = 0
    max_age: int = 0
    weighted_age: float = 0.0


@dataclass(frozen=True, slots=True)
class Submission:
    """Who runs: `name` tells a restart of one submission from another one; `info` goes into run.json."""

    name: str
    takeover: bool
    info: dict[str, Any]


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

    Raises:
        ConfigError: a setting is unknown or out of range.
        EngineRefusedError: the engine is of an unsupported kind, or its groups mix layers.
        StorageError: `storage` is no path or URI that can be opened.
    """
    settings = parse_config(config)
    zero3 = Zero3Engine(engine)
    store = open_storage(storage, run)
    client = coordinator or in_process_client(store, settings, zero3.rank, zero3.world_size)
    return Session(
        zero3, store, run, settings, client, Submission(submission or uuid.uuid4().hex, takeover, run_info or {})
    )


@dataclass(slots=True)
class _Open:
    """What a session holds from `resume` to `close`."""

    attempt: int
    ledger: Ledger
    taker: SnapshotTaker
    writer: ShardWriter
    link: HeartbeatLink | None
    run_log: RunLog
    receipt: Receipt | None
    step: int = 0
    skipped: int = 0
    part: int = 0
    state: TrainerState = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    told_lost: set[int] = field(default_factory=set)

    def notices(self) -> RankNotices:
        """This rank's slots of the next all-reduce; on rank 0 with what the coordinator said last."""
        backlog = self.writer.backlog_bytes
        if self.link is None:
            return RankNotices(backlog)
        reply = self.link.reply
        untold = sorted(set(reply.lost_steps) - self.told_lost)
        told, later = untold[:LOST_SLOTS], untold[LOST_SLOTS:]
        self.told_lost.update(told)
        # A commit newer than a loss that has no slot yet would pass the lost event off as committed.
        committed = min(reply.committed_step, later[0] - 1) if later else reply.committed_step
        return RankNotices(backlog, False, committed, reply.committed_part, tuple(told), reply.fenced)


class Session:
    """See `attach`. Call `resume` first, `after_step` after every `engine.step()`, `close` at the end."""

    def __init__(
        self,
        zero3: Zero3Engine,
        storage: Storage,
        run: str,
        config: LayerCheckConfig,
        coordinator: CoordinatorClient,
        submission: Submission,
    ) -> None:
        self._zero3 = zero3
        self._storage = storage
        self._run = run
        self._config = config
        self._coordinator = coordinator
        self._submission = submission
        self._meter = DriftMeter(zero3, config.drift)
        self._open: _Open | None = None

    # ------------------------------------------------------------------ resume

    def resume(self) -> ResumePoint:
        """Opens the run: starts it, or recovers the newest version of every layer. Call once, before training.

        Returns:
            The first step to run and the trainer state that belongs to the step before it.

        Raises:
            StoreMismatchError, NoPlanError, RunIsLiveError, RestartLoopError, StorageError: nothing was changed.
        """
        self._check_storage_is_shared()
        started = time.monotonic()
        grant = on_rank_zero(self._begin)
        receipt: Receipt | None = None
        if grant.plan is not None:
            grant, receipt = restore(
                self._zero3, self._storage, self._coordinator, grant, time.monotonic() - started
            )
        self._open = opened = self._start(grant, receipt)
        plan = grant.plan
        if plan is None:
            self._step_zero()
            return ResumePoint(step=1)
        self._zero3.set_global_state(plan.resume_step - 1, plan.trainer_state)
        opened.step = plan.resume_step - 1
        if self._zero3.rank == 0:
            assert receipt is not None
            self._coordinator.note_receipt(grant.attempt, receipt.model_dump(mode="json"))
        return ResumePoint(plan.resume_step, plan.trainer_state, receipt)

    def _check_storage_is_shared(self) -> None:
        token = on_rank_zero(lambda: uuid.uuid4().hex)
        self._probe = f"probe-{token}"
        on_rank_zero(lambda: self._storage.write(self._probe, [token.encode()]))
        blind = self._storage.size(self._probe) is None
        if count_over_ranks(int(blind), self._zero3.collective_device):
            where = "this rank does not" if blind else "another rank does not"
            raise StorageError(
                f"storage {self._storage.root}: {where} see what rank 0 wrote there; "
                "give a storage path that all nodes share",
                path=self._storage.root,
            )

    def _begin(self) -> AttemptGrant:
        try:
            changed = self._coordinator.open_run(self._run_record(), self._probe)
        finally:
            self._storage.delete(self._probe)
        for line in changed:
            log.warning("setting changed since this run began: %s", line)
        grant = self._coordinator.begin_attempt(
            uuid.uuid4().hex,
            self._submission.name,
            self._zero3.world_size,
            self._config.recovery,
            self._submission.takeover,
        )
        for note in grant.notes:
            log.warning("%s", note)
        return grant

    def _run_record(self) -> RunRecord:
        info = self._submission.info
        return RunRecord(
            run_id=uuid.uuid4().hex,
            name=self._run,
            layer_map=self._zero3.layer_map,
            optimizer=type(self._zero3.optimizer).__name__,
            model_config_json=self._zero3.model_config(),
            tokenizer_files=info.get("tokenizer_files", {}),
            config={**info.get("config", {}), "checkpoint": self._config.model_dump(mode="json")},
        )

    def _start(self, grant: AttemptGrant, receipt: Receipt | None) -> "_Open":
        zero3, config = self._zero3, self._config
        pool = StagingPool(config.staging_bytes or _staging_bytes(zero3), pin=zero3.on_accelerator)
        return _Open(
            attempt=grant.attempt,
            ledger=(
                Ledger.fresh(zero3.layer_map, config, zero3.initial_lr)
                if grant.plan is None
                else Ledger.resumed(zero3.layer_map, config, grant.plan, zero3.initial_lr)
            ),
            taker=SnapshotTaker(zero3, pool, config.storage_wait_s),
            writer=ShardWriter(
                self._storage,
                self._coordinator,
                zero3.rank,
                zero3.world_size,
                retries=config.write_retries,
                timeout_s=config.storage_wait_s,
            ),
            link=HeartbeatLink(self._coordinator, grant.attempt) if zero3.rank == 0 else None,
            run_log=RunLog.open(self._storage, grant.attempt, config.metrics_flush_s, zero3),
            receipt=receipt,
        )

    def _step_zero(self) -> None:
        opened = self._need_open()
        decision = decide(opened.ledger.facts(0, 0.0), self._config)
        self._save(opened, decision, {"step": 0})
        self._announce(opened, {"step": 0})
        self._wait_for_commits(opened, 0)
        self._meter.reset()

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
                f"after_step(step={step}) but engine.global_steps is {self._zero3.step}: pass the engine's step"
            )
        started = time.monotonic()
        opened.step = step
        state: TrainerState = {**(trainer_state or {}), "step": step, **self._zero3.global_state()}
        report = self._exchange(opened, step, self._is_poisoned(opened, state))
        self._refuse_poison(opened, report)
        opened.ledger.observe(report)
        decision = decide(opened.ledger.facts(step, report.lr), self._config)
        tracked = time.monotonic()
        nbytes = self._save(opened, decision, state)
        self._announce(opened, state)
        if decision.must_wait:
            self._wait_for_commits(opened, step)
        finished = time.monotonic()
        result = StepReport(
            step=step,
            stall_s=finished - tracked,
            tracking_s=tracked - started,
            layers_written=len(decision.writes),
            bytes_written=nbytes,
            max_age=opened.ledger.max_age(step),
            weighted_age=opened.ledger.weighted_age(step),
        )
        opened.run_log.step(result, state, report, decision, opened.ledger)
        self._complete_receipt(opened, step, state)
        return result

    def _exchange(self, opened: "_Open", step: int, error: bool = False) -> DriftReport:
        report = self._meter.reduce(step, replace(opened.notices(), error=error))
        if report.fenced:
            raise FencedError(
                f"attempt {opened.attempt} of run {self._run} was taken over by a newer one at step {step}", step=step
            )
        return report

    def _is_poisoned(self, opened: "_Open", state: TrainerState) -> bool:
        if self._zero3.skipped > opened.skipped:
            opened.skipped = self._zero3.skipped
            return False
        values = (state.get("loss"), self._zero3.grad_norm())
        return any(value is not None and not math.isfinite(value) for value in values)

    def _refuse_poison(self, opened: "_Open", report: DriftReport) -> None:
        layer = opened.ledger.non_finite(report)
        if layer is None and not report.errors:
            return
        what = f"layer {layer} moved by a non-finite amount" if layer else "the loss or gradient norm is not finite"
        reason = f"step {report.step}: {what}; nothing of this step was saved, collection is frozen"
        if self._zero3.rank == 0:
            self._coordinator.end_attempt(opened.attempt, "failed", reason)
        self.close("failed")
        raise NonFiniteStateError(reason, step=report.step, layer=layer)

    def _save(self, opened: "_Open", decision: PersistDecision, state: TrainerState, part: int = 0) -> int:
        """Copies the chosen layers and hands them to the writer; returns this rank's bytes."""
        if not decision.writes:
            return 0
        if part == 0:
            opened.ledger.select(decision)
        state = {**state, "layercheck": opened.ledger.to_state()}
        event = EventId(step=decision.step, attempt=opened.attempt, part=part)
        try:
            return opened.taker.take(event, decision, state, opened.writer.submit).layout.total
        except StorageError as error:
            # The writer reports this event as lost; its drift comes back by the notice (I9).
            log.error("event %s is lost: %s", event.folder, error)
            return 0

    def _announce(self, opened: "_Open", state: TrainerState) -> None:
        if opened.link is not None:
            state = {**state, "layercheck": opened.ledger.to_state()}
            opened.link.post(state["step"], state, opened.ledger.drift)

    def _wait_for_commits(self, opened: "_Open", step: int) -> None:
        """Blocks all ranks while a layer is at its age limit (I1). The repeated all-reduce brings the commits."""
        deadline = time.monotonic() + self._config.storage_wait_s
        while must_wait(opened.ledger.facts(step, 0.0), self._config):
            if self._config.on_bound == "continue" and step > 0:
                log.error("the age bound s_max=%d is broken at step %d", self._config.s_max, step)
                return
            if time.monotonic() > deadline:
                raise AgeBoundError(
                    f"step {step}: a layer is s_max={self._config.s_max} steps old and the storage committed nothing "
                    f"newer within storage_wait_s={self._config.storage_wait_s:g}",
                    step=step,
                )
            self._poll(opened, step)

    def _poll(self, opened: "_Open", step: int) -> DriftReport:
        if opened.link is not None:
            opened.link.wait_for_answer(POLL_S)
        report = self._exchange(opened, step)
        opened.ledger.observe(report)
        return report

    def _complete_receipt(self, opened: "_Open", step: int, state: TrainerState) -> None:
        receipt = opened.receipt
        if receipt is None or opened.link is None:
            return
        if receipt.first_step_s is None:
            update: dict[str, Any] = {"first_step_s": time.monotonic() - opened.since}
        elif step == receipt.resume_step + LATER_STEPS - 1 and state.get("loss") is not None:
            update = {"loss_20_steps_later": float(state["loss"])}
        else:
            return
        opened.receipt = receipt.model_copy(update=update)
        self._coordinator.note_receipt(opened.attempt, opened.receipt.model_dump(mode="json"))

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
                LayerWrite(layer.name, "full", drift.get(layer.name, 0.0), 0.0, ages.get(layer.name, 0))
                for layer in self._zero3.layer_map.layers
            ),
        )
        opened.part += 1
        self._save(opened, decision, state, part=opened.part)
        self._announce(opened, state)
        deadline = time.monotonic() + self._config.storage_wait_s
        while True:
            report = self._poll(opened, step)
            if (report.committed_step, report.committed_part) >= (step, opened.part):
                opened.ledger.saved_now(step)
                return
            if step in report.lost_steps or time.monotonic() > deadline:
                raise StorageError(f"the full event of step {step} was not committed; see the log above", step=step)

    def close(self, how: str = "completed") -> None:
        """Waits for the writer, ends the threads and, on rank 0, the attempt. Safe to call twice."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if not opened.writer.close(CLOSE_S):
            log.error("%d bytes were not durable %g s after the end", opened.writer.backlog_bytes, CLOSE_S)
        opened.run_log.close()
        if opened.link is not None:
            opened.link.close(CLOSE_S)
            if how == "completed":
                self._coordinator.end_attempt(opened.attempt, how)

    def _need_open(self) -> "_Open":
        if self._open is None:
            raise LayerCheckError("the session is not open: call session.resume() once before training")
        return self._open


def _staging_bytes(zero3: Zero3Engine) -> int:
    """min(this rank's full state, this rank's share of a quarter of the host's free memory)."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", zero3.world_size))
    share = psutil.virtual_memory().available // 4 // ranks_here
    return min(zero3.nbytes, share)
