"""Rank 0's line to the coordinator: a background thread that sends heartbeats and keeps the newest answer.

At most one heartbeat is outstanding; a newer one replaces an unsent one. Between steps the last one is
repeated every `REPEAT_S`, so that the coordinator can tell a slow step from a dead driver.
"""

import logging
import threading

from layercheck.coordination.protocol import CoordinatorClient, HeartbeatReply
from layercheck.errors import CoordinatorLostError, FencedError, LayerCheckError
from layercheck.manifest import TrainerState
from layercheck.receipt import Receipt

log = logging.getLogger(__name__)
REPEAT_S = 5.0
Beat = tuple[int, TrainerState, dict[str, float]]


class HeartbeatLink:
    """Sends the heartbeats of one attempt; `reply` is what the coordinator said last."""

    def __init__(self, coordinator: CoordinatorClient, attempt: int) -> None:
        self._coordinator = coordinator
        self._attempt = attempt
        self._newest: Beat | None = None
        self._receipt: Receipt | None = None
        self._sent: Beat | None = None
        self._closing = False
        self._changed = threading.Condition()
        self.reply = HeartbeatReply()
        self._alerts: list[str] = []
        self._thread = threading.Thread(target=self._run, name="layercheck-heartbeat", daemon=True)
        self._thread.start()

    def post(self, step: int, trainer_state: TrainerState, drift: dict[str, float]) -> None:
        """Hands over the newest complete step; never waits."""
        with self._changed:
            self._newest = (step, trainer_state, drift)
            self._changed.notify_all()

    def note_receipt(self, receipt: Receipt) -> None:
        """Hands over a receipt; never waits, and a failure never reaches training."""
        with self._changed:
            self._receipt = receipt
            self._changed.notify_all()

    def poke(self) -> None:
        """Asks the coordinator again now, for a training thread that waits for a commit."""
        with self._changed:
            self._sent = None
            self._changed.notify_all()

    def wait_for_answer(self, timeout_s: float) -> None:
        """Asks again and waits at most `timeout_s` for the answer."""
        before = self.reply
        self.poke()
        with self._changed:
            self._changed.wait_for(lambda: self.reply is not before, timeout_s)

    def take_alerts(self) -> list[str]:
        """What the coordinator told, once each, and what kept it from being reached."""
        with self._changed:
            alerts, self._alerts = self._alerts, []
        return alerts

    def close(self, timeout_s: float) -> None:
        """Sends the last heartbeat and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ heartbeat thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, REPEAT_S)
                closing, beat = self._closing, self._newest
                fresh, self._sent = beat is not self._sent, beat
                receipt, self._receipt = self._receipt, None
            if receipt is not None:
                self._send_receipt(receipt)
            if beat is not None and (fresh or not closing):
                self._send(beat)
            if closing:
                return

    def _has_work(self) -> bool:
        return self._closing or self._receipt is not None or self._newest is not self._sent

    def _send_receipt(self, receipt: Receipt) -> None:
        try:
            self._coordinator.note_receipt(self._attempt, receipt.model_dump(mode="json"))
        except LayerCheckError as error:
            log.error("the receipt of attempt %d was not written: %s", self._attempt, error)

    def _send(self, beat: Beat) -> None:
        step, trainer_state, drift = beat
        try:
            self._answer(self._coordinator.heartbeat(self._attempt, step, trainer_state, drift))
        except FencedError:
            self._answer(HeartbeatReply(fenced=True))
        except CoordinatorLostError as error:
            # Training goes on: the journal is then behind by the time the coordinator is away (I12).
            with self._changed:
                self._alerts.append(f"no heartbeat reached the coordinator: {error}")

    def _answer(self, reply: HeartbeatReply) -> None:
        with self._changed:
            self.reply = reply
            self._alerts += reply.alerts
            self._changed.notify_all()
