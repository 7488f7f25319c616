"""The newest heartbeat of the current attempt and when it goes to storage."""

from collections.abc import Callable
from copy import deepcopy

from layercheck.coordination import journal
from layercheck.manifest import AttemptRecord, Progress, RecoveryPlan, TrainerState
from layercheck.persistence.storage import Storage

_MIN_INTERVAL_S = 1.0
SILENCE_S = 15.0
"""Three times the interval in which a session repeats its heartbeat."""


class Heart:
    """Keeps one `Progress`; writes it at most once a second, and for every heartbeat that comes slower.

    A session beats at least every 5 s, so the file changes at least that often while it lives.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float]) -> None:
        self._storage, self._clock = storage, clock
        self.progress: Progress | None = None
        """Newest heartbeat heard here; None if this coordinator heard none of the current attempt."""
        self.heard_at: float | None = None
        self.is_unsaved = False
        self._is_silent = False
        self._saved_at: float | None = None
        self._base = Progress(attempt=1, step=0, trainer_state={"step": 0}, drift={})

    def follow(self, record: AttemptRecord, journaled: Progress | None, plan: RecoveryPlan | None) -> None:
        """Goes over to another attempt; what it journaled before counts on."""
        self.progress, self.is_unsaved, self._saved_at, self.heard_at = None, False, None, None
        self._is_silent = False
        self._base = journaled or Progress(
            attempt=record.attempt,
            step=record.r_b,
            trainer_state=record.trainer_state,
            drift=plan.drift if plan else {},
        )

    def beat(self, step: int, trainer_state: TrainerState, drift: dict[str, float]) -> None:
        """Takes a heartbeat; an older one that a retry repeated is dropped."""
        self.heard_at, self._is_silent = self._clock(), False
        newest = self.progress or self._base
        if step < newest.step:
            return
        self.progress = newest.model_copy(
            update={
                "step": step,
                "trainer_state": deepcopy(trainer_state),  # the caller may go on changing its own
                "drift": dict(drift),
                "beat": newest.beat + 1,
            }
        )
        self.is_unsaved = True

    def seconds_around(self, failure_at: float | None) -> tuple[float | None, float | None]:
        """(from the last heartbeat to the failure, from the failure to now), as far as they are known."""
        if failure_at is None:
            return None, None
        detect_s = None if self.heard_at is None else max(0.0, failure_at - self.heard_at)
        return detect_s, self._clock() - failure_at

    def take_silence(self) -> str | None:
        """Once in each silence of an attempt that has not ended: a line for a person.

        A rank 0 that hangs in its training thread beats on, with the same step; a silent one is stopped,
        dead, or cut off.
        """
        beat = self.progress
        if beat is None or beat.ended or self.heard_at is None or self._is_silent:
            return None
        if self._clock() - self.heard_at < SILENCE_S:
            return None
        self._is_silent = True
        return (
            f"no heartbeat of attempt {beat.attempt} for {SILENCE_S:g} s, its last step was {beat.step}: "
            "rank 0 is stopped, dead or cut off from the coordinator"
        )

    def is_due(self) -> bool:
        """True if a heartbeat waits and the last write is a second old."""
        return self.is_unsaved and (
            self._saved_at is None or self._clock() - self._saved_at >= _MIN_INTERVAL_S
        )

    def save(self) -> None:
        """Writes the newest heartbeat."""
        assert self.progress is not None
        self._saved_at = self._clock()  # also of a failed try: a storage that refuses is not asked every step
        journal.write_progress(self._storage, self.progress)
        self.is_unsaved = False

    def end(self, how: str, reason: str) -> None:
        """The attempt ended; said in its progress file, so that no successor has to watch it."""
        newest = self.progress or self._base
        self.progress = newest.model_copy(update={"ended": how, "reason": reason, "beat": newest.beat + 1})
        self.is_unsaved = True
        self.save()
