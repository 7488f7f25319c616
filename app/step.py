"""One optimizer step of one rank: a pure function of the step number and the engine's state."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from app.config import Config
from app.data import Dataset
from app.forward import answer_loss
from app.order import Order, seed_everything


@dataclass(frozen=True)
class Job:
    """All that the steps of one rank need; nothing in it changes but the engine's own state."""

    config: Config
    rank: int
    world_size: int
    dataset: Dataset
    order: Order
    engine: Any
    total_steps: int
    for_recovery: bool


def one_step(job: Job, step: int) -> torch.Tensor:
    """Forward, backward and the optimizer; returns this rank's part of the loss."""
    config, engine = job.config, job.engine
    mine = job.order.rank_indices(step, job.rank, job.world_size)
    micro_batch = config.train.micro_batch
    num_micro = len(mine) // micro_batch
    num_labels = job.dataset.label_count(job.order.step_indices(step)) / (job.world_size * num_micro)
    total = torch.zeros((), device=engine.device)
    for micro in range(num_micro):
        seed_everything(config.run.seed, step, job.rank, micro)
        batch = job.dataset.batch(mine[micro * micro_batch : (micro + 1) * micro_batch])
        loss = answer_loss(engine, batch, config.model.attention, num_labels)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / num_micro
    return total


def mean_over_ranks(job: Job, loss: torch.Tensor, report_due: bool) -> tuple[float, bool]:
    """The mean loss of the global batch, and rank 0's word on whether all ranks report now."""
    pair = torch.stack([loss / job.world_size, torch.tensor(float(report_due and job.rank == 0)).to(loss)])
    if job.world_size > 1:
        dist.all_reduce(pair)
    mean, due = pair.tolist()
    return mean, bool(due)
