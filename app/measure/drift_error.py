"""How far the sampled drift is from the exact one: two meters on one engine, the same updates."""

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from app.data import open_dataset
from app.measure.regime import CHECKPOINT, Regime, config
from app.model import build_engine, build_model, init_distributed, set_lr
from app.order import Order
from app.schedule import lr_at
from app.step import Job, one_step
from layercheck.config import DriftConfig
from layercheck.tracking.drift import DriftMeter
from layercheck.tracking.notices import RankNotices
from layercheck.zero3 import Zero3Engine

_FIRST_STEP = 20
_EVERY = 10
_FEWEST_STEPS = 60


Pairs = list[tuple[float, float]]
"""(D_est, D_exact)."""


@dataclass(frozen=True, slots=True)
class DriftPairs:
    """Pairs at the moments that count.

    Attributes:
        path: of all layers; `embeddings`: of the embeddings among them.
        displacement: of all layers.
    """

    path: Pairs
    embeddings: Pairs
    displacement: Pairs


def measure_drift(rank: int, storage: str, regime: Regime) -> DriftPairs:
    """Trains with exact and sampled meters of both kinds on one engine.

    The path is compared every 10th step from 20 on, and whenever it would have made its layer due (it then
    starts again at 0); the displacement every 10th step after its version, one every `target_interval` steps.
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
    samples: tuple[Literal["auto"], Literal["exact"]] = ("auto", "exact")
    paths = [DriftMeter(zero3, DriftConfig(sample=kind)) for kind in samples]
    distances = [DriftMeter(zero3, DriftConfig(kind="displacement", sample=kind)) for kind in samples]
    layers = [layer.name for layer in zero3.layer_map.trainable]
    reports, displacement = [], []
    for step in range(1, num_steps + 1):
        set_lr(engine, lr_at(step - 1, num_steps, settings.train))
        one_step(job, step)
        reports.append(tuple(meter.reduce(step, RankNotices()).delta for meter in paths))
        moved = [meter.reduce(step, RankNotices()).displacement or {} for meter in distances]
        if step > _FIRST_STEP and step % _EVERY == 0:
            displacement += [(moved[0][name], moved[1][name]) for name in layers]
        if step >= _FIRST_STEP and (step - _FIRST_STEP) % int(CHECKPOINT["target_interval"]) == 0:
            for meter in distances:
                meter.take(step, layers)
    job.loader.close()
    embeddings = {layer.name for layer in zero3.layer_map.trainable if layer.kind == "embedding"}
    path = [pair for name in layers for pair in _compared(reports, name)]
    of_embeddings = [pair for name in sorted(embeddings) for pair in _compared(reports, name)]
    return DriftPairs(path, of_embeddings, displacement)


def _compared(reports: list[tuple[dict[str, float], ...]], layer: str) -> Pairs:
    """(D_est, D_exact) of one layer at the moments that count."""
    mean = sum(exact[layer] for _, exact in reports) / len(reports)
    threshold = mean * float(CHECKPOINT["target_interval"])
    pairs: Pairs = []
    estimated = exact_sum = 0.0
    for step, (sampled, exact) in enumerate(reports, start=1):
        estimated, exact_sum = estimated + sampled[layer], exact_sum + exact[layer]
        is_due = estimated > threshold
        if is_due or (step >= _FIRST_STEP and step % _EVERY == 0):
            pairs.append((estimated, exact_sum))
        if is_due:
            estimated = exact_sum = 0.0
    return pairs
