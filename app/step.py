"""One optimizer step of one rank: a pure function of the step number and the engine's state."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from app.config import Config
from app.data import Dataset
from app.forward import answer_loss
from app.loader import Ordered, StepLoader, StepSource
from app.order import Order, seed_everything
from app.stream import Stream


@dataclass(frozen=True)
class Job:
    """All that the steps of one rank need; what changes is the engine's own state, and data read ahead."""

    config: Config
    rank: int
    world_size: int
    dataset: Dataset | Stream
    order: Order | None
    """None of a stream, which has an order of its own."""
    engine: Any
    total_steps: int
    for_recovery: bool

    @cached_property
    def loader(self) -> StepLoader:
        """Its data."""
        return StepLoader(
            self._source,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=self.config.train.micro_batch,
            last_step=self.total_steps,
            wait_s=self.config.data.wait_s,
            pin=self.engine.device.type == "cuda",
        )

    @property
    def _source(self) -> StepSource:
        if isinstance(self.dataset, Stream):
            return self.dataset
        assert self.order is not None, "a data set of random access needs an order"
        return Ordered(self.dataset, self.order)


def one_step(job: Job, step: int) -> torch.Tensor:
    """Forward, backward and the optimizer; returns this rank's part of the loss."""
    config, engine = job.config, job.engine
    data = job.loader.take(step)
    total = torch.zeros((), device=engine.device)
    for micro, batch in enumerate(data.batches):
        seed_everything(config.run.seed, step, job.rank, micro)
        loss = answer_loss(engine, batch, config.model.attention, data.num_labels)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / len(data.batches)
    return total


def mean_over_ranks(job: Job, loss: torch.Tensor, report_due: bool) -> tuple[float, bool]:
    """The mean loss of the global batch, and rank 0's word on whether all ranks report now."""
    pair = torch.stack([loss / job.world_size, torch.tensor(float(report_due and job.rank == 0)).to(loss)])
    if job.world_size > 1:
        dist.all_reduce(pair)
    mean, due = pair.tolist()
    return mean, bool(due)
