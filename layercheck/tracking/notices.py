"""What the ranks tell each other beside their drift: slots of the vector that one all-reduce a step sums.

Slots by rank hold 0 on all other ranks, so that their sum is what that rank said; those of rank 0 likewise.
Seconds come as each rank's part of their mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from layercheck.drift_report import DriftReport
from layercheck.layers import LayerStep

if TYPE_CHECKING:
    from torch import Tensor

LOST_SLOTS = 4
_OF_RANK_ZERO = 6 + LOST_SLOTS
_OF_ALL = 4


@dataclass(frozen=True, slots=True)
class RankNotices:
    """What one rank says with a step.

    Attributes:
        backlog: bytes that its writer still has to write.
        error: this rank cannot go on: its state is not finite, or its wait is over.
        grad_norm: of the step; where it is not finite the rank has an error too. May live on a device.
        step_s: seconds of the step itself, without what the session did in it.
        stall_s: seconds for which training waited for saves since the last report.
        left_out: copies in memory that this rank had no room for since the last report.
        grace_s: seconds until this rank will be ended from outside; 0 for not announced.
        committed_step, committed_part, lost_steps, fenced, demoted: count on rank 0 alone.
    """

    backlog: float = 0.0
    error: bool = False
    grad_norm: "Tensor | float | None" = None
    committed_step: int = -1
    committed_part: int = 0
    lost_steps: tuple[int, ...] = ()
    fenced: bool = False
    demoted: LayerStep | None = None
    step_s: float = 0.0
    stall_s: float = 0.0
    grace_s: float = 0.0
    left_out: int = 0


class NoticeSlots:
    """Where each notice lies: backlog and grace of each rank, what rank 0 knows, what is summed.

    Args:
        rank: this rank.
        world_size: number of ranks.
        layers: all layers, in model order.
    """

    ERROR = -1
    """Index of the slot that counts ranks in error."""

    def __init__(self, rank: int, world_size: int, layers: Sequence[str]) -> None:
        self._rank, self._world = rank, world_size
        self._layers = tuple(layers)
        self.count = 2 * world_size + _OF_RANK_ZERO + _OF_ALL

    def encode(self, notices: RankNotices, lr: float) -> list[float]:
        """This rank's summands. `lr` is the largest learning rate of the step."""
        rank, world = self._rank, self._world
        slots = [0.0] * self.count
        slots[rank] = notices.backlog
        slots[world + rank] = notices.grace_s
        norm_is_bad = isinstance(notices.grad_norm, float) and not isfinite(notices.grad_norm)
        is_bad = float(notices.error or norm_is_bad)
        seconds = notices.step_s / world, notices.stall_s / world
        slots[-_OF_ALL:] = [*seconds, float(notices.left_out), is_bad]
        if rank == 0:
            lost = (*notices.lost_steps[:LOST_SLOTS], *[-1] * LOST_SLOTS)[:LOST_SLOTS]
            slots[2 * world : -_OF_ALL] = [
                float(notices.fenced),
                float(notices.committed_step),
                float(notices.committed_part),
                lr,
                *self._demotion(notices.demoted),
                *map(float, lost),
            ]
        return slots

    def decode(
        self,
        step: int,
        delta: dict[str, float],
        displacement: dict[str, float] | None,
        slots: Sequence[float],
    ) -> DriftReport:
        """The report of a step: its drift, and the sums of all ranks' slots."""
        world = self._world
        fenced, committed, part, lr, rotten, usable, *lost = slots[2 * world : -_OF_ALL]
        step_s, stall_s, left_out, errors = slots[-_OF_ALL:]
        return DriftReport(
            step=step,
            delta=delta,
            displacement=displacement,
            lr=lr,
            committed_step=int(committed),
            committed_part=int(part),
            lost_steps=tuple(int(slot) for slot in lost if slot >= 0),
            backlog=max(slots[:world]),
            fenced=fenced > 0,
            demoted=LayerStep(self._layers[int(rotten)], int(usable)) if rotten >= 0 else None,
            errors=int(errors),
            step_s=step_s,
            stall_s=stall_s,
            left_out=int(left_out),
            grace_s=min((slot for slot in slots[world : 2 * world] if slot > 0), default=0.0),
        )

    def _demotion(self, demoted: LayerStep | None) -> tuple[float, float]:
        """(number of the layer, -1 for none; step)."""
        if demoted is None:
            return -1.0, 0.0
        return float(self._layers.index(demoted.layer)), float(demoted.step)
