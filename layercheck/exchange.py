"""What the ranks of a session tell each other: one all-reduce a step, in which all of them hear the same.

With a lag the report of a step is heard at the next one. Until then nobody knows whether the state of the
step is finite: its heartbeat is not sent, and its event, if it has one, is not committed (I13).
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from math import isfinite

from layercheck.attempt import Attempt
from layercheck.drift_report import DriftReport
from layercheck.errors import FencedError, NonFiniteStateError
from layercheck.manifest import TrainerState
from layercheck.tracking.drift import DriftMeter
from layercheck.tracking.notices import RankNotices
from layercheck.watchdog import Watchdog
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
POLL_S = 0.05
ANSWER_S = 1.0


class Exchange:
    """The only caller of the meter's collectives.

    Args:
        zero3: the engine.
        meter: measures it.
        watchdog: told of every step and every look at the news.
        run: name of the run, for errors.
    """

    def __init__(self, zero3: Zero3Engine, meter: DriftMeter, watchdog: Watchdog, run: str) -> None:
        self._zero3 = zero3
        self._meter = meter
        self._watchdog = watchdog
        self._run = run

    def step(self, opened: Attempt, step: int, state: TrainerState) -> None:
        """Says what happened in a step and takes in the reports that are due. A collective.

        Raises:
            FencedError: a newer attempt has taken over.
            NonFiniteStateError: the state of a step is poisoned; nothing of it was or will be committed.
        """
        opened.unreported[step] = state
        reports = self._meter.exchange(step, self._notices(opened, state))
        self._watchdog.beat(step)
        self._hear(opened, reports)

    def settle(self, opened: Attempt) -> bool:
        """Waits for the reports on their way: then the newest step is known to be complete. No collective.

        Returns:
            True if there were any.

        Raises:
            FencedError, NonFiniteStateError: as `step`.
        """
        reports = self._meter.drain()
        self._hear(opened, reports)
        return bool(reports)

    def poll(self, opened: Attempt, step: int, deadline: float) -> DriftReport:
        """One look of waiting ranks at the news; `errors` tells all of them alike that time is up.

        Settle first. A collective.

        Args:
            opened: the attempt.
            step: the step that waits.
            deadline: monotonic seconds; only rank 0 looks at the clock.
        """
        if opened.link is not None:
            time.sleep(POLL_S)
            opened.link.wait_for_answer(ANSWER_S)
        is_late = opened.link is not None and time.monotonic() > deadline
        report = self._meter.reduce(step, replace(opened.notices(), error=is_late))
        self._watchdog.beat(step)
        self._refuse_fenced(opened, report)
        self._observe(opened, report)
        return report

    def _notices(self, opened: Attempt, state: TrainerState) -> RankNotices:
        """A gradient norm goes as it is: asking a device whether it is finite would wait for the device."""
        if self._zero3.skipped > opened.skipped:
            opened.skipped = self._zero3.skipped
            return opened.notices()
        loss = state.get("loss")
        is_bad = loss is not None and not isfinite(loss)
        return replace(opened.notices(), error=is_bad, grad_norm=self._zero3.grad_norm())

    def _hear(self, opened: Attempt, reports: Iterable[DriftReport]) -> None:
        for report in reports:
            self._refuse_fenced(opened, report)
            self._refuse_poison(opened, report)
            self._observe(opened, report)

    def _observe(self, opened: Attempt, report: DriftReport) -> None:
        events = opened.observe(report)
        self._meter.settle(events.committed, events.lost)
        if events.still and opened.link is not None:
            log.warning("not moving by step %d: %s; are their updates seen?", report.step, events.still)

    def _refuse_fenced(self, opened: Attempt, report: DriftReport) -> None:
        if report.fenced:
            raise FencedError(
                f"attempt {opened.number} of run {self._run} was taken over at step {report.step}",
                step=report.step,
            )

    def _refuse_poison(self, opened: Attempt, report: DriftReport) -> None:
        if report.is_clean:
            return
        layer = opened.ledger.non_finite(report)
        what = (
            f"layer {layer} moved by a non-finite amount"
            if layer
            else "the loss or gradient norm is not finite"
        )
        raise NonFiniteStateError(
            f"step {report.step}: {what}; nothing of this step was saved, collection is frozen",
            step=report.step,
            layer=layer,
        )
