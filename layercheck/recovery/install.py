"""Puts fetched layers into a live engine, one at a time; its weights follow once all are in.

The fp32 partitions and moments of an engine that recovers are no state that anybody needs, so they are where
the layers are gathered, unchecked bytes among them until all ranks have said that all is good. What the
model computes with, its low-precision weights, changes in `finish` alone.
"""

import torch

from layercheck.errors import LayerCheckError
from layercheck.manifest import RecoveryPlan
from layercheck.partition import ParamSlice
from layercheck.persistence.elements import TORCH_DTYPES, elements
from layercheck.recovery.fetch import FetchedLayer
from layercheck.recovery.scatter import Array
from layercheck.zero3 import Zero3Engine


def start(zero3: Zero3Engine, plan: RecoveryPlan, frozen: str) -> None:
    """Makes the engine ready for the layers.

    Args:
        zero3: the engine.
        plan: its layers.
        frozen: `base`, or `source` where the frozen layers are in the engine already and in no plan.

    Raises:
        LayerCheckError: the plan lacks a layer of the engine; the engine is as it was.
    """
    planned = {layer.layer for layer in plan.layers}
    needed = zero3.layer_map.trainable if frozen == "source" else zero3.layer_map.layers
    missing = [layer.name for layer in needed if layer.name not in planned]
    if missing:
        raise LayerCheckError(f"nothing was installed: the plan has no layer {missing[0]}", layers=missing)
    zero3.begin_install()


def clear(zero3: Zero3Engine, layer: str) -> None:
    """Forgets the optimizer state of one layer, before a version of it is fetched into the engine."""
    for sub_group in zero3.sub_groups:
        if sub_group.layer == layer:
            zero3.clear_state(sub_group.index)


def room(zero3: Zero3Engine, part: ParamSlice, key: str, dtype: str) -> Array | None:
    """Where the bytes of a tensor belong, as bytes; None if they have to be copied there by `put`.

    Copied is what goes to an accelerator, and what is held in another type than it was saved in.
    """
    live = zero3.room(part, key)
    if live.device.type != "cpu" or live.dtype != TORCH_DTYPES[dtype] or not live.numel():
        return None
    return live.view(torch.uint8).numpy()


def put(zero3: Zero3Engine, fetched: FetchedLayer) -> None:
    """Replaces what is left of one layer: its scalars, and the tensors for which `room` had none."""
    for part in zero3.slices[fetched.layer]:
        found = fetched.slices[part.spec.name]
        for key, raw in found.tensors.items():
            if key not in found.placed:
                zero3.room(part, key).copy_(elements(torch.from_numpy(raw), found.dtypes[key]))
        zero3.set_scalars(part, found.scalars)


def finish(zero3: Zero3Engine) -> None:
    """Makes the weights follow. A collective: every rank calls it once all ranks hold all layers.

    Raises:
        LayerCheckError: a low-precision copy does not follow its fp32 weights.
    """
    zero3.end_install()
    stale = zero3.stale_parameter()
    if stale is not None:
        raise LayerCheckError(
            f"after the install, parameter {stale} does not show its fp32 values", parameter=stale
        )
