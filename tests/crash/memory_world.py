"""A run of two ranks on two nodes with a vault each, whose parts die at will, and what it must come back to.

Shard files, coordinator, vaults, plan and fetch are real; only the collectives are loops over the ranks, and
the storage is a folder.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layercheck.coordination.coordinator import Coordinator
from layercheck.errors import FencedError, VaultError
from layercheck.manifest import MEMORY_PART, BadShard, EventId, RecoveryPlan
from layercheck.memory import folders
from layercheck.memory.reader import Copy, MemoryFirst, OwnCopy, PeerCopy
from layercheck.memory.staging import About, MemorySink
from layercheck.memory.vault import Vault
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery.fetch import Fetcher
from tests.crash.lives import check_bytes, save_shards, wanted_by
from tests.crash.oracle import FROZEN
from tests.fakes import Clock, flip_bit
from tests.runs import LAYERS, WARMUP, config, run_record
from tests.vaults import die

WORLD, RUN = 2, "run"
SETTINGS = config(keep_versions=1, write_retries=0)
Version = tuple[int, int]
"""(attempt, step): the newest is the largest."""


@dataclass
class World:
    """Everything, and what the oracle knows.

    Attributes:
        sealed: layer -> versions that both ranks have sealed and no later attempt has done without.
        is_exact: nothing was damaged or lost since the last recovery: the newest sealed versions come back.
        recoveries: how many there were.
    """

    tmp: Path
    budget: int = 10**6
    clock: Clock = field(default_factory=Clock)
    attempt: int = 0
    step: int = 0
    tokens: int = 0
    sealed: dict[str, Version] = field(default_factory=dict)
    is_exact: bool = True
    recoveries: int = 0
    selected: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storage = LocalStorage(str(self.tmp / "store"))
        (self.tmp / "shm").mkdir()
        self.coordinator = Coordinator(self.storage, SETTINGS, self.clock, self.clock.sleep)
        self.storage.write("probe", [b"x"])
        self.coordinator.open_run(run_record(SETTINGS, FROZEN), "probe")
        self.vaults = [self._vault(node) for node in range(WORLD)]
        self.sinks: list[MemorySink] = []
        self.recover()
        for step in (0, 2, WARMUP):
            self.step = step
            self.save(LAYERS + FROZEN if step == 0 else LAYERS, in_memory=False)
        self.settle_writes()

    def _vault(self, node: int) -> Vault:
        # The listener is looked up at each call: a coordinator that was killed is built anew.
        return Vault(
            RUN, f"n{node}", self.storage, _Listener(self), budget_bytes=self.budget, retries=0,
            place=str(self.tmp / "shm"),
        )  # fmt: skip

    # ------------------------------------------------------------------ training

    def save(self, layers: tuple[str, ...], in_memory: bool, ranks: int = WORLD) -> None:
        """After the current step some or all ranks seal these layers; then the heartbeat."""
        event = EventId(step=self.step, attempt=self.attempt, part=MEMORY_PART if in_memory else 0)
        whole = ranks == WORLD
        if not in_memory:
            self.selected |= dict.fromkeys(layers, self.step)
        for rank in range(ranks):
            try:
                rows = save_shards(self.sinks[rank], event, rank, WORLD, layers)
                self.sinks[rank].record(event, rank, rows, self._state())
            except VaultError:
                assert in_memory, "what the storage is to have is written in any case"
                whole = False
        if whole:
            self.sealed |= dict.fromkeys(layers, (self.attempt, self.step))
        self.beat()

    def beat(self) -> None:
        self.clock.now += 1.0
        drift = dict.fromkeys(LAYERS, 0.25)
        assert not self.coordinator.heartbeat(self.attempt, self.step, self._state(), drift).fenced

    def settle_writes(self) -> None:
        for vault in self.vaults:
            assert vault._uploads.drain(10.0)

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "layercheck": {"selected": dict(self.selected)}}

    # ------------------------------------------------------------------ deaths and damage

    def kill_vault(self, node: int) -> None:
        die(self.vaults[node])
        self.vaults[node] = self._vault(node)
        self._reconnect()

    def lose_node(self, node: int) -> None:
        """Its memory is gone; its rank comes back on a node without any."""
        die(self.vaults[node])
        shutil.rmtree(self.vaults[node].folder)
        self.is_exact = False
        self.vaults[node] = self._vault(node)

    def kill_coordinator(self) -> None:
        self.coordinator = Coordinator(self.storage, SETTINGS, self.clock, self.clock.sleep)

    def damage(self, number: int) -> None:
        """Flips a bit somewhere in a segment, wherever that is."""
        paths = [os.path.join(v.folder, name) for v in self.vaults for name in folders.segments(v.folder)]
        if paths:
            path = Path(paths[number % len(paths)])
            flip_bit(path, number * 7919 % (8 * path.stat().st_size))
            self.is_exact = False

    def tear(self, rank: int, layers: tuple[str, ...]) -> None:
        """A rank dies between the last byte and the seal."""
        event = EventId(step=self.step, attempt=self.attempt, part=MEMORY_PART)
        try:
            save_shards(self.sinks[rank], event, rank, WORLD, layers)
        except VaultError:
            return

    def zombies_seal(self, old: list[MemorySink], attempt: int, step: int) -> None:
        """Ranks of an older attempt go on as if nothing had happened: nobody may ever see it."""
        event = EventId(step=step, attempt=attempt, part=MEMORY_PART)
        for rank, sink in enumerate(old):
            try:
                rows = save_shards(sink, event, rank, WORLD, LAYERS)
                sink.record(event, rank, rows, {"step": step})
            except (FencedError, VaultError):
                continue

    def _reconnect(self) -> None:
        """A rank's handle leads to the vault that its node has now."""
        for rank, sink in enumerate(self.sinks):
            sink._vault = self.vaults[rank]

    # ------------------------------------------------------------------ recovery

    def recover(self) -> RecoveryPlan | None:
        """All ranks die and begin again; what they get is checked byte by byte."""
        self.tokens += 1
        self.recoveries += 1
        token = f"{self.tokens:032x}"
        held = tuple(one for vault in self.vaults for one in vault.settle(token, 10.0))
        grant = self.coordinator.begin_attempt(token, "s1", WORLD, "composite", False, held)
        self.attempt = grant.attempt
        while grant.plan is not None:
            bad = self._fetch(grant.plan, held)
            if not bad:
                break
            assert not self.is_exact, f"bad without any damage: {bad}"
            grant = self.coordinator.amend(grant.attempt, tuple(bad))
        plan = grant.plan
        self._go_on(token, plan)
        return plan

    def _fetch(self, plan: RecoveryPlan, held: tuple[Any, ...]) -> list[BadShard]:
        layers, bad = [], []
        for rank in range(WORLD):
            reader = MemoryFirst(self.storage, self._copies(rank, held))
            fetcher = Fetcher(reader, sleep=lambda _: None, pass_over=reader.pass_over)
            wanted = wanted_by(rank, WORLD)
            found = {one.layer: fetcher.fetch(one, wanted[one.layer]) for one in plan.layers}
            layers.append(found)
            bad += [one for one in found.values() if isinstance(one, BadShard)]
        if not bad:
            check_bytes(layers, _as_loaded(plan), WORLD)
            if self.is_exact:
                self._check_fresh(plan)
        return bad

    def _copies(self, rank: int, held: tuple[Any, ...]) -> dict[str, list[Copy]]:
        copies: dict[str, list[Copy]] = {}
        for one in sorted(held, key=lambda one: one.node != f"n{rank}"):
            vault = self.vaults[int(one.node[1:])]
            path = os.path.join(vault.folder, folders.segment_name(one.event, one.rank))
            own: Copy = OwnCopy(path, one.nbytes)
            peer: Copy = PeerCopy(vault, one.file, one.nbytes)
            copies.setdefault(one.file, []).append(own if one.node == f"n{rank}" else peer)
        return copies

    def _check_fresh(self, plan: RecoveryPlan) -> None:
        loaded = {one.layer: one.loaded for one in plan.layers}
        for layer, version in self.sealed.items():
            found = loaded[layer]
            assert (found.attempt, found.step) == version, f"{layer}: {found.step} by {found.attempt}"
        newest = max(step for _, step in self.sealed.values())
        assert plan.t_fail >= newest

    def _go_on(self, token: str, plan: RecoveryPlan | None) -> None:
        keep = (
            frozenset(r.file for one in plan.layers if one.memory for r in one.memory.shards) if plan else ()
        )
        for vault in self.vaults:
            vault.began(token, keep)
        abouts = [About(RUN, f"n{rank}", rank, WORLD, token) for rank in range(WORLD)]
        self.sinks = [
            MemorySink(vault, self.storage, _Listener(self), about, wait_s=10.0)
            for vault, about in zip(self.vaults, abouts, strict=True)
        ]
        self.is_exact = True
        if plan is None:
            return
        self.step = plan.resume_step - 1
        self.selected = {one.layer: one.step for one in plan.layers}
        self.sealed = {one.layer: (one.loaded.attempt, one.loaded.step) for one in plan.layers}

    def end(self) -> None:
        """The run ends well: nothing of it is left in memory, and storage alone is enough."""
        self.settle_writes()
        for vault in self.vaults:
            vault.end(None)
        assert os.listdir(self.tmp / "shm") == []


class _Listener:
    """Whoever keeps the manifest now."""

    def __init__(self, world: World) -> None:
        self._world = world

    def record(self, *args: Any) -> None:
        self._world.coordinator.record(*args)

    def lost(self, *args: Any) -> None:
        self._world.coordinator.lost(*args)


def _as_loaded(plan: RecoveryPlan) -> RecoveryPlan:
    return plan.model_copy(update={"layers": tuple(layer.loaded for layer in plan.layers)})
