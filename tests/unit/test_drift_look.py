"""How densely a meter looks: drift at blocks that move on, displacement at the same ones for ever."""

from types import SimpleNamespace
from typing import Any

import torch

from layercheck.config import DriftConfig
from layercheck.partition import SubGroup
from layercheck.tracking.drift import DriftMeter

NUMEL = 2_500_000


def engine() -> Any:
    layer = SimpleNamespace(name="a", kind="block", numel=NUMEL)
    return SimpleNamespace(
        layer_map=SimpleNamespace(layers=(layer,), trainable=(layer,)),
        sub_groups=(SubGroup(0, 0, "a", torch.zeros(NUMEL), ((0, NUMEL),)),),
        rank=0,
        world_size=1,
        on_update=lambda before, after: lambda: None,
    )


def test_displacement_looks_at_a_long_run_densely_and_drift_thinly() -> None:
    meter = DriftMeter(engine(), DriftConfig(kind="displacement", sample="sampled"))
    assert meter.rotation == 509
    assert meter._references is not None
    meter._references.take(0, ["a"])
    (kept,) = meter._references._kept["a"][0]
    assert kept.numel() > NUMEL / 62
