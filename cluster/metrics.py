"""The one observer that maps what a coordinator hears and says to Ray metrics. See docs/reference/metrics.md.

It costs no storage access and no call. What only the ranks know (stall, bytes in flight, drift over
threshold, ages) rides in the heartbeat's trainer state, `["layercheck"]["costs"]`.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray.util.metrics import Counter, Gauge

from cluster.pace import Pace
from layercheck.coordination.protocol import HeartbeatReply
from layercheck.manifest import EventId
from layercheck.receipt import RECOVERY_PHASES

GAUGES = {
    "attempt": "Number of the attempt that trains",
    "step": "Last complete step",
    "committed_step": "Step of the newest commit of this attempt, -1 for none",
    "max_age": "Steps since the newest committed version of the oldest layer",
    "weighted_age": "Mean of these steps over the layers, weighted by size",
    "lost_steps": "Steps that a failure now would lose, weighted by layer size",
    "lost_drift": "Movement that a failure now would lose, in the drift's norm",
    "drift_ratio": "Largest D/K after the decision of a step; above 1 a due layer was put off",
    "inflight_bytes": "Bytes that the slowest rank still has to write",
    "s_max": "Steps that no layer may be older than",
    "step_seconds": "Median seconds of a step, saving included",
    "ettr": "Median step x steps kept / elapsed time, since this coordinator's first step",
    "vault_bytes": "Bytes that the memory tier of a node holds",
}
COUNTERS = {
    "events": "Events that were committed",
    "failed_saves": "Events that were declared lost",
    "shard_bytes": "Bytes of all shards that ranks reported durable",
    "stall_seconds": "Seconds that training waited for saves",
    "skipped_copies": "Copies in memory that ranks left out, mostly for lack of room",
    "recoveries": "Recoveries whose receipt came",
    "recovery_seconds": "Seconds of recoveries, by phase",
    "recovery_lost_steps": "Steps lost at recoveries, weighted by layer size",
    "recovery_lost_drift": "Movement lost at recoveries, in the drift's norm",
}
PHASES = tuple(phase.removesuffix("_s") for phase in RECOVERY_PHASES)
"""Values of the tag `phase` of `recovery_seconds`."""
PREFIX = "layercheck_"
_OF_VAULTS = ("vault_bytes",)
"""Gauges that each vault sets in its own process."""
_SUMS = {"stall_s": "stall_seconds", "skipped_copies": "skipped_copies"}
"""Cost that is a sum over the steps of an attempt -> its counter."""
_COSTS = ("max_age", "weighted_age", "lost_steps", "lost_drift", "drift_ratio", "inflight_bytes")


class Metrics:
    """Gauges and counters of one run. `values` holds what was set or counted, for tests and people.

    A counter is what this coordinator counted; a restarted one counts from zero, as Prometheus expects.
    """

    def __init__(
        self, run: str, s_max: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gauges = {key: _gauge(run, key) for key in GAUGES if key not in _OF_VAULTS}
        self._counters = {
            key: Counter(PREFIX + key, text, tag_keys=tag_keys(key)) for key, text in COUNTERS.items()
        }
        for counter in self._counters.values():
            counter.set_default_tags({"run": run})
        self.values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._attempt = 0
        self._summed: dict[str, float] = {}
        self._lost: set[int] = set()
        self._committed: tuple[int, int] = (-1, 0)
        self._open: dict[EventId, set[int]] = {}
        self._told: set[tuple[int, str]] = set()
        self._pace = Pace(clock)
        if s_max is not None:
            self.limit(s_max)

    def limit(self, s_max: int) -> None:
        """The age limit that holds from now on."""
        self._set("s_max", s_max)

    def saw(self, name: str, args: Sequence[Any], answer: Any) -> None:
        """Takes one call and its answer; calls of several threads come in any order."""
        with self._lock:
            if name == "record":
                self._record(*args)
            elif name == "heartbeat":
                self._heartbeat(args[0], args[1], args[2], answer)
            elif name == "note_receipt":
                self._receipt(*args)

    def _record(self, event: EventId, rank: int, rows: Sequence[Any], _state: Any) -> None:
        known = event.attempt == self._attempt and _order(event) <= self._committed
        if event.attempt < self._attempt or known or rank in self._open.get(event, ()):
            return  # of a zombie, or told again: a client retries a call whose answer was lost
        self._open.setdefault(event, set()).add(rank)
        self._count("shard_bytes", sum(row.nbytes for row in rows))

    def _heartbeat(self, attempt: int, step: int, state: dict[str, Any], reply: HeartbeatReply) -> None:
        if reply.fenced or attempt < self._attempt:
            return  # a zombie's figures would mix two lives
        is_new = attempt > self._attempt
        if is_new:
            self._begin(attempt)
        if step < self.values.get("step", 0):
            return
        self._set("step", step)
        figures = self._pace.saw(step, is_new)
        if figures is not None:
            self._set("step_seconds", figures.step_s)
            self._set("ettr", figures.ettr)
        new = set(reply.lost_steps) - self._lost
        self._lost |= new
        self._count("failed_saves", len(new))
        self._committed = max(self._committed, (reply.committed_step, reply.committed_part))
        self._set("committed_step", self._committed[0])
        self._close_events()
        self._costs((state.get("layercheck") or {}).get("costs") or {})

    def _receipt(self, attempt: int, receipt: dict[str, Any]) -> None:
        """A receipt comes again when more of it is known: each phase counts once."""
        if (attempt, "") not in self._told:
            self._told.add((attempt, ""))
            self._count("recoveries", 1)
            for key in ("lost_steps", "lost_drift"):
                self._count(f"recovery_{key}", receipt.get(key) or 0.0)
        for phase in PHASES:
            seconds = receipt.get(f"{phase}_s")
            if seconds is not None and (attempt, phase) not in self._told:
                self._told.add((attempt, phase))
                self._count("recovery_seconds", seconds, phase)

    def _close_events(self) -> None:
        """Events commit in step order, so all up to the newest one are committed or lost."""
        over = [event for event in self._open if _order(event) <= self._committed]
        self._count("events", sum(event.step not in self._lost for event in over))
        for event in over:
            del self._open[event]

    def _begin(self, attempt: int) -> None:
        """What is counted by attempt starts again; gauges keep their last value until told another."""
        self._attempt, self._summed, self._lost, self._committed = attempt, {}, set(), (-1, 0)
        self._open = {event: ranks for event, ranks in self._open.items() if event.attempt == attempt}
        self.values.pop("step", None)  # after a roll-back it is a smaller one
        self._set("attempt", attempt)

    def _costs(self, costs: dict[str, float]) -> None:
        for key in _COSTS:
            if key in costs and math.isfinite(costs[key]):
                self._set(key, costs[key])
        for key, counter in _SUMS.items():
            known, told = self._summed.get(key, 0.0), costs.get(key, 0.0)
            self._count(counter, told - known)
            self._summed[key] = max(known, told)

    def _set(self, key: str, value: float) -> None:
        self.values[key] = value
        self._gauges[key].set(value)

    def _count(self, key: str, more: float, phase: str | None = None) -> None:
        if more > 0:
            name = key if phase is None else f"{key}.{phase}"
            self.values[name] = self.values.get(name, 0) + more
            self._counters[key].inc(more, tags={"phase": phase} if phase else {})


class VaultMetrics:
    """The gauges of one vault. Ray adds to each which node it comes from."""

    def __init__(self, run: str) -> None:
        self._gauges = {key: _gauge(run, key) for key in _OF_VAULTS}

    def looked(self, used_bytes: int) -> None:
        """What the segments of the vault take."""
        self._gauges["vault_bytes"].set(used_bytes)


def _gauge(run: str, key: str) -> Gauge:
    made = Gauge(PREFIX + key, GAUGES[key], tag_keys=tag_keys(key))
    made.set_default_tags({"run": run})
    return made


def tag_keys(key: str) -> tuple[str, ...]:
    """Tags of a metric."""
    return ("run", "phase") if key == "recovery_seconds" else ("run",)


def _order(event: EventId) -> tuple[int, int]:
    return event.step, event.part
