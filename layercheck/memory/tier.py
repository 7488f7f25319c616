"""The memory tier as a session sees it: what stands before the storage when it saves and when it recovers.

One recovery, all ranks together:
1. `settle`, before the attempt is claimed: each vault commits what is sealed and says what it holds.
2. the plan is made with it, on rank 0.
3. `reader` serves what memory has; `sources` says what came from where.
4. `began`: vaults drop what the plan does not use and refuse whoever comes from an older attempt.
"""

import logging
import os
import socket
from collections.abc import Mapping

from layercheck.config import LayerCheckConfig
from layercheck.errors import VaultError
from layercheck.manifest import RecoveryPlan
from layercheck.memory import folders
from layercheck.memory.held import Held
from layercheck.memory.protocol import VaultCalls, Vaults
from layercheck.memory.reader import TIERS, Copy, MemoryFirst, OwnCopy, PeerCopy, Tier
from layercheck.memory.staging import About, MemorySink
from layercheck.memory.vault import open_vault
from layercheck.persistence.sink import Listener
from layercheck.persistence.storage import Readable, Storage
from layercheck.recovery.collectives import gather

log = logging.getLogger(__name__)


Place = tuple[str, str, int, int]
"""(storage path or URI, run name, rank, world size)."""


class RankVaults:
    """Without Ray: one vault in the process of each rank. Its segments outlive the process, and are adopted.

    Args:
        place: whose it is.
        storage, coordinator, config: of the session.
    """

    def __init__(
        self, place: Place, storage: Storage, coordinator: Listener, config: LayerCheckConfig
    ) -> None:
        where, name, rank, _ = place
        self.run = folders.run_key(name, os.path.abspath(where) if "://" not in where else where)
        self.node = f"{socket.gethostname()}-{os.environ.get('LOCAL_RANK', rank)}"
        self.own = open_vault(self.run, self.node, storage, coordinator, config)

    def others(self) -> Mapping[str, VaultCalls]:
        """See `Vaults.others`. Those of other ranks end with their processes."""
        return {}

    def close(self) -> None:
        """See `Vaults.close`."""
        self.own.close()


def open_tier(
    place: Place,
    storage: Storage,
    coordinator: Listener,
    config: LayerCheckConfig,
    vaults: Vaults | None,
) -> "MemoryTier | None":
    """The tier of one rank, None if it is off; `vaults` None keeps one in this process."""
    if not config.memory.enabled:
        return None
    vaults = vaults or RankVaults(place, storage, coordinator, config)
    return MemoryTier(vaults, place[2], place[3], config.memory.settle_s)


class MemoryTier:
    """See the module. `settle`, `sources` are collectives.

    Args:
        vaults: as this rank sees them.
        rank, world_size: of this process.
        settle_s: limit of each vault's part in `settle`.
    """

    def __init__(self, vaults: Vaults, rank: int, world_size: int, settle_s: float) -> None:
        self._vaults = vaults
        self._rank, self._world_size, self._settle_s = rank, world_size, settle_s
        self._token = ""
        self._nodes: frozenset[str] = frozenset()
        self._held: tuple[Held, ...] = ()

    def settle(self, token: str) -> tuple[Held, ...]:
        """What all vaults hold for the attempt that this token will begin; the same on every rank."""
        self._token = token
        mine = list(self._ask(self._vaults.node, self._vaults.own))
        self._nodes = frozenset(gather(self._vaults.node))
        for node, vault in self._without_ranks():
            mine += self._ask(node, vault)
        told = {(held.node, held.file): held for held in (one for told in gather(mine) for one in told)}
        self._held = tuple(told.values())
        return self._held

    def reader(self, storage: Readable) -> MemoryFirst:
        """The storage with what memory has in front of it, this node's first."""
        copies: dict[str, list[Copy]] = {}
        others = self._vaults.others() if any(one.node != self._vaults.node for one in self._held) else {}
        for held in sorted(self._held, key=lambda one: one.node != self._vaults.node):
            if held.node == self._vaults.node:
                folder = folders.folder_of(self._vaults.run, held.node)
                name = folders.segment_name(held.event, held.rank)
                copies.setdefault(held.file, []).append(OwnCopy(os.path.join(folder, name), held.nbytes))
            elif held.node in others:
                peer = PeerCopy(others[held.node], held.file, held.nbytes)
                copies.setdefault(held.file, []).append(peer)
        return MemoryFirst(storage, copies)

    def sources(self, plan: RecoveryPlan, reader: MemoryFirst) -> dict[str, Tier]:
        """Layer -> the farthest tier that any rank read a part of it from. A collective."""
        mine = {
            layer.layer: max(TIERS.index(reader.tiers.get(row.file, "memory")) for row in layer.all_shards)
            for layer in plan.layers
        }
        told = gather(mine)
        return {name: TIERS[max(one[name] for one in told)] for name in mine}

    def began(self, plan: RecoveryPlan | None) -> None:
        """The attempt goes on from this plan."""
        layers = plan.layers if plan else ()
        keep = frozenset(row.file for layer in layers if layer.memory for row in layer.memory.shards)
        vaults = [self._vaults.own, *(self._vaults.others().values() if self._rank == 0 else ())]
        for vault in vaults:
            try:
                vault.began(self._token, keep)
            except VaultError as error:
                log.warning("%s", error)  # what it keeps beyond that no later attempt was told of

    def sink(self, storage: Storage, coordinator: Listener, wait_s: float) -> MemorySink:
        """What this rank's writer gets in place of both."""
        about = About(self._vaults.run, self._vaults.node, self._rank, self._world_size, self._token)
        return MemorySink(self._vaults.own, storage, coordinator, about, wait_s)

    def close(self, completed: bool) -> None:
        """The session ends; of a run that is complete nothing stays in memory."""
        if completed:
            self._end(self._vaults.own, self._rank)
            for _, vault in self._without_ranks():
                self._end(vault, None)
        self._vaults.close()

    def _without_ranks(self) -> list[tuple[str, VaultCalls]]:
        """Vaults of nodes that no rank speaks for; rank 0 does."""
        if self._rank > 0:
            return []
        return [(node, vault) for node, vault in self._vaults.others().items() if node not in self._nodes]

    def _end(self, vault: VaultCalls, rank: int | None) -> None:
        try:
            vault.end(rank)
        except VaultError as error:
            log.warning("%s", error)  # it ends itself, or its node is gone

    def _ask(self, node: str, vault: VaultCalls) -> tuple[Held, ...]:
        try:
            return vault.settle(self._token, self._settle_s)
        except VaultError as error:
            log.warning("the memory of node %s is passed over: %s", node, error)
            return ()
