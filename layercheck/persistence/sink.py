"""What a writer needs of the place that its files go to, and of whoever is told of them."""

from typing import Protocol

from layercheck.manifest import EventId, ShardRecord, TrainerState
from layercheck.persistence.hashed import HashedBytes


class FileSink(Protocol):
    """Where the files go: the storage, or the memory of the node and a vault behind it."""

    def write(self, path: str, chunks: HashedBytes, /) -> None:
        """Writes one whole file; nobody sees it after an exception."""
        ...


class Listener(Protocol):
    """Who is told of them; see `CoordinatorClient`."""

    def record(
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState, /
    ) -> None:
        """The files of this event are whole."""
        ...

    def lost(self, event: EventId, rank: int, reason: str, /) -> None:
        """They never will be."""
        ...
