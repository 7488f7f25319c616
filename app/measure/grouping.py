"""What layer groups cost in an optimizer step: many groups against two, on parameters too small to matter.

The layer groups are watched by a meter, as in a session; its own seconds inside the hooks are taken off.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from app.config import parse
from app.model import build_engine, init_distributed
from layercheck.config import DriftConfig
from layercheck.tracking.drift import DriftMeter
from layercheck.tracking.notices import RankNotices
from layercheck.zero3 import Zero3Engine

_STEPS = 30
_PAIRS = 3
_WIDTH = 16
_ALL_REDUCES = 300


class _Blocks(torch.nn.Module):
    """Blocks of one matrix and one vector each: two groups a block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(num_blocks))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.float().square().mean()


def grouping_ms(rank: int, storage: str, blocks: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds per step that layer groups add: {blocks: median of (with - with stock groups)}.

    Each difference is of two engines timed one right after the other, since a machine's speed drifts.
    """
    return {str(count): 1000 * statistics.median(_differences_s(storage, count)) for count in blocks}


def _differences_s(storage: str, num_blocks: int) -> list[float]:
    return [
        _step_s(storage, num_blocks, "layer") - _step_s(storage, num_blocks, "stock") for _ in range(_PAIRS)
    ]


def scalar_all_reduce_ms(rank: int) -> float:
    """Median milliseconds of an all-reduce of one number; DeepSpeed makes one for each group's norm."""
    seconds = []
    for _ in range(_ALL_REDUCES):
        value = torch.zeros(1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(value)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def _step_s(storage: str, num_blocks: int, groups: str) -> float:
    """Median seconds of the optimizer part of a step."""
    settings = parse(
        {
            "run": {"storage": storage},
            "model": {"config": {"model_type": "qwen2"}},
            "train": {"steps": 1, "global_batch": dist.get_world_size(), "groups": groups},
            "checkpoint": {"method": "none"},
            "cluster": {"workers": dist.get_world_size()},
        }
    )
    init_distributed(settings)
    torch.manual_seed(0)
    engine: Any = build_engine(_Blocks(num_blocks), settings, dist.get_world_size())
    meter = DriftMeter(Zero3Engine(engine), DriftConfig()) if groups == "layer" else None
    seconds = []
    for step in range(_STEPS):
        inputs = torch.ones(1, _WIDTH, dtype=torch.bfloat16)
        engine.backward(engine(inputs))
        dist.barrier()
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
        if meter is not None:
            meter.reduce(step, RankNotices())
            seconds[-1] -= meter.hook_s
    engine.destroy()
    return statistics.median(seconds[5:])
