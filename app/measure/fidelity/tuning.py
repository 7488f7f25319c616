"""One fine-tuning run with its failures: the app's own steps, a real session, real files, one process.

A failure: the session is closed as failed, which leaves in the store what a kill would leave once the writer
is idle. The next life builds another model of the same shape, with weights of its own, and recovers into it.
"""

import gc
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from app.config import Config
from app.data import open_dataset
from app.measure.fidelity.base import base_model
from app.measure.fidelity.held_out import HeldOut
from app.measure.fidelity.moments import treat_moments
from app.measure.fidelity.regime import tuning_config, unlike
from app.measure.fidelity.spec import Outcome, Recovery, RunSpec
from app.measure.fidelity.texts import Texts, write_texts
from app.methods import open_session
from app.model import build_engine, build_model, init_distributed
from app.order import Order
from app.schedule import lr_at
from app.step import Job, mean_over_ranks, one_step
from layercheck.errors import LayerCheckError
from layercheck.receipt import Receipt
from layercheck.step_report import StepReport

_SUBMISSION = "fidelity"


def run_specs(rank: int, folder: str, specs: list[RunSpec], keep: bool) -> list[Outcome]:
    """Runs them one after the other; each outcome is a file as soon as it is known.

    Args:
        rank: 0, of a group of one.
        folder: of all files; outcomes are `<key>.json`.
        specs: runs to be made.
        keep: leave the folder of each run, with its drift and metrics.
    """
    assert rank == 0, "these runs have one rank"
    return [_run_spec(Path(folder), spec, keep) for spec in specs]


def _run_spec(folder: Path, spec: RunSpec, keep: bool) -> Outcome:
    length = spec.length
    place = folder / f"texts-{length.train_rows}-{length.held_out_rows}"
    place.mkdir(exist_ok=True)
    texts = write_texts(place, length.train_rows, length.held_out_rows)
    config = tuning_config(folder, base_model(folder, spec.model, length), texts, spec)
    shutil.rmtree(config.run.folder, ignore_errors=True)  # of a run that was broken off
    outcome = Tuning(config, spec, texts).run()
    temporary = folder / f"{spec.key}.tmp"
    temporary.write_text(outcome.model_dump_json(indent=1) + "\n")
    temporary.rename(folder / f"{spec.key}.json")
    if not keep:
        shutil.rmtree(config.run.folder)
    return outcome


@dataclass
class _Notes:
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    weighted_age: list[float] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    bytes_written: int = 0

    def add(self, report: StepReport, step_s: float, warmup_steps: int) -> None:
        self.weighted_age.append(report.weighted_age)
        self.step_s.append(step_s)
        if report.step > warmup_steps:
            self.bytes_written += report.bytes_written


class Tuning:
    """A run of one spec.

    Args:
        config: of the run; its folder does not exist yet.
        spec: what it was made from.
        texts: with the held-out rows.
    """

    def __init__(self, config: Config, spec: RunSpec, texts: Texts) -> None:
        init_distributed(config)
        self._config, self._spec = config, spec
        self._dataset = open_dataset(config)
        self._held_out = HeldOut(config, texts)
        self._notes = _Notes()

    def run(self) -> Outcome:
        """Trains to the last step, through all failures."""
        job = self._job(self._config)
        session = open_session(job, None, _SUBMISSION, False)
        step = session.resume().step
        self._notes.evaluations.append((0, self._held_out.loss(job.engine)))
        for failure in self._spec.failures:
            self._train(job, session, step, failure)
            step = failure + 1
            job, session = self._fail_and_recover(job, session, failure)
        self._train(job, session, step, self._spec.length.steps)
        session.close("completed")
        outcome = self._outcome(job)
        job.loader.close()
        job.engine.destroy()
        return outcome

    def _job(self, model_config: Config) -> Job:
        config = self._config
        engine = build_engine(build_model(model_config, self._dataset.tokenizer, 1), config, 1)
        order = Order(len(self._dataset), config.train.global_batch, config.run.seed)
        return Job(config, 0, 1, self._dataset, order, engine, self._spec.length.steps, False)

    def _train(self, job: Job, session: Any, first: int, last: int) -> None:
        warmup_steps = self._config.checkpoint.settings.warmup_steps
        for step in range(first, last + 1):
            began = time.perf_counter()
            self._set_rates(job, step)
            loss, _ = mean_over_ranks(job, one_step(job, step), False)
            report = session.after_step(step, {"loss": loss})
            self._notes.add(report, time.perf_counter() - began, warmup_steps)
            if self._spec.length.is_evaluated(step):
                self._notes.evaluations.append((step, self._held_out.loss(job.engine)))

    def _set_rates(self, job: Job, step: int) -> None:
        """The rate of the app's schedule; lower for layers further from the head if `lr_decay` says so."""
        groups = job.engine.optimizer.param_groups
        layers = list(dict.fromkeys(group["layer"] for group in groups))
        rate = lr_at(step - 1, job.total_steps, job.config.train)
        for group in groups:
            above = len(layers) - 1 - layers.index(group["layer"])
            group["lr"] = rate * self._spec.lr_decay**above

    # ------------------------------------------------------------------ a failure

    def _fail_and_recover(self, job: Job, session: Any, step: int) -> tuple[Job, Any]:
        before = self._held_out.loss(job.engine)
        session.close("failed", "a failure of the experiment")
        job.loader.close()
        job.engine.destroy()
        del session
        gc.collect()
        job = self._job(unlike(self._config, self._spec.model, seed=step))
        session = open_session(job, None, _SUBMISSION, False)
        point = session.resume()
        receipt = point.receipt
        if receipt is None or point.step != step + 1:
            raise LayerCheckError(f"after a failure at step {step} the run went on at step {point.step}")
        self._note_recovery(job, receipt, before)
        return job, session

    def _note_recovery(self, job: Job, receipt: Receipt, loss_before: float) -> None:
        ages = {str(layer["name"]): int(layer["age"]) for layer in receipt.layers}
        treat_moments(job.engine, ages, self._spec.moment)
        self._notes.recoveries.append(
            Recovery(
                step=receipt.t_fail,
                lost_steps=receipt.lost_steps,
                weighted_age=receipt.weighted_age,
                max_age=receipt.max_age,
                nbytes=receipt.nbytes,
                loss_before=loss_before,
                loss_after=self._held_out.loss(job.engine),
            )
        )

    def _outcome(self, job: Job) -> Outcome:
        notes = self._notes
        return Outcome(
            spec=self._spec,
            evaluations=tuple(notes.evaluations),
            weighted_age=tuple(notes.weighted_age),
            recoveries=tuple(notes.recoveries),
            accuracy=self._held_out.accuracy(job.engine),
            bytes_written=notes.bytes_written,
            num_parameters=sum(param.ds_numel for param in job.engine.module.parameters()),
            step_s=median(notes.step_s),
        )
