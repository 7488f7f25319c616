"""What of a gradient partition the optimizer consumes, and that in bytes: top-k or all of it in 16 bits.

Both change the gradient in place. What is stored is what is left there, so replay can be exact.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

INDEX = torch.int32


def num_kept(numel: int, rho: float) -> int:
    """Elements that top-k keeps of a slice: at least one of any that there are."""
    return min(numel, max(1, int(rho * numel)))


def keep_largest(part: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Sets all but the largest elements of `part` (1-D) to zero; there is no error feedback.

    Returns:
        Indices (int32, ascending) and values of the elements that stay. NaN counts as largest: an overflow
        stays one.
    """
    kept = num_kept(part.numel(), rho)
    indices = torch.topk(part.abs(), kept, sorted=False).indices.sort().values
    values = part[indices]
    part.zero_()
    part[indices] = values
    return indices.to(INDEX), values


def round_to_16_bits(part: Tensor) -> Tensor:
    """Rounds an fp32 `part` (1-D) to bfloat16 in place; one that has 16 bits already stays.

    Returns:
        The values in 16 bits: a new tensor for fp32, else `part` itself, which is still the trainer's.
    """
    if part.dtype != torch.float32:
        return part
    rounded = part.bfloat16()
    part.copy_(rounded)
    return rounded


def spread(data: Tensor, parts: Sequence[Tensor], rho: float | None) -> None:
    """Fills `parts` (1-D each) with the bytes `data` (uint8) of one differential: the inverse of the above.

    `data` holds the values of all parts one after the other, for top-k (`rho`) all indices before them.
    """
    counts = [part.numel() if rho is None else num_kept(part.numel(), rho) for part in parts]
    if rho is None:
        for part, values in zip(parts, _typed(data, _stored(parts)).split(counts), strict=True):
            part.copy_(values)
        return
    index_bytes = sum(counts) * INDEX.itemsize
    indices = _typed(data[:index_bytes], INDEX).split(counts)
    values = _typed(data[index_bytes:], parts[0].dtype).split(counts)
    for part, index, value in zip(parts, indices, values, strict=True):
        part.zero_()
        part[index.long()] = value


def stored_dtype(dtype: torch.dtype, rho: float | None) -> torch.dtype:
    """In which type the values of a gradient of this type are stored."""
    return torch.bfloat16 if rho is None and dtype == torch.float32 else dtype


def _stored(parts: Sequence[Tensor]) -> torch.dtype:
    return stored_dtype(parts[0].dtype, None)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.view(dtype) if data.numel() else torch.empty(0, dtype=dtype)
