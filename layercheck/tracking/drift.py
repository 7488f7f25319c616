"""Measures how far each layer moved in a step, and reduces it over the ranks with one all-reduce.

Hooks around the optimizer see each sub-group's fp32 partition before and after its update, so any optimizer
is measured as it really stepped. Large partitions on a CPU are sampled: contiguous blocks, one in
`SAMPLE_EVERY`, rotating from step to step so that the whole partition is visited. Per layer l with n_l
elements, dW = W(t)-W(t-1):

    mean_abs  sum|dW| / n_l            rms      sqrt(sum dW^2 / n_l)
    rel_l1    sum|dW| / sum|W|         rel_l2   sqrt(sum dW^2 / sum W^2)

The paper (section 3.2) fixes the accumulated, normalised update and leaves the norm open.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from layercheck.config import DriftConfig
from layercheck.manifest import DriftReport
from layercheck.zero3 import SubGroup, Zero3Engine

BLOCK = 256
SAMPLE_EVERY = 64
SMALL_NUMEL = 32768
LOST_SLOTS = 4
_STRIDE = 27  # coprime to SAMPLE_EVERY: neighbouring steps look at distant blocks


@dataclass(frozen=True, slots=True)
class RankNotices:
    """What one rank adds to the vector of a step.

    `error`: this rank cannot go on: its state is not finite, or its wait is over. The fields after it count
    on rank 0 alone.
    """

    backlog: float = 0.0
    error: bool = False
    committed_step: int = -1
    committed_part: int = 0
    lost_steps: tuple[int, ...] = ()
    fenced: bool = False


class DriftMeter:
    """Measures updates between two calls of `reduce`, which is a collective."""

    def __init__(self, zero3: Zero3Engine, config: DriftConfig) -> None:
        self._zero3 = zero3
        self._order = 1 if config.norm in ("mean_abs", "rel_l1") else 2
        self._relative = config.norm.startswith("rel_")
        self._layers = [layer.name for layer in zero3.layer_map.trainable]
        self._numel = [layer.numel for layer in zero3.layer_map.trainable]
        self._index = {name: i for i, name in enumerate(self._layers)}
        device = zero3.sub_groups[0].flat.device
        on_cpu = device.type == "cpu"
        sampled = config.sample == "sampled" or (config.sample == "auto" and on_cpu)
        self._small = SMALL_NUMEL if sampled else math.inf
        self._vector_device = zero3.collective_device
        self._phase = 0
        self._sums = torch.zeros(2, len(self._layers), dtype=torch.float64, device=device)
        self._scratch = torch.empty(self._scratch_numel(), dtype=torch.float32, device=device)
        self._lr = self._held_lr = 0.0
        zero3.on_update(self._before, self._after)

    # ------------------------------------------------------------------ inside the optimizer step

    def _scratch_numel(self) -> int:
        return max(sum(view.numel() for view, _ in self._views(group)) for group in self._zero3.sub_groups)

    def _views(self, group: SubGroup) -> list[tuple[Tensor, float]]:
        """What this step looks at, as (view, weight): `weight` scales the view's sum to its segment."""
        views: list[tuple[Tensor, float]] = []
        for begin, length in group.segments:
            run = group.flat.narrow(0, begin, length)
            blocks = length // BLOCK
            if length <= self._small or blocks < SAMPLE_EVERY:
                views.append((run, 1.0))
                continue
            chosen = run[: blocks * BLOCK].view(blocks, BLOCK)[self._phase % SAMPLE_EVERY :: SAMPLE_EVERY]
            views.append((chosen, length / chosen.numel()))
        return views

    def _before(self, group: SubGroup, lr: float) -> None:
        self._lr = max(self._lr, lr)
        offset = 0
        for view, _ in self._views(group):
            self._scratch[offset : offset + view.numel()].view(view.shape).copy_(view)
            offset += view.numel()

    def _after(self, group: SubGroup) -> None:
        layer, offset = self._index[group.layer], 0
        for view, weight in self._views(group):
            moved = self._scratch[offset : offset + view.numel()].view(view.shape)
            moved.sub_(view)
            self._sums[0, layer] += weight * self._power_sum(moved)
            if self._relative:
                self._sums[1, layer] += weight * self._power_sum(view)
            offset += view.numel()

    def _power_sum(self, values: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(values, ord=self._order, dtype=torch.float64)
        return norm if self._order == 1 else norm * norm

    # ------------------------------------------------------------------ once a step, on every rank

    def reset(self) -> None:
        """Forgets what was measured since the last `reduce`."""
        self._sums.zero_()
        self._lr = 0.0

    def reduce(self, step: int, notices: RankNotices) -> DriftReport:
        """Sums the measurements and the notices of all ranks: the one collective of a step.

        Args:
            step: the optimizer step that was measured.
            notices: this rank's flags; what rank 0 heard from the coordinator.

        Returns:
            The same report on every rank.
        """
        rank, world = self._zero3.rank, self._zero3.world_size
        count = len(self._layers)
        tail = [0.0] * (2 * world + 4 + LOST_SLOTS)
        tail[rank] = notices.backlog
        tail[world + rank] = float(notices.error)
        if rank == 0:
            lost = (*notices.lost_steps[:LOST_SLOTS], *[-1] * LOST_SLOTS)[:LOST_SLOTS]
            tail[2 * world :] = [
                float(notices.fenced),
                float(notices.committed_step),
                float(notices.committed_part),
                self._lr or self._held_lr,  # a skipped step has none of its own
                *map(float, lost),
            ]
        vector = torch.cat(
            [
                self._sums.flatten().to(self._vector_device),
                torch.tensor(tail, dtype=torch.float64, device=self._vector_device),
            ]
        )
        dist.all_reduce(vector)
        values = vector.tolist()
        self._sums.zero_()
        self._phase += _STRIDE
        self._held_lr, self._lr = self._lr or self._held_lr, 0.0
        flags = values[2 * count :]
        fenced, committed, part, lr, *lost_slots = flags[2 * world :]
        return DriftReport(
            step=step,
            delta=self._deltas(values[:count], values[count : 2 * count]),
            lr=lr,
            committed_step=int(committed),
            committed_part=int(part),
            lost_steps=tuple(int(slot) for slot in lost_slots if slot >= 0),
            backlog=max(flags[:world]),
            fenced=fenced > 0,
            errors=int(sum(flags[world : 2 * world])),
        )

    def _deltas(self, moved: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
        scale = weights if self._relative else self._numel
        return {
            name: (moved[i] / scale[i] if scale[i] else moved[i]) ** (1.0 / self._order)
            for i, name in enumerate(self._layers)
        }
