"""Which elements of a partition are looked at: all, or blocks at equal distances that move on every step.

`every` is a prime. Distances are then no multiple of a row's length, so one step's blocks are spread over all
columns of a matrix; and any step between two phases visits every block once in `every` steps (one rotation).
A block is one cache line: for the same memory traffic, many short blocks say more than few long ones, most of
all for embeddings, whose updates sit in the rows of the tokens that were seen; those are sampled more densely
too. The error depends on the number of blocks, not on their share: a long run is looked at more thinly.

Largest error of the accumulated path from step 20 on, Zipf tokens, one block in 61: 0.1 % for AdamW at 26 M
parameters on two ranks (of a single step 1.1 %); with 280 blocks in each long run 2.3 % at 32 M (99th
percentile; embedding 0.2 %). For matrices of 44 k to 0.5 M elements, where a sample is
small: AdamW 0.7 %, plain SGD 4.5 % (embedding 3.3 %); blocks of 256, one in 64, gave 2.6 and 15 % there.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from layercheck.layers import LayerKind
from layercheck.partition import SubGroup

SMALL_NUMEL = 32768
"""A run of elements up to this size is looked at as a whole."""
_PHASE_STEP = 27  # neighbouring steps look at distant blocks


@dataclass(frozen=True, slots=True)
class Rule:
    """Blocks of `block` elements, one in `every`."""

    block: int
    every: int


@dataclass(frozen=True, slots=True)
class Density:
    """How densely runs are looked at: by the first rule, the thinnest, that leaves `enough` blocks."""

    rules: tuple[Rule, ...]
    enough: int = 0

    def rule(self, length: int) -> Rule:
        """The rule for a run of `length` elements; the densest for one that is short."""
        fitting = (rule for rule in self.rules if length // rule.block // rule.every >= self.enough)
        return next(fitting, self.rules[-1])

    @property
    def densest(self) -> "Density":
        """For a measure that looks at the same elements for ever: nothing averages its error out."""
        return Density(self.rules[-1:])


EXACT = Density((Rule(1, 1),))
SAMPLED = Density((Rule(16, 509), Rule(16, 251), Rule(16, 127), Rule(16, 61)), enough=256)
SAMPLED_EMBEDDING = Density((Rule(16, 251), Rule(16, 127), Rule(16, 61), Rule(16, 17)), enough=512)


def density_for(kind: LayerKind, sampled: bool) -> Density:
    """How the layers of one kind are looked at."""
    if not sampled:
        return EXACT
    return SAMPLED_EMBEDDING if kind == "embedding" else SAMPLED


def phase_of(count: int) -> int:
    """The phase after `count` steps."""
    return count * _PHASE_STEP


@dataclass(slots=True)
class _Run:
    """One run of real elements of a partition, without padding."""

    flat: Tensor
    begin: int
    length: int
    rule: Rule
    slot_at: int
    slots: dict[int, Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.length <= SMALL_NUMEL or self.rule.every == 1

    def count(self, phase: int) -> int:
        """Elements looked at."""
        if self.whole:
            return self.length
        blocks, every = self.length // self.rule.block, self.rule.every
        return (blocks - phase % every + every - 1) // every * self.rule.block

    def view(self, phase: int) -> Tensor:
        """The live elements, of shape (blocks, block) or (length,)."""
        if self.whole:
            return self.flat.narrow(0, self.begin, self.length)
        block, every = self.rule.block, self.rule.every
        first = self.flat.storage_offset() + self.begin + phase % every * block
        return self.flat.as_strided((self.count(phase) // block, block), (block * every, 1), first)

    def slot(self, scratch: Tensor, phase: int) -> Tensor:
        """Room for a copy of `view(phase)`. There are two sizes, so both are kept."""
        count = self.count(phase)
        if count not in self.slots:
            room = scratch.narrow(0, self.slot_at, count)
            self.slots[count] = room if self.whole else room.view(-1, self.rule.block)
        return self.slots[count]


class SubGroupSample:
    """The elements of one sub-group that are looked at.

    Args:
        group: the sub-group.
        density: how to sample its long runs.
    """

    def __init__(self, group: SubGroup, density: Density) -> None:
        self.layer = group.layer
        self._runs: list[_Run] = []
        self.numel = 0
        """Elements looked at in phase 0, the most of all phases."""
        for begin, length in group.segments:
            run = _Run(group.flat, begin, length, density.rule(length), self.numel)
            self._runs.append(run)
            self.numel += run.count(0)
        self._whole_views = [run.view(0) for run in self._runs if run.whole]

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def rotation(self) -> int:
        """Steps in which every element is looked at."""
        return max((run.rule.every for run in self._runs if not run.whole), default=1)

    def views(self, phase: int) -> list[Tensor]:
        """The live elements, one tensor for each run."""
        if len(self._whole_views) == len(self._runs):
            return self._whole_views
        return [run.view(phase) for run in self._runs]

    def slots(self, scratch: Tensor, phase: int) -> list[Tensor]:
        """Tensors of the same shapes in `scratch`, which has at least `numel` elements."""
        return [run.slot(scratch, phase) for run in self._runs]

    def weights(self, phase: int) -> list[float]:
        """What each run's sum over the sample is multiplied with to stand for the whole run."""
        return [run.length / run.count(phase) for run in self._runs]


def norms(tensors: list[Tensor], order: int) -> list[Tensor]:
    """The norm of each tensor, a scalar each; on a CPU in doubles if any has over `SMALL_NUMEL` elements.

    For fewer, fp32 is 4e-4 off at most, and doubles are dear: they are made in a buffer of their own, and to
    free one of more than 64 KB makes glibc trim the heap of all that the step has left there (3 ms here).
    """
    is_long = max(tensor.numel() for tensor in tensors) > SMALL_NUMEL
    dtype = torch.float64 if is_long and tensors[0].device.type == "cpu" else None
    return list(torch._foreach_norm(tensors, order, dtype=dtype))
