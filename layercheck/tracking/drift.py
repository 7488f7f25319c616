"""Measures how far each layer moved in a step, and reduces it over the ranks with one all-reduce.

Hooks around the optimizer see each sub-group's fp32 partition before and after its update, so any optimizer
is measured as it really stepped. Large partitions on a CPU are sampled, see `sample.py`. Per layer l with n_l
elements, dW = W(t)-W(t-1):

    mean_abs  sum|dW| / n_l            rms      sqrt(sum dW^2 / n_l)
    rel_l1    sum|dW| / sum|W|         rel_l2   sqrt(sum dW^2 / sum W^2)

`drift.kind: displacement` measures W(t)-W(t_l) in the same norms as well, see `displacement.py`. The paper
(section 3.2) fixes the accumulated, normalised update and leaves the norm open.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from layercheck.config import DriftConfig
from layercheck.manifest import DriftReport
from layercheck.tracking.displacement import References
from layercheck.tracking.sample import SubGroupSample, norms, phase_of, rule_for
from layercheck.zero3 import SubGroup, Zero3Engine

LOST_SLOTS = 4


@dataclass(frozen=True, slots=True)
class RankNotices:
    """What one rank adds to the vector of a step.

    Attributes:
        error: this rank cannot go on: its state is not finite, or its wait is over.
        step_s: seconds of the step itself, without what the session did in it.
        stall_s: seconds for which training waited for saves since the last report.
        grace_s: seconds until this rank will be ended from outside; 0 for not announced.
        committed_step, committed_part, lost_steps, fenced: count on rank 0 alone.
    """

    backlog: float = 0.0
    error: bool = False
    committed_step: int = -1
    committed_part: int = 0
    lost_steps: tuple[int, ...] = ()
    fenced: bool = False
    step_s: float = 0.0
    stall_s: float = 0.0
    grace_s: float = 0.0


class DriftMeter:
    """Measures updates between two calls of `reduce`, which is a collective. Ends with `close`.

    Several meters may watch one engine.

    Attributes:
        hook_s: seconds inside the optimizer hooks of the step that the last `reduce` reported.
        reduce_s: seconds of that `reduce`; `collective_s` of them inside the all-reduce, most of which is
            the wait for later ranks.
    """

    def __init__(self, zero3: Zero3Engine, config: DriftConfig) -> None:
        self._zero3 = zero3
        self._order = 1 if config.norm in ("mean_abs", "rel_l1") else 2
        self._relative = config.norm.startswith("rel_")
        layers = zero3.layer_map.trainable
        self._layers = [layer.name for layer in layers]
        self._numel = [layer.numel for layer in layers]
        self._index = {name: i for i, name in enumerate(self._layers)}
        device = zero3.sub_groups[0].flat.device
        sampled = config.sample == "sampled" or (config.sample == "auto" and device.type == "cpu")
        self._samples = self._look(sampled)
        room = max(sample.numel for sample in self._samples)
        self._scratch = torch.empty(room, dtype=torch.float32, device=device)
        self._references = (
            # A whole copy of the weights is never what `auto` means.
            References(self._look(config.sample != "exact"), self._order)
            if config.kind == "displacement"
            else None
        )
        self._reduced = 0
        self._lr = self._held_lr = 0.0
        self.hook_s = self.reduce_s = self.collective_s = self._collecting_s = 0.0
        self.reset()
        self.close = zero3.on_update(self._before, self._after)

    def _look(self, sampled: bool) -> list[SubGroupSample]:
        kinds = {layer.name: layer.kind for layer in self._zero3.layer_map.trainable}
        return [
            SubGroupSample(group, rule_for(kinds[group.layer], sampled)) for group in self._zero3.sub_groups
        ]

    # ------------------------------------------------------------------ inside the optimizer step

    def _before(self, group: SubGroup, lr: float) -> None:
        started = perf_counter()
        self._lr = max(self._lr, lr)
        sample, phase = self._samples[group.index], phase_of(self._reduced)
        self._views = sample.views(phase)
        self._slots = sample.slots(self._scratch, phase)
        if self._slots:
            torch._foreach_copy_(self._slots, self._views)
        self._collecting_s += perf_counter() - started

    def _after(self, group: SubGroup) -> None:
        started = perf_counter()
        if self._slots:
            torch._foreach_sub_(self._slots, self._views)
            self._moved += norms(self._slots, self._order)
            if self._relative:
                self._held += norms(self._views, self._order)
            sample = self._samples[group.index]
            self._owners += [self._index[group.layer]] * len(sample)
            self._weights += sample.weights(phase_of(self._reduced))
        self._collecting_s += perf_counter() - started

    # ------------------------------------------------------------------ versions

    def take(self, step: int, layers: Iterable[str]) -> None:
        """A version of these layers is selected: displacement counts from here."""
        if self._references is not None:
            self._references.take(step, layers)

    def settle(self, committed: Iterable[int], lost: Iterable[int]) -> None:
        """Steps of the events whose fate is now known; displacement counts from the older version again."""
        if self._references is not None:
            for step in lost:
                self._references.lose(step)
            for step in committed:
                self._references.commit(step)

    # ------------------------------------------------------------------ once a step, on every rank

    def reset(self) -> None:
        """Forgets what was measured since the last `reduce`."""
        self._moved: list[Tensor] = []
        self._held: list[Tensor] = []
        self._owners: list[int] = []
        self._weights: list[float] = []
        self._lr = 0.0

    def reduce(self, step: int, notices: RankNotices) -> DriftReport:
        """Sums the measurements and the notices of all ranks: the one collective of a step.

        Args:
            step: the optimizer step that was measured.
            notices: this rank's flags; what rank 0 heard from the coordinator.

        Returns:
            The same report on every rank.
        """
        started = perf_counter()
        world, count = self._zero3.world_size, len(self._layers)
        device = self._zero3.collective_device
        measured = [self._sums(self._moved), self._sums(self._held)]
        if self._references is not None:
            measured += list(self._references.sums(self._layers))
        tail = torch.tensor(self._tail(notices), dtype=torch.float64)
        vector = torch.cat([*(part.to(device) for part in measured), tail.to(device)])
        posted = perf_counter()
        dist.all_reduce(vector)
        values = vector.tolist()
        self.collective_s = perf_counter() - posted
        self._reduced += 1
        self._held_lr = self._lr or self._held_lr
        self.reset()
        rows = [values[i * count : (i + 1) * count] for i in range(len(measured))]
        report = self._report(step, rows, values[len(measured) * count :], world)
        self.hook_s, self._collecting_s = self._collecting_s, 0.0
        self.reduce_s = perf_counter() - started
        return report

    def _tail(self, notices: RankNotices) -> list[float]:
        """Backlog and grace of each rank, what rank 0 knows, seconds as parts of their means, errors."""
        rank, world = self._zero3.rank, self._zero3.world_size
        tail = [0.0] * (2 * world + 4 + LOST_SLOTS + 3)
        tail[rank] = notices.backlog
        tail[world + rank] = notices.grace_s
        tail[-3:] = [notices.step_s / world, notices.stall_s / world, float(notices.error)]
        if rank == 0:
            lost = (*notices.lost_steps[:LOST_SLOTS], *[-1] * LOST_SLOTS)[:LOST_SLOTS]
            tail[2 * world : -3] = [
                float(notices.fenced),
                float(notices.committed_step),
                float(notices.committed_part),
                self._lr or self._held_lr,  # a skipped step has none of its own
                *map(float, lost),
            ]
        return tail

    def _sums(self, found: list[Tensor]) -> Tensor:
        """Per layer, the weighted sum of the powers of the norms that the hooks found."""
        sums = torch.zeros(len(self._layers), dtype=torch.float64, device=self._scratch.device)
        if found:
            owners = torch.tensor(self._owners, device=sums.device)
            weights = torch.tensor(self._weights, dtype=torch.float64, device=sums.device)
            sums.index_add_(0, owners, torch.stack(found).double() ** self._order * weights)
        return sums

    def _report(
        self, step: int, rows: Sequence[Sequence[float]], tail: Sequence[float], world: int
    ) -> DriftReport:
        fenced, committed, part, lr, *lost_slots = tail[2 * world : -3]
        return DriftReport(
            step=step,
            delta=self._normalised(rows[0], rows[1]),
            displacement=self._normalised(rows[2], rows[3]) if len(rows) > 2 else None,
            lr=lr,
            committed_step=int(committed),
            committed_part=int(part),
            lost_steps=tuple(int(slot) for slot in lost_slots if slot >= 0),
            backlog=max(tail[:world]),
            fenced=fenced > 0,
            errors=int(tail[-1]),
            step_s=tail[-3],
            stall_s=tail[-2],
            grace_s=min((slot for slot in tail[world : 2 * world] if slot > 0), default=0.0),
        )

    def _normalised(self, moved: Sequence[float], held: Sequence[float]) -> dict[str, float]:
        scale = held if self._relative else self._numel
        return {
            name: (moved[i] / scale[i] if scale[i] else moved[i]) ** (1.0 / self._order)
            for i, name in enumerate(self._layers)
        }
