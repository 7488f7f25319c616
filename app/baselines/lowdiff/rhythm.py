"""When a batch is full and a base is due: as configured, or the optimum for what the first steps cost."""

import statistics
import time

from app.baselines.committer import Saved
from app.baselines.lowdiff.tuning import Costs, Rhythm, optimum
from app.baselines.settings import LowDiffSettings
from layercheck.recovery.collectives import on_rank_zero

_NO_BASE = 1 << 62


class RhythmKeeper:
    """The rhythm of one attempt; while `auto` measures, each step is a batch and no base is due.

    Args:
        settings: may hold `auto`.
    """

    def __init__(self, settings: LowDiffSettings) -> None:
        self._settings = settings
        self._left = settings.profile_steps if self.measures else 0
        self._step_s: list[float] = []
        self._update_s: list[float] = []
        self._update_began_s: float | None = None
        self._ended_s: float | None = None
        self.now = Rhythm(*self._configured(Rhythm(1, _NO_BASE)))

    @property
    def measures(self) -> bool:
        """Whether anything is `auto`: then the first base of an attempt is needed for its figures."""
        return "auto" in (self._settings.batch, self._settings.base_every)

    def update_begins(self) -> None:
        """The optimizer begins to update; further calls in the same step change nothing."""
        if self._left and self._update_began_s is None:
            self._update_began_s = time.monotonic()

    def step_ended(self) -> bool:
        """True once, when enough steps were timed: `decide` comes next. The same on all ranks."""
        if not self._left:
            return False
        ended_s = time.monotonic()
        if self._ended_s is not None:
            self._step_s.append(ended_s - self._ended_s)
        if self._update_began_s is not None:
            self._update_s.append(ended_s - self._update_began_s)
        self._ended_s, self._update_began_s = ended_s, None
        self._left -= 1
        return self._left == 0

    def decide(self, base: Saved | None) -> None:
        """Rank 0 decides for all. A collective.

        Args:
            base: how the first base went; without one the rhythm stays at one step a file and no base, until
                the next attempt.
        """
        self.now = on_rank_zero(lambda: self._best(base))

    def _best(self, base: Saved | None) -> Rhythm:
        if base is None or base.error is not None or not self._update_s:
            return self.now
        assert self._settings.mtbf_h is not None, "the settings were checked"
        costs = Costs(
            step_s=statistics.median(self._step_s),
            apply_s=statistics.median(self._update_s),
            base_bytes=base.nbytes,
            write_bytes_per_s=base.nbytes / base.write_s,
            mtbf_s=3600 * self._settings.mtbf_h,
        )
        return Rhythm(*self._configured(optimum(costs)))

    def _configured(self, best: Rhythm) -> tuple[int, int]:
        batch, every = self._settings.batch, self._settings.base_every
        return best.batch if batch == "auto" else batch, best.base_every if every == "auto" else every
