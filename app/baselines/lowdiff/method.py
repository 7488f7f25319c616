"""LowDiff as one of the methods that LayerCheck is compared with."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor
from xxhash import xxh3_128_hexdigest

from app.baselines.commits import Commit, FileRecord
from app.baselines.committer import Committer, Saved
from app.baselines.lowdiff.batch_file import BatchHeader, run_after
from app.baselines.lowdiff.compress import keep_largest, num_kept, round_to_16_bits, stored_dtype
from app.baselines.lowdiff.diff_store import DiffStore
from app.baselines.lowdiff.gradients import Gradients
from app.baselines.lowdiff.outbox import Outbox
from app.baselines.lowdiff.replay import Replay, Replayed
from app.baselines.lowdiff.rhythm import RhythmKeeper
from app.baselines.protocol import Recovered, StepCost
from app.baselines.rolling import Background, Books, must_be_saved, roll_back
from app.baselines.settings import LowDiffSettings
from app.baselines.state import Captured, StateImage, capture, install
from layercheck.errors import StorageError
from layercheck.manifest import TrainerState
from layercheck.overlap import overlap_of
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero
from layercheck.recovery.fetch import part_of
from layercheck.zero3 import SubGroup, Zero3Engine

log = logging.getLogger("app")


class LowDiff:
    """LowDiff (the paper that the comparison is with; its sections on compressed differentials and tuning).

    Every step's gradient, as the optimizer consumes it, is a differential checkpoint; every `base_every`
    steps there is a base, a full state. A recovery loads a base and replays the differentials after it, one
    optimizer step each, bit for bit. Under ZeRO-3 the differential of a rank is its averaged gradient
    partition; no rank sees another's.

    `topk`: the largest `rho` of each slice stays in the gradient, before norm and clipping, without error
    feedback; the rest is zero for training too. Stored: int32 indices and values in the gradient's type.
    `dense`: all of it in 16 bits. bf16 and fp16 training consume what they always do. In fp32 training the
    gradient is rounded to bf16 *for training too*, else replay could not be exact: its loss curve is then
    that of this rounding, not of fp32, and has to be shown beside the uninterrupted one of `none`.

    A crash loses the steps of the batch that is not full and of those at the writer. It is not skipped but
    goes back to the newest step that all ranks have.

    Simplified or changed against the public code, always in the method's favour:
    - each rank writes its own files, from a thread; bases too. There rank 0 writes all, bases while training
      stands still.
    - top-k is taken after the averaging, so the exchange is not compressed (ZeRO-3 has reduced by then).
    - a batch that cannot be written is lost with an alert, and the next base heals the gap.
    - replay is serial per rank; the ranks replay disjoint partitions side by side. Summing differentials
      first, as their parallel recovery would have to, is not exact with Adam.
    - the queue of batches in host memory has an end: then training waits.

    Args:
        zero3: the engine; optimizer offload is refused.
        committer: of the bases.
        settings: mode and rhythm.
        wait_s: limit of every wait for the storage.
    """

    def __init__(
        self, zero3: Zero3Engine, committer: Committer, settings: LowDiffSettings, wait_s: float
    ) -> None:
        self._zero3, self._committer = zero3, committer
        self._rho = settings.rho if settings.mode == "topk" else None
        self._wait_s = wait_s
        self._gradients = Gradients(zero3)
        self._header = self._batch_header(settings)
        self._diffs = DiffStore(committer.store.storage, committer.store.method, zero3.rank)
        self._copier = overlap_of(zero3, wait_s).copier
        self._outbox = Outbox(
            self._diffs, self._header, self._copier, zero3.on_accelerator, settings.pending, wait_s
        )
        self._rhythm = RhythmKeeper(settings)
        self._bases, self._books = Background("lowdiff-base"), Books()
        self._image, self._filled = StateImage(pin=zero3.on_accelerator), threading.Event()
        self._filled.set()
        self._torn = False
        self._first_base: Saved | None = None
        self._attempt, self._last_base = 0, 0
        self._protected_base: int | None = None
        self._leave: Callable[[], None] = lambda: None
        self._stall_s = self._compress_s = 0.0
        self._sums = {"base_bytes": 0, "base_events": 0, "diff_bytes": 0, "diff_events": 0}
        self._replayed: Replayed | None = None
        self._recovered_state: TrainerState | None = None
        self._data_bytes, self._all_data_bytes = self._differential_bytes()

    def _batch_header(self, settings: LowDiffSettings) -> BatchHeader:
        parts = [(part.spec.name, part.offset, part.numel) for part in self._gradients.slices]
        return BatchHeader(
            mode=settings.mode,
            dtype=str(stored_dtype(self._gradients.dtype, self._rho)).removeprefix("torch."),
            rho=self._rho,
            layout=xxh3_128_hexdigest(repr(parts).encode()),
            rank=self._zero3.rank,
            world_size=self._zero3.world_size,
            steps=(),
        )

    def _differential_bytes(self) -> tuple[int, int]:
        """Bytes of one differential without its header: this rank's, and those of all ranks."""
        world = self._zero3.world_size
        of_rank = [0] * world
        for numel in (part.spec.numel for part in self._gradients.slices):
            for rank in range(world):
                of_rank[rank] += self._slice_bytes(part_of(numel, rank, world)[1])
        return of_rank[self._zero3.rank], sum(of_rank)

    def _slice_bytes(self, numel: int) -> int:
        value_bytes = stored_dtype(self._gradients.dtype, self._rho).itemsize
        return numel * value_bytes if self._rho is None else num_kept(numel, self._rho) * (4 + value_bytes)

    # ------------------------------------------------------------------ recovery

    def recover(self) -> Recovered | None:
        """The newest whole base, and all differentials after it that every rank has.

        `load_s` is the reading of both, `reconstruct_s` the install of the base and the replay.
        """
        found = roll_back(self._committer, self._zero3, self._read_base, self._install_base)
        if found is None:
            on_rank_zero(lambda: self._diffs.roll_back_to(0))
            return None
        self._last_base = found.step
        self._replayed = done = Replay(self._zero3, self._gradients, self._diffs, self._header).after(
            found.step
        )
        on_rank_zero(lambda: self._diffs.roll_back_to(done.step))
        self._recovered_state = done.trainer_state or found.trainer_state
        return Recovered(
            step=done.step,
            trainer_state=self._recovered_state,
            plan_s=found.plan_s,
            load_s=found.load_s + done.load_s,
            reconstruct_s=found.reconstruct_s + done.replay_s,
            nbytes=found.nbytes + done.nbytes,
            source=f"{found.source}, and {done.steps} differentials",
            passed_over=found.passed_over,
        )

    def _read_base(self, commit: Commit) -> StateImage:
        (file,) = commit.files[self._zero3.rank]
        self._committer.store.read_file(commit.step, file, self._image.room(file.nbytes))
        return self._image

    def _install_base(self, commit: Commit, image: StateImage) -> None:
        (file,) = commit.files[self._zero3.rank]
        install(self._zero3, image.tensor, f"{self._committer.store.folder(commit.step)}/{file.name}")

    def begin(self, attempt: int, step: int) -> None:
        """A run begins with a base of step 0; with `auto` every attempt does, to be measured."""
        self._attempt = attempt
        if step:
            self._protected_base = step
        self._leave = self._gradients.watch(self._take, self._release)
        if step == 0 or self._rhythm.measures:
            self._start_base(step, self._recovered_state or {"step": step, **self._zero3.global_state()})

    # ------------------------------------------------------------------ inside a step

    def _take(self, parts: list[Tensor]) -> None:
        started = time.monotonic()
        if self._rho is None:
            pieces = [round_to_16_bits(part) for part in parts]
        else:
            kept = [keep_largest(part, self._rho) for part in parts if part.numel()]
            pieces = [indices for indices, _ in kept] + [values for _, values in kept]
        self._compress_s += time.monotonic() - started
        self._outbox.hand_over(pieces)
        self._stall_s += time.monotonic() - started

    def _release(self) -> None:
        started = time.monotonic()
        self._outbox.release()
        self._stall_s += time.monotonic() - started

    def before_update(self, group: SubGroup, lr: float) -> None:
        """Waits for the copy of a base that was begun after the last step."""
        self._rhythm.update_begins()
        if not self._filled.wait(self._wait_s):
            self._torn = True

    # ------------------------------------------------------------------ after a step

    def after_step(self, step: int, state: TrainerState) -> None:
        """Completes the differential; hands a full batch over; begins a base when one is due."""
        self._note_base(self._bases.poll())
        self._outbox.add(step, self._gradients.take_consumed(), state)
        if self._rhythm.step_ended():
            self._note_base(self._bases.wait())
            self._rhythm.decide(self._first_base)
        if self._outbox.collected >= self._rhythm.now.batch:
            self._outbox.flush()
        if step - self._last_base >= self._rhythm.now.base_every:
            self._start_base(step, state)

    def _start_base(self, step: int, state: TrainerState) -> None:
        self._note_base(self._bases.wait())
        self._last_base = step
        self._filled.clear()
        self._torn = False
        captured = capture(self._zero3, step, self._attempt)
        self._bases.start(partial(self._save_base, captured, step, state))

    def _save_base(self, captured: Captured, step: int, state: TrainerState) -> Saved:
        """In the thread of the bases: copy, write, commit, collect what the oldest base makes needless."""
        try:
            self._image.fill(captured)
        finally:
            self._filled.set()
        saved = self._committer.commit(step, self._attempt, state, partial(self._write_base, step), "base")
        if saved.error is None and self._zero3.rank == 0:
            self._collect()
        return saved

    def _write_base(self, step: int) -> tuple[FileRecord, ...]:
        if self._torn:
            raise StorageError(f"it was not copied within {self._wait_s:g} s (storage_wait_s)")
        name = f"rank-{self._zero3.rank:05d}.safetensors"
        return (self._committer.store.write_file(step, name, self._image.chunks()),)

    def _collect(self) -> None:
        try:
            self._diffs.collect(min(self._committer.store.committed()))
        except StorageError as error:
            log.error("older differentials could not be deleted: %s", error)  # the next base tries again

    # ------------------------------------------------------------------ books

    def _note_base(self, saved: Saved | None) -> None:
        self._books.note(saved)
        if saved is None or saved.error is not None:
            return
        self._first_base = self._first_base or saved
        self._protected_base = saved.step
        self._outbox.forget(saved.step)
        self._sums["base_bytes"] += saved.nbytes
        self._sums["base_events"] += 1

    def _protected_step(self) -> int:
        """What this rank would come back to if the others have as much."""
        if self._protected_base is None:
            return -1
        run = run_after(self._protected_base, self._outbox.durable())
        return run[-1].last if run else self._protected_base

    def take_cost(self) -> StepCost:
        """See `Baseline`. A batch is an event, and each differential in it holds every layer."""
        bases, written = self._books.take(), self._outbox.take_written()
        headers = written.nbytes - written.updates * self._data_bytes
        nbytes = written.updates * self._all_data_bytes + headers * self._zero3.world_size
        self._sums["diff_bytes"] += nbytes
        self._sums["diff_events"] += written.batches
        stall_s, self._stall_s = self._stall_s, 0.0
        return StepCost(
            stall_s=stall_s,
            nbytes=bases.nbytes + nbytes,
            events=bases.events + written.batches,
            layer_writes=bases.layer_writes + written.updates * len(self._zero3.layer_map.trainable),
            protected_step=max(0, self._protected_step()),
            alerts=bases.alerts + written.alerts,
        )

    def facts(self) -> dict[str, float]:
        """See `Baseline`. `compress_s` is part of the stall; bytes are of all ranks."""
        rhythm = self._rhythm.now
        own = {"batch_steps": rhythm.batch, "base_interval_steps": rhythm.base_every}
        found = {**own, **self._sums, "compress_s": self._compress_s, **self._books.facts()}
        if self._replayed is None:
            return found
        return {
            **found,
            "replayed_differentials": self._replayed.steps,
            "replaying_s": self._replayed.replay_s,
        }

    # ------------------------------------------------------------------ the end

    def save_now(self, step: int, state: TrainerState) -> None:
        """Writes the batch as far as it is; where that does not reach to `step` on all ranks, a base."""
        self._outbox.flush()
        self._outbox.drain()
        self._note_base(self._bases.wait())
        if count_over_ranks(int(self._protected_step() < step), self._zero3.collective_device):
            self._start_base(step, state)
            saved = self._bases.wait()
            self._note_base(saved)
            must_be_saved(saved, "lowdiff")

    def close(self, *, wait: bool) -> None:
        """See `Baseline`."""
        self._leave()
        self._outbox.close(wait=wait)
        if wait:
            self._note_base(self._bases.wait())
        self._copier.close()
