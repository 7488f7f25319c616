"""[pure] Whose memory keeps whose second copy: groups of two hosts, what is left over makes a ring of three.

GEMINI section 4 with m = 2: if the hosts divide into groups of m, everyone of a group stores everyone;
otherwise the left-over hosts join the last group, which becomes a ring. A rank's replica goes to the rank of
the next host of its group that has the same place there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

REPLICAS = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Who keeps the replica of whom.

    Attributes:
        hosts: rank -> its host.
        keepers: rank -> the rank that keeps its replica; None if there is no other rank.
    """

    hosts: tuple[str, ...]
    keepers: tuple[int | None, ...]

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """The ranks whose replicas `rank` keeps, in ascending order."""
        return tuple(shard for shard, keeper in enumerate(self.keepers) if keeper == rank)

    def keys_on(self, host: str) -> frozenset[tuple[int, int]]:
        """The (shard, keeper) pairs that live on a host: own copies and replicas of others."""
        ranks = [rank for rank, place in enumerate(self.hosts) if place == host]
        kept = {(shard, rank) for rank in ranks for shard in self.kept_by(rank)}
        return frozenset(kept | {(rank, rank) for rank in ranks})

    @property
    def dies_with_one_host(self) -> tuple[int, ...]:
        """Ranks whose two copies are on one host, or that have one copy only."""
        return tuple(
            rank
            for rank, keeper in enumerate(self.keepers)
            if keeper is None or self.hosts[keeper] == self.hosts[rank]
        )


def place(hosts: Sequence[str]) -> Placement:
    """Places the replicas of all ranks; the same answer wherever it is asked.

    Args:
        hosts: rank -> its host. With one host alone, its ranks keep each other's replicas.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        ring = {rank: other for group in _groups(range(len(hosts))) for rank, other in _next(group)}
        keepers = tuple(ring.get(rank) for rank in range(len(hosts)))
        return Placement(tuple(hosts), keepers)
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    found: dict[int, int] = {}
    for group in _groups(names):
        for name, peer in _next(group):
            for index, rank in enumerate(ranks[name]):
                found[rank] = ranks[peer][index % len(ranks[peer])]
    return Placement(tuple(hosts), tuple(found[rank] for rank in range(len(hosts))))


def _groups(members: Sequence[T]) -> list[list[T]]:
    starts = list(range(0, len(members), REPLICAS))
    if len(members) % REPLICAS and len(starts) > 1:
        starts.pop()
    return [list(members[a:b]) for a, b in zip(starts, [*starts[1:], len(members)], strict=True)]


def _next(group: Sequence[T]) -> list[tuple[T, T]]:
    """Each member with the one after it; nobody is its own peer."""
    if len(group) < REPLICAS:
        return []
    return list(zip(group, [*group[1:], group[0]], strict=True))
