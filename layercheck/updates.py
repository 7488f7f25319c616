"""Sees every optimizer call, and keeps one call per layer group cheap.

ZeRO-3 makes one optimizer call per sub-group, with only that group's `params` filled. An optimizer of torch
walks over all its groups in each call, the empty ones too: G layer groups cost G x G turns a step. While a
call runs, `param_groups` therefore holds the one group that has something to step; an empty group changes
nothing in those optimizers, so every result keeps its bits.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layercheck.errors import EngineRefusedError

Before = Callable[[int, float], None]
After = Callable[[int], None]

_EMPTY_GROUPS_DO_NOTHING = ("torch.optim.", "deepspeed.ops.adam.", "deepspeed.ops.lion.")
"""Homes of the optimizers whose `step` passes an empty group over. All others keep the full list."""


class OptimizerCalls:
    """Tells listeners which partition each optimizer call updates, and at what learning rate.

    Without listeners the optimizer is as it was.

    Args:
        optimizer: the optimizer that DeepSpeed calls.
        partitions: flat fp32 tensor of each sub-group, in the order in which they are stepped.
        groups: index into `optimizer.param_groups` of each sub-group.
        batch_norms: makes the gradient norms of many groups cheap while there are listeners, see
            `group_norms.py`; returns how to end it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        partitions: Sequence[Tensor],
        groups: Sequence[int],
        batch_norms: Callable[[], Callable[[], None]],
    ) -> None:
        self._optimizer = optimizer
        self._partitions = tuple(partitions)
        self._groups = tuple(groups)
        self._index_of = {id(partition): index for index, partition in enumerate(partitions)}
        self._batch_norms = batch_norms
        self._restore_norms: Callable[[], Any] = lambda: None
        self._listeners: tuple[tuple[Before, After], ...] = ()
        self._hooks: list[Any] = []
        self._stepping = -1
        self._narrowing = False
        self._own_step: Any = None
        self._inner_step: Any = None

    def listen(self, before: Before, after: After) -> Callable[[], None]:
        """Calls `before(index, lr)` and `after(index)` around each update.

        Returns:
            A function that ends it; harmless to call twice.
        """
        pair = (before, after)
        if not self._listeners:
            self._install()
        self._listeners = (*self._listeners, pair)

        def leave() -> None:
            others = tuple(other for other in self._listeners if other is not pair)
            if self._listeners and not others:
                self._remove()
            self._listeners = others

        return leave

    # ------------------------------------------------------------------ inside an optimizer call

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        groups = optimizer.param_groups
        group = groups[0] if self._narrowing else self._locate(groups)
        for before, _ in self._listeners:
            before(self._stepping, float(group["lr"]))

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for _, after in self._listeners:
            after(self._stepping)

    def _locate(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The group that has something to step. DeepSpeed goes in order: the next one is tried first."""
        index = (self._stepping + 1) % len(self._partitions)
        position = self._groups[index]
        group = groups[position] if position < len(groups) else groups[0]
        if not (group["params"] and group["params"][0] is self._partitions[index]):
            group = next((group for group in groups if group["params"]), {"params": [None]})
            index = self._index_of.get(id(group["params"][0]), -1)
            if index < 0:
                raise EngineRefusedError("an optimizer step of tensors that are no ZeRO-3 partition")
        self._stepping = index
        return group

    # ------------------------------------------------------------------ on and off

    def _install(self) -> None:
        optimizer = self._optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self._restore_norms = self._batch_norms()
        if f"{type(optimizer).__module__}.".startswith(_EMPTY_GROUPS_DO_NOTHING):
            self._narrow(optimizer)

    def _narrow(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces `optimizer.step`; a hook could not put the list back when the step itself raises."""
        inner = optimizer.step

        @functools.wraps(inner)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._narrowing:
                return inner(*args, **kwargs)
            groups = optimizer.param_groups
            optimizer.param_groups = [self._locate(groups)]
            try:
                return inner(*args, **kwargs)
            finally:
                optimizer.param_groups = groups

        # A bound method, not a function: the LR schedulers of torch take it apart.
        self._own_step = types.MethodType(step, optimizer)
        self._inner_step = vars(optimizer).get("step")
        self._narrowing = True
        optimizer.step = self._own_step  # type: ignore[method-assign]

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._restore_norms()
        if not self._narrowing:
            return
        self._narrowing = False
        if vars(self._optimizer).get("step") is not self._own_step:
            return  # somebody has wrapped our wrapper since: it stays, and passes every call on
        if self._inner_step is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._inner_step  # type: ignore[method-assign]
