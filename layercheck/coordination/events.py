"""The events of one attempt on their way to a commit. In memory only; no storage, no clock of its own.

States of an event: expected (a heartbeat named it) or open (some ranks' shards are durable) -> complete (all
ranks') -> committed, or lost. Committed and lost are final. Events leave in step order: an event waits until
all earlier ones are committed or lost, so one step number says what a successor has seen (I15).
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from layercheck.coordination.commit_file import text_of
from layercheck.manifest import EventId, ShardRecord, TrainerState

Order = tuple[int, int]
"""(step, part)."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
REMEMBERED = 4096
"""Final events that are kept in memory, of each kind. A run commits events for weeks; nobody retries a call
about one that so many others have followed."""


@dataclass(slots=True)
class OpenEvent:
    """One event that is neither committed nor lost."""

    event: EventId
    since: float
    shards: dict[int, tuple[ShardRecord, ...]] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    """The canonical text of each rank's rows, made as they come: the commit then has less to do."""
    trainer_state: TrainerState = field(default_factory=dict)
    failures: int = 0
    not_before: float = 0.0

    @property
    def records(self) -> tuple[ShardRecord, ...]:
        """All rows, in rank order."""
        return tuple(row for rank in sorted(self.shards) for row in self.shards[rank])

    @property
    def row_texts(self) -> list[bytes]:
        """The texts of the same rows."""
        return [self.texts[rank] for rank in sorted(self.texts)]


class EventBook:
    """Which events of an attempt are open, committed, lost. Of the final ones the newest are remembered.

    Attributes:
        newest_committed: of this attempt, (-1, 0) for none.
        num_committed, num_lost: counts, forgotten ones included.
        lost: the reason of each lost event, oldest first.
    """

    def __init__(self, attempt: int, world_size: int, committed: Iterable[EventId] = ()) -> None:
        self.attempt = attempt
        self.world_size = world_size
        self.open: dict[EventId, OpenEvent] = {}
        self.lost: dict[EventId, str] = {}
        self.num_committed = self.num_lost = 0
        self.newest_committed: Order = (-1, 0)
        self._committed: dict[EventId, None] = {}
        self._forgotten: Order = (-1, 0)
        self._spoke: dict[int, Order] = {}
        for event in sorted(committed, key=_order):
            self._remember(event)

    @property
    def lost_steps(self) -> tuple[int, ...]:
        """Steps of the lost events, ascending."""
        return tuple(sorted({event.step for event in self.lost}))

    def expect(self, steps: Iterable[int], now: float) -> None:
        """A heartbeat named these steps. Where no part of an event was heard of, its timeout runs now."""
        known = {event.step for events in (self.open, self.lost, self._committed) for event in events}
        for step in sorted(set(steps) - known):
            event = EventId(step=step, attempt=self.attempt)
            if not self._is_final(event):
                self.open[event] = OpenEvent(event, now)

    def add(
        self, event: EventId, rank: int, rows: tuple[ShardRecord, ...], state: TrainerState, now: float
    ) -> None:
        """One rank's shards are durable. Nothing happens if the event is final already."""
        if self._is_final(event):
            return
        entry = self.open.setdefault(event, OpenEvent(event, now))
        entry.shards[rank], entry.texts[rank] = rows, text_of(rows)
        if rank == 0 or not entry.trainer_state:
            entry.trainer_state = deepcopy(state)  # the caller may go on changing its own
        self._heard(rank, event)
        if len(entry.shards) == self.world_size and (reason := _disagreement(entry)):
            self.lose(event, reason)

    def rank_lost(self, event: EventId, rank: int, reason: str) -> None:
        """One rank will never deliver this event."""
        self._heard(rank, event)
        if not self._is_final(event):
            self.lose(event, f"rank {rank}: {reason}")

    def lose(self, event: EventId, reason: str) -> None:
        """Final: it can never commit."""
        self.open.pop(event, None)
        self.num_lost += event not in self.lost
        self.lost[event] = reason
        _shorten(self.lost)

    def commit_failed(self, event: EventId, why: str, retries: int, now: float) -> bool:
        """Bounded retries with backoff (I9); True if it is lost now, and the next one gets its turn."""
        entry = self.open[event]
        entry.failures += 1
        if entry.failures > retries:
            self.lose(event, why)
            return True
        entry.not_before = now + min(_FIRST_PAUSE_S * 2 ** (entry.failures - 1), _LONGEST_PAUSE_S)
        return False

    def commit(self, event: EventId) -> None:
        """Final: its commit is durable."""
        del self.open[event]
        self._remember(event)

    def expire(self, now: float, timeout_s: float) -> list[EventId]:
        """Declares incomplete events lost that waited too long."""
        late = [
            entry
            for entry in self.open.values()
            if now - entry.since >= timeout_s and not self._is_complete(entry)
        ]
        for entry in late:
            ranks = ", ".join(map(str, sorted(self._missing(entry))[:8]))
            self.lose(entry.event, f"nothing from ranks {ranks} within {timeout_s:g} s")
        return [entry.event for entry in late]

    def next_complete(self, now: float) -> OpenEvent | None:
        """The oldest open event if it may be committed now."""
        if not self.open:
            return None
        entry = self.open[min(self.open, key=_order)]
        return entry if self._is_complete(entry) and now >= entry.not_before else None

    def _is_complete(self, entry: OpenEvent) -> bool:
        return len(entry.shards) == self.world_size

    def _missing(self, entry: OpenEvent) -> set[int]:
        return set(range(self.world_size)) - set(entry.shards)

    def _is_final(self, event: EventId) -> bool:
        order = _order(event)
        if order > self.newest_committed:
            return event in self.lost
        if order > self._forgotten and event not in self._committed and event not in self.lost:
            self.lose(event, "later events are committed")  # committing it now would break the order
        return True

    def _remember(self, event: EventId) -> None:
        self.num_committed += 1
        self.newest_committed = _order(event)  # events leave in order
        self._committed[event] = None
        if (forgotten := _shorten(self._committed)) is not None:
            self._forgotten = _order(forgotten)

    def _heard(self, rank: int, event: EventId) -> None:
        """A rank speaks of its events in step order: what it left out before this one will not come.

        Matters after a restart of the coordinator, which forgets half-recorded events: without this rule each
        would hold up all later ones until its timeout.
        """
        spoke = self._spoke[rank] = max(self._spoke.get(rank, (-1, 0)), _order(event))
        left_out = [
            entry.event
            for entry in self.open.values()
            if rank not in entry.shards and _order(entry.event) < spoke
        ]
        for other in left_out:
            self.lose(other, f"rank {rank} went on to step {spoke[0]} without it")


def _order(event: EventId) -> Order:
    return event.step, event.part


def _shorten(events: dict[EventId, Any]) -> EventId | None:
    """Forgets the oldest entry if there are too many; returns it."""
    if len(events) <= REMEMBERED:
        return None
    oldest = next(iter(events))
    del events[oldest]
    return oldest


def _disagreement(entry: OpenEvent) -> str | None:
    """Why a complete event must not commit: ranks that chose different layers broke I3."""
    first = _saved(entry.shards[0])
    if not first:
        return "it holds no layer"
    rank = next((rank for rank, rows in entry.shards.items() if _saved(rows) != first), None)
    return None if rank is None else f"ranks 0 and {rank} saved different layers"


def _saved(rows: Iterable[ShardRecord]) -> list[tuple[str, str, int, int]]:
    """What one rank has of an event: each layer, and of a residual the version that it adds to."""
    return sorted((row.layer, row.kind, row.base_step or -1, row.base_attempt or 0) for row in rows)
