"""Hashes of the layers that do not train, for runs that keep nothing else of them (`frozen: source`)."""

from typing import Any

import torch
import torch.distributed as dist
import xxhash

from layercheck.partition import ParamSlice
from layercheck.zero3 import FROZEN, Zero3Engine


def frozen_hashes(zero3: Zero3Engine) -> dict[str, str]:
    """The xxh3-128 of each frozen layer: over its parameters in model order, whole, as they are held.

    So it does not depend on the world size. Each layer is hashed by one rank, which gathers one parameter at
    a time. A collective; the same answer on every rank.

    Returns:
        Layer -> hex digest, in model order; empty if everything trains.
    """
    frozen = [layer.name for layer in zero3.layer_map.layers if not layer.trainable]
    mine: dict[str, str] = {}
    for number, layer in enumerate(frozen):
        owner = number % zero3.world_size
        digest = xxhash.xxh3_128()
        for part in zero3.slices[layer]:
            digest.update(_whole(zero3, part, owner))
        if zero3.rank == owner:
            mine[layer] = digest.hexdigest()
    every: list[dict[str, str]] = [{} for _ in range(zero3.world_size)]
    if frozen:
        dist.all_gather_object(every, mine)
    return {layer: every[number % zero3.world_size][layer] for number, layer in enumerate(frozen)}


def _whole(zero3: Zero3Engine, part: ParamSlice, owner: int) -> Any:
    """The bytes of one parameter on the rank `owner`, nothing elsewhere."""
    own = zero3.tensors(part)[FROZEN]
    size = own.element_size()
    each = -(-part.spec.numel // zero3.world_size) * size
    sent = torch.zeros(each, dtype=torch.uint8, device=zero3.collective_device)
    sent[: part.numel * size].copy_(own.view(torch.uint8))
    if zero3.rank != owner:
        dist.gather(sent, dst=owner)
        return b""
    whole = sent.new_empty(zero3.world_size, each)
    dist.gather(sent, list(whole.unbind()), dst=owner)
    return whole.view(-1)[: part.spec.numel * size].cpu().numpy().data
