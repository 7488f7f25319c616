"""Hashes of the layers that do not train, for runs that keep nothing else of them (`frozen: source`)."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from layercheck.errors import LayerCheckError
from layercheck.partition import ParamSlice
from layercheck.recovery.collectives import count_over_ranks
from layercheck.zero3 import FROZEN, Zero3Engine

log = logging.getLogger(__name__)
_PROGRESS_S = 10.0


def frozen_hashes(zero3: Zero3Engine) -> dict[str, str]:
    """The xxh3-128 of each frozen layer: over its parameters in model order, whole, as they are held.

    So it does not depend on the world size. Each layer is hashed by one rank, which gathers one parameter at
    a time. A collective; the same answer on every rank.

    Returns:
        Layer -> hex digest, in model order; empty if everything trains.

    Raises:
        LayerCheckError: on every rank, if one of them cannot read or hash a layer; there it is chained to
            what happened.
    """
    frozen = [layer.name for layer in zero3.layer_map.layers if not layer.trainable]
    if not frozen:
        return {}
    with _Together(zero3, "make room for the hashes of the frozen layers") as errors, errors.kept():
        gather = _Gather(zero3, frozen)
    began = said = time.monotonic()
    _say(zero3, "frozen='source': hashing %d frozen layers, %.2f GB", len(frozen), gather.nbytes / 1e9)
    mine: dict[str, str] = {}
    for number, layer in enumerate(frozen):
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            _say(zero3, "frozen='source': %d of %d layers hashed", number, len(frozen))
        digest = gather.digest(layer, owner=number % zero3.world_size)
        if digest is not None:
            mine[layer] = digest
    every: list[dict[str, str]] = [{} for _ in range(zero3.world_size)]
    dist.all_gather_object(every, mine)
    _say(zero3, "frozen='source': hashed in %.1f s", time.monotonic() - began)
    return {layer: every[number % zero3.world_size][layer] for number, layer in enumerate(frozen)}


def _say(zero3: Zero3Engine, text: str, *values: Any) -> None:
    if zero3.rank == 0:
        log.info(text, *values)


class _Together:
    """A rank that left a row of collectives alone would hang the others: errors are kept, then all leave."""

    def __init__(self, zero3: Zero3Engine, what: str) -> None:
        self._zero3, self._what = zero3, what
        self._first: Exception | None = None

    def __enter__(self) -> "_Together":
        return self

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What may fail on one rank; no collective in it."""
        try:
            yield
        except Exception as error:
            self._first = self._first or error

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:  # a collective has failed, on all ranks
            return
        if count_over_ranks(int(self._first is not None), self._zero3.collective_device):
            who = f"rank {self._zero3.rank}" if self._first else "another rank"
            why = self._first or "see its error"
            raise LayerCheckError(f"{who} cannot {self._what}: {why}") from self._first


class _Gather:
    """Whole parameters on one rank, one at a time, in memory that all of them share.

    Attributes:
        nbytes: of all the layers.
    """

    def __init__(self, zero3: Zero3Engine, layers: list[str]) -> None:
        self._zero3 = zero3
        parts = [part for layer in layers for part in zero3.slices[layer]]
        self._sizes = {part.spec.name: zero3.tensors(part)[FROZEN].element_size() for part in parts}
        self.nbytes = sum(self._whole_bytes(part) for part in parts)
        most = max(map(self._part_bytes, parts))
        self._sent = torch.zeros(most, dtype=torch.uint8, device=zero3.collective_device)
        self._whole = self._sent.new_empty(zero3.world_size * most)

    def _whole_bytes(self, part: ParamSlice) -> int:
        return part.spec.numel * self._sizes[part.spec.name]

    def _part_bytes(self, part: ParamSlice) -> int:
        """Of one rank, the padding of the last one included."""
        return -(-part.spec.numel // self._zero3.world_size) * self._sizes[part.spec.name]

    def digest(self, layer: str, owner: int) -> str | None:
        """The hash of a layer on the rank `owner`, None elsewhere. A collective."""
        digest, mine = xxhash.xxh3_128(), self._zero3.rank == owner
        with _Together(self._zero3, f"hash the frozen layer {layer}") as errors:
            for part in self._zero3.slices[layer]:
                each = self._part_bytes(part)
                sent, whole = self._sent[:each], self._whole[: each * self._zero3.world_size]
                with errors.kept():
                    own = self._zero3.tensors(part)[FROZEN].view(torch.uint8)
                    sent[: own.numel()].copy_(own)
                dist.gather(
                    sent, list(whole.view(self._zero3.world_size, each).unbind()) if mine else None, dst=owner
                )
                with errors.kept():
                    if mine:
                        digest.update(whole[: self._whole_bytes(part)].cpu().numpy().data)
        return digest.hexdigest() if mine else None
