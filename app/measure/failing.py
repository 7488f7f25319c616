"""A real run that loses workers at given times, or as often as its recoveries are to be timed.

A kill is SIGKILL of one worker of a group that no kill has hit yet: if the time has come and the group is
still being started, the kill waits for it, and the moment at which it was delivered is what counts. So each
kill ends a training or a recovery, as a failure of the simulation does.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.measure.waits import LIMIT_S, wait_for
from app.step_log import LoggedStep, read_lives
from cluster.private_run import PrivateRun

SETTLE_STEPS = 5
"""Steps after a restart that may take longer than others; what they take longer is part of the recovery."""
_NUM_WORKERS = 2

Life = tuple[LoggedStep, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """What a run did. Seconds are on the monotonic clock of this machine.

    Attributes:
        lives: the steps of each worker group that made any, in order.
        kills_s: when workers were killed.
        begin_step: the watch began when this step had ended.
    """

    lives: tuple[Life, ...]
    kills_s: tuple[float, ...]
    begin_step: int

    @property
    def begin_s(self) -> float:
        """When the watch began."""
        first = self.lives[0]
        if not self.begin_step:
            return first[0].begin_s
        return next(step.end_s for step in first if step.step == self.begin_step)


class FailingRun:
    """The run, and the one who kills it; also a context manager that ends it.

    Args:
        folder: of all files of the run; must be new or empty.
        config: a name in `app/configs/`, or a YAML file, with two workers.
        settings: `--set` items beyond it.
        begin_step: the watch begins when this step has ended; 0 for the first step's beginning.
        seed: of the choice of workers.
    """

    def __init__(
        self, folder: Path, config: str, settings: Sequence[str], begin_step: int, seed: int = 0
    ) -> None:
        self._log = folder / "steps"
        self._run = PrivateRun(folder, "validation", config, (*settings, f"faults.step_log={self._log}"))
        self._begin_step = begin_step
        self._rng = random.Random(seed)
        self._hit: set[int] = set()
        self._kills_s: list[float] = []

    def __enter__(self) -> "FailingRun":
        self._run.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run.stop()

    def kill_at(self, times_s: Sequence[float], say: Callable[[str], None]) -> Failed:
        """Kills at these seconds after the watch began; ends with the first step after the last kill.

        Raises:
            LayerCheckError: the run ended by itself, or made no step within `LIMIT_S`.
        """
        wait_for(
            self._run, lambda: self._newest_step() >= max(1, self._begin_step), f"step {self._begin_step}"
        )
        begin_s = self._seen().begin_s
        for number, after_s in enumerate(times_s, start=1):
            wait_for(
                self._run,
                lambda until=begin_s + after_s: time.monotonic() >= until,  # type: ignore[misc]
                f"second {after_s:.0f}",
                after_s + LIMIT_S,
            )
            self._kill()
            say(f"kill {number}/{len(times_s)} after {self._kills_s[-1] - begin_s:.1f} s")
        self._wait_for_life(1)
        return self._seen()

    def time_recoveries(
        self, steady_steps: int, kills: int, steps_between: int, say: Callable[[str], None]
    ) -> Failed:
        """Lets the run train for `steady_steps` without a failure, then kills it again and again.

        Args:
            steady_steps: after the beginning of the watch.
            kills: how many.
            steps_between: steps that the run makes after a kill before the next one, `SETTLE_STEPS` at least.
                A run that goes back has to get beyond where it was: LayerCheck ends one that does not (I13).
            say: told each recovery.

        Raises:
            LayerCheckError: as `kill_at`.
        """
        until = self._begin_step + steady_steps
        wait_for(
            self._run, lambda: self._newest_step() >= until, f"step {until}", LIMIT_S + 10 * steady_steps
        )
        for number in range(1, kills + 1):
            self._kill()
            self._wait_for_life(max(SETTLE_STEPS, steps_between))
            say(f"recovery {number}/{kills}: {self._seen().lives[-1][0].begin_s - self._kills_s[-1]:.1f} s")
        return self._seen()

    # ------------------------------------------------------------------ kills and waits

    def _kill(self) -> None:
        wait_for(
            self._run, lambda: len(self._fresh()) == _NUM_WORKERS, "a worker group that was not killed yet"
        )
        group = self._fresh()
        self._hit.update(group)
        os.kill(self._rng.choice(group), signal.SIGKILL)
        self._kills_s.append(time.monotonic())

    def _fresh(self) -> list[int]:
        return sorted(set(self._run.actors("RayTrainWorker")) - self._hit)

    def _wait_for_life(self, steps: int) -> None:
        """Waits until a group that began after the newest kill has made so many steps."""

        def is_back() -> bool:
            lives = self._seen().lives
            return lives[-1][0].begin_s > self._kills_s[-1] and len(lives[-1]) >= steps

        wait_for(self._run, is_back, f"{steps} steps after the kill")

    def _newest_step(self) -> int:
        lives = self._seen().lives
        return lives[-1][-1].step if lives else 0

    def _seen(self) -> Failed:
        return Failed(tuple(read_lives(self._log)), tuple(self._kills_s), self._begin_step)
