"""The one object that an application holds: resume, after_step, save_now, close.

Saving goes tracking -> persistence -> coordination, recovering goes coordination -> recovery; only this file
knows both. All methods are collectives: every rank calls them at the same step.
"""

import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from layercheck.age_bound import wait_for_commits
from layercheck.attempt import Attempt, start_attempt
from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.in_process import RankZeroClient, in_process_client
from layercheck.coordination.protocol import AttemptGrant, CoordinatorClient
from layercheck.decision import PersistDecision
from layercheck.errors import (
    LayerCheckError,
    NonFiniteStateError,
    PreemptedError,
    StorageError,
)
from layercheck.exchange import Exchange
from layercheck.last_save import everything, save_before_end
from layercheck.manifest import MEMORY_PART, EventId, TrainerState
from layercheck.memory.protocol import Vaults
from layercheck.memory.tier import MemoryTier, open_tier
from layercheck.overlap import overlap_of
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.shard_file import RngState
from layercheck.persistence.storage import Readable, Storage, open_run_folder, open_storage
from layercheck.receipt import Receipt, ResumePoint
from layercheck.recovery import rng as random_state
from layercheck.recovery.begin import Submission, begin
from layercheck.recovery.restore import in_words, restore
from layercheck.step_report import StepReport
from layercheck.tracking.drift import DriftMeter
from layercheck.tracking.policy import decide
from layercheck.tracking.preemption import last_parts
from layercheck.tracking.still import LEAST_STEPS, StillLayers
from layercheck.watchdog import Watchdog
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
CLOSE_S = 60.0
RngPolicy = Literal["keyed", "captured"]
T = TypeVar("T")


def attach(
    engine: Any,
    storage: str,
    run: str,
    config: LayerCheckConfig | dict[str, Any] | None = None,
    coordinator: CoordinatorClient | None = None,
    *,
    submission: str | None = None,
    takeover: bool = False,
    run_info: dict[str, Any] | None = None,
    rng: RngPolicy = "keyed",
    store: Storage | None = None,
    vaults: Vaults | None = None,
) -> "Session":
    """Binds a session to a DeepSpeed ZeRO-3 engine whose optimizer was given `layer_groups`.

    Args:
        engine: what `deepspeed.initialize` returned.
        storage: folder or URI that every rank sees; the run lives in `<storage>/<run>/layercheck/`.
        run: name of the run; the same name continues it.
        config: settings, or their dict; None for the defaults.
        coordinator: where the manifest is kept; None runs it inside rank 0.
        submission: the same for all restarts of one submission; another one has to take over.
        takeover: fence off another submission of this run even if it is alive.
        run_info: `config` and `tokenizer_files` to be kept in run.json.
        rng: `captured` for a loop that draws from the global generators: each rank's states ride with the
            events and come back by `resume`; `keyed` for one whose draws are functions of the step.
        store: the run's `layercheck` folder if it is not to be opened from `storage`.
        vaults: with `memory.enabled`, those of the nodes; None keeps one in each rank's process.

    Raises:
        ConfigError: a setting is unknown or out of range.
        EngineRefusedError: the engine is of an unsupported kind, or its groups mix layers.
        StorageError: `storage` is no path or URI that can be opened.
    """
    settings = parse_config(config)
    zero3 = Zero3Engine(engine)
    store = store or open_storage(storage, run)
    client = coordinator or in_process_client(store, settings, zero3.rank, zero3.world_size)
    who = Submission(run, submission or uuid.uuid4().hex, takeover, run_info or {})
    tier = open_tier((storage, run, zero3.rank, zero3.world_size), store, client, settings, vaults)
    return Session(zero3, store, open_run_folder(storage, run), settings, client, who, rng, tier)


class Session:
    """See `attach`. Call `resume` first, `after_step` after every `engine.step()`, `close` at the end."""

    def __init__(
        self,
        zero3: Zero3Engine,
        storage: Storage,
        run_folder: Storage,
        config: LayerCheckConfig,
        coordinator: CoordinatorClient,
        submission: Submission,
        rng: RngPolicy = "keyed",
        tier: MemoryTier | None = None,
    ) -> None:
        self._zero3, self._tier, self._config = zero3, tier, config
        self._storage, self._run_folder, self._coordinator = storage, run_folder, coordinator
        self._submission, self._rng = submission, rng
        self._recovered_rng: RngState | None = None
        self._overlap = overlap_of(zero3, config.storage_wait_s)
        self._bases = BaseCopies(config.residual.covers) if config.residual.enabled else None
        self.meter = DriftMeter(zero3, config.drift)
        self.watchdog = Watchdog(config.hang_s)
        self._ranks = Exchange(zero3, self.meter, self.watchdog, submission.run)
        self._open: Attempt | None = None

    # ------------------------------------------------------------------ resume

    def resume(self) -> ResumePoint:
        """Starts the run, or recovers the newest version of every layer. Call once, before training.

        Returns:
            The first step to run and the trainer state that belongs to the step before it.

        Raises:
            StoreMismatchError, NoPlanError, RunIsLiveError, RestartLoopError, StorageError: do not train.
        """
        try:
            grant, receipt = self._recover()
        except BaseException:
            self._close_own()
            raise
        if self._tier is not None:
            self._tier.began(grant.plan)
        self.meter.lag = self._overlap.lag
        self._open = opened = start_attempt(
            self._zero3,
            self._storage,
            self._run_folder,
            self._coordinator,
            self._config,
            grant,
            receipt,
            self._overlap,
            self._bases,
            self._tier,
        )
        opened.ledger.still = StillLayers(max(LEAST_STEPS, self.meter.rotation))
        self.watchdog.start(grant.r_b)
        if (plan := grant.plan) is None:
            self._step_zero()
            return ResumePoint(step=1, attempt=opened.number)
        self._zero3.set_global_state(plan.resume_step - 1, plan.trainer_state)
        opened.step, opened.skipped = self._zero3.step, self._zero3.skipped
        self.meter.take(opened.step, self._zero3.slices)
        opened.state = opened.complete = plan.trainer_state
        self._announce(opened)
        if opened.link is not None and receipt is not None:
            opened.link.note_receipt(receipt)
            log.warning("%s", in_words(receipt))
        self.restore_rng()
        return ResumePoint(plan.resume_step, plan.trainer_state, receipt, opened.number)

    def restore_rng(self) -> None:
        """Puts the recovered generators back; `resume` does it. Again for a loop that draws before step 1."""
        if self._recovered_rng is not None:
            random_state.restore(self._recovered_rng)

    def _recover(self) -> tuple[AttemptGrant, Receipt | None]:
        started = time.monotonic()
        zero3, storage, client, tier = self._zero3, self._storage, self._coordinator, self._tier
        grant = begin(zero3, storage, client, self._config, self._submission, tier)
        if grant.plan is None:
            return grant, None
        plan_s = max(0.0, time.monotonic() - started - grant.wait_s)
        frozen, bases = self._config.frozen, self._bases
        grant, receipt = restore(zero3, storage, client, grant, plan_s, frozen, bases, tier)
        if self._rng == "captured" and grant.plan is not None:
            place: Readable = tier.reader(storage) if tier is not None else storage
            said, self._recovered_rng = random_state.find(zero3, place, grant.plan)
            receipt = receipt.model_copy(update={"rng": said})
        return grant, receipt

    def _step_zero(self) -> None:
        opened = self._need_open()
        decision = decide(opened.ledger.facts(0, 0.0), self._config)
        self._save(opened, decision, {"step": 0})
        opened.complete = {"step": 0}
        self._wait_for_commits(opened, {"step": 0})
        self.meter.reset()

    # ------------------------------------------------------------------ after every step

    def after_step(self, step: int, trainer_state: TrainerState | None = None) -> StepReport:
        """Measures, decides, copies; a no-op off the accumulation boundary.

        Args:
            step: number of the optimizer step just taken; must equal `engine.global_steps`.
            trainer_state: JSON values that the next step depends on; kept is rank 0's. `loss` must be finite.

        Raises:
            FencedError: a newer attempt has taken over; return from training without being retried.
            NonFiniteStateError: the state is poisoned; nothing of it was committed.
            AgeBoundError: a layer is `s_max` steps old and the storage did not commit in time.
            PreemptedError: a report said `preempted`, and the loop went on.
        """
        opened = self._need_open()
        if self._zero3.step == opened.step:
            return StepReport(step)
        if step != self._zero3.step:
            raise LayerCheckError(
                f"after_step(step={step}): engine.global_steps is {self._zero3.step}; pass that"
            )
        if opened.preempted:
            raise PreemptedError(f"step {step}: end the loop where a StepReport says `preempted`", step=step)
        started = time.monotonic()
        opened.step, opened.step_s = step, started - opened.ended
        state: TrainerState = {**(trainer_state or {}), "step": step, **self._zero3.global_state()}
        opened.state = state
        self._exchange(lambda: self._ranks.step(opened, step, state))
        if opened.told_grace_s:
            tracked = time.monotonic()
            decision, nbytes = self._last_save(opened, state)
        else:
            decision = decide(opened.ledger.facts(step, opened.ledger.lr), self._config)
            tracked = time.monotonic()
            nbytes = self._save(opened, decision, state)
            self._save(opened, opened.for_memory(decision, self._config), state, MEMORY_PART)
            if decision.must_wait:
                self._wait_for_commits(opened, state)
        result = opened.report(decision, nbytes, started, tracked)
        if opened.run_log is not None:
            opened.run_log.step(result, state, decision, opened.ledger)
            opened.note(result)
        opened.complete_receipt(step, state)
        self._announce(opened)  # last: its thread would hold the interpreter lock against what comes after
        opened.stall_s, opened.ended = result.stall_s, time.monotonic()
        return result

    def _exchange(self, tell: Callable[[], T]) -> T:
        """Whatever the ranks hear of a poisoned state ends the attempt before it is raised (I13)."""
        try:
            return tell()
        except NonFiniteStateError as error:
            self.close("failed", error.message)
            raise

    def _settle(self, opened: Attempt) -> None:
        """Hears what is still on its way, so that the newest step is known to be clean and complete."""
        if self._exchange(lambda: self._ranks.settle(opened)):
            self._announce(opened)

    def _save(self, opened: Attempt, decision: PersistDecision, state: TrainerState, part: int = 0) -> int:
        """Copies the chosen layers and hands them to the writer; returns this rank's bytes."""
        if not decision.writes:
            return 0
        if part == 0:
            opened.ledger.select(decision)
            self.meter.take(decision.step, [write.layer for write in decision.versions])
        if opened.sealed is not None:
            opened.sealed.take(decision.step, [write.layer for write in decision.versions])
        state = {**state, "layercheck": opened.ledger.to_state()}
        event = EventId(step=decision.step, attempt=opened.number, part=part)
        try:
            rng = random_state.capture() if self._rng == "captured" else None
            wait_s = opened.limited_s(self._config.storage_wait_s)
            submit = partial(opened.writer.submit, pending=self.meter.newest_pending)
            with self.watchdog.phase("copying a snapshot", wait_s):
                snapshot = opened.taker.take(event, decision, state, submit, rng, wait_s)
        except StorageError as error:
            # The writer reports this event as lost; its drift comes back by the notice (I9).
            opened.alert(f"event {event.folder} is lost: {error}")
            return 0
        if snapshot.stream.streaming and part != MEMORY_PART:
            opened.alert(
                f"event {event.folder} of {snapshot.staged_bytes} bytes on rank {self._zero3.rank} is larger "
                f"than the staging memory: training waited {snapshot.stream.copy_s:.2f} s; raise "
                f"staging_bytes={self._config.staging_bytes}"
            )
        return snapshot.layout.total

    def _announce(self, opened: Attempt) -> None:
        if opened.link is not None:
            state = {**opened.complete, "layercheck": opened.told_by_heartbeats()}
            opened.link.post(state["step"], state, opened.ledger.drift)

    def _wait_for_commits(self, opened: Attempt, state: TrainerState) -> None:
        """Blocks all ranks while a layer is at its limit (I1): the repeated all-reduce brings the commits."""
        self._settle(opened)
        self._announce(opened)
        is_ending = wait_for_commits(
            opened,
            state["step"],
            self._config,
            save=lambda decision: self._save(opened, decision, state),
            poll=lambda deadline: self._ranks.poll(opened, state["step"], deadline),
        )
        if is_ending:
            self._last_save(opened, state)

    # ------------------------------------------------------------------ last save, save now, close

    def preempt(self, grace_s: float | None = None) -> None:
        """Says that this rank will be ended in `grace_s` (default `preemption_grace_s`) seconds.

        No collective: one rank may call it alone, from any thread. At their next `after_step` all ranks save
        what moved, and report `preempted`.
        """
        seconds = self._config.preemption_grace_s if grace_s is None else grace_s
        self._need_open().ends_at = time.monotonic() + seconds

    def _last_save(self, opened: Attempt, state: TrainerState) -> tuple[PersistDecision, int]:
        self._settle(opened)
        self._announce(opened)  # first: if the time is short, at least the step is known
        return save_before_end(
            opened,
            last_parts(opened.ledger.facts(opened.step, opened.ledger.lr), self._config),
            opened.told_grace_s,
            save=lambda part, number: self._save(opened, part, state, number),
            poll=lambda deadline: self._ranks.poll(opened, opened.step, deadline),
        )

    def save_now(self, trainer_state: TrainerState | None = None) -> None:
        """Takes a full event of the current step and waits until it is committed (I10).

        Raises:
            StorageError: it was not committed within `storage_wait_s`.
        """
        opened = self._need_open()
        self._settle(opened)
        step = opened.step
        state: TrainerState = {**(trainer_state or opened.state), "step": step, **self._zero3.global_state()}
        part = opened.next_part()
        self._save(opened, everything(opened.ledger, step), state, part)
        opened.complete = state
        self._announce(opened)
        deadline = time.monotonic() + self._config.storage_wait_s
        while True:
            report = self._ranks.poll(opened, step, deadline)
            if (report.committed_step, report.committed_part) >= (step, part):
                opened.ledger.saved_now(step)
                self.meter.take(step, opened.ledger.full_set)
                self.meter.settle((step,), ())
                return
            if step in report.lost_steps or report.errors:
                raise StorageError(
                    f"the full event of step {step} was not committed; see the log above", step=step
                )

    def close(self, how: str = "completed", reason: str = "") -> None:
        """Waits for what is being written, saves nothing more, ends the attempt. Safe twice, after any error.

        Args:
            how: `completed` (`preempted` if it was), `failed` or `fenced`.
            reason: for people, if it did not complete.

        Raises:
            FencedError, NonFiniteStateError: what `after_step` would have raised at the next step.
        """
        self.meter.close()
        if self._open is not None and how == "completed":
            self._settle(self._open)
        self.watchdog.close()
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.signals.restore()
        how = "preempted" if opened.preempted and how == "completed" else how
        limit_s = opened.limited_s(CLOSE_S)
        opened.finish_writing(limit_s, how)
        opened.taker.close()
        if opened.run_log is not None:
            opened.run_log.close()
        if opened.link is not None:
            opened.link.close(limit_s)
            opened.say_ended(self._coordinator, how, reason)
        self._close_own(how)

    def _close_own(self, how: str = "failed") -> None:
        if self._tier is not None:
            self._tier.close(completed=how == "completed")
        if isinstance(self._coordinator, RankZeroClient):
            self._coordinator.close()

    def _need_open(self) -> Attempt:
        if self._open is None:
            raise LayerCheckError("the session is not open: call session.resume() once before training")
        return self._open
