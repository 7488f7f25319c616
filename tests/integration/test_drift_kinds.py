"""Displacement beside path, several meters on one engine, and the group lists during an optimizer call."""

from pathlib import Path
from typing import Any

import pytest

from tests import micro
from tests.harness import run_ranks


def _meter(zero3: Any, **settings: Any) -> Any:
    from layercheck.config import DriftConfig
    from layercheck.tracking.drift import DriftMeter

    return DriftMeter(zero3, DriftConfig(**settings))


def _reduce(meter: Any, step: int) -> Any:
    from layercheck.tracking.notices import RankNotices

    return meter.reduce(step, RankNotices())


# ------------------------------------------------------------------ displacement


def _distance_and_path(norm: str) -> list[tuple[float, float, float]]:
    """(displacement, path, distance by hand) of every layer, 6 steps after a version that came at step 2."""
    import torch

    from layercheck.persistence.shard_file import MASTER
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    meter = _meter(zero3, kind="displacement", norm=norm, sample="exact")

    def weights() -> dict[str, Any]:
        return {
            name: torch.cat([zero3.tensors(part)[MASTER].clone() for part in parts]).double()
            for name, parts in zero3.slices.items()
        }

    path = dict.fromkeys(zero3.slices, 0.0)
    for step in range(1, 9):
        micro.train_step(engine, step)
        report = _reduce(meter, step)
        for name in path:
            path[name] += report.delta[name]
        if step == 2:
            meter.take(2, zero3.slices)
            path, version = dict.fromkeys(path, 0.0), weights()
    found = []
    for layer in zero3.layer_map.layers:
        moved = weights()[layer.name] - version[layer.name]
        order = 1 if norm == "mean_abs" else 2
        total = moved.abs().pow(order).sum()
        torch.distributed.all_reduce(total)
        by_hand = (total.item() / layer.numel) ** (1 / order)
        found.append((report.displacement[layer.name], path[layer.name], by_hand))
    return found


@pytest.mark.parametrize("norm", ["mean_abs", "rms"])
def test_displacement_is_the_distance_from_the_version_and_never_more_than_the_path(
    tmp_path: Path, norm: str
) -> None:
    for found in run_ranks(2, tmp_path, _distance_and_path, norm):
        for displacement, path, by_hand in found:
            assert displacement == pytest.approx(by_hand, rel=1e-4)
            assert 0 < displacement <= path * (1 + 1e-9)
        assert any(displacement < 0.99 * path for displacement, path, _ in found), "they never differ"


def _lose_and_commit() -> dict[str, dict[str, float]]:
    """Distance from the versions of step 2 and 4, as the second is lost and as it is committed."""
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    lost, kept, old = (_meter(zero3, kind="displacement") for _ in range(3))
    for step in range(1, 7):
        micro.train_step(engine, step)
        if step == 2:
            for meter in (lost, kept, old):
                meter.take(2, zero3.slices)
        if step == 4:
            lost.take(4, ["layers.0", "norm"])
            kept.take(4, ["layers.0", "norm"])
        if step == 5:
            lost.settle(committed=(2,), lost=(4,))
            kept.settle(committed=(2, 4), lost=())
    return {
        name: _reduce(meter, 6).displacement
        for name, meter in {"lost": lost, "kept": kept, "old": old}.items()
    }


def test_when_an_event_is_lost_distance_counts_from_the_version_before_it(tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path, _lose_and_commit)[0]
    assert found["lost"] == found["old"]
    for name in found["old"]:
        if name in ("layers.0", "norm"):
            assert 0 < found["kept"][name] < found["old"][name]
        else:
            assert found["kept"][name] == found["old"][name] > 0


# ------------------------------------------------------------------ several meters, and none


def _three_meters() -> list[dict[str, float]]:
    """Deltas of one meter alone, then of the same steps with two others beside it that come and go."""
    from layercheck.zero3 import Zero3Engine

    found = []
    for others in (False, True):
        engine = micro.build()
        zero3 = Zero3Engine(engine)
        meter = _meter(zero3, sample="exact")
        first = _meter(zero3, sample="sampled") if others else None
        for step in range(1, 5):
            micro.train_step(engine, step)
            if first is not None and step == 2:
                second = _meter(zero3, norm="rms")
                first.close()
                first.close()
            found.append(_reduce(meter, step).delta)
            if others and step > 2:
                assert all(value > 0 for value in _reduce(second, step).delta.values())
        meter.close()
        if others:
            second.close()
        optimizer = zero3.optimizer
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert "step" not in vars(optimizer)
        micro.train_step(engine, 5)
        assert set(_reduce(meter, 5).delta.values()) == {0.0}
    return found


def test_meters_on_one_engine_do_not_disturb_each_other_and_leave_nothing_behind(tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path, _three_meters)[0]
    assert found[:4] == found[4:]


def _two_updates_before_a_report() -> list[dict[str, float]]:
    """What a sampled and an exact meter add up; all runs of this model are small, so both look at all."""
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    meters = [_meter(Zero3Engine(engine), sample=sample) for sample in ("sampled", "exact")]
    for step in (1, 2):
        micro.train_step(engine, step)
    return [_reduce(meter, 2).delta for meter in meters]


def test_a_path_over_two_updates_is_the_sum_of_both(tmp_path: Path) -> None:
    sampled, exact = run_ranks(1, tmp_path, _two_updates_before_a_report)[0]
    assert sampled == pytest.approx(exact, rel=1e-4)


# ------------------------------------------------------------------ the alarm


def _steps_before_the_alarm(storage: str, rotation: int) -> int:
    from layercheck.tracking.drift import DriftMeter
    from tests.integration.ranks import open_session

    DriftMeter.rotation = property(lambda self: rotation)  # type: ignore[assignment, method-assign]
    session = open_session(micro.build(), storage)
    session.resume()
    steps: int = session._open.ledger.still.rotation
    session.close()
    return steps


@pytest.mark.parametrize(("rotation", "steps"), [(1, 61), (251, 251)])
def test_the_alarm_waits_until_every_element_was_looked_at(tmp_path: Path, rotation: int, steps: int) -> None:
    assert run_ranks(1, tmp_path, _steps_before_the_alarm, str(tmp_path / "store"), rotation) == [steps]


def _one_layer_never_moves(storage: str) -> tuple[list[tuple[str, ...]], list[str]]:
    import logging

    import torch

    from tests.integration.ranks import open_session

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("layercheck.exchange").addHandler(handler)
    engine = micro.build(optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-3))
    session = open_session(engine, storage)
    session.resume()
    for param in engine.module.model.norm.parameters():
        param.register_hook(torch.zeros_like)
    still = []
    for step in range(1, 67):
        loss = micro.train_step(engine, step)
        still.append(session.after_step(step, {"loss": loss}).still_layers)
    session.close()
    return still, [line for line in said if "not moving" in line]


def test_a_trainable_layer_without_any_movement_raises_one_alarm_after_a_rotation(tmp_path: Path) -> None:
    still, said = run_ranks(2, tmp_path, _one_layer_never_moves, str(tmp_path / "store"))[0]
    assert still == [()] * 60 + [("norm",)] * 6
    assert len(said) == 1
    assert "('norm',)" in said[0]


# ------------------------------------------------------------------ one group in an optimizer call


def _failing_call() -> tuple[int, int, str]:
    """Groups that a foreign hook sees during a call, and that are there after a call that raised."""
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    leave = zero3.on_update(lambda group, lr: None, lambda group: None)
    optimizer, seen = zero3.optimizer, []

    def look(stepped: Any, args: Any, kwargs: Any) -> None:
        seen.append(len(stepped.param_groups))
        if len(seen) == 3:
            raise RuntimeError("a foreign hook")

    handle = optimizer.register_step_pre_hook(look)
    try:
        micro.train_step(engine, 1)
    except RuntimeError as error:
        message = str(error)
    handle.remove()
    leave()
    return max(seen), len(optimizer.param_groups), message


def test_the_group_list_is_whole_again_after_an_optimizer_call_that_raised(tmp_path: Path) -> None:
    seen, after, message = run_ranks(1, tmp_path, _failing_call)[0]
    assert seen == 1
    assert after > 5
    assert message == "a foreign hook"


def _with_scheduler(attach_first: bool) -> list[float]:
    import torch

    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    leaves = []
    if attach_first:
        leaves.append(zero3.on_update(lambda group, lr: None, lambda group: None))
    scheduler = torch.optim.lr_scheduler.LambdaLR(zero3.optimizer, lambda step: 1.0)
    leaves.append(zero3.on_update(lambda group, lr: None, lambda group: None))
    losses = []
    for step in range(1, 4):
        losses.append(micro.train_step(engine, step))
        scheduler.step()
    for leave in leaves:
        leave()
    return [*losses, micro.train_step(engine, 4)]


def test_schedulers_of_torch_that_wrap_the_step_too_do_not_matter(tmp_path: Path) -> None:
    first = run_ranks(1, tmp_path, _with_scheduler, True)[0]
    assert first == run_ranks(1, tmp_path, _with_scheduler, False)[0]
    assert len(set(first)) == 4
