"""Measures how far each layer moved in a step, and reduces it over the ranks with one all-reduce.

Hooks around the optimizer see each sub-group's fp32 partition before and after its update, so any optimizer
is measured as it really stepped. Large partitions on a CPU are sampled, see `sample.py`. Per layer l with n_l
elements, dW = W(t)-W(t-1):

    mean_abs  sum|dW| / n_l            rms      sqrt(sum dW^2 / n_l)
    rel_l1    sum|dW| / sum|W|         rel_l2   sqrt(sum dW^2 / sum W^2)

`drift.kind: displacement` measures W(t)-W(t_l) in the same norms as well, see `displacement.py`. The paper
(section 3.2) fixes the accumulated, normalised update and leaves the norm open.

On an accelerator nothing here makes the host wait for the device (lag 1): the vector of a step is posted, and
its report is given out at the next step.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from layercheck.config import DriftConfig
from layercheck.drift_report import DriftReport
from layercheck.partition import SubGroup
from layercheck.tracking.displacement import References
from layercheck.tracking.notices import NoticeSlots, RankNotices
from layercheck.tracking.pending import PendingReport
from layercheck.tracking.sample import SubGroupSample, density_for, norms, phase_of
from layercheck.zero3 import Zero3Engine


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these values; where `device` is no CPU, without making the host wait for it."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


class _Copied(NamedTuple):
    """By run of elements: `slots` hold what the live `views` held before the update."""

    slots: list[Tensor]
    views: list[Tensor]


class DriftMeter:
    """Measures updates between two calls of `exchange` or `reduce`, both collectives. Ends with `close`.

    Several meters may watch one engine.

    Attributes:
        lag: reports that `exchange` leaves on their way.
        hook_s: seconds inside the optimizer hooks of the step that was posted last.
        reduce_s: seconds of the last exchange; `collective_s` of them inside the all-reduce, most of which is
            the wait for later ranks.
    """

    def __init__(self, zero3: Zero3Engine, config: DriftConfig, lag: int = 0) -> None:
        self._zero3 = zero3
        self.lag = lag
        self._pending: deque[PendingReport] = deque()
        self._order = 1 if config.norm in ("mean_abs", "rel_l1") else 2
        self._relative = config.norm.startswith("rel_")
        layers = zero3.layer_map.trainable
        self._layers = [layer.name for layer in layers]
        every = [layer.name for layer in zero3.layer_map.layers]
        self._notice_slots = NoticeSlots(zero3.rank, zero3.world_size, every)
        self._numel = [layer.numel for layer in layers]
        self._index = {name: i for i, name in enumerate(self._layers)}
        device = zero3.sub_groups[0].flat.device
        sampled = config.sample == "sampled" or (config.sample == "auto" and device.type == "cpu")
        self._samples = self._look(sampled)
        rooms = [sample.numel for sample in self._samples]
        # A sample is small enough to be kept until the report of the step: then one pass serves all groups.
        self._keeps = sampled
        room = sum(rooms) if self._keeps else max(rooms)
        self._scratch = torch.empty(room, dtype=torch.float32, device=device)
        self._rooms = torch.split(self._scratch, rooms) if self._keeps else [self._scratch] * len(rooms)
        self._references = (
            # A whole copy of the weights is never what `auto` means.
            References(self._look(config.sample != "exact", densest=True), self._order, device)
            if config.kind == "displacement"
            else None
        )
        self._reduced = 0
        self._lr = self._held_lr = 0.0
        self.hook_s = self.reduce_s = self.collective_s = self._collecting_s = 0.0
        self.reset()
        self.close = zero3.on_update(self._before, self._after)

    def _look(self, sampled: bool, densest: bool = False) -> list[SubGroupSample]:
        kinds = {layer.name: layer.kind for layer in self._zero3.layer_map.trainable}
        densities = {name: density_for(kind, sampled) for name, kind in kinds.items()}
        return [
            SubGroupSample(group, densities[group.layer].densest if densest else densities[group.layer])
            for group in self._zero3.sub_groups
        ]

    # ------------------------------------------------------------------ inside the optimizer step

    def _before(self, group: SubGroup, lr: float) -> None:
        started = perf_counter()
        self._lr = max(self._lr, lr)
        if group.index in self._updated:
            self._fold()
        if not self._keeps:
            self._copy([group.index])
        elif not self._updated:
            # Before the first update of a step all are as they were: one pass copies them.
            self._copy(range(len(self._samples)))
        self._updated.add(group.index)
        self._collecting_s += perf_counter() - started

    def _after(self, group: SubGroup) -> None:
        if not self._keeps:
            started = perf_counter()
            self._fold()
            self._collecting_s += perf_counter() - started

    def _copy(self, indices: Iterable[int]) -> None:
        """Keeps what these sub-groups hold at the places that are looked at."""
        phase = phase_of(self._reduced)
        slots, views = [], []
        for index in indices:
            sample = self._samples[index]
            slots += sample.slots(self._rooms[index], phase)
            views += sample.views(phase)
            self._owners += [self._index[sample.layer]] * len(sample)
            self._weights += sample.weights(phase)
        if slots:
            torch._foreach_copy_(slots, views)
        self._copied = _Copied(slots, views)

    def _fold(self) -> None:
        """Adds how far the copied elements have moved since they were copied."""
        slots, views = self._copied
        self._copied = _Copied([], [])
        self._updated.clear()
        if not slots:
            return
        torch._foreach_sub_(slots, views)
        self._moved += norms(slots, self._order)
        if self._relative:
            self._held += norms(views, self._order)

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
        self._copied = _Copied([], [])
        self._updated: set[int] = set()
        self._moved: list[Tensor] = []
        self._held: list[Tensor] = []
        self._owners: list[int] = []
        self._weights: list[float] = []
        self._lr = 0.0

    def exchange(self, step: int, notices: RankNotices) -> tuple[DriftReport, ...]:
        """Sums the measurements and the notices of all ranks: the one collective of a step.

        Args:
            step: the optimizer step that was measured.
            notices: this rank's flags; what rank 0 heard from the coordinator.

        Returns:
            The reports that are due, oldest first, the same on every rank: with lag 0 that of this step, with
            lag 1 that of the exchange before, if it was not drained.
        """
        started = perf_counter()
        vector = self._vector(notices)
        posted = perf_counter()
        self._pending.append(PendingReport(step, vector, partial(self._report, step)))
        self._reduced += 1
        self._held_lr = self._lr or self._held_lr
        self.reset()
        self.hook_s, self._collecting_s = self._collecting_s, 0.0
        reports = self._take(self.lag)
        finished = perf_counter()
        self.collective_s, self.reduce_s = finished - posted, finished - started
        return reports

    def drain(self) -> tuple[DriftReport, ...]:
        """All reports that are on their way, waited for. No collective: they were posted before."""
        return self._take(0)

    def reduce(self, step: int, notices: RankNotices) -> DriftReport:
        """`exchange` and `drain`: the report of this very exchange. Drain before to see older ones."""
        return (*self.exchange(step, notices), *self.drain())[-1]

    @property
    def rotation(self) -> int:
        """Steps in which every element of every layer is looked at."""
        return max(sample.rotation for sample in self._samples)

    @property
    def newest_pending(self) -> PendingReport | None:
        """The report of the newest exchange while it is on its way; with lag 0 there is none."""
        return self._pending[-1] if self._pending else None

    def _take(self, left: int) -> tuple[DriftReport, ...]:
        return tuple(self._pending.popleft().result() for _ in range(len(self._pending) - left))

    def _vector(self, notices: RankNotices) -> Tensor:
        """This rank's summands: partial norms by layer, then the slots of the notices."""
        self._fold()
        device = self._zero3.collective_device
        measured = [self._sums(self._moved), self._sums(self._held)]
        if self._references is not None:
            measured += self._references.sums(self._layers).unbind()
        # A skipped step has no learning rate of its own.
        slots = on_device(
            self._notice_slots.encode(notices, self._lr or self._held_lr), torch.float64, device
        )
        if isinstance(notices.grad_norm, Tensor):
            is_bad = (~torch.isfinite(notices.grad_norm.detach())).to(device, torch.float64)
            error = slots[NoticeSlots.ERROR]
            torch.maximum(error, is_bad.reshape(()), out=error)
        return torch.cat([*(part.to(device) for part in measured), slots])

    def _sums(self, found: list[Tensor]) -> Tensor:
        """Per layer, the weighted sum of the powers of the norms that the hooks found."""
        sums = torch.zeros(len(self._layers), dtype=torch.float64, device=self._scratch.device)
        if found:
            owners = on_device(self._owners, torch.int64, sums.device)
            weights = on_device(self._weights, torch.float64, sums.device)
            sums.index_add_(0, owners, torch.stack(found).double() ** self._order * weights)
        return sums

    def _report(self, step: int, values: Sequence[float]) -> DriftReport:
        count, num_rows = len(self._layers), 2 if self._references is None else 4
        rows = [values[i * count : (i + 1) * count] for i in range(num_rows)]
        return self._notice_slots.decode(
            step,
            delta=self._normalised(rows[0], rows[1]),
            displacement=self._normalised(rows[2], rows[3]) if num_rows > 2 else None,
            slots=values[num_rows * count :],
        )

    def _normalised(self, moved: Sequence[float], held: Sequence[float]) -> dict[str, float]:
        scale = held if self._relative else self._numel
        return {
            name: (moved[i] / scale[i] if scale[i] else moved[i]) ** (1.0 / self._order)
            for i, name in enumerate(self._layers)
        }
