"""The DeepSpeed side: groups by layer, slices without padding, drift of the realised update."""

from pathlib import Path
from typing import Any

import pytest

from tests import micro
from tests.harness import RankFailedError, run_ranks


def _drift_against_exact(norm: str) -> list[tuple[float, float]]:
    import torch

    from layercheck.config import DriftConfig
    from layercheck.persistence.shard_file import MASTER
    from layercheck.tracking.drift import DriftMeter
    from layercheck.tracking.notices import RankNotices
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    for group in zero3.sub_groups:
        _poison_padding(zero3, group)
    meter = DriftMeter(zero3, DriftConfig(norm=norm))
    pairs = []
    for step in (1, 2):
        before = {
            name: torch.cat([zero3.tensors(part)[MASTER].clone() for part in parts])
            for name, parts in zero3.slices.items()
        }
        micro.train_step(engine, step)
        report = meter.reduce(step, RankNotices())
        for layer in zero3.layer_map.layers:
            after = torch.cat([zero3.tensors(part)[MASTER] for part in zero3.slices[layer.name]])
            moved = (after - before[layer.name]).double()
            order = 1 if norm in ("mean_abs", "rel_l1") else 2
            sums = torch.stack([moved.abs().pow(order).sum(), after.double().abs().pow(order).sum()])
            torch.distributed.all_reduce(sums)
            scale = sums[1].item() if norm.startswith("rel_") else layer.numel
            pairs.append((report.delta[layer.name], (sums[0].item() / scale) ** (1 / order)))
    return pairs


def _poison_padding(zero3: Any, group: Any) -> None:
    """What a partition holds behind its real elements is nobody's: make it loud."""
    real = {i for begin, length in group.segments for i in range(begin, begin + length)}
    for i in range(group.flat.numel()):
        if i not in real:
            group.flat[i] = float("nan")


@pytest.mark.parametrize("norm", ["mean_abs", "rms", "rel_l2", "rel_l1"])
def test_drift_is_the_norm_of_the_realised_update_and_ignores_nan_in_the_padding(
    tmp_path: Path, norm: str
) -> None:
    for pairs in run_ranks(5 if norm == "mean_abs" else 2, tmp_path, _drift_against_exact, norm):
        for measured, exact in pairs:
            assert measured == pytest.approx(exact, rel=1e-4)


def _slices() -> list[tuple[str, int, int, int]]:
    from layercheck.zero3 import Zero3Engine

    zero3 = Zero3Engine(micro.build(sub_group_size=300))
    return [
        (part.spec.name, part.offset, part.numel, part.spec.numel)
        for parts in zero3.slices.values()
        for part in parts
    ]


@pytest.mark.parametrize("world_size", [3, 5])
def test_fragments_of_every_parameter_tile_it_exactly(tmp_path: Path, world_size: int) -> None:
    from layercheck.recovery.fetch import part_of

    per_rank = run_ranks(world_size, tmp_path, _slices)
    for pieces in zip(*per_rank, strict=True):
        position = 0
        for rank, (name, offset, count, numel) in enumerate(pieces):
            assert (offset, count) == part_of(numel, rank, world_size), name
            assert offset == min(position, numel)
            position += count
        assert position == pieces[0][3]


def _stock_groups() -> None:
    from layercheck.zero3 import Zero3Engine

    Zero3Engine(micro.build(groups="stock", sub_group_size=10**9))


def test_groups_that_mix_layers_are_refused_naming_two_of_them(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"mixes the layers embed_tokens and layers\.0"):
        run_ranks(2, tmp_path, _stock_groups)


def _refusal(build: dict[str, Any]) -> str:
    from layercheck.errors import EngineRefusedError
    from layercheck.zero3 import Zero3Engine

    engine = micro.build(**build)
    try:
        Zero3Engine(engine)
    except EngineRefusedError as error:
        return str(error)
    return "taken"


def _pretend(build: dict[str, Any], name: str, value: Any) -> str:
    """The engine that needs other hardware is a usual one that says it is of that kind."""
    from layercheck.errors import EngineRefusedError
    from layercheck.zero3 import Zero3Engine

    engine = micro.build(**build)
    owner, _, attribute = name.rpartition(".")
    setattr(engine.optimizer if owner == "zero" else engine, attribute, value)
    try:
        Zero3Engine(engine)
    except EngineRefusedError as error:
        return str(error)
    return "taken"


def _all_refusals() -> list[tuple[str, str]]:
    """(expected words, message) of every kind of engine that can be built or played on a CPU."""
    return [
        ("stage = 3", _refusal({"zero": {"stage": 2}})),
        ("hpZ", _refusal({"zero": {"zero_hpz_partition_size": 2}})),
        ("NVMe offload", _pretend({}, "zero.swap_optimizer", True)),
        ("ZenFlow", _pretend({}, "zero.zenflow", True)),
        ("SuperOffload", _pretend({}, "super_offload", lambda: True)),
        ("tensor or pipeline parallelism", _pretend({}, "mp_world_size", 2)),
        ("no torch.optim.Optimizer", _pretend({}, "zero.optimizer", object())),
        ("taken", _refusal({})),
    ]


def test_engines_whose_updates_the_hooks_would_miss_are_refused_by_name(tmp_path: Path) -> None:
    for expected, message in run_ranks(2, tmp_path, _all_refusals)[0]:
        assert expected in message


def _twin_flow() -> str:
    from tests.integration.test_drift_optimizers import _cpu_adam

    return _refusal({"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "optimizer": _cpu_adam})


@pytest.mark.slow
def test_twin_flow_is_refused_by_name(tmp_path: Path) -> None:
    assert "Twin-Flow" in run_ranks(2, tmp_path, _twin_flow)[0]


def _skipped_step() -> dict[str, float]:
    from layercheck.config import DriftConfig
    from layercheck.tracking.drift import DriftMeter
    from layercheck.tracking.notices import RankNotices
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    meter = DriftMeter(zero3, DriftConfig())
    weight = next(engine.module.parameters())
    handle = weight.register_hook(lambda grad: grad * float("inf"))
    micro.train_step(engine, 1)
    handle.remove()
    assert zero3.skipped == 1
    assert zero3.step == 1
    return meter.reduce(1, RankNotices()).delta


def test_a_skipped_step_adds_no_drift(tmp_path: Path) -> None:
    for delta in run_ranks(2, tmp_path, _skipped_step):
        assert set(delta.values()) == {0.0}


def _rates_around_a_restore() -> tuple[list[float], list[float]]:
    """Rates of steps 5 and 6 of a warm-up: uninterrupted, and by a fresh engine from the state of step 4."""
    import json

    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    from layercheck.zero3 import Zero3Engine

    def build() -> tuple[Any, Zero3Engine]:
        engine = micro.build(sub_group_size=10**9)
        engine.lr_scheduler = WarmupLR(engine.optimizer, 0.0, 1e-3, warmup_num_steps=50)
        return engine, Zero3Engine(engine)

    def rate_of_next_step(engine: Any) -> float:
        rate = float(engine.optimizer.optimizer.param_groups[0]["lr"])
        tokens = torch.zeros(1, micro.SEQ, dtype=torch.long)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        return rate

    engine, zero3 = build()
    for _ in range(4):
        rate_of_next_step(engine)
    state = json.loads(json.dumps(zero3.global_state()))
    uninterrupted = [rate_of_next_step(engine) for _ in range(2)]
    fresh, restored = build()
    restored.set_global_state(4, state)
    return uninterrupted, [rate_of_next_step(fresh) for _ in range(2)]


def test_the_first_step_after_a_recovery_has_the_rate_of_the_schedule(tmp_path: Path) -> None:
    uninterrupted, recovered = run_ranks(1, tmp_path, _rates_around_a_restore)[0]
    assert recovered == uninterrupted
    assert uninterrupted[0] != uninterrupted[1]
