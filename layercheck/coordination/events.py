"""The events of one attempt on their way to a commit. In memory only; no storage, no clock of its own.

States of an event: expected (a heartbeat named it) or open (some ranks' shards are durable) -> complete (all
ranks') -> committed, or lost. Committed and lost are final. Events leave in step order: an event waits until
all earlier ones are committed or lost, so one step number says what a successor has seen (I15).
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from layercheck.manifest import EventId, ShardRecord, TrainerState

Order = tuple[int, int]
"""(step, part)."""


@dataclass(slots=True)
class OpenEvent:
    """One event that is neither committed nor lost."""

    event: EventId
    since: float
    shards: dict[int, tuple[ShardRecord, ...]] = field(default_factory=dict)
    trainer_state: TrainerState = field(default_factory=dict)
    failures: int = 0
    not_before: float = 0.0

    @property
    def records(self) -> tuple[ShardRecord, ...]:
        """All rows, in rank order."""
        return tuple(row for rank in sorted(self.shards) for row in self.shards[rank])


class EventBook:
    """Which events of an attempt are open, committed, lost."""

    def __init__(self, attempt: int, world_size: int, committed: Iterable[EventId] = ()) -> None:
        self.attempt = attempt
        self.world_size = world_size
        self.committed = set(committed)
        self.open: dict[EventId, OpenEvent] = {}
        self.lost: dict[EventId, str] = {}
        self._spoke: dict[int, Order] = {}

    @property
    def newest_committed(self) -> Order:
        """Of this attempt, (-1, 0) for none."""
        return max(map(_order, self.committed), default=(-1, 0))

    @property
    def lost_steps(self) -> tuple[int, ...]:
        """Steps of all lost events, ascending."""
        return tuple(sorted({event.step for event in self.lost}))

    def expect(self, event: EventId, now: float) -> None:
        """A heartbeat named an event of this step. If no part of it was heard of, its timeout runs now."""
        known = (*self.open, *self.lost, *self.committed)
        if all(other.step != event.step for other in known) and not self._is_final(event):
            self.open[event] = OpenEvent(event, now)

    def add(
        self, event: EventId, rank: int, rows: tuple[ShardRecord, ...], state: TrainerState, now: float
    ) -> None:
        """One rank's shards are durable. Nothing happens if the event is final already."""
        if self._is_final(event):
            return
        entry = self.open.setdefault(event, OpenEvent(event, now))
        entry.shards[rank] = rows
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
        self.lost[event] = reason

    def commit(self, event: EventId) -> None:
        """Final: its commit is durable."""
        del self.open[event]
        self.committed.add(event)

    def expire(self, now: float, timeout_s: float) -> list[EventId]:
        """Declares incomplete events lost that waited too long."""
        late = [
            entry for entry in self.open.values() if self._missing(entry) and now - entry.since >= timeout_s
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
        return None if self._missing(entry) or now < entry.not_before else entry

    def _missing(self, entry: OpenEvent) -> set[int]:
        return set(range(self.world_size)) - set(entry.shards)

    def _is_final(self, event: EventId) -> bool:
        if event in self.lost or event in self.committed:
            return True
        if _order(event) <= self.newest_committed:
            self.lose(event, "later events are committed")  # committing it now would break the order
            return True
        return False

    def _heard(self, rank: int, event: EventId) -> None:
        """A rank speaks of its events in step order: what it left out before this one will not come.

        Matters after a restart of the coordinator, which forgets half-recorded events: without this rule each
        would hold up all later ones until its timeout.
        """
        self._spoke[rank] = max(self._spoke.get(rank, (-1, 0)), _order(event))
        for entry in list(self.open.values()):
            if rank not in entry.shards and _order(entry.event) < self._spoke[rank]:
                self.lose(entry.event, f"rank {rank} went on to step {self._spoke[rank][0]} without it")


def _order(event: EventId) -> Order:
    return event.step, event.part


def _disagreement(entry: OpenEvent) -> str | None:
    """Why a complete event must not commit: ranks that chose different layers broke I3."""
    chosen = {rank: sorted(row.layer for row in rows) for rank, rows in entry.shards.items()}
    if not chosen[0]:
        return "it holds no layer"
    differing = [rank for rank, layers in chosen.items() if layers != chosen[0]]
    return f"ranks 0 and {differing[0]} saved different layers" if differing else None
