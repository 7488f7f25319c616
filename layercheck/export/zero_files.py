"""A folder that `engine.load_checkpoint` of DeepSpeed reads under ZeRO-3, at any world size and grouping.

DeepSpeed keeps, for each rank, `*_model_states.pt` (names, shapes, frozen parts, counters) and
`*_optim_states.pt` (for each sub-group one flat fp32 tensor, its moments and its scalars). These files are
pickles by their format: this is the one place that writes any, and nothing here or elsewhere reads one.

States:
1. the layers pass through one at a time; their elements go to where they belong in one scratch file on disk,
   ordered by rank, so that memory holds one layer whatever the size of the model.
2. for each rank the scratch file is mapped and saved; padding is zero.
"""

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from layercheck.errors import ConfigError
from layercheck.export.composite import Composite
from layercheck.export.scratch import Scratch
from layercheck.groups import OptimizerGroup, split_by_size
from layercheck.layers import ParamSpec
from layercheck.manifest import TrainerState
from layercheck.persistence.scalars import unpack_scalar
from layercheck.persistence.shard_file import MASTER
from layercheck.recovery.fetch import FetchedSlice
from layercheck.zero3 import FROZEN

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of `zero_optimization.sub_group_size`; it decides how groups are cut."""
_STAGE = 3
_STEP = "step"


@dataclass(slots=True)
class _SubGroup:
    """What one `optimizer.step()` updates: parameters one after the other in one flat tensor a rank."""

    params: tuple[ParamSpec, ...]
    numel: int
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: set[float] = field(default_factory=set)


@dataclass(slots=True)
class _Layout:
    """Which parameter lies where, and what is known once all layers passed."""

    groups: tuple[OptimizerGroup, ...]
    members: list[list[int]]
    """Group -> indices of its sub-groups."""
    sub_groups: list[_SubGroup]
    place: dict[str, tuple[int, int]]
    """Trainable parameter -> (sub-group, first element in a rank's flat tensor)."""


def write_zero(
    composite: Composite,
    folder: Path,
    groups: Sequence[OptimizerGroup],
    world_size: int,
    sub_group_size: int = SUB_GROUP_SIZE,
) -> tuple[str, ...]:
    """Writes a composite as DeepSpeed's `save_checkpoint` would have.

    Args:
        composite: what to write.
        folder: an empty folder; gets `latest` and one folder named after the step.
        groups: the optimizer groups of the engine that will load it, in its order.
        world_size: number of ranks of that engine.
        sub_group_size: its `zero_optimization.sub_group_size`.

    Returns:
        What a person should know of it.

    Raises:
        ConfigError: the state cannot be said in this format.
        BadShardError: see `Composite.layers`; the folder is then of no use.
    """
    _refuse_fp16(composite)
    layout = _layout(composite, groups, world_size, sub_group_size)
    tag = f"global_step{composite.step}"
    (folder / tag).mkdir()
    scratch = Scratch(folder / "scratch", world_size)
    try:
        _fill(scratch, composite, layout, world_size)
        for rank in range(world_size):
            _save_rank(folder / tag, scratch, composite, layout, rank, world_size)
    finally:
        scratch.close()
        (folder / "scratch").unlink()
    (folder / "latest").write_text(tag)
    return _notes(composite, layout)


def _refuse_fp16(composite: Composite) -> None:
    for spec in (spec for layer in composite.run.layer_map.trainable for spec in layer.params):
        if spec.dtype == "float16":
            raise ConfigError(
                f"--to deepspeed: {spec.name} trains in float16, and no store has the counters of "
                "DeepSpeed's dynamic loss scale: use --to hf"
            )


def _layout(
    composite: Composite, groups: Sequence[OptimizerGroup], world_size: int, sub_group_size: int
) -> _Layout:
    specs = {spec.name: spec for layer in composite.run.layer_map.trainable for spec in layer.params}
    layout = _Layout(tuple(groups), [], [], {})
    for group in groups:
        params = [specs[name] for name in group.names]
        lengths = (
            split_by_size([_part(spec, world_size) for spec in params], sub_group_size) if params else []
        )
        layout.members.append([len(layout.sub_groups) + index for index in range(len(lengths))])
        for length in lengths:
            mine, params = params[:length], params[length:]
            begin = 0
            for spec in mine:
                layout.place[spec.name] = len(layout.sub_groups), begin
                begin += _part(spec, world_size)
            layout.sub_groups.append(_SubGroup(tuple(mine), begin))
    return layout


def _part(spec: ParamSpec, world_size: int) -> int:
    """Elements of a parameter on each rank, padding included."""
    return -(-spec.numel // world_size)


# ---------------------------------------------------------------- from layers to flat tensors


def _fill(scratch: Scratch, composite: Composite, layout: _Layout, world_size: int) -> None:
    specs = {spec.name: spec for layer in composite.run.layer_map.layers for spec in layer.params}
    for layer in composite.layers():
        for name in list(layer.slices):
            fetched = layer.slices.pop(name)
            if name in layout.place:
                index, begin = layout.place[name]
                _merge_scalars(layout.sub_groups[index], name, fetched)
                numel = layout.sub_groups[index].numel
                for key, raw in fetched.tensors.items():
                    scratch.put((str(index), key), numel, fetched.dtypes[key], begin, raw)
            else:
                numel = _part(specs[name], world_size)
                scratch.put((name, FROZEN), numel, fetched.dtypes[FROZEN], 0, fetched.tensors[FROZEN])


def _merge_scalars(sub_group: _SubGroup, name: str, fetched: FetchedSlice) -> None:
    """Scalars are one per sub-group: of Adam's steps the largest, all else has to agree."""
    for key, packed in fetched.scalars.items():
        known = sub_group.scalars.get(key)
        if key == _STEP:
            sub_group.steps.add(packed["value"])
            if known is None or packed["value"] > known["value"]:
                sub_group.scalars[key] = packed
        elif known is not None and known != packed:
            raise ConfigError(
                f"--groups: {key} is {known['value']} and, for {name}, {packed['value']} in one group, which "
                "DeepSpeed keeps once: use --groups layer",
                parameter=name,
            )
        else:
            sub_group.scalars[key] = packed


def _notes(composite: Composite, layout: _Layout) -> tuple[str, ...]:
    notes = []
    mixed = [sub_group.steps for sub_group in layout.sub_groups if len(sub_group.steps) > 1]
    if mixed:
        least, most = min(map(min, mixed)), max(map(max, mixed))
        notes.append(
            f"Adam's step is one number per sub-group: {len(mixed)} of {len(layout.sub_groups)} hold layers "
            f"of different steps ({least:g} to {most:g}) and got the largest; --groups layer keeps each"
        )
    if composite.run.buffers:
        notes.append(
            f"the values of the model's buffers ({composite.run.buffers[0]}, ...) are in no store: load with "
            "load_module_strict=False"
        )
    return tuple(notes)


# ---------------------------------------------------------------- one rank's two files


def _save_rank(
    folder: Path, scratch: Scratch, composite: Composite, layout: _Layout, rank: int, world_size: int
) -> None:
    about = {"ds_config": {}, "ds_version": _deepspeed_version()}
    prefix = "bf16_" if _trains_in_bf16(composite) else ""
    _save(
        folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        _model_state(scratch, composite, layout, rank, world_size) | about,
    )
    _save(
        folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        {"optimizer_state_dict": _optimizer_state(scratch, composite, layout, rank, world_size)} | about,
    )


def _model_state(
    scratch: Scratch, composite: Composite, layout: _Layout, rank: int, world_size: int
) -> dict[str, Any]:
    run, state = composite.run, composite.plan.trainer_state
    specs = {spec.name: spec for layer in run.layer_map.layers for spec in layer.params}
    frozen = [spec for layer in run.layer_map.layers if not layer.trainable for spec in layer.params]
    empty = {name: torch.empty(0, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    return {
        # Under ZeRO-3 the module itself is empty: its parameters are in the optimizer's flat tensors.
        "module": OrderedDict(empty | {alias: empty[owner] for alias, owner in run.tied.items()}),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((spec.name, torch.Size(spec.shape)) for spec in sub_group.params)
            for sub_group in layout.sub_groups
        ],
        "frozen_param_shapes": OrderedDict((spec.name, torch.Size(spec.shape)) for spec in frozen),
        "frozen_param_fragments": OrderedDict(
            (spec.name, scratch.tensor((spec.name, FROZEN), rank)) for spec in frozen
        ),
        "shared_params": dict(run.tied),
        "lr_scheduler": state.get("lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": state.get("skipped", 0),
        "global_steps": composite.step,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "layercheck": {
            "run": run.name,
            "trainer_state": state,
            "ages": {layer.layer: layer.age for layer in composite.plan.layers},
        },
    }


def _optimizer_state(
    scratch: Scratch, composite: Composite, layout: _Layout, rank: int, world_size: int
) -> dict[str, Any]:
    indices = range(len(layout.sub_groups))
    return {
        "zero_stage": _STAGE,
        "loss_scaler": _LossScaler(float(composite.plan.trainer_state.get("loss_scale", 1.0))),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": world_size,
        "optimizer_state_dict": {
            "state": {
                index: state
                for index in indices
                if (state := _state(scratch, layout.sub_groups, index, rank))
            },
            "param_groups": _param_groups(composite, layout),
        },
        "fp32_flat_groups": [scratch.tensor((str(index), MASTER), rank) for index in indices],
    }


def _state(scratch: Scratch, sub_groups: list[_SubGroup], index: int, rank: int) -> dict[str, Any]:
    scalars = {key: unpack_scalar(packed) for key, packed in sub_groups[index].scalars.items()}
    keys = [key for name, key in scratch.regions if name == str(index) and key != MASTER]
    return scalars | {key: scratch.tensor((str(index), key), rank) for key in keys}


def _param_groups(composite: Composite, layout: _Layout) -> list[dict[str, Any]]:
    scheduled = _scheduled(composite.plan.trainer_state, len(layout.groups))
    return [
        {key: _from_json(value) for key, value in (group.settings | values).items()} | {"params": members}
        for group, members, values in zip(layout.groups, layout.members, scheduled, strict=True)
    ]


def _from_json(value: Any) -> Any:
    """Betas come from JSON as a list."""
    return tuple(value) if isinstance(value, list) else value


def _scheduled(state: TrainerState, count: int) -> list[dict[str, Any]]:
    """What the run's scheduler has set in each group for the next update; nothing where none is known.

    In other groups than the run's it is known only if it was the same in all of them.
    """
    scheduler = state.get("lr_scheduler") or state.get("hf_scheduler") or {}
    known = state.get("groups") or [{"lr": rate} for rate in scheduler.get("_last_lr") or ()]
    if len(known) == count:
        return list(known)
    return [known[0] if known and all(values == known[0] for values in known) else {}] * count


def _trains_in_bf16(composite: Composite) -> bool:
    trainable = composite.run.layer_map.trainable
    return any(spec.dtype == "bfloat16" for layer in trainable for spec in layer.params)


def _deepspeed_version() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "unknown"


# ---------------------------------------------------------------- pickles that name a class of DeepSpeed


class _LossScaler:
    """Stands for `deepspeed.runtime.fp16.loss_scaler.LossScaler`, which the files hold an object of."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale
        self.dynamic = False


_PythonPickler: Any = pickle._Pickler
"""The one whose handling of names can be changed."""


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes the name of DeepSpeed's class for ours, so that DeepSpeed need not be imported to write it."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not _LossScaler:
            super().save_global(obj, name)
            return
        self.write(pickle.GLOBAL + b"deepspeed.runtime.fp16.loss_scaler\nLossScaler\n")
        self.memoize(obj)


def _save(path: Path, value: dict[str, Any]) -> None:
    names = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
    torch.save(value, path, pickle_module=names)
