"""CheckFreq: checkpoints in two phases beside training, as often as a budget allows."""

import threading
import time
from dataclasses import asdict, replace

from app.baselines.checkfreq_tuning import Profile, Tuning
from app.baselines.commits import Commit, FileRecord
from app.baselines.committer import Committer, Saved
from app.baselines.protocol import Recovered, StepCost
from app.baselines.rolling import Background, Books, must_be_saved, roll_back
from app.baselines.settings import CheckFreqSettings
from app.baselines.state import Captured, StateImage, capture, install
from layercheck.errors import StorageError
from layercheck.manifest import TrainerState
from layercheck.partition import SubGroup
from layercheck.recovery.collectives import on_rank_zero
from layercheck.zero3 import Zero3Engine

KEY = "checkfreq"


class CheckFreq:
    """CheckFreq (Mohan et al., FAST'21, sections 4.1 to 4.3), which the paper compares with.

    States of a checkpoint:
    1. training thread: joins the one before. A checkpoint is never skipped because one is on its way.
    2. our thread: snapshot, a copy of the live state into host memory, while the next forward and backward
       pass run. The next *update* waits for it (`before_update`), nothing else does.
    3. our thread: persist and commit, while training goes on.

    The interval is profiled: some steps are timed, one checkpoint is made and timed while training waits,
    then `shortest_interval` decides. With `dynamic`, or until it is once within the budget, every window
    between two checkpoints is watched, and the interval grows by 2 where the overhead is above it. Rank 0
    decides for all. The tuning rides in each commit, so a recovered run does not profile again.

    The original saves from rank 0 of a replicated model; under ZeRO-3 every rank saves its part, and a
    checkpoint exists when all have. Simplified: snapshots go to host memory by a thread (its CPU
    mode); no copy on the device, no choice between thread and process. Its resumable data iterator is not
    needed: the batches of a step are a function of its number. Kept are `keep` commits (2) beside the one
    that is being written, one more than originally, so that a rotten one has a predecessor as elsewhere.
    """

    def __init__(
        self, zero3: Zero3Engine, committer: Committer, settings: CheckFreqSettings, wait_s: float
    ) -> None:
        self._zero3, self._committer = zero3, committer
        self._settings, self._wait_s = settings, wait_s
        self._books, self._background = Books(), Background("app-checkfreq")
        self.image = StateImage(pin=zero3.on_accelerator)
        self._copied = threading.Event()
        self._copied.set()
        self._torn = False
        """The optimizer has gone on before the snapshot was whole: it must not be committed."""
        self._tuning = Tuning(settings.interval_steps) if settings.mode == "manual" else None
        self._profiled: Profile | None = None
        self._seen, self._timed_from = 0, 0.0
        self._next, self._in_window, self._window_from = 0, False, 0.0
        self._attempt = 0

    # ------------------------------------------------------------------ recovery

    def recover(self) -> Recovered | None:
        """Rolls back to the newest whole commit."""
        found = roll_back(self._committer, self._zero3, self._read, self._put)
        if found is None:
            return None
        state = dict(found.trainer_state)
        tuning = state.pop(KEY)
        if self._settings.mode == "auto" and tuning is not None:
            self._tuning = Tuning(**tuning)
        return replace(found, trainer_state=state)

    def _read(self, commit: Commit) -> str:
        (file,) = commit.files[self._zero3.rank]
        self._committer.store.read_file(commit.step, file, self.image.room(file.nbytes))
        return f"{self._committer.store.folder(commit.step)}/{file.name}"

    def _put(self, commit: Commit, name: str) -> None:
        install(self._zero3, self.image.tensor, name)

    def begin(self, attempt: int, step: int) -> None:
        """See `Baseline`."""
        self._attempt, self._books.protected_step = attempt, step
        self._timed_from = time.monotonic()
        if self._tuning is not None:
            self._next = self._after(step, self._tuning)

    # ------------------------------------------------------------------ when

    def after_step(self, step: int, state: TrainerState) -> None:
        """Profiles, or begins a checkpoint when one is due."""
        now = time.monotonic()
        self._seen += 1
        self._note(self._background.poll())
        if self._tuning is None:
            self._profile(step, state, now)
        elif step == self._next:
            self._tuning = self._watched(self._tuning, now)
            self._start(step, state, self._tuning)
            self._next = self._after(step, self._tuning)

    def _after(self, step: int, tuning: Tuning) -> int:
        """The step of the next checkpoint; a manual interval falls on its multiples, as other methods' do."""
        k = tuning.interval_steps
        return (step // k + 1) * k if self._settings.mode == "manual" else step + k

    def _profile(self, step: int, state: TrainerState, now: float) -> None:
        """Times steps from `profile_from` on; after the last, one checkpoint that training waits for."""
        settings = self._settings
        if self._seen == settings.profile_from - 1:
            self._timed_from = now
        if self._seen < settings.profile_from + settings.profile_steps - 1:
            return
        step_s = (now - self._timed_from) / settings.profile_steps
        started = time.monotonic()
        self._start(step, state, None)
        self._copied.wait(self._wait_s)
        snapshot_s = time.monotonic() - started
        self._note(self._background.wait())
        profile = Profile(step_s, snapshot_s, time.monotonic() - started)
        self._profiled = profile = on_rank_zero(lambda: profile)
        self._tuning = Tuning.of(profile, settings.max_overhead)
        self._next = self._after(step, self._tuning)

    def _watched(self, tuning: Tuning, now: float) -> Tuning:
        """The tuning after the window that ends now; the first checkpoint only begins one."""
        window_s, self._window_from = now - self._window_from, now
        first, self._in_window = not self._in_window, True
        if first or not tuning.watching:
            return tuning
        settings = self._settings
        return on_rank_zero(lambda: tuning.after_window(window_s, settings.max_overhead, settings.dynamic))

    # ------------------------------------------------------------------ the two phases

    def _start(self, step: int, state: TrainerState, tuning: Tuning | None, kind: str = "interval") -> None:
        """States 1 to 3."""
        self._note(self._background.wait())
        captured = capture(self._zero3, step, self._attempt)
        self._copied.clear()
        self._torn = False
        kept = {**state, KEY: None if tuning is None else tuning.to_state()}
        self._background.start(lambda: self._checkpoint(step, kept, captured, kind))

    def _checkpoint(self, step: int, state: TrainerState, captured: Captured, kind: str) -> Saved:
        try:
            self.image.fill(captured)
        finally:
            self._copied.set()
        return self._committer.commit(step, self._attempt, state, lambda: self._persist(step), kind)

    def _persist(self, step: int) -> tuple[FileRecord, ...]:
        if self._torn:
            raise StorageError(f"the snapshot was not copied within storage_wait_s={self._wait_s:g} s")
        name = f"rank-{self._zero3.rank:05d}.safetensors"
        return (self._committer.store.write_file(step, name, self.image.chunks()),)

    def before_update(self, group: SubGroup, lr: float) -> None:
        """The update waits for the snapshot; one that takes too long is given up, training is not."""
        if not self._copied.wait(self._wait_s):
            self._torn = True

    def save_now(self, step: int, state: TrainerState) -> None:
        """See `Baseline`."""
        self._note(self._background.wait())
        if self._books.protected_step != step:
            self._start(step, state, self._tuning, "last")
            must_be_saved(self._note(self._background.wait()), "checkfreq")

    def _note(self, saved: Saved | None) -> Saved | None:
        self._books.note(saved)
        return saved

    # ------------------------------------------------------------------ books

    def take_cost(self) -> StepCost:
        """See `Baseline`."""
        return self._books.take()

    def facts(self) -> dict[str, float]:
        """The interval, and the profile that it came from if this attempt made one."""
        found = self._books.facts()
        if self._tuning is not None:
            found["interval_steps"] = self._tuning.interval_steps
        if self._profiled is not None:
            found |= {f"profile_{key}": value for key, value in asdict(self._profiled).items()}
        return found

    def close(self, *, wait: bool) -> None:
        """See `Baseline`."""
        if wait:
            self._note(self._background.wait())
