"""The way back: a base, then the differentials after it, one optimizer step each.

States, all ranks together:
1. the newest base that is whole is in the engine (`rolling.roll_back`).
2. rank 0 lists the batches that follow it without a gap; the first step wanted is base + 1.
3. batch by batch each rank reads and checks its own file. If it is bad on any rank, all stop before it: the
   state never mixes steps.
4. each rank replays its own partition; no collective. Steps are not summed (Adam is not linear), and a
   skipped one changes nothing.
5. the low-precision weights follow.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from app.baselines.lowdiff.batch_file import Batch, BatchHeader, Span, StepRecord, run_after
from app.baselines.lowdiff.compress import spread
from app.baselines.lowdiff.diff_store import DiffStore
from app.baselines.lowdiff.gradients import Gradients
from app.baselines.newest import read_on_all_ranks
from layercheck.errors import StoreMismatchError
from layercheck.manifest import TrainerState
from layercheck.recovery import install
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero
from layercheck.zero3 import Zero3Engine

log = logging.getLogger("app")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was replayed.

    Attributes:
        step: newest step that is in the state, and `trainer_state` after it, None if nothing was replayed.
        steps: differentials; `nbytes` of their files, all ranks.
        load_s: seconds of reading and checking; `replay_s` of the optimizer steps, weights included.
    """

    step: int
    trainer_state: TrainerState | None
    steps: int
    nbytes: int
    load_s: float
    replay_s: float


class Replay:
    """Replays onto an engine that holds a base.

    Args:
        zero3: the engine.
        gradients: of the same engine.
        store: this rank's files.
        header: of the batches that this engine would write: others do not fit it.
    """

    def __init__(
        self, zero3: Zero3Engine, gradients: Gradients, store: DiffStore, header: BatchHeader
    ) -> None:
        self._zero3, self._gradients, self._store, self._header = zero3, gradients, store, header

    def after(self, base: int) -> Replayed:
        """Goes as far as there are differentials of all ranks without a gap. A collective.

        Raises:
            StoreMismatchError: the differentials are of another partition or type of gradient.
            StorageError: the storage does not answer one of the ranks.
        """
        spans = on_rank_zero(lambda: run_after(base, self._store.spans()))
        done = Replayed(base, None, 0, 0, 0.0, 0.0)
        partitions = self._gradients.empty() if spans else []
        self._zero3.begin_install()
        for span in spans:
            started = time.monotonic()
            batch = self._read(span)
            load_s = time.monotonic() - started
            if batch is None:
                log.warning(
                    "differentials of steps %d to %d are not whole: passed over", span.first, span.last
                )
                break
            started = time.monotonic()
            records = [record for record in batch.header.steps if record.step > base]
            for record in records:
                self._step(batch, record, partitions)
            done = Replayed(
                step=span.last,
                trainer_state=batch.header.steps[-1].trainer_state,
                steps=done.steps + len(records),
                nbytes=done.nbytes + batch.nbytes,
                load_s=done.load_s + load_s,
                replay_s=done.replay_s + time.monotonic() - started,
            )
        return self._finish(done)

    def _read(self, span: Span) -> Batch | None:
        found = read_on_all_ranks(lambda: self._store.read(span), self._zero3.collective_device)
        batch = None if found is None else found[0]
        differs = batch is not None and _kind(batch.header) != _kind(self._header)
        if count_over_ranks(int(differs), self._zero3.collective_device):
            raise StoreMismatchError(_mismatch(span, batch, self._header))
        return batch

    def _step(self, batch: Batch, record: StepRecord, partitions: list[list[torch.Tensor]]) -> None:
        if record.consumed is None:
            return
        data = torch.frombuffer(bytearray(batch.of(record)), dtype=torch.uint8)
        spread(data, self._gradients.real(partitions), self._header.rho)
        self._gradients.replay(partitions, record.consumed)

    def _finish(self, done: Replayed) -> Replayed:
        started = time.monotonic()
        install.finish(self._zero3)
        return Replayed(
            done.step,
            done.trainer_state,
            done.steps,
            count_over_ranks(done.nbytes, self._zero3.collective_device),
            done.load_s,
            done.replay_s + time.monotonic() - started,
        )


def _kind(header: BatchHeader) -> dict[str, Any]:
    return header.model_dump(exclude={"steps"})


def _mismatch(span: Span, batch: Batch | None, header: BatchHeader) -> str:
    written = {} if batch is None else _kind(batch.header)
    now = _kind(header)
    which = ", ".join(
        f"{key}={written[key]!r}, now {now[key]!r}" for key in now if written.get(key) != now[key]
    )
    return (
        f"the differentials of steps {span.first} to {span.last} cannot be replayed here "
        f"({which or 'see the error of another rank'}): set checkpoint.baseline.lowdiff, train.dtype and "
        "cluster.workers as they were, or give another run.name"
    )
