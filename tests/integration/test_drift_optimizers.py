"""Any optimizer works unchanged: its updates are seen, and a fresh engine recovers it bit for bit (I10)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import open_session

SAVED_AT, LAST = 6, 11


def _adamw(params: Any) -> Any:
    import torch

    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def _plain_sgd(params: Any) -> Any:
    import torch

    return torch.optim.SGD(params, lr=1e-3)


def _sgd_with_momentum(params: Any) -> Any:
    import torch

    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True)


def _own(params: Any) -> Any:
    """An optimizer that nobody knows: sign of a slow mean, a tensor state, an int and a float."""
    import torch

    class Own(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    if not state:
                        state.update(slow=torch.zeros_like(param), count=0, size=1.0)
                    state["count"] += 1
                    state["size"] = 0.9 * state["size"] + 0.1 / state["count"]
                    state["slow"].lerp_(param.grad, 0.3)
                    param.add_(state["slow"].sign(), alpha=-group["lr"] * state["size"])

    return Own(params)


def _cpu_adam(params: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=1e-3)


def _save_and_recover(storage: str, make: Callable[[Any], Any], build: dict[str, Any]) -> dict[str, Any]:
    """Losses after `save_now` in the run itself and in a fresh engine that recovered; what was written."""
    from layercheck.persistence.shard_file import MASTER

    engine = micro.build(optimizer=make, **build)
    session = open_session(engine, storage)
    session.resume()
    for step in range(1, SAVED_AT + 1):
        zero3 = session._zero3
        before = [zero3.tensors(part)[MASTER].clone() for part in zero3.slices["layers.1"]]
        loss = micro.train_step(engine, step)
        after = [zero3.tensors(part)[MASTER] for part in zero3.slices["layers.1"]]
        moved = sum((new - old).abs().double().sum() for new, old in zip(after, before, strict=True))
        session.after_step(step, {"loss": loss})
    session.save_now()
    drift = session._need_open().ledger.meter.per_lr
    session.close("failed")
    went_on = [micro.train_step(engine, step) for step in range(SAVED_AT + 1, LAST + 1)]

    fresh = micro.build(seed=99, optimizer=make, **build)
    again = open_session(fresh, storage)
    point = again.resume()
    recovered = []
    for step in range(point.step, LAST + 1):
        recovered.append(micro.train_step(fresh, step))
        again.after_step(step, {"loss": recovered[-1]})
    again.close()
    kinds = {key for part in zero3.slices["layers.1"] for key in zero3.tensors(part)}
    return {
        "first": point.step,
        "max_age": point.receipt.max_age,
        "went_on": went_on,
        "recovered": recovered,
        "moved": float(moved),
        "drift": drift,
        "kinds": kinds,
    }


@pytest.mark.parametrize(
    ("make", "kinds", "build"),
    [
        (_adamw, {"fp32", "exp_avg", "exp_avg_sq"}, {}),
        (_plain_sgd, {"fp32"}, {}),
        (_sgd_with_momentum, {"fp32", "momentum_buffer"}, {}),
        (_own, {"fp32", "slow"}, {}),
        pytest.param(
            _cpu_adam,
            {"fp32", "exp_avg", "exp_avg_sq"},
            {"zero": {"offload_optimizer": {"device": "cpu"}}},
            marks=pytest.mark.slow,  # builds an extension
        ),
    ],
    ids=["fused adamw", "sgd", "sgd with momentum", "own", "offloaded cpu adam"],
)
def test_i10_the_state_of_any_optimizer_is_measured_and_recovered_bit_for_bit(
    tmp_path: Path, make: Callable[[Any], Any], kinds: set[str], build: dict[str, Any]
) -> None:
    for result in run_ranks(2, tmp_path, _save_and_recover, str(tmp_path / "store"), make, build):
        assert result["first"] == SAVED_AT + 1
        assert result["max_age"] == 0
        assert result["recovered"] == result["went_on"]
        assert result["kinds"] == kinds
        assert result["moved"] > 0
        assert all(value > 0 for value in result["drift"].values())
