"""Puts fetched layers into a live engine: all of them or none."""

import torch
from torch import Tensor

from layercheck.errors import LayerCheckError
from layercheck.recovery.fetch import Array, FetchedLayer, FetchedSlice
from layercheck.zero3 import Zero3Engine

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def install(zero3: Zero3Engine, layers: dict[str, FetchedLayer]) -> None:
    """Replaces weights, moments and optimizer scalars of every layer. A collective: all ranks call it.

    Starts only when each layer of the engine is there, so a failure before leaves the engine as it was.

    Raises:
        LayerCheckError: a layer is missing, or a low-precision copy does not follow its fp32 weights.
    """
    missing = [layer.name for layer in zero3.layer_map.layers if layer.name not in layers]
    if missing:
        raise LayerCheckError(f"nothing was installed: the plan has no layer {missing[0]}", layers=missing)
    zero3.begin_install()
    for sub_group in zero3.sub_groups:
        zero3.clear_state(sub_group.index)
    for name, parts in zero3.slices.items():
        for part in parts:
            fetched = layers[name].slices[part.spec.name]
            zero3.write(part, _tensors(fetched), fetched.scalars)
    zero3.end_install()
    stale = zero3.stale_parameter()
    if stale is not None:
        raise LayerCheckError(
            f"after the install, parameter {stale} does not show its fp32 values", parameter=stale
        )


def _tensors(fetched: FetchedSlice) -> dict[str, Tensor]:
    return {key: _tensor(raw, _DTYPES[fetched.dtypes[key]]) for key, raw in fetched.tensors.items()}


def _tensor(raw: Array, dtype: torch.dtype) -> Tensor:
    # torch refuses to see an empty array as wider elements; a rank may own nothing of a small parameter.
    return torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
