"""One all-reduce for the gradient norms of all groups, where DeepSpeed makes one for each group.

Layer groups are many, and an all-reduce of one number costs its latency. The norms are added up in doubles as
DeepSpeed does it; with more than two ranks the order of the sum over them may be another.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NEEDED = ("_get_norm_groups", "averaged_gradients", "fp16_groups", "dp_process_group")
_INVALID = -1.0
"""How DeepSpeed marks a norm that is not finite."""


def batch_group_norms(zero: Any) -> Callable[[], None]:
    """Replaces the norms of a ZeRO-3 optimizer; one that computes them in another way stays as it is.

    Args:
        zero: the ZeRO-3 optimizer. With offload its norms come from elsewhere.

    Returns:
        A function that puts the optimizer's own way back.
    """
    if zero.offload_optimizer or not all(hasattr(zero, name) for name in _NEEDED):
        return lambda: None

    def norms() -> list[Tensor]:
        gradients = [zero.averaged_gradients[i] for i in range(len(zero.fp16_groups))]
        sums = torch.stack([_sum_of_squares(group) for group in gradients])
        dist.all_reduce(sums, group=zero.dp_process_group)
        totals = sums**0.5
        return list(torch.where(totals.isfinite(), totals, _INVALID).unbind())

    zero._get_norm_groups = norms

    def restore() -> None:
        if vars(zero).get("_get_norm_groups") is norms:
            del zero._get_norm_groups

    return restore


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.double().norm() for gradient in gradients]).square().sum()
