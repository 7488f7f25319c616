"""What a session holds while it is open."""

import logging
import os
import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import psutil

from layercheck.config import LayerCheckConfig
from layercheck.coordination.link import HeartbeatLink
from layercheck.coordination.protocol import AttemptGrant, CoordinatorClient, HeartbeatReply
from layercheck.decision import PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.end_signals import EndSignals, listen
from layercheck.errors import LayerCheckError
from layercheck.layers import MASTER_BYTES, LayerStep
from layercheck.manifest import TrainerState
from layercheck.memory.staging import MemorySink
from layercheck.memory.tier import MemoryTier
from layercheck.overlap import Overlap
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.quantise import Code
from layercheck.persistence.snapshot import SnapshotTaker, StagingPool
from layercheck.persistence.storage import Storage
from layercheck.persistence.writer import ShardWriter
from layercheck.receipt import Receipt
from layercheck.step_report import StepReport
from layercheck.tracking.ledger import Ledger, LedgerEvents
from layercheck.tracking.memory import Staged, copies
from layercheck.tracking.notices import LOST_SLOTS, RankNotices
from layercheck.tracking.reasons import REASON_WINDOW
from layercheck.tracking.run_log import RunLog
from layercheck.tracking.sealed import Sealed
from layercheck.tracking.warmup import told_at_the_end
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
LATER_STEPS = 20
_LEAST_GRACE_S = 1.0
_STAGED_S = 5.0


@dataclass(slots=True)
class Attempt:
    """One life of a session: from `resume` to `close`.

    Attributes:
        number: the attempt's number.
        step: newest step that `after_step` saw; `skipped` the engine's count then.
        part: number of `save_now` events taken.
        state: trainer state of that step; `complete` that of the newest step whose report is clean, which is
            what heartbeats carry; `unreported` those in between, by step.
        backlog: bytes that the slowest rank still had to write, by the newest report; `told_grace_s` the
            seconds in which some rank will be ended, 0 for none.
        since: when training began, monotonic seconds.
        told_lost: lost events that went through the all-reduce already.
        told_rot: the newest step whose report told of a version that has rotted.
        ended: when `after_step` last returned, monotonic seconds.
        step_s: seconds between that and the next call; `stall_s` the stall in the call before.
        alerts: what the next `StepReport` tells a person; see `alert`, `take_alerts`.
        signals: what announces the end of this process; `signal_grace_s` after that it comes.
        sink, staged, sealed: of the memory tier, None without one.
        told_left_out: copies in memory of which this rank has told that it left them out.
        ends_at: when the end comes by other word, monotonic seconds; see `grace_s`.
        preempted: the last save is over.
        costs: on rank 0, figures of the newest step; `stall_s` is the sum over this attempt's steps.
    """

    number: int
    ledger: Ledger
    taker: SnapshotTaker
    writer: ShardWriter
    link: HeartbeatLink | None
    run_log: RunLog | None
    receipt: Receipt | None
    signals: EndSignals
    signal_grace_s: float
    sink: MemorySink | None = None
    staged: Staged | None = None
    sealed: Sealed | None = None
    told_left_out: int = 0
    ends_at: float = inf
    preempted: bool = False
    step: int = 0
    skipped: int = 0
    part: int = 0
    part_step: int = -1
    state: TrainerState = field(default_factory=dict)
    complete: TrainerState = field(default_factory=dict)
    unreported: dict[int, TrainerState] = field(default_factory=dict)
    backlog: float = 0.0
    told_grace_s: float = 0.0
    since: float = field(default_factory=time.monotonic)
    told_lost: set[int] = field(default_factory=set)
    told_rot: int = 0
    ended: float = field(default_factory=time.monotonic)
    step_s: float = 0.0
    stall_s: float = 0.0
    alerts: list[str] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)

    def alert(self, text: str) -> None:
        """Something that this rank's training thread has to tell: in the log now, and in the next report."""
        log.error("%s", text)
        self.alerts.append(text)

    def take_alerts(self) -> tuple[str, ...]:
        """All that is to be told since the last call: also the writer's, on rank 0 the coordinator's."""
        told = self.link.take_alerts() if self.link is not None else []
        for text in told:
            log.error("%s", text)
        own, self.alerts = self.alerts, []
        of_memory = self.sink.take_alerts() if self.sink is not None else []
        return (*own, *self.writer.take_alerts(), *of_memory, *told)

    def observe(self, report: DriftReport) -> LedgerEvents:
        """Takes in one clean report; on rank 0 also into the tables."""
        had_k0 = self.ledger.k0 is not None
        events = self.ledger.observe(report)
        if self.link is not None and not had_k0 and (told := told_at_the_end(report.step, self.ledger)):
            log.warning("%s", told)
        self.complete = self.unreported.pop(report.step, self.complete)
        self.backlog, self.told_grace_s = report.backlog, report.grace_s
        if self.staged is not None:
            self.staged.observe(report)
        if self.sealed is not None:
            self.sealed.observe(report)
        if self.run_log is not None:
            self.run_log.observed(report, self.ledger)
        return events

    def for_memory(self, chosen: PersistDecision, config: LayerCheckConfig) -> PersistDecision:
        """What is copied to memory alone after a step; nothing without a memory tier."""
        if self.staged is None:
            return PersistDecision(chosen.step)
        self.staged.take(chosen.step, [write.layer for write in chosen.versions])
        facts = self.ledger.facts(chosen.step, self.ledger.lr)
        found = copies(facts, self.staged, chosen, config, self.backlog)
        self.staged.copied(found, self.backlog > 0)
        return found

    def report(self, decision: PersistDecision, nbytes: int, started: float, tracked: float) -> StepReport:
        """What the step cost: it began to be tracked at `started`, and to be saved at `tracked`."""
        return StepReport(
            step=self.step,
            stall_s=time.monotonic() - tracked + self.taker.take_stall_s(),
            tracking_s=tracked - started,
            layers_written=len(decision.versions),
            bytes_written=nbytes,
            max_age=self.ledger.max_age(self.step),
            weighted_age=self.ledger.weighted_age(self.step),
            still_layers=self.ledger.still.layers,
            preempted=self.preempted,
            alerts=self.take_alerts(),
        )

    def note(self, step: StepReport) -> None:
        """Keeps what a step cost and how fresh the store is: its heartbeat takes it to the metrics."""
        thresholds, drift = self.ledger.thresholds(self.ledger.lr), self.ledger.drift
        self.costs = {
            "stall_s": self.costs.get("stall_s", 0.0) + step.stall_s,
            "inflight_bytes": self.backlog,
            "max_age": step.max_age,
            "weighted_age": step.weighted_age,
            "lost_steps": self.ledger.unsaved.lost_steps(step.step),
            "lost_drift": self.ledger.unsaved.lost_drift,
            "skipped_copies": self.sealed.left_out if self.sealed is not None else 0,
            "drift_ratio": max((drift[name] / k for name, k in thresholds.items() if k), default=0.0),
        }
        self._warn_if_age_dominates(step.step)

    def told_by_heartbeats(self) -> dict[str, Any]:
        """The ledger's state, as commits hold it too, with what only the journal and the metrics need."""
        told: dict[str, Any] = {"costs": self.costs, "unsaved": self.ledger.unsaved.to_state()}
        if self.sealed is not None:
            told["memory"] = self.sealed.to_state()
        return self.ledger.to_state() | told

    def _warn_if_age_dominates(self, step: int) -> None:
        """Says, at most every `REASON_WINDOW` steps, that the threshold decides nothing."""
        if step % REASON_WINDOW == 0 and self.ledger.reasons.age_dominates:
            log.warning(
                "step %d: most layer writes of the last %d steps came from the age limit, so the threshold "
                "decides little: lower target_interval (or k0), or raise s_max",
                step,
                REASON_WINDOW,
            )

    def next_part(self) -> int:
        """The number of one more event of the current step, beside that of the policy."""
        if self.part_step != self.step:
            self.part_step, self.part = self.step, 0
        self.part += 1
        return self.part

    @property
    def grace_s(self) -> float:
        """Seconds until this rank will be ended; 0 if nobody said so.

        Never less than one second once it was said: a rank that outlived its time may still save something.
        """
        ends_at = self.ends_at
        if self.signals.came is not None:
            ends_at = min(ends_at, self.signals.came_at + self.signal_grace_s)
        return 0.0 if ends_at == inf else max(_LEAST_GRACE_S, ends_at - time.monotonic())

    def limited_s(self, limit_s: float) -> float:
        """A wait of at most `limit_s` that a last save must not draw out beyond its grace."""
        return min(limit_s, self.grace_s) if self.preempted else limit_s

    def finish_writing(self, limit_s: float, how: str) -> None:
        """Waits until what was taken is durable; after a failure that is left to the vault."""
        if not self.writer.close(limit_s):
            log.error("%d bytes were not durable %g s after the end", self.writer.backlog_bytes, limit_s)
        if self.sink is not None and how in ("completed", "preempted") and not self.sink.drain(limit_s):
            log.error("the vault had not written everything %g s after the end", limit_s)

    def complete_receipt(self, step: int, state: TrainerState) -> None:
        """Adds to the receipt what only the steps after a recovery show, once each (rank 0)."""
        if self.receipt is None or self.link is None:
            return
        if self.receipt.first_step_s is None:
            update: dict[str, Any] = {"first_step_s": time.monotonic() - self.since}
        elif step == self.receipt.resume_step + LATER_STEPS - 1 and state.get("loss") is not None:
            update = {"loss_20_steps_later": float(state["loss"])}
        else:
            return
        self.receipt = self.receipt.model_copy(update=update)
        self.link.note_receipt(self.receipt)

    def say_ended(self, coordinator: CoordinatorClient, how: str, reason: str) -> None:
        """Tells the coordinator how this attempt ended (rank 0)."""
        try:
            coordinator.end_attempt(self.number, how, reason)
        except LayerCheckError as error:
            # The store says less of how this attempt ended; nothing that was saved depends on it.
            log.error("the end of attempt %d could not be noted: %s", self.number, error)

    def notices(self) -> RankNotices:
        """This rank's slots of the next all-reduce; on rank 0 with what the coordinator said last.

        Who wants a copy of every step waits here for that of the step before, which has had a step's time.
        """
        if self.staged is not None and self.ledger.lag == 0 and self.ledger.config.memory.k_ratio == 0:
            self.writer.drain(_STAGED_S)
        backlog = self.writer.backlog_bytes  # first: what is not in it any more, `left_out` counts already
        own = RankNotices(
            backlog,
            step_s=self.step_s,
            stall_s=self.stall_s,
            grace_s=self.grace_s,
            left_out=self._left_out_to_tell(),
        )
        if self.link is None:
            return own
        reply = self.link.reply
        if reply.grace_s and self.ends_at == inf:
            self.ends_at = time.monotonic() + reply.grace_s
            own = replace(own, grace_s=self.grace_s)
        untold = sorted(set(reply.lost_steps) - self.told_lost)
        told, later = untold[:LOST_SLOTS], untold[LOST_SLOTS:]
        self.told_lost.update(told)
        # A commit newer than a loss that has no slot yet would pass the lost event off as committed.
        committed = min(reply.committed_step, later[0] - 1) if later else reply.committed_step
        return replace(
            own,
            committed_step=committed,
            committed_part=reply.committed_part,
            lost_steps=tuple(told),
            fenced=reply.fenced,
            demoted=self._rot_to_tell(reply),
        )

    def _left_out_to_tell(self) -> int:
        """Each copy once."""
        known = self.sink.left_out if self.sink is not None else 0
        told, self.told_left_out = self.told_left_out, known
        return known - told

    def _rot_to_tell(self, reply: HeartbeatReply) -> LayerStep | None:
        """One layer a step whose newest version has rotted, as far as the ledger does not know it yet.

        Not to ranks that wait: their step has had its event, and one more for this layer could not be taken.
        """
        if self.told_rot >= self.step:
            return None
        layers = self.ledger.versions.layers
        told = next((one for one in reply.demoted if layers[one.layer].committed > one.step), None)
        if told is not None:
            self.told_rot = self.step
        return told


def start_attempt(
    zero3: Zero3Engine,
    storage: Storage,
    run_folder: Storage,
    coordinator: CoordinatorClient,
    config: LayerCheckConfig,
    grant: AttemptGrant,
    receipt: Receipt | None,
    overlap: Overlap,
    bases: BaseCopies | None,
    tier: MemoryTier | None = None,
) -> Attempt:
    """Starts the threads and books of an attempt that was granted and, if it has a plan, restored."""
    pool = StagingPool(config.staging_bytes or _staging_bytes(zero3), pin=zero3.on_accelerator)
    sink = tier.sink(storage, coordinator, config.storage_wait_s) if tier is not None else None
    writer = ShardWriter(
        sink or storage,
        sink or coordinator,
        zero3.rank,
        zero3.world_size,
        retries=config.write_retries,
        timeout_s=config.storage_wait_s,
        bases=bases,
    )
    code = Code(config.residual.bits, config.residual.block) if bases is not None else None
    if bases is not None:
        log.info("%d bytes of host memory on this rank are for residuals", _base_bytes(zero3, bases))
    leads = zero3.rank == 0
    metrics = (config.metrics_flush_s, zero3.layer_map, zero3.layer_nbytes, config.residual)
    return Attempt(
        number=grant.attempt,
        ledger=(
            Ledger.fresh(zero3.layer_map, config, zero3.initial_lr, overlap.lag)
            if grant.plan is None
            else Ledger.resumed(zero3.layer_map, config, grant.plan, zero3.initial_lr, overlap.lag)
        ),
        taker=SnapshotTaker(zero3, pool, config.storage_wait_s, overlap.copier, code),
        writer=writer,
        link=HeartbeatLink(coordinator, grant.attempt) if leads else None,
        run_log=RunLog(run_folder, grant.attempt, *metrics) if leads else None,
        receipt=receipt,
        signals=listen(config.preemption_signals),
        signal_grace_s=config.preemption_grace_s,
        sink=sink,
        staged=Staged.since(grant.r_b, zero3.layer_map, grant.plan) if sink is not None else None,
        sealed=Sealed.since(config.memory.replicas, grant.plan) if sink is not None else None,
    )


def _staging_bytes(zero3: Zero3Engine) -> int:
    """min(this rank's full state, this rank's share of a quarter of the host's free memory)."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", zero3.world_size))
    share = psutil.virtual_memory().available // 4 // ranks_here
    return min(zero3.nbytes, share)


def _base_bytes(zero3: Zero3Engine, bases: BaseCopies) -> int:
    """What this rank's copies of the newest versions' weights take, all of them together."""
    covered = (group for group in zero3.sub_groups if bases.covers(group.layer))
    return sum(MASTER_BYTES * length for group in covered for _, length in group.segments)
