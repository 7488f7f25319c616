"""[pure] What to recover from: the own host's memory, a peer's memory, or the newest remote checkpoint.

1. A trainer died and its host lives: its shard comes from the host's own copy.
2. A host is lost: whoever replaces its ranks pulls their shards from the hosts that keep the replicas; all
   others use their own host's copies.
3. Every copy of some shard is lost: everyone takes the newest remote checkpoint.

In all cases it is one step of one life of the worker group for all ranks, the newest that is complete.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from app.baselines.gemini.records import SlotRecord

Kind = Literal["own", "peer", "remote", "fresh"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One slot with a valid record: on `host`, in the box of (`record.shard`, `keeper`)."""

    host: str
    keeper: int
    slot: int
    record: SlotRecord

    @property
    def key(self) -> tuple[int, int]:
        """The box: (shard, keeper)."""
        return self.record.shard, self.keeper


@dataclass(frozen=True, slots=True)
class Source:
    """How one rank gets its shard. `sender` is the rank that sends it; None: no rank lives on that host."""

    copy: Copy
    how: Literal["own", "peer", "host"]
    sender: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do. `step` is the last step that counts as done, 0 for a fresh start.

    Attributes:
        sources: rank -> where its shard comes from; empty for `remote` and `fresh`.
    """

    kind: Kind
    step: int
    sources: tuple[Source, ...] = ()


def decide(hosts: Sequence[str], copies: Collection[Copy], remote_step: int | None) -> Decision:
    """Decides for all ranks at once.

    Args:
        hosts: rank -> the host where it lives now.
        copies: all that living hosts hold, without those known to be bad. Those of another world size count
            for nothing.
        remote_step: step of the newest valid checkpoint in storage, None for none.
    """
    states: dict[tuple[int, bytes], dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        if copy.record.world_size == len(hosts):
            states[copy.record.step, copy.record.attempt][copy.record.shard].append(copy)
    complete = [state for state, shards in states.items() if len(shards) == len(hosts)]
    newest = max(complete, default=None)
    if newest is not None and newest[0] >= (remote_step or 0):
        sources = tuple(_source(rank, hosts, states[newest][rank]) for rank in range(len(hosts)))
        kind: Kind = "own" if all(source.how == "own" for source in sources) else "peer"
        return Decision(kind, newest[0], sources)
    return Decision("fresh", 0) if remote_step is None else Decision("remote", remote_step)


def _source(rank: int, hosts: Sequence[str], copies: list[Copy]) -> Source:
    """The own host before others, a host with ranks (they send) before one without."""
    here = hosts[rank]
    best = min(copies, key=lambda copy: (copy.host != here, copy.host not in hosts, copy.keeper, copy.slot))
    if best.host == here:
        return Source(best, "own")
    if best.host in hosts:
        return Source(best, "peer", hosts.index(best.host))
    return Source(best, "host")
