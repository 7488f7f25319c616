"""One life of a run that is killed: the app's own loop, from wherever the store says to its next SIGKILL."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from app.config import Config
from app.measure.residuals.notes import Notes, Sampler, Weights, distances, notes_of
from app.measure.residuals.regime import run_config
from app.measure.residuals.spec import KilledRun, Recovered
from app.train_loop import train
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.errors import LayerCheckError
from layercheck.persistence.shard_file import MASTER
from layercheck.receipt import ResumePoint
from layercheck.zero3 import Zero3Engine

SUBMISSION = "residuals"
STEP_S = 1.0
"""Seconds of a step in which a kill may come: short for a large model."""
_BEGUN_S = 0.03
_COMMITTED_S = 20.0
_LOOK_S = 0.005


def live(folder: str, run: KilledRun, coordinator: CoordinatorClient | None) -> None:
    """Trains to the next kill, or to the last step. On one rank, whose group has been made.

    Args:
        folder: of all runs.
        run: what is asked for.
        coordinator: outlives this process; None runs it in here.
    """
    assert dist.get_world_size() == 1, "these runs have one rank"
    config = run_config(Path(folder), run)
    watch = Watch(config, run, Notes(notes_of(Path(folder), run)))
    train(
        config,
        rank=0,
        world_size=1,
        coordinator=coordinator,
        submission=SUBMISSION,
        faults=watch,
        witness=watch,
    )


class Watch:
    """Notes the true weights, lets no step begin before the saves are committed, kills its process.

    The model is so small that its steps would be over before a commit, which takes a part of a usual step.
    A kill comes at any moment of a step of `STEP_S`: what was taken at its beginning may be lost or not.
    """

    def __init__(self, config: Config, run: KilledRun, notes: Notes) -> None:
        self._run, self._notes = run, notes
        self._events = Path(config.run.folder) / "layercheck" / "events"
        self._kill_at = next(iter(sorted(set(run.kills) - set(notes.killed_at))), None)
        self._left: frozenset[Path] = frozenset()
        self._zero3: Zero3Engine | None = None
        self._sampler: Sampler | None = None

    def built(self, engine: Any, for_recovery: bool) -> None:
        """See `Witness`."""
        self._zero3 = Zero3Engine(engine)
        if self._run.sampled:
            self._sampler = Sampler(self._notes.folder, self._weights())

    def begun(self, point: ResumePoint) -> None:
        """Compares what came back with what was lost."""
        self._left = frozenset(self._events.glob("*"))
        if point.receipt is None:
            return
        step, receipt = self._notes.killed_at[-1], point.receipt
        distance, by_layer = distances(self._notes.lost(step), self._weights())
        self._notes.add(
            Recovered(
                killed_at=step,
                distance=distance,
                by_layer=by_layer,
                t_fail=receipt.t_fail,
                resume_step=receipt.resume_step,
                lost_steps=receipt.lost_steps,
                lost_drift=receipt.lost_drift,
                max_age=receipt.max_age,
                weighted_age=receipt.weighted_age,
                nbytes=receipt.nbytes,
            )
        )

    def stepped(self, step: int) -> None:
        """The weights are those of this step; nothing of it is saved yet."""
        if self._sampler is not None:
            self._sampler.add(self._weights())
        if step == self._kill_at:
            self._notes.keep_lost(step, self._weights())

    def maybe_kill(self, rank: int, step: int) -> None:
        """See `Faults`."""
        if step == self._kill_at:
            time.sleep(STEP_S * random.Random(step).random())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_BEGUN_S)
        deadline = time.monotonic() + _COMMITTED_S
        while waited := self._not_committed():
            if time.monotonic() > deadline:
                raise LayerCheckError(f"{waited[0].name} was not committed within {_COMMITTED_S:.0f} s")
            time.sleep(_LOOK_S)

    def _not_committed(self) -> list[Path]:
        """Events of this life; what an earlier one left unfinished stays so until it is swept."""
        mine = set(self._events.iterdir()) - self._left
        return [one for one in mine if not (one / "commit.parquet").exists()]

    def _weights(self) -> Weights:
        assert self._zero3 is not None
        return {
            (part.layer, part.spec.name): self._zero3.tensors(part)[MASTER].numpy().copy()
            for parts in self._zero3.slices.values()
            for part in parts
        }
