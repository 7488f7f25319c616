"""What a store holds, as values: the input of planning, collection and status. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from layercheck.coordination.lineage import Lineage
from layercheck.coordination.rows import nbytes_of, packed
from layercheck.layers import LayerMap
from layercheck.manifest import (
    AttemptRecord,
    BadShard,
    Commit,
    EventId,
    Progress,
    RunRecord,
    ShardRecord,
)
from layercheck.memory.held import Held

SaveKey = tuple[str, int, int, int]
"""(layer, step, attempt, part). A step can have several events, each with its own save of a layer (a residual
of the policy, a version of `save_now`), and one of these can be damaged alone."""
State = tuple[int, int]
"""(step, attempt). All versions of one layer in this state hold the same bytes (I4), whatever their event."""


@dataclass(frozen=True, slots=True)
class Version:
    """One saved copy of one layer with the shards of all ranks.

    `base` makes it a residual: the state of the version that it adds to.
    """

    layer: str
    event: EventId
    shards: Sequence[ShardRecord]
    base: State | None = None

    @property
    def key(self) -> SaveKey:
        """What a blacklist names."""
        return key_of(self.layer, self.event)

    @property
    def state(self) -> State:
        """Step and attempt; the part says nothing of what it holds."""
        return self.event.step, self.event.attempt

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts versions of one layer; the newest is the largest."""
        return self.event.step, self.event.attempt, self.event.part

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks."""
        return nbytes_of(self.shards)


@dataclass(frozen=True)
class StoreFacts:
    """Everything readable of one run at one moment.

    Attributes:
        run: what is trained.
        attempts: readable attempt records by number.
        highest_attempt: largest number that was ever claimed, readable or not.
        commits: commits with a right digest.
        damaged: events whose commit cannot be trusted; they count as absent.
        progress: newest known progress by attempt.
        live_attempt: the attempt whose progress a living coordinator heard itself, 0 for none.
        receipts: by attempt.
        bad: shards that failed their check twice.
        bad_plans: attempts whose plan led to a non-finite loss (I13).
        notes: what a person should read.
        held: what the vaults hold, where an attempt is being planned; no part of the store.
    """

    run: RunRecord
    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    highest_attempt: int = 0
    commits: tuple[Commit, ...] = ()
    damaged: tuple[EventId, ...] = ()
    progress: dict[int, Progress] = field(default_factory=dict)
    live_attempt: int = 0
    receipts: dict[int, dict[str, Any]] = field(default_factory=dict)
    bad: tuple[BadShard, ...] = ()
    bad_plans: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()

    @cached_property
    def newest(self) -> AttemptRecord | None:
        """The newest readable attempt."""
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def lineage(self) -> Lineage:
        """The chain of the newest attempt."""
        return Lineage(self.newest.lineage) if self.newest else Lineage()

    @cached_property
    def bad_saves(self) -> frozenset[SaveKey]:
        """Versions and residuals that no plan may use."""
        return frozenset(key_of(shard.layer, shard.event) for shard in self.bad)

    @property
    def committed_bytes(self) -> int:
        """Bytes of the shards of all commits."""
        return sum(nbytes_of(commit.records) for commit in self.commits)

    def packed(self) -> "StoreFacts":
        """The store in less memory, for whoever keeps it for long."""
        return replace(self, commits=tuple(map(packed, self.commits)), held=())

    def with_commit(self, commit: Commit) -> "StoreFacts":
        """One more commit, packed."""
        return replace(self, commits=(*self.commits, packed(commit)))

    def live_commits(self, lineage: Lineage) -> list[Commit]:
        """The commits that count for a chain, oldest first."""
        live = [c for c in self.commits if lineage.is_live(c.event.step, c.event.attempt)]
        return sorted(live, key=lambda c: (c.event.step, c.event.attempt, c.event.part))

    def newest_commit_step(self, attempt: int) -> int:
        """Newest committed step of one attempt, -1 for none."""
        return max((c.event.step for c in self.commits if c.event.attempt == attempt), default=-1)


def key_of(layer: str, event: EventId) -> SaveKey:
    """What tells the save of a layer in one event from all others."""
    return layer, event.step, event.attempt, event.part


def saves_of(commit: Commit) -> Iterator[Version]:
    """The complete versions and residuals of one commit: rows of all ranks 0 to world_size - 1 are there."""
    for layer in commit.whole_layers:
        yield Version(layer, commit.event, commit.by_layer[layer], commit.bases.get(layer))


def versions_of(commit: Commit) -> Iterator[Version]:
    """The complete versions of one commit."""
    return (save for save in saves_of(commit) if save.base is None)


def version_in(commit: Commit, layer: str) -> Version | None:
    """The version of a layer in one commit, None if it has none that is complete."""
    if layer not in commit.whole_layers or layer in commit.bases:
        return None
    return Version(layer, commit.event, commit.by_layer[layer])


def by_layer(commits: Iterable[Commit], layer_map: LayerMap) -> dict[str, list[Version]]:
    """Layer -> its complete versions, newest first; every layer of the map has an entry."""
    found: dict[str, list[Version]] = {layer.name: [] for layer in layer_map.layers}
    for commit in commits:
        for version in versions_of(commit):
            if version.layer in found:
                found[version.layer].append(version)
    for versions in found.values():
        versions.sort(key=lambda version: version.order, reverse=True)
    return found


def full_events(
    versions: dict[str, list[Version]], layer_map: LayerMap, bad: frozenset[SaveKey] = frozenset()
) -> list[State]:
    """The states of which every trainable layer has a version, newest first; damaged ones left out."""
    names = [layer.name for layer in layer_map.trainable]
    held = [{v.state for v in versions[name] if v.key not in bad} for name in names]
    return sorted(set.intersection(*held), reverse=True) if held else []
