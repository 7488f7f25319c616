"""The state of a rank as DeepSpeed itself lays it out, by a way that knows nothing of LayerCheck's slices."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Parts = dict[str, np.ndarray]


def parts_of(engine: Any) -> Parts:
    """`parameter/key` -> this rank's part, padding included; also `/step` (Adam's) and `/numel` (of all)."""
    found: Parts = {}
    for name, param, _, flat, state, begin in _walk(engine):
        end = begin + param.ds_tensor.ds_numel
        for key, tensor in [("fp32", flat), *_moments(flat, state)]:
            found[f"{name}/{key}"] = tensor.detach()[begin:end].clone().numpy()
        found[f"{name}/step"] = np.array(float(state["step"])) if "step" in state else np.array(0.0)
        found[f"{name}/numel"] = np.array(param.ds_numel)
    return found


def sub_groups_of(engine: Any) -> list[list[str]]:
    """The parameters of every sub-group."""
    groups: dict[int, list[str]] = {}
    for name, _, index, *_ in _walk(engine):
        groups.setdefault(index, []).append(name)
    return list(groups.values())


def poison_padding(engine: Any, rank: int) -> int:
    """Makes every padding element NaN, in masters and moments; returns how many there are."""
    count = 0
    for _, param, _, flat, state, begin in _walk(engine):
        part = param.ds_tensor.ds_numel
        real = max(0, min(part, param.ds_numel - rank * part))
        for tensor in (flat, *(moment for _, moment in _moments(flat, state))):
            tensor.detach()[begin + real : begin + part] = float("nan")
        count += part - real
    return count


def whole(ranks: list[Parts], key: str) -> np.ndarray:
    """One tensor of the whole model, from the parts of all ranks."""
    numel = int(ranks[0][f"{key.rpartition('/')[0]}/numel"])
    return np.concatenate([parts[key] for parts in ranks])[:numel]


def tensor_keys(parts: Parts) -> list[str]:
    """The keys of tensors: masters and moments."""
    return [key for key in parts if not key.endswith(("/step", "/numel"))]


def _walk(engine: Any) -> Iterator[tuple[str, Any, int, Any, dict[str, Any], int]]:
    names = {id(param): name for name, param in engine.module.named_parameters()}
    zero = engine.optimizer
    for index, params in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[index]
        state = zero.optimizer.state.get(flat, {})
        begin = 0
        for param in params:
            yield names[id(param)], param, index, flat, state, begin
            begin += param.ds_tensor.ds_numel


def _moments(flat: Any, state: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in state.items() if getattr(value, "numel", int)() == flat.numel()]
