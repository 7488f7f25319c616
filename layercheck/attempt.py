"""What a session holds while it is open."""

import logging
import time
from dataclasses import dataclass, field

from layercheck.coordination.link import HeartbeatLink
from layercheck.manifest import DriftReport, Receipt, StepReport, TrainerState
from layercheck.persistence.snapshot import SnapshotTaker
from layercheck.persistence.writer import ShardWriter
from layercheck.tracking.drift import LOST_SLOTS, RankNotices
from layercheck.tracking.ledger import REASON_WINDOW, Ledger
from layercheck.tracking.run_log import RunLog

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """One life of a session: from `resume` to `close`.

    Attributes:
        number: the attempt's number.
        step: newest step that `after_step` saw; `skipped` the engine's count then.
        part: number of `save_now` events taken.
        since: when training began, monotonic seconds.
        told_lost: lost events that went through the all-reduce already.
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
    costs: dict[str, float] = field(default_factory=dict)

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
