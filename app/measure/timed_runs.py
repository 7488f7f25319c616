"""Real runs of the app, one after the other, on one private cluster in which each rank has a node of its own.

Two nodes on this machine: a method that keeps copies in the memory of a peer needs two hosts, and all methods
are to run on the same cluster.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from app.measure.waits import wait_for_end
from app.step_log import LoggedStep, read_lives
from cluster.head import PrivateHead, start_head, start_node
from cluster.private_run import PrivateRun

WORLD_SIZE = 2
_START_LIMIT_S = 300.0
_STEP_LIMIT_S = 20.0
"""A run may take so long to start, and so long a step, before it is given up."""


class TimedRuns:
    """The cluster and the runs on it; a context manager that ends both.

    Args:
        config: a YAML file or a name in `app/configs/`, with two workers.
    """

    def __init__(self, config: str) -> None:
        self._config = config
        self._stack = ExitStack()
        self._head: PrivateHead | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._head = stack.enter_context(start_head(num_cpus=0))
            for _ in range(WORLD_SIZE):
                # No spare CPU: a killed rank comes back where its host's memory is.
                stack.enter_context(start_node(self._head, 1))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, folder: Path, name: str, settings: tuple[str, ...], steps: int) -> "TimedRun":
        """Trains a run to its end.

        Args:
            folder: for the storage, the log and the step log; new.
            name: of the run.
            settings: `--set` items.
            steps: about how many it makes, replayed ones included: for the limit of time.

        Raises:
            LayerCheckError: it failed, or took longer than the limit.
        """
        log = folder / "steps"
        run = PrivateRun(folder, name, self._config, (*settings, f"faults.step_log={log}"), self._head)
        limit_s = _START_LIMIT_S + _STEP_LIMIT_S * steps
        try:
            run.start()
            wait_for_end(run, limit_s)
        finally:
            run.stop()
        return TimedRun(run.storage / name, tuple(read_lives(log)))


class TimedRun:
    """A run that completed: its folder, and the steps of each worker group."""

    def __init__(self, folder: Path, lives: tuple[tuple[LoggedStep, ...], ...]) -> None:
        self.folder = folder
        self.lives = lives
