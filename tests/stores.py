"""Stores whose shards are real safetensors files, made by a real coordinator without torch."""

from pathlib import Path

from xxhash import xxh3_128_hexdigest

from layercheck.coordination.coordinator import Coordinator
from layercheck.manifest import EventId, Reason, ShardRecord
from layercheck.persistence.shard_file import ShardAbout, ShardTensor, SliceMeta, layout
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery.fetch import part_of
from tests.fakes import Clock
from tests.runs import LAYERS, WARMUP, config, layer_map, run_record

RANKS = 2


class RealRun:
    """One attempt of two ranks whose shard files any safetensors reader opens."""

    def __init__(self, folder: Path, token: str = "t1", **settings: object) -> None:
        self.folder = folder / "layercheck"
        self.storage = LocalStorage(str(self.folder))
        clock = Clock()
        self.coordinator = Coordinator(self.storage, config(**settings), clock, clock.sleep)
        if self.storage.size("run.json") is None:
            self.storage.write("probe", [b"x"])
            self.coordinator.open_run(run_record(config(**settings)), "probe")
            self.storage.delete("probe")
        self.attempt = self.coordinator.begin_attempt(token, "s1", RANKS, "composite").attempt
        self.selected: dict[str, int] = {}

    def save(self, step: int, *layers: str, reason: Reason = "drift") -> EventId:
        event = EventId(step=step, attempt=self.attempt)
        layers = layers or LAYERS
        self.selected |= dict.fromkeys(layers, step)
        for rank in range(RANKS):
            rows = self._write(event, rank, layers, "full" if layers == LAYERS else reason)
            self.coordinator.record(event, rank, rows, self._state(step))
        return event

    def beat(self, step: int, drift: float = 0.25) -> None:
        self.coordinator.heartbeat(self.attempt, step, self._state(step), dict.fromkeys(LAYERS, drift))

    def train(self, until: int, since: int = 0) -> None:
        for step in range(since + 1, until + 1):
            self.beat(step)

    def end(self, how: str = "completed", reason: str = "") -> None:
        self.coordinator.end_attempt(self.attempt, how, reason)

    def _state(self, step: int) -> dict[str, object]:
        return {"step": step, "layercheck": {"selected": dict(self.selected)}}

    def _write(
        self, event: EventId, rank: int, layers: tuple[str, ...], reason: Reason
    ) -> tuple[ShardRecord, ...]:
        about = ShardAbout(step=event.step, attempt=event.attempt, rank=rank, world_size=RANKS)
        tensors, slices = [], []
        for layer in layers:
            (param,) = layer_map().by_name[layer].params
            offset, numel = part_of(param.numel, rank, RANKS)
            tensors.append(ShardTensor(param.name, "fp32", layer, "F32", numel))
            slices.append(
                SliceMeta(
                    parameter=param.name, layer=layer, step=event.step, shape=param.shape, offset=offset,
                    numel=numel,
                )
            )  # fmt: skip
        placed = layout(tensors, slices, about)
        data = bytes((event.step + rank) % 256 for _ in range(placed.total - len(placed.header)))
        whole = placed.header + data
        self.storage.write(event.shard_file(rank), [whole])
        return tuple(
            ShardRecord(
                layer=layer, step=event.step, attempt=event.attempt, rank=rank, world_size=RANKS,
                file=event.shard_file(rank), begin=begin, end=end,
                xxh3_128=xxh3_128_hexdigest(whole[begin:end]),
                drift=1.0, threshold=0.5, age=1, reason=reason, snapshot_s=0.0, write_s=0.0,
            )
            for layer, (begin, end) in placed.layers.items()
        )  # fmt: skip


def real_run(folder: Path, **settings: object) -> RealRun:
    """Warm-up of four steps, then layers saved one by one up to step 12; heartbeats to step 14."""
    run = RealRun(folder, **settings)
    run.beat(0)
    for step in (0, 2, WARMUP):
        run.save(step)
    run.train(WARMUP)
    run.save(8, "layers.0")
    run.save(10, "norm")
    run.save(12, "layers.0", reason="age")
    run.train(14, since=WARMUP)
    run.coordinator.close()
    return run
