"""Scalars of the optimizer state, such as the Adam step, as JSON values that keep their type."""

from typing import Any

import torch
from torch import Tensor

from layercheck.errors import EngineRefusedError


def pack_scalar(key: str, value: Any) -> dict[str, Any]:
    """{kind, value} of one scalar of an optimizer's state.

    Raises:
        EngineRefusedError: the value is no scalar.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"kind": f"tensor:{str(value.dtype).removeprefix('torch.')}", "value": value.item()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"kind": type(value).__name__, "value": value}
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise EngineRefusedError(
        f"optimizer state {key!r} ({shape}) is neither a scalar nor of its partition's size: this "
        "optimizer cannot be saved layer by layer",
        key=key,
    )


def unpack_scalar(packed: dict[str, Any]) -> Any:
    """What `pack_scalar` was given, of the same type."""
    kind, value = packed["kind"], packed["value"]
    if kind.startswith("tensor:"):
        return torch.tensor(value, dtype=getattr(torch, kind.removeprefix("tensor:")))
    return int(value) if kind == "int" else float(value)
