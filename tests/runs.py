"""Small stores made by a real coordinator: a run of three trainable layers, driven step by step."""

from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_hexdigest

from layercheck.config import LayerCheckConfig
from layercheck.coordination import journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.protocol import AttemptGrant
from layercheck.layers import LayerMap, LayerSpec, ParamSpec
from layercheck.manifest import EventId, RecoveryPlan, RunRecord, ShardRecord
from layercheck.persistence.storage import LocalStorage
from tests.fakes import Clock

LAYERS = ("embed_tokens", "layers.0", "norm")
WARMUP = 4


def layer_map(frozen: tuple[str, ...] = ()) -> LayerMap:
    specs = [
        LayerSpec(
            name=name,
            kind="block" if name.startswith("layers") else "other",
            trainable=name not in frozen,
            params=(ParamSpec(name=f"{name}.w", shape=(10 * (i + 1),), dtype="float32"),),
        )
        for i, name in enumerate((*LAYERS, *frozen))
    ]
    return LayerMap(layers=tuple(specs))


def config(**settings: Any) -> LayerCheckConfig:
    base = {
        "warmup_steps": WARMUP, "warmup_full_every": 2, "s_max": 40, "target_interval": 10,
        "probation_steps": 0, "takeover_s": 3, "event_timeout_s": 10,
    }  # fmt: skip
    return LayerCheckConfig(**(base | settings))


def run_record(settings: LayerCheckConfig | None = None, frozen: tuple[str, ...] = ()) -> RunRecord:
    checkpoint = (settings or config()).model_dump(mode="json")
    return RunRecord(
        run_id="id",
        name="r1",
        layer_map=layer_map(frozen),
        optimizer="AdamW",
        config={"checkpoint": checkpoint},
    )


def shard_bytes(layer: str, step: int, attempt: int, rank: int) -> bytes:
    return f"{layer} at {step} by {attempt}, part {rank}".encode()


@dataclass
class Group:
    """Ranks of one attempt as the coordinator sees them; `die` by not being used any more."""

    coordinator: Coordinator
    storage: LocalStorage
    grant: AttemptGrant
    world_size: int = 2
    selected: dict[str, int] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        return self.grant.attempt

    def state(self, step: int) -> dict[str, Any]:
        return {"step": step, "layercheck": {"selected": dict(self.selected)}}

    def rows(
        self, event: EventId, rank: int, layers: tuple[str, ...], reason: str = "drift"
    ) -> tuple[ShardRecord, ...]:
        rows, position = [], 0
        for layer in layers:
            data = shard_bytes(layer, event.step, event.attempt, rank)
            rows.append(
                ShardRecord(
                    layer=layer,
                    step=event.step,
                    attempt=event.attempt,
                    part=event.part,
                    rank=rank,
                    world_size=self.world_size,
                    file=event.shard_file(rank),
                    begin=position,
                    end=position + len(data),
                    xxh3_128=xxh3_128_hexdigest(data),
                    drift=1.0,
                    threshold=0.5,
                    age=1,
                    reason=reason,
                    snapshot_s=0.0,
                    write_s=0.0,
                )
            )
            position += len(data)
        return tuple(rows)

    def write(
        self, step: int, rank: int, layers: tuple[str, ...], reason: str = "drift"
    ) -> tuple[EventId, tuple[ShardRecord, ...]]:
        """One rank's shards become durable; the coordinator does not know yet."""
        event = EventId(step=step, attempt=self.attempt)
        rows = self.rows(event, rank, layers, reason)
        data = [shard_bytes(layer, step, self.attempt, rank) for layer in layers]
        self.storage.write(event.shard_file(rank), data)
        return event, rows

    def record(self, step: int, rank: int, layers: tuple[str, ...], reason: str = "drift") -> None:
        event, rows = self.write(step, rank, layers, reason)
        self.selected |= dict.fromkeys(layers, step)
        self.coordinator.record(event, rank, rows, self.state(step))

    def save_residual(self, step: int, layer: str, base: tuple[int, int]) -> None:
        """All ranks save a residual of one layer."""
        event = EventId(step=step, attempt=self.attempt)
        kind = {"kind": "residual", "base_step": base[0], "base_attempt": base[1]}
        for rank in range(self.world_size):
            _, rows = self.write(step, rank, (layer,), "residual")
            added = tuple(row.model_copy(update=kind) for row in rows)
            self.coordinator.record(event, rank, added, self.state(step))

    def save(self, step: int, *layers: str) -> None:
        """All ranks save these layers (default: all, a full event)."""
        for rank in range(self.world_size):
            self.record(step, rank, layers or LAYERS, "drift" if layers else "full")

    def beat(self, step: int, drift: float = 0.25) -> Any:
        return self.coordinator.heartbeat(self.attempt, step, self.state(step), dict.fromkeys(LAYERS, drift))

    def train(self, until: int, since: int | None = None) -> None:
        for step in range((since or self.grant.r_b) + 1, until + 1):
            self.beat(step)


def coordinator(storage: LocalStorage, clock: Clock | None = None, **settings: Any) -> Coordinator:
    clock = clock or Clock()
    return Coordinator(storage, config(**settings), clock, clock.sleep)


def start(
    storage: LocalStorage,
    made: Coordinator | None = None,
    token: str = "t1",
    world_size: int = 2,
    **settings: Any,
) -> Group:
    """A first or next attempt on this store, by the same submission."""
    made = made or coordinator(storage, **settings)
    if storage.size("run.json") is None:
        storage.write("probe", [b"x"])
        made.open_run(run_record(config(**settings)), "probe")
    return Group(made, storage, made.begin_attempt(token, "s1", world_size, "composite"), world_size)


def with_base(storage: LocalStorage, **settings: Any) -> Group:
    """A run whose warm-up is over: full events of steps 0, 2 and 4, heartbeats to 4."""
    group = start(storage, **settings)
    for step in (0, 2, WARMUP):
        group.save(step)
    group.train(WARMUP)
    return group


def plan_of(group: Group) -> RecoveryPlan:
    assert group.grant.plan is not None
    return group.grant.plan


def steps(plan: RecoveryPlan) -> dict[str, int]:
    """Layer -> step of its planned version."""
    return {layer.layer: layer.step for layer in plan.layers}


def committed(storage: LocalStorage) -> list[str]:
    """Folders of the events that exist."""
    return [e.folder for e in journal.event_folders(storage) if storage.size(e.commit_file) is not None]
