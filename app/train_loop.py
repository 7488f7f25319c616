"""The training loop: one for a first start, a restart after a failure, every method and every launcher."""

import json
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from app.baselines.protocol import MethodSession
from app.config import Config
from app.data import Dataset, from_rank_0, open_dataset
from app.final_model import MARK, exported
from app.memory_check import tell_memory
from app.methods import open_session, will_recover
from app.model import build_engine, build_model, init_distributed, set_lr
from app.order import Order
from app.progress import Meter
from app.runfiles import RunFiles
from app.schedule import lr_at
from app.shape import model_shape
from app.step import Job, mean_over_ranks, one_step
from app.stream import Stream, open_stream
from app.train_result import TrainResult
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.errors import FencedError, NoPlanError
from layercheck.manifest import TrainerState
from layercheck.memory.protocol import Vaults
from layercheck.receipt import ResumePoint

log = logging.getLogger("app")
Reporter = Callable[[dict[str, Any]], None]
Publisher = Callable[[Path | None, dict[str, Any]], None]
"""Takes the folder of the trained model, None beside rank 0, and the last metrics; may be a barrier."""


class Faults(Protocol):
    """What may end this process at a named place."""

    def maybe_kill(self, rank: int, step: int) -> None:
        """Ends this process if a fault names this rank and step."""
        ...


class Drains(Protocol):
    """Word of nodes that will be taken away."""

    def ask(self) -> None:
        """Asks for it; all ranks call it at the same steps, it may be a barrier."""
        ...

    @property
    def announced(self) -> bool:
        """True once there was word."""
        ...

    def due_s(self, step_s: float) -> float | None:
        """Seconds that remain for a last save, if it has to begin now."""
        ...


class Witness(Protocol):
    """What notes down the state that this rank really had."""

    def built(self, engine: Any, for_recovery: bool) -> None:
        """The engine is there."""
        ...

    def begun(self, point: ResumePoint) -> None:
        """The attempt has begun."""
        ...

    def stepped(self, step: int) -> None:
        """The optimizer has stepped."""
        ...


def train(
    config: Config,
    *,
    rank: int,
    world_size: int,
    coordinator: CoordinatorClient | None = None,
    submission: str | None = None,
    takeover: bool = False,
    vaults: Vaults | None = None,
    reporter: Reporter | None = None,
    publisher: Publisher | None = None,
    faults: Faults | None = None,
    drains: Drains | None = None,
    witness: Witness | None = None,
) -> TrainResult:
    """Trains to the last step, from wherever the store says. All ranks call it; it is one collective.

    Args:
        config: the run.
        rank: of this process.
        world_size: number of processes.
        coordinator: keeps the manifest; None runs it inside rank 0.
        submission: the same for all restarts of one submission.
        takeover: fence off another submission even if it is alive.
        vaults: of the memory tier; None keeps them in the ranks, where the tier is on.
        reporter: called on all ranks at the same steps, every `report_every_s`; may be a barrier.
        publisher: takes the trained model, once, on all ranks; None leaves it in the store.
        faults: failures to inject.
        drains: asked whenever progress is reported.
        witness: notes what the state really was.

    Returns:
        `completed`, `preempted` when the end was announced and all was saved, or `fenced` when a newer
        attempt has taken the run over.
    """
    init_distributed(config)
    job, session = _set_up(config, rank, world_size, coordinator, submission, takeover, vaults)
    if witness is not None:
        witness.built(job.engine, job.for_recovery)
    try:
        point = session.resume()
        _check_weights_are_there(job, point)
        if witness is not None:
            witness.begun(point)
        result = _run_steps(job, session, point, reporter, faults, drains, witness)
    except FencedError as fenced:
        log.warning("%s", fenced)
        session.close("fenced")
        return TrainResult("fenced", message=str(fenced))
    finally:
        job.loader.close()
        if rank == 0 and isinstance(job.dataset, Stream):
            log.info("data: of the rows read, %s", job.dataset.counts)
    if result.status == "completed" and publisher is not None:
        _publish(job, result, publisher)
    return result


def _set_up(
    config: Config,
    rank: int,
    world_size: int,
    coordinator: CoordinatorClient | None,
    submission: str | None,
    takeover: bool,
    vaults: Vaults | None,
) -> tuple[Job, MethodSession]:
    dataset = _open_data(config, rank)
    recovers = from_rank_0(lambda: _look_ahead(config, dataset, world_size), rank, config.data.wait_s)
    model = build_model(config, dataset.tokenizer, world_size, for_recovery=recovers)
    engine = build_engine(model, config, world_size)
    order, num_sequences = None, 0
    if isinstance(dataset, Dataset):
        num_sequences = len(dataset)
        order = Order(num_sequences, config.train.global_batch, config.run.seed)
    steps = config.train.total_steps(num_sequences)
    job = Job(config, rank, world_size, dataset, order, engine, steps, recovers)
    return job, open_session(job, coordinator, submission, takeover, vaults)


def _open_data(config: Config, rank: int) -> Dataset | Stream:
    if config.data.streaming:
        return open_stream(config, rank)
    dataset = open_dataset(config, rank)
    if rank == 0:
        log.info("data: %d sequences of %d tokens; %s", len(dataset), dataset.seq_len, dataset.counts)
    return dataset


def _look_ahead(config: Config, dataset: Dataset | Stream, world_size: int) -> bool:
    """Whether there is a state to recover; a run that begins is told what memory it will take first."""
    recovers = will_recover(config)
    if not recovers:
        tell_memory(model_shape(config, dataset.tokenizer), config, world_size)
    return recovers


def _publish(job: Job, result: TrainResult, publisher: Publisher) -> None:
    """Hands the model over, unless an earlier life has: one that ended between its last step and this."""
    if not job.config.export:
        return
    files = RunFiles(job.config.run.folder)
    if not result.ran and from_rank_0(lambda: files.exists(MARK), job.rank, job.config.data.wait_s):
        return
    with exported(job) as folder:
        publisher(folder, {"step": result.steps, "steps": result.steps, "loss": result.final_loss})
    if job.rank == 0:
        files.write(MARK, json.dumps({"step": result.steps}).encode())


def _check_weights_are_there(job: Job, point: ResumePoint) -> None:
    # The weights were left alone for a recovery. Should the run begin anew after all (somebody removed the
    # store meanwhile), it would silently train whatever lay in memory.
    if job.for_recovery and point.receipt is None:
        raise NoPlanError(
            f"run {job.config.run.name} had a state to recover when its model was built and has none now; "
            "give another run.name, or start it again",
            run=job.config.run.name,
        )


def _run_steps(
    job: Job,
    session: MethodSession,
    point: ResumePoint,
    reporter: Reporter | None,
    faults: Faults | None,
    drains: Drains | None,
    witness: Witness | None,
) -> TrainResult:
    state: TrainerState = dict(point.trainer_state)
    if isinstance(job.dataset, Stream):
        job.dataset.seek(point.step, state.get("data"))
    with closing(Meter(job.config, job.total_steps, job.rank)) as meter:
        for step in range(point.step, job.total_steps + 1):
            meter.begin()
            lr = lr_at(step - 1 - job.engine.skipped_steps, job.total_steps, job.config.train)
            set_lr(job.engine, lr)
            loss, report_due = mean_over_ranks(job, one_step(job, step), meter.report_due())
            state = _trainer_state(job, step, loss)
            if witness is not None:
                witness.stepped(step)
            report = session.after_step(step, state)
            meter.end(step, loss, lr, report)
            if report.preempted:
                session.close("preempted")
                return TrainResult("preempted", step, loss, meter.steps, meter.median_step_s())
            if faults is not None:
                faults.maybe_kill(job.rank, step)
            if report_due:
                _report(meter, job.rank, reporter)
            if drains is not None:
                _heed(drains, session, report_due, meter)
        if point.step <= job.total_steps:
            session.save_now(state)
        session.close("completed")
        if meter.has_news():
            _report(meter, job.rank, reporter)
        return TrainResult(
            "completed", job.total_steps, state.get("loss"), meter.steps, meter.median_step_s()
        )


def _heed(drains: Drains, session: MethodSession, ask: bool, meter: Meter) -> None:
    """Nearly every step ends at `announced`: a median over all steps so far is not for each of them."""
    if ask:
        drains.ask()
    if drains.announced and (left_s := drains.due_s(meter.median_step_s() or 0.0)) is not None:
        session.preempt(left_s)


def _trainer_state(job: Job, step: int, loss: float) -> TrainerState:
    state: TrainerState = {
        "step": step,
        "loss": loss,
        "consumed_samples": step * job.config.train.global_batch,
        "lr_index": step - job.engine.skipped_steps,
    }
    position = job.loader.position
    return state if position is None else state | {"data": position}


def _report(meter: Meter, rank: int, reporter: Reporter | None) -> None:
    metrics = meter.report()
    if rank == 0:
        log.info("%s", meter.line(metrics))
    if reporter is not None:
        reporter(metrics)
