"""Which sequences a step trains on: a pure function of (seed, epoch, step); a resume loads nothing."""

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Order:
    """The endless sequence over epochs: each epoch is one permutation of all sequences."""

    num_sequences: int
    global_batch: int
    seed: int

    def step_indices(self, step: int) -> list[int]:
        """Sequences of step 1, 2, ... whatever the world size, in order; `global_batch` of them."""
        first = (step - 1) * self.global_batch
        return [self._index(position) for position in range(first, first + self.global_batch)]

    def rank_indices(self, step: int, rank: int, world_size: int) -> list[int]:
        """The contiguous part of one rank."""
        each = self.global_batch // world_size
        return self.step_indices(step)[rank * each : (rank + 1) * each]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.num_sequences)
        return int(_permutation(self.num_sequences, self.seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_sequences)


def seed_everything(seed: int, step: int, rank: int, micro: int = 0) -> None:
    """Sets the state of every generator from its key, so that no state has to be saved."""
    words = np.random.SeedSequence([seed, step, rank, micro]).generate_state(2, np.uint32)
    key = int(words[0]) << 32 | int(words[1])
    torch.manual_seed(key)
    np.random.seed(int(words[0]))
    random.seed(key)
