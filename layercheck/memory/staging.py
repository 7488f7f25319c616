"""What the writer of a rank has in place of the storage and the coordinator: its node's vault.

Files become segments and reports become seals; from there the vault goes on by itself, whatever becomes of
the rank. Where the vault has no room, or is gone, the file goes to the storage from here, as without the
tier, and after all that the vault still has of this rank; a copy for memory alone is then left out.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass

from layercheck.errors import StorageError, VaultError
from layercheck.manifest import EventId, ShardRecord, TrainerState
from layercheck.memory import segment
from layercheck.memory.held import Held
from layercheck.memory.protocol import VaultCalls
from layercheck.memory.uploads import checked_bytes
from layercheck.persistence.hashed import HashedBytes
from layercheck.persistence.sink import Listener
from layercheck.persistence.storage import Storage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """What all segments of one rank and attempt have in common. `run` is a `folders.run_key`."""

    run: str
    home: str
    rank: int
    world_size: int
    token: str


class MemorySink:
    """A `FileSink` and a `Listener`, for the writer thread of one rank.

    Args:
        vault: of this node.
        storage, coordinator: what it stands in front of.
        about: whose segments they are.
        wait_s: limit of the wait for the vault before a file goes to the storage from here.

    Attributes:
        left_out: events of which memory has no part of this rank, or none that its vault is sure to know of.
    """

    def __init__(
        self, vault: VaultCalls, storage: Storage, coordinator: Listener, about: About, wait_s: float
    ) -> None:
        self._vault, self._storage, self._coordinator = vault, storage, coordinator
        self._about, self._wait_s = about, wait_s
        self._open: dict[EventId, tuple[str, int]] = {}
        self._alerts: list[str] = []
        self._is_refused = False
        self.left_out = 0
        self._newest_left_out: EventId | None = None

    def write(self, path: str, chunks: HashedBytes) -> None:
        """See `FileSink.write`."""
        event = EventId.parse(path.rpartition("/")[0])
        assert event is not None, path
        about = self._about
        self._open.pop(event, None)
        try:
            place = self._vault.open(event, about.rank, about.token, chunks.nbytes)
        except VaultError as error:
            self._alert(error)
            if event.in_memory:
                raise  # it is given up: see `lost`
            self._leave_out(event)
            self._write_past(path, chunks)
            return
        segment.fill(place, chunks)
        self._open[event] = place, chunks.nbytes
        self._is_refused = False

    def record(
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState
    ) -> None:
        """See `Listener.record`."""
        if event not in self._open:
            self._coordinator.record(event, rank, records, trainer_state)
            return
        place, nbytes = self._open[event]
        about = self._about
        held = Held(
            run=about.run,
            home=about.home,
            event=event,
            rank=rank,
            world_size=about.world_size,
            token=about.token,
            nbytes=nbytes,
            records=records,
            trainer_state=trainer_state,
        )
        segment.seal(place, held)
        try:
            self._vault.sealed(held.file)
        except VaultError as error:
            # One that comes back finds the segment; until then the storage must not wait for it.
            self._alert(error)
            self._leave_out(event)
            if not event.in_memory:
                self._storage.write(held.file, checked_bytes(held, place))
                self._coordinator.record(event, rank, records, trainer_state)
        del self._open[event]

    def lost(self, event: EventId, rank: int, reason: str) -> None:
        """See `Listener.lost`. What was for memory alone no coordinator waits for."""
        self._open.pop(event, None)
        self._leave_out(event)
        if not event.in_memory:
            self._coordinator.lost(event, rank, reason)

    def drain(self, limit_s: float) -> bool:
        """Waits until the vault has written all that this rank sealed; False if it has not."""
        try:
            return self._vault.drain(self._about.rank, limit_s)
        except VaultError as error:
            log.error("%s", error)
            return False

    def take_alerts(self) -> list[str]:
        """What a person should know since the last call."""
        alerts, self._alerts = self._alerts, []
        return alerts

    def _write_past(self, path: str, chunks: HashedBytes) -> None:
        with suppress(VaultError):
            self._vault.drain(self._about.rank, self._wait_s)
        self._storage.write(path, chunks)

    def _leave_out(self, event: EventId) -> None:
        """Counts an event once, however often it is tried: those of a rank come one after the other."""
        self.left_out += event != self._newest_left_out
        self._newest_left_out = event

    def _alert(self, error: StorageError) -> None:
        """Said once until it works again: it would be said at every step."""
        if not self._is_refused:
            self._is_refused = True
            text = f"rank {self._about.rank} does without the memory tier: {error.message}"
            log.error("%s", text)
            self._alerts.append(text)
