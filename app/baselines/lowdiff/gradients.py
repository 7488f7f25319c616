"""Where DeepSpeed's averaged gradients can be seen, changed and put back.

One optimizer step, on every rank, in the training thread:
1. backward has left this rank's averaged gradient, per parameter; with fp16 an overflow ends the step here.
2. `take` sees it and may change it: what it leaves is what the norm, the clipping and the update get.
3. the norm is taken over all ranks; one that is not finite ends the step here.
4. the update of each sub-group begins: how the gradient is consumed is known from here on.
5. the next backward begins and will write where the gradient lies: `release` is called before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.baselines.lowdiff.batch_file import Consumed
from layercheck.errors import EngineRefusedError
from layercheck.persistence.scalars import pack_scalar, unpack_scalar
from layercheck.zero3 import ParamSlice, Zero3Engine

_SCHEDULED = ("lr", "momentum", "betas")


class Gradients:
    """The gradients of one engine. `slices` are this rank's real elements, in the order of all that follows.

    Raises:
        EngineRefusedError: the engine keeps its averaged gradients elsewhere.
    """

    def __init__(self, zero3: Zero3Engine) -> None:
        self._zero3 = zero3
        self._zero: Any = zero3.zero
        if self._zero.offload_optimizer:
            raise EngineRefusedError(
                "checkpoint.method=lowdiff with zero_optimization.offload_optimizer: the gradients then lie "
                "in the optimizer's own buffers; take the offload out of train.deepspeed, or another method"
            )
        by_group: list[list[ParamSlice]] = [[] for _ in zero3.sub_groups]
        for part in (part for parts in zero3.slices.values() for part in parts if part.sub_group >= 0):
            by_group[part.sub_group].append(part)
        self._by_group = [sorted(parts, key=lambda part: part.begin) for parts in by_group]
        self.slices = tuple(part for parts in self._by_group for part in parts)
        self.dtype: torch.dtype = self._zero.gradient_accumulation_dtype
        self._consumed: tuple[Any, float, float, tuple[dict[str, Any], ...]] | None = None

    def watch(self, take: Callable[[list[Tensor]], None], release: Callable[[], None]) -> Callable[[], None]:
        """Calls `take(parts)` and `release()` as the module says; `parts` are 1-D, one for each of `slices`.

        Returns:
            A function that ends it.
        """
        zero = self._zero
        norms, scale, prologue = zero._get_norm_groups, zero.unscale_and_clip_grads, zero.backward_prologue

        def norm_groups() -> Any:
            take(self._parts(zero.averaged_gradients))
            return norms()

        def unscale(sub_group: int, norm: Any) -> None:
            if sub_group == 0:
                self._consumed = (norm, float(zero.loss_scale), float(zero.clip_grad), self._scheduled())
            scale(sub_group, norm)

        def before_backward() -> None:
            release()
            prologue()

        ours = {
            "_get_norm_groups": norm_groups,
            "unscale_and_clip_grads": unscale,
            "backward_prologue": before_backward,
        }
        return _replaced(zero, ours)

    def _parts(self, averaged: Any) -> list[Tensor]:
        return [
            gradient.view(-1).narrow(0, 0, part.numel)
            for index, parts in enumerate(self._by_group)
            for part, gradient in zip(parts, averaged[index], strict=True)
        ]

    def _scheduled(self) -> tuple[dict[str, Any], ...]:
        groups = self._zero3.optimizer.param_groups
        return tuple({key: group[key] for key in _SCHEDULED if key in group} for group in groups)

    def take_consumed(self) -> Callable[[], Consumed] | None:
        """How the newest gradient was consumed, None for a skipped step; told once.

        The answer is a call, for another thread: it may have to wait for a device.
        """
        found, self._consumed = self._consumed, None
        if found is None:
            return None
        norm, loss_scale, clip, groups = found
        return lambda: Consumed(
            norm=pack_scalar("norm", norm), loss_scale=loss_scale, clip=clip, groups=groups
        )

    # ------------------------------------------------------------------ replay

    def empty(self) -> list[list[Tensor]]:
        """Zeros for `replay`: for each sub-group the partition of each parameter, padding included."""
        device = self._zero3.sub_groups[0].flat.device
        return [
            [torch.zeros(numel, dtype=self.dtype, device=device) for numel in self._partition_numels(index)]
            for index in range(len(self._by_group))
        ]

    def _partition_numels(self, sub_group: int) -> list[int]:
        return [param.partition_numel() for param in self._zero.fp16_groups[sub_group]]

    def real(self, partitions: list[list[Tensor]]) -> list[Tensor]:
        """The real elements of what `empty` gave, one for each of `slices`."""
        return self._parts(partitions)

    def replay(self, partitions: list[list[Tensor]], consumed: Consumed) -> None:
        """Steps the fp32 weights and moments as they were stepped, through DeepSpeed's own calls.

        No collective. The low-precision weights do not follow: see `Zero3Engine.end_install`.
        """
        zero = self._zero
        self._set_scheduled(consumed.groups)
        norm = unpack_scalar(consumed.norm)
        norm = norm.to(self._zero3.sub_groups[0].flat.device) if isinstance(norm, Tensor) else norm
        before = zero.clip_grad, zero.loss_scaler.cur_scale
        zero.clip_grad, zero.loss_scaler.cur_scale = consumed.clip, consumed.loss_scale
        try:
            for index, gradients in enumerate(partitions):
                zero.averaged_gradients[index] = gradients
                zero._prepare_sub_group(index, set())
                zero.unscale_and_clip_grads(index, norm)
                zero._optimizer_step(index)
                zero._release_sub_group(index, set())
        finally:
            zero.clip_grad, zero.loss_scaler.cur_scale = before

    def _set_scheduled(self, groups: tuple[dict[str, Any], ...]) -> None:
        for group, values in zip(self._zero3.optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _replaced(zero: Any, ours: dict[str, Any]) -> Callable[[], None]:
    """Puts functions of one object in the place of its own; returns what puts those back.

    Others may have replaced them before, and may do so after: then ours stay where they are called from.
    """
    before = {name: vars(zero).get(name) for name in ours}
    vars(zero).update(ours)

    def restore() -> None:
        for name, function in ours.items():
            if vars(zero).get(name) is function:
                del vars(zero)[name]
                if before[name] is not None:
                    vars(zero)[name] = before[name]

    return restore
