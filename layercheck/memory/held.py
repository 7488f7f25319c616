"""[pure] What a vault says of one sealed segment: enough to commit its event, and to plan with it."""

from typing import Any

from layercheck.manifest import EventId, Record, ShardRecord, TrainerState


class Held(Record):
    """One rank's file of one event, whole, in the memory of a node.

    Attributes:
        run: key of the run, see `folders.run_key`.
        home: node of the rank that made it, whose vault writes it.
        token: that of the attempt that made it; a number alone may mean another life of the store.
        nbytes: size of the file.
        offered: tokens of the attempts that were told of it while they were being planned, oldest first.
        node: where it lies.
    """

    run: str
    home: str
    event: EventId
    rank: int
    world_size: int
    token: str
    nbytes: int
    records: tuple[ShardRecord, ...]
    trainer_state: TrainerState
    offered: tuple[str, ...] = ()
    node: str = ""

    @property
    def file(self) -> str:
        """Path of the same bytes below the store, where they go or would go."""
        return self.event.shard_file(self.rank)

    @property
    def layers(self) -> frozenset[str]:
        """Layers of which it holds a version."""
        return frozenset(row.layer for row in self.records if row.kind == "version")

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts the segments of a rank; the newest is the largest."""
        return self.event.attempt, self.event.step, self.event.part

    def meta(self) -> dict[str, Any]:
        """What its segment says of it."""
        return self.model_dump(exclude={"offered", "node"})
