"""Events of any world size with real shard files and known values, without a run that wrote them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from layercheck.groups import OptimizerGroup
from layercheck.layers import LayerMap, LayerSpec, ParamSpec
from layercheck.manifest import EventId, LayerPlan, RecoveryPlan, RunRecord, ShardRecord
from layercheck.persistence.shard_file import ShardAbout, ShardTensor, SliceMeta, StateScalar, layout
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery.fetch import part_of

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
Values = npt.NDArray[np.float32]


def layer_map(shapes: Mapping[str, tuple[tuple[int, ...], ...]]) -> LayerMap:
    """Layers with the given parameter shapes; parameter i of layer l is `l.i`."""
    return LayerMap(
        layers=tuple(
            LayerSpec(
                name=layer,
                kind="block",
                trainable=True,
                params=tuple(
                    ParamSpec(name=f"{layer}.{i}", shape=shape, dtype="bfloat16")
                    for i, shape in enumerate(params)
                ),
            )
            for layer, params in shapes.items()
        )
    )


@dataclass(frozen=True)
class Shelf:
    """A store folder that versions are put on."""

    storage: LocalStorage
    run: RunRecord

    def put(self, layer: LayerSpec, step: int, world_size: int) -> LayerPlan:
        """Writes one version of one layer, as the ranks of that world size would, and plans it."""
        shards = tuple(self._shard(layer, step, rank, world_size) for rank in range(world_size))
        return LayerPlan(
            layer=layer.name, numel=layer.numel, step=step, attempt=1, age=0, lost=0, reason="drift",
            shards=shards,
        )  # fmt: skip

    def _shard(self, layer: LayerSpec, step: int, rank: int, world_size: int) -> ShardRecord:
        # Each layer has its own event here, so that each can have its own world size.
        event = EventId(
            step=step, attempt=1, part=[spec.name for spec in self.run.layer_map.layers].index(layer.name)
        )
        cuts = {spec.name: part_of(spec.numel, rank, world_size) for spec in layer.params}
        placed = layout(
            [
                ShardTensor(spec.name, key, layer.name, "F32", cuts[spec.name][1])
                for spec in layer.params
                for key in KEYS
            ],
            [
                SliceMeta(
                    parameter=spec.name, layer=layer.name, step=step, shape=spec.shape,
                    offset=cuts[spec.name][0], numel=cuts[spec.name][1],
                    state={"step": StateScalar(kind="tensor:float32", value=step)},
                )
                for spec in layer.params
            ],
            ShardAbout(step=step, attempt=1, part=event.part, rank=rank, world_size=world_size),
        )  # fmt: skip
        data = placed.header
        for spec in layer.params:
            begin, count = cuts[spec.name]
            for key in KEYS:
                data += values(spec, key, step)[begin : begin + count].tobytes()
        self.storage.write(event.shard_file(rank), [data])
        begin, end = placed.layers.get(layer.name, (len(data), len(data)))
        return ShardRecord(
            layer=layer.name, step=step, attempt=1, part=event.part, rank=rank, world_size=world_size,
            file=event.shard_file(rank), begin=begin, end=end, xxh3_128=xxh3_128_hexdigest(data[begin:end]),
            drift=1.0, threshold=0.5, age=1, reason="drift", snapshot_s=0.0, write_s=0.0,
        )  # fmt: skip


def values(spec: ParamSpec, key: str, step: int) -> Values:
    """What one parameter held at one step: every element is another one."""
    seed = [step, KEYS.index(key), *spec.name.encode()]
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(spec.numel, np.float32)


@dataclass(frozen=True)
class Want:
    """A slice that somebody wants."""

    spec: ParamSpec
    offset: int
    numel: int


def wants(params: tuple[ParamSpec, ...], rank: int, world_size: int) -> list[Want]:
    """What one rank of a group wants of these parameters."""
    return [Want(spec, *part_of(spec.numel, rank, world_size)) for spec in params]


def shelf(folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], ...]]) -> Shelf:
    """An empty store of a model with these layers."""
    layers = layer_map(shapes)
    group = OptimizerGroup(names=tuple(layers.layer_of), settings={"lr": 0.1})
    run = RunRecord(
        run_id="id", name="r1", layer_map=layers, optimizer="AdamW", optimizer_groups=(group,),
        model_config_json={"model_type": "qwen2"},
    )  # fmt: skip
    return Shelf(LocalStorage(str(folder)), run)


def plan_of(layers: tuple[LayerPlan, ...], world_size: int = 1) -> RecoveryPlan:
    """A composite of these versions."""
    newest = max(layer.step for layer in layers)
    return RecoveryPlan(
        mode="composite", world_size=world_size, t_fail=newest, t_fail_source="commit",
        resume_step=newest + 1, trainer_state={"step": newest}, drift={}, layers=layers,
    )  # fmt: skip
