"""One run on a storage that may fail at any call: two ranks and a coordinator, life after life.

The protocol is that of a session (`recovery/begin.py`, `recovery/restore.py`, `persistence/writer.py`) with
the real coordinator, journal, plan, shard files and fetch; only the collectives are loops over the ranks.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layercheck.config import LayerCheckConfig
from layercheck.coordination import audit, journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.protocol import AttemptGrant
from layercheck.layers import ParamSpec
from layercheck.manifest import BadShard, EventId, LayerPlan, Reason, RecoveryPlan, ShardRecord
from layercheck.persistence.hashed import HashedBytes
from layercheck.persistence.shard_file import ShardAbout, ShardTensor, SliceMeta, StateScalar, layout
from layercheck.persistence.sink import FileSink
from layercheck.persistence.storage import TEMP_PREFIX, Storage
from layercheck.recovery.fetch import Fetcher, part_of
from layercheck.tracking.metrics_log import METRICS, PartWriter
from tests.crash.bucket import Bucket
from tests.crash.disk import Disk
from tests.crash.oracle import FROZEN, MAP, Oracle, true_values
from tests.fakes import Clock, PowerCutError
from tests.runs import LAYERS, WARMUP, config, run_record

Medium = Disk | Bucket
RUN = "/shared/runs/r1"
WORLD = 2
COORDINATOR = "coordinator"
STATES = ("fp32", "exp_avg")
SETTINGS = config(keep_versions=1)


@dataclass
class World:
    """What outlives a process: the storage, the oracle, and the counter of tokens."""

    medium: Medium
    oracle: Oracle = field(default_factory=Oracle)
    tokens: int = 0
    clock: Clock = field(default_factory=Clock)
    settings: LayerCheckConfig = SETTINGS
    restarts_coordinator: bool = False
    """A coordinator that dies alone is built anew and asked again, as its client does."""
    coordinator: Coordinator | None = None
    """The newest one: it may outlive the ranks."""

    def storage(self, owner: str) -> Storage:
        """The run's folder as one process has it."""
        made: Storage = self.medium.storage(f"{RUN}/layercheck", owner)
        write = made.write

        def noted(path: str, chunks: Any) -> None:
            with self.oracle.writing(path):
                write(path, chunks)

        if owner == COORDINATOR:
            made.write = noted  # type: ignore[method-assign]
        return made

    def token(self) -> str:
        self.tokens += 1
        return f"{self.tokens:032x}"


@dataclass(frozen=True)
class Wanted:
    """What one rank wants of a parameter after a recovery."""

    spec: ParamSpec
    offset: int
    numel: int


class Life:
    """One worker group, from its first line to its end. A coordinator that lived on is taken over."""

    def __init__(self, world: World, coordinator: Coordinator | None = None, world_size: int = WORLD) -> None:
        self.world, self.world_size = world, world_size
        self.stores = [world.storage(f"rank {rank}") for rank in range(world_size)]
        self.coordinator = coordinator or self._build()
        self.selected: dict[str, int] = {}
        self.safe_full = -1
        self.parts: PartWriter | None = None

    def _build(self) -> Coordinator:
        world = self.world
        try:
            world.coordinator = Coordinator(
                world.storage(COORDINATOR), world.settings, world.clock, world.clock.sleep
            )
        except PowerCutError:
            if not self._may_restart():
                raise
            return self._build()
        return world.coordinator

    def _may_restart(self) -> bool:
        """True if only the coordinator is dead and somebody builds it anew."""
        dead = self.world.medium.watch.dead
        if not self.world.restarts_coordinator or dead != {COORDINATOR}:
            return False
        dead.clear()
        return True

    def ask(self, name: str, *args: Any) -> Any:
        """One call of the coordinator."""
        try:
            return getattr(self.coordinator, name)(*args)
        except PowerCutError:
            if not self._may_restart():
                raise
            self.coordinator = self._build()
            return getattr(self.coordinator, name)(*args)

    # ------------------------------------------------------------------ the start

    def begin(self) -> int:
        """Returns the first step to run; what it recovered has been checked byte by byte."""
        store = self.stores[0]
        probe, token = f"probe-{self.world.token()}", self.world.token()
        store.write(probe, [b"seen"])
        assert all(other.size(probe) is not None for other in self.stores)
        self.ask("open_run", run_record(self.world.settings, FROZEN), probe)
        grant: AttemptGrant = self.ask("begin_attempt", token, "s1", self.world_size, "composite")
        store.delete(probe)
        grant = self._restore(grant)
        self.attempt = grant.attempt
        run_folder = self.world.medium.storage(RUN, "rank 0")
        self.parts = PartWriter(run_folder, "metrics", grant.attempt, 1e9, METRICS, self.world.clock)
        if grant.plan is None:
            self.step(0, full=True)
            return 1 if self.safe_full == 0 else self._begin_again()
        self.ask("note_receipt", grant.attempt, {"t_fail": grant.plan.t_fail})
        self.selected = {layer.layer: layer.step for layer in grant.plan.layers}
        self.safe_full = min(self.selected[name] for name in LAYERS)
        return grant.plan.resume_step

    def _begin_again(self) -> int:
        """Training does not begin before step 0 is committed (I1). Its event is lost: a new attempt."""
        self.world.clock.now += self.world.settings.event_timeout_s
        self.step(0)
        self.ask("end_attempt", self.attempt, "failed", "AgeBoundError: the save of step 0 was lost")
        self.selected = {}
        return self.begin()

    def _restore(self, grant: AttemptGrant) -> AttemptGrant:
        while grant.plan is not None:
            layers, bad = fetch(self.stores, grant.plan)
            if not bad:
                self.world.oracle.check(grant.plan)
                check_bytes(layers, grant.plan, self.world_size)
                return grant
            grant = self.ask("amend", grant.attempt, tuple(bad))
        self.world.oracle.check(None)
        return grant

    # ------------------------------------------------------------------ training

    def step(self, step: int, *layers: str, full: bool = False) -> None:
        """One optimizer step: what is to be saved goes to storage, then the heartbeat."""
        oracle = self.world.oracle
        if full:
            layers = LAYERS if self.selected else LAYERS + FROZEN
        if layers:
            event = EventId(step=step, attempt=self.attempt)
            oracle.layers_of[step, self.attempt] = layers
            self.selected |= dict.fromkeys(layers, step)
            for rank, store in enumerate(self.stores):
                rows = save_shards(store, event, rank, self.world_size, layers)
                self.ask("record", event, rank, rows, self._state(step))
        oracle.told = max(oracle.told, step)
        self.world.clock.now += 1.0
        reply = self.ask("heartbeat", self.attempt, step, self._state(step), dict.fromkeys(LAYERS, 0.25))
        assert not reply.fenced, "the only attempt was told that it is fenced"
        oracle.acknowledge(self.attempt, reply.committed_step, reply.lost_steps)
        if full and reply.committed_step >= step and step not in reply.lost_steps:
            self.safe_full = step

    def owes_base(self, step: int) -> bool:
        """A full event of the warm-up is due, or the base was lost."""
        return step in (2, WARMUP) or (step > WARMUP and self.safe_full < WARMUP)

    def write_metrics(self, step: int) -> None:
        assert self.parts is not None
        self.parts.add({"step": step})
        self.parts.flush()

    def end(self) -> None:
        self.ask("end_attempt", self.attempt, "completed")

    def _state(self, step: int) -> dict[str, Any]:
        return {"step": step, "consumed": 10 * step, "layercheck": {"selected": dict(self.selected)}}


# ---------------------------------------------------------------- bytes


def save_shards(
    store: FileSink, event: EventId, rank: int, world_size: int, layers: tuple[str, ...]
) -> tuple[ShardRecord, ...]:
    """One rank's file of one event, as the writer thread makes it."""
    tensors, slices, chunks = [], [], []
    for layer in layers:
        for param in MAP.by_name[layer].params:
            offset, numel = part_of(param.numel, rank, world_size)
            slices.append(
                SliceMeta(
                    parameter=param.name, layer=layer, step=event.step, shape=param.shape, offset=offset,
                    numel=numel, state={"step": StateScalar(kind="int", value=event.step)},
                )
            )  # fmt: skip
            for key in STATES:
                tensors.append(ShardTensor(param.name, key, layer, "F32", numel))
                values = true_values(param, key, event.step, event.attempt)[offset : offset + numel]
                chunks.append(memoryview(values.tobytes()))
    about = ShardAbout(
        step=event.step, attempt=event.attempt, part=event.part, rank=rank, world_size=world_size
    )
    placed = layout(tensors, slices, about)
    content = HashedBytes(placed, [memoryview(b"".join(chunks))])
    file = event.shard_file(rank)
    store.write(file, content)
    reason: Reason = "full" if set(LAYERS) <= set(layers) else "drift"
    return tuple(
        ShardRecord(
            layer=layer, step=event.step, attempt=event.attempt, part=event.part, rank=rank,
            world_size=world_size, file=file, begin=begin, end=end, xxh3_128=content.digests[layer],
            drift=1.0, threshold=0.5, age=1, reason=reason, snapshot_s=0.0, write_s=0.0,
        )
        for layer, (begin, end) in placed.layers.items()
    )  # fmt: skip


def wanted_by(rank: int, world_size: int) -> dict[str, list[Wanted]]:
    """Layer -> the slices that a rank of the new group holds."""
    return {
        spec.name: [Wanted(param, *part_of(param.numel, rank, world_size)) for param in spec.params]
        for spec in MAP.layers
    }


def fetch(stores: list[Storage], plan: RecoveryPlan) -> tuple[list[dict[str, Any]], list[Any]]:
    """What each rank got, and the bad shards that any of them met."""
    layers, bad = [], {}
    for rank, store in enumerate(stores):
        fetcher, wanted = Fetcher(store), wanted_by(rank, len(stores))
        found = {version.layer: fetcher.fetch(version, wanted[version.layer]) for version in plan.layers}
        layers.append(found)
        bad |= {(one.file, one.layer): one for one in found.values() if isinstance(one, BadShard)}
    return layers, list(bad.values())


def check_bytes(layers: list[dict[str, Any]], plan: RecoveryPlan, world_size: int) -> None:
    """Every weight, moment and Adam step is that of the step that the plan names."""
    for rank, got in enumerate(layers):
        for version in plan.layers:
            for want in wanted_by(rank, world_size)[version.layer]:
                _check_slice(got[version.layer].slices[want.spec.name], want, version)


def _check_slice(found: Any, want: Wanted, version: LayerPlan) -> None:
    assert set(found.tensors) == set(STATES)
    for key in STATES:
        values = true_values(want.spec, key, version.step, version.attempt)
        expected = values[want.offset : want.offset + want.numel]
        assert np.array_equal(found.tensors[key].view(np.float32), expected), (
            f"wrong bytes of {version.layer}"
        )
    assert found.scalars["step"]["value"] == version.step, f"Adam step of {version.layer}"


# ---------------------------------------------------------------- whole lives


SCHEDULE: dict[int, tuple[str, ...]] = {
    5: ("layers.0",), 6: ("embed_tokens", "norm"), 7: ("layers.0",), 8: ("norm",), 11: ("layers.0",),
    12: ("embed_tokens",),
}  # fmt: skip
FIRST_LIFE, SECOND_LIFE = 8, 13


def live(world: World, until: int) -> Life:
    """A life by the schedule; it is not ended, it just stops."""
    life = Life(world)
    for step in range(life.begin(), until + 1):
        if life.owes_base(step) or step == 10:
            life.step(step, full=True)
        else:
            life.step(step, *SCHEDULE.get(step, ()))
        if step % 4 == 0:
            life.write_metrics(step)
    return life


def recover(
    world: World, coordinator: Coordinator | None = None, world_size: int = WORLD, tidy: bool = True
) -> Life:
    """The next life goes on for a few steps, saves, ends well; then a reader looks at storage alone."""
    check_commits(world)
    life = Life(world, coordinator, world_size)
    first = life.begin()
    for step in range(first, max(first + 3, WARMUP + 1)):
        world.clock.now += 300.0
        if life.owes_base(step) or step == first + 1:
            life.step(step, full=True)
        else:
            life.step(step, *(("layers.0",) if step == first else ()))
    life.write_metrics(first)
    life.end()
    check_cold(world, tidy)
    return life


def check_commits(world: World) -> None:
    """I2: whatever happened, all shards of every commit that can be seen are there, and right."""
    reader = world.storage("reader")
    for commit in journal.load_commits(reader)[0]:
        for row in commit.records:
            if (row.layer, (row.step, row.attempt)) not in world.oracle.rotten:
                audit.check_twice(reader, row, {})


def check_cold(world: World, tidy: bool) -> None:
    """Storage alone gives the same plan, holds what it names, and nothing that a crash left behind."""
    reader = world.storage("reader")
    plan = make_plan(journal.load_facts(reader), PlanRequest(3))
    assert plan is not None
    layers, bad = fetch([reader] * 3, plan)
    assert not bad, f"bad shards after a recovery: {bad}"
    world.oracle.copy().check(plan)
    check_bytes(layers, plan, 3)
    assert left_behind(reader) == [] or not tidy


def left_behind(storage: Storage) -> list[str]:
    """What nobody will ever need: unfinished writes, probes, events without a commit."""
    found = [name for name in storage.list("") if name.startswith((TEMP_PREFIX, "probe-"))]
    for folder in ("attempts", "blacklist", "history"):
        found += [f"{folder}/{name}" for name in storage.list(folder) if name.startswith(TEMP_PREFIX)]
    for event in journal.event_folders(storage):
        if storage.size(event.commit_file) is None:
            found.append(event.folder)
    return found
