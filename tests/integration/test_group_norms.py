"""The gradient norms of all groups in one all-reduce: DeepSpeed's own values, at any number of groups."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layercheck.group_norms import batch_group_norms
from tests import micro
from tests.harness import run_ranks


def _norms(watched: bool, poisoned: int = 0, **settings: Any) -> tuple[list[Any], int, bool]:
    """Norms of four steps, all-reduces of the last optimizer step, and if the engine is as it was after."""
    import torch
    import torch.distributed as dist

    from layercheck.zero3 import Zero3Engine

    engine = micro.build(**settings)
    zero3 = Zero3Engine(engine)
    leave = zero3.on_update(lambda group, lr: None, lambda group: None) if watched else lambda: None
    calls, all_reduce = [0], dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return all_reduce(*args, **kwargs)

    norms = []
    parameter = next(engine.module.parameters())
    dist.all_reduce = count
    for step in range(1, 5):
        calls[0] = 0
        hook = parameter.register_hook(lambda grad: grad * torch.nan) if step == poisoned else None
        micro.train_step(engine, step)
        norms.append(float(zero3.grad_norm()))
        if hook is not None:
            hook.remove()
    dist.all_reduce = all_reduce
    leave()
    norms.append([p.ds_tensor.sum().item() for p in engine.module.parameters()])
    return norms, calls[0], "_get_norm_groups" not in vars(zero3.zero)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norms_and_the_weights_are_those_of_deepspeed(tmp_path: Path, world_size: int) -> None:
    ours, fewer, _ = run_ranks(world_size, tmp_path, _norms, True)[0]
    stock, calls, _ = run_ranks(world_size, tmp_path, _norms, False)[0]
    assert ours == stock
    assert calls - fewer >= 5, "one all-reduce for each group remained"


def test_a_step_with_an_invalid_norm_is_treated_as_deepspeed_does(tmp_path: Path) -> None:
    ours, _, as_it_was = run_ranks(2, tmp_path, _norms, True, 3)[0]
    stock, _, _ = run_ranks(2, tmp_path, _norms, False, 3)[0]
    assert str(ours) == str(stock)
    assert as_it_was


def test_an_optimizer_that_computes_them_in_another_way_stays_as_it_is() -> None:
    offloaded = SimpleNamespace(
        offload_optimizer=True,
        _get_norm_groups=None,
        averaged_gradients={},
        fp16_groups=[],
        dp_process_group=0,
    )
    later_version = SimpleNamespace(offload_optimizer=False, averaged_gradients={})
    for zero in (offloaded, later_version):
        before = dict(vars(zero))
        batch_group_norms(zero)()
        assert vars(zero) == before
