"""How long a run stood still before an attempt, as far as its coordinator saw it: figures for the receipt."""

from collections.abc import Callable
from dataclasses import dataclass

from layercheck.coordination.heart import Heart
from layercheck.manifest import AttemptRecord


@dataclass(frozen=True, slots=True)
class Standstill:
    """Seconds before one attempt, None for what nobody timed; see `AttemptGrant`."""

    detect_s: float | None = None
    reschedule_s: float | None = None
    wait_s: float = 0.0


class Outage:
    """From the first word of a failure to the next attempt.

    Args:
        clock: monotonic seconds.

    Attributes:
        before: what came before the newest attempt; the same when its grant is asked for again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failure_at: float | None = None
        self.before = Standstill()

    @property
    def is_known(self) -> bool:
        """Somebody said that the workers failed, and no attempt has begun since."""
        return self._failure_at is not None

    def note_failure(self) -> None:
        """Workers failed; the first word of it counts."""
        if self._failure_at is None:
            self._failure_at = self._clock()

    def ends(self, heart: Heart, old: AttemptRecord | None, new: AttemptRecord, wait_s: float) -> None:
        """An attempt is granted: what came before it is known, unless this was known already.

        Args:
            heart: of the attempt before.
            old: that attempt.
            new: the one that is granted.
            wait_s: how long another submission was watched for it.
        """
        if old is not None and old.token == new.token:
            return
        # Between two submissions it was a person who took the time.
        is_restart = old is not None and old.submission == new.submission
        self.before = Standstill(*heart.seconds_around(self._failure_at if is_restart else None), wait_s)

    def forget(self) -> None:
        """The next failure is another one."""
        self._failure_at = None
