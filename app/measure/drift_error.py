"""How far the sampled drift is from the exact one: two meters on one engine, the same updates."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from app.data import open_dataset
from app.measure.regime import CHECKPOINT, Regime, config
from app.model import build_engine, build_model, init_distributed, set_lr
from app.order import Order
from app.schedule import lr_at
from app.step import Job, one_step
from layercheck.config import DriftConfig
from layercheck.tracking.drift import DriftMeter, RankNotices
from layercheck.zero3 import Zero3Engine

_FIRST_STEP = 20
_EVERY = 10
_FEWEST_STEPS = 60


@dataclass(frozen=True, slots=True)
class DriftPairs:
    """(D_est, D_exact) at the moments that count: of all layers, and of the embeddings among them."""

    all_layers: list[tuple[float, float]]
    embeddings: list[tuple[float, float]]


def measure_drift(rank: int, storage: str, regime: Regime) -> DriftPairs:
    """Trains with an exact and a sampled meter on one engine.

    D is compared every 10th step from 20 on, and whenever it would have made its layer due (it then starts
    again at 0).
    """
    num_steps = max(_FEWEST_STEPS, regime.num_steps // 2)
    settings = config(storage, "layer", num_steps)
    init_distributed(settings)
    dataset = open_dataset(settings, rank)
    world_size = dist.get_world_size()
    engine: Any = build_engine(build_model(settings, dataset.tokenizer, world_size), settings, world_size)
    order = Order(len(dataset), settings.train.global_batch, settings.run.seed)
    job = Job(settings, rank, world_size, dataset, order, engine, num_steps, False)
    zero3 = Zero3Engine(engine)
    meters = [DriftMeter(zero3, DriftConfig(sample=kind)) for kind in ("auto", "exact")]
    reports = []
    for step in range(1, num_steps + 1):
        set_lr(engine, lr_at(step - 1, num_steps, settings.train))
        one_step(job, step)
        reports.append(tuple(meter.reduce(step, RankNotices()).delta for meter in meters))
    embeddings = {layer.name for layer in zero3.layer_map.trainable if layer.kind == "embedding"}
    pairs = [pair for name in zero3.layer_map.by_name for pair in _compared(reports, name)]
    of_embeddings = [pair for name in embeddings for pair in _compared(reports, name)]
    return DriftPairs(pairs, of_embeddings)


def _compared(reports: list[tuple[dict[str, float], ...]], layer: str) -> list[tuple[float, float]]:
    """(D_est, D_exact) of one layer at the moments that count."""
    mean = sum(exact[layer] for _, exact in reports) / len(reports)
    threshold = mean * float(CHECKPOINT["target_interval"])
    pairs, estimated, exact_sum = [], 0.0, 0.0
    for step, (sampled, exact) in enumerate(reports, start=1):
        estimated, exact_sum = estimated + sampled[layer], exact_sum + exact[layer]
        is_due = estimated > threshold
        if is_due or (step >= _FIRST_STEP and step % _EVERY == 0):
            pairs.append((estimated, exact_sum))
        if is_due:
            estimated = exact_sum = 0.0
    return pairs
