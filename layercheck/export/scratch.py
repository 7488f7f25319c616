"""Flat tensors of all ranks, gathered in one file on disk, so that memory holds one layer at a time."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layercheck.persistence.elements import elements
from layercheck.persistence.shard_file import DTYPE_BYTES
from layercheck.recovery.fetch import part_of
from layercheck.recovery.scatter import Array


@dataclass(frozen=True, slots=True)
class _Region:
    """A flat tensor of every rank in the scratch file, rank after rank."""

    offset: int
    numel: int
    dtype: str

    def of_rank(self, rank: int) -> int:
        return self.offset + rank * self.numel * DTYPE_BYTES[self.dtype]


class Scratch:
    """Flat tensors on disk. What is never put reads as zero."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._file = path.open("w+b")
        self._world_size = world_size
        self._end = 0
        self.regions: dict[tuple[str, str], _Region] = {}

    def put(self, name: tuple[str, str], numel: int, dtype: str, begin: int, whole: Array) -> None:
        """Cuts one parameter for all ranks; on each it begins at element `begin` of the flat tensor."""
        region = self.regions.get(name)
        if region is None:
            region = self.regions[name] = _Region(self._end, numel, dtype)
            size = self._world_size * numel * DTYPE_BYTES[dtype]
            self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._file.truncate(self._end)
        size = DTYPE_BYTES[region.dtype]
        for rank in range(self._world_size):
            first, count = part_of(whole.size // size, rank, self._world_size)
            if count:
                data = whole[first * size : (first + count) * size]
                os.pwrite(self._file.fileno(), data.data, region.of_rank(rank) + begin * size)

    def tensor(self, name: tuple[str, str], rank: int) -> Tensor:
        """One rank's flat tensor, mapped: the disk is read when it is used."""
        region = self.regions[name]
        nbytes = region.numel * DTYPE_BYTES[region.dtype]
        if not nbytes:  # nothing can be mapped
            return elements(torch.empty(0, dtype=torch.uint8), region.dtype)
        raw = np.memmap(self._file, np.uint8, "c", region.of_rank(rank), (nbytes,))
        return elements(torch.from_numpy(raw), region.dtype)

    def close(self) -> None:
        """Ends the use of the file; tensors that are still mapped stay readable."""
        self._file.close()
