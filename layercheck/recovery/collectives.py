"""Small agreements between ranks, for the start of an attempt; training itself has one all-reduce a step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from layercheck.errors import LayerCheckError

T = TypeVar("T")


def on_rank_zero(call: Callable[[], T]) -> T:
    """Runs `call` on rank 0 and gives its result, or its LayerCheckError, to every rank. A collective."""
    answer: list[T | LayerCheckError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [call()]
        except LayerCheckError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], LayerCheckError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def count_over_ranks(count: int, device: torch.device) -> int:
    """The sum of `count` over all ranks. A collective."""
    total = torch.tensor([float(count)], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return int(total.item())


def gather(mine: T) -> list[T]:
    """What each rank gives, in rank order. A collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told
