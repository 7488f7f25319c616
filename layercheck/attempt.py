"""What a session holds while it is open."""

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from layercheck.config import LayerCheckConfig
from layercheck.coordination.link import HeartbeatLink
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.manifest import AttemptGrant, DriftReport, Receipt, TrainerState
from layercheck.persistence.snapshot import SnapshotTaker, StagingPool
from layercheck.persistence.storage import Storage
from layercheck.persistence.writer import ShardWriter
from layercheck.step_report import StepReport
from layercheck.tracking.drift import LOST_SLOTS, RankNotices
from layercheck.tracking.ledger import REASON_WINDOW, Ledger
from layercheck.tracking.run_log import RunLog
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
LATER_STEPS = 20
"""Steps after a recovery whose loss completes its receipt."""


@dataclass(slots=True)
class Attempt:
    """One life of a session: from `resume` to `close`.

    Attributes:
        number: the attempt's number.
        step: newest step that `after_step` saw; `skipped` the engine's count then.
        part: number of `save_now` events taken.
        since: when training began, monotonic seconds.
        told_lost: lost events that went through the all-reduce already.
        ended: when `after_step` last returned, monotonic seconds.
        step_s: seconds between that and the next call; `stall_s` the stall in the call before.
        alerts: what the next `StepReport` tells a person; see `alert`, `take_alerts`.
        costs: on rank 0, figures of the newest step; `stall_s` is the sum over this attempt's steps.
    """

    number: int
    ledger: Ledger
    taker: SnapshotTaker
    writer: ShardWriter
    link: HeartbeatLink | None
    run_log: RunLog | None
    receipt: Receipt | None
    step: int = 0
    skipped: int = 0
    part: int = 0
    state: TrainerState = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    told_lost: set[int] = field(default_factory=set)
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
        return (*own, *self.writer.take_alerts(), *told)

    def note(self, step: StepReport, report: DriftReport) -> None:
        """Keeps what a step cost and how fresh the store is: the next heartbeat takes it to the metrics."""
        thresholds, drift = self.ledger.thresholds(step.step, report.lr), self.ledger.drift
        self.costs = {
            "stall_s": self.costs.get("stall_s", 0.0) + step.stall_s,
            "inflight_bytes": report.backlog,
            "max_age": step.max_age,
            "weighted_age": step.weighted_age,
            "drift_ratio": max((drift[name] / k for name, k in thresholds.items() if k), default=0.0),
        }
        self._warn_if_age_dominates(step.step)

    def _warn_if_age_dominates(self, step: int) -> None:
        """Says, at most every `REASON_WINDOW` steps, that the threshold decides nothing."""
        if step % REASON_WINDOW == 0 and self.ledger.age_dominates:
            log.warning(
                "step %d: most layer writes of the last %d steps came from the age limit, so the threshold "
                "decides little: lower target_interval (or k0), or raise s_max",
                step,
                REASON_WINDOW,
            )

    def complete_receipt(self, step: int, state: TrainerState) -> None:
        """After a recovery: rank 0 adds the seconds to the first step, later the loss."""
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

    def notices(self) -> RankNotices:
        """This rank's slots of the next all-reduce; on rank 0 with what the coordinator said last."""
        backlog = self.writer.backlog_bytes
        if self.link is None:
            return RankNotices(backlog, step_s=self.step_s, stall_s=self.stall_s)
        reply = self.link.reply
        untold = sorted(set(reply.lost_steps) - self.told_lost)
        told, later = untold[:LOST_SLOTS], untold[LOST_SLOTS:]
        self.told_lost.update(told)
        # A commit newer than a loss that has no slot yet would pass the lost event off as committed.
        committed = min(reply.committed_step, later[0] - 1) if later else reply.committed_step
        return RankNotices(
            backlog,
            committed_step=committed,
            committed_part=reply.committed_part,
            lost_steps=tuple(told),
            fenced=reply.fenced,
            step_s=self.step_s,
            stall_s=self.stall_s,
        )


def start_attempt(
    zero3: Zero3Engine,
    storage: Storage,
    run_folder: Storage,
    coordinator: CoordinatorClient,
    config: LayerCheckConfig,
    grant: AttemptGrant,
    receipt: Receipt | None,
) -> Attempt:
    """Starts the threads and books of an attempt that was granted and, if it has a plan, restored."""
    pool = StagingPool(config.staging_bytes or _staging_bytes(zero3), pin=zero3.on_accelerator)
    writer = ShardWriter(
        storage,
        coordinator,
        zero3.rank,
        zero3.world_size,
        retries=config.write_retries,
        timeout_s=config.storage_wait_s,
    )
    leads = zero3.rank == 0
    metrics = (config.metrics_flush_s, zero3.layer_map, zero3.layer_nbytes)
    return Attempt(
        number=grant.attempt,
        ledger=(
            Ledger.fresh(zero3.layer_map, config, zero3.initial_lr)
            if grant.plan is None
            else Ledger.resumed(zero3.layer_map, config, grant.plan, zero3.initial_lr)
        ),
        taker=SnapshotTaker(zero3, pool, config.storage_wait_s),
        writer=writer,
        link=HeartbeatLink(coordinator, grant.attempt) if leads else None,
        run_log=RunLog(run_folder, grant.attempt, *metrics) if leads else None,
        receipt=receipt,
    )


def _staging_bytes(zero3: Zero3Engine) -> int:
    """min(this rank's full state, this rank's share of a quarter of the host's free memory)."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", zero3.world_size))
    share = psutil.virtual_memory().available // 4 // ranks_here
    return min(zero3.nbytes, share)
