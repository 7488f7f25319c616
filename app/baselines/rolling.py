"""What the roll-back methods share: their books, the way back, and commits in a thread beside training."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from app.baselines.commits import Commit
from app.baselines.committer import Committer, Saved
from app.baselines.newest import newest_whole
from app.baselines.protocol import Recovered, StepCost
from layercheck.errors import StorageError
from layercheck.recovery.collectives import on_rank_zero
from layercheck.zero3 import Zero3Engine

T = TypeVar("T")


def roll_back(
    committer: Committer,
    zero3: Zero3Engine,
    read: Callable[[Commit], T],
    put: Callable[[Commit, T], None],
) -> Recovered | None:
    """Brings back the newest whole commit and deletes what is newer. A collective.

    Args:
        committer: of these commits; it counts on from the one that was found.
        zero3: the engine.
        read: reads and checks this rank's files, see `newest_whole`.
        put: puts what was read into the engine; a collective.

    Returns:
        None if nothing was ever committed.
    """
    store = committer.store
    newest = newest_whole(store, zero3.world_size, zero3.collective_device, read)
    # Also without a commit: a folder that a dead writer left must not mix with what is written there again.
    if newest is None:
        on_rank_zero(lambda: store.roll_back_to(-1))
        return None
    commit = newest.commit
    started = time.monotonic()
    put(commit, newest.content)
    reconstruct_s = time.monotonic() - started
    committer.goes_on_from(commit)
    on_rank_zero(lambda: store.roll_back_to(commit.step))
    return Recovered(
        step=commit.step,
        trainer_state=commit.state,
        plan_s=newest.plan_s,
        load_s=newest.read_s,
        reconstruct_s=reconstruct_s,
        nbytes=commit.nbytes,
        source=f"storage, step {commit.step}",
        passed_over=newest.passed_over,
    )


class Books:
    """What was saved since this was last told, and what a failure now would come back to. Training thread."""

    def __init__(self) -> None:
        self.protected_step = 0
        self.commit_s: list[float] = []
        """Seconds of each commit, from its first write to its record."""
        self._saved: list[Saved] = []

    def note(self, saved: Saved | None) -> None:
        """A commit has succeeded or failed; None: there was none."""
        if saved is not None:
            self._saved.append(saved)
        if saved is not None and saved.error is None:
            self.protected_step = saved.step
            self.commit_s.append(saved.commit_s)

    def take(self) -> StepCost:
        """What came since the last call."""
        saved, self._saved = self._saved, []
        good = [each for each in saved if each.error is None]
        return StepCost(
            nbytes=sum(each.nbytes for each in good),
            events=len(good),
            layer_writes=sum(each.layers for each in good),
            protected_step=self.protected_step,
            alerts=tuple(f"step {each.step} was not saved: {each.error}" for each in saved if each.error),
        )

    def facts(self) -> dict[str, float]:
        """The mean seconds of a commit, in the background or not."""
        return {"commit_s": sum(self.commit_s) / len(self.commit_s)} if self.commit_s else {}


def must_be_saved(saved: Saved | None, what: str) -> None:
    """For saves that somebody waits for.

    Raises:
        StorageError: it was not saved.
    """
    if saved is not None and saved.error is not None:
        raise StorageError(f"{what}: step {saved.step} was not saved: {saved.error}", step=saved.step)


class Background:
    """One commit at a time in a thread of its own. No collectives there but on the committer's own group.

    The calls are for the training thread. What the thread raised (a bug, or another rank is gone) is raised
    at the next call; a storage that refuses is no error but a `Saved` that says so. The thread is a daemon:
    with a rank gone it may hang in a collective, and must not keep the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: Future[Saved] | None = None

    @property
    def busy(self) -> bool:
        """Whether a commit is on its way, or its outcome was not asked for yet."""
        return self._running is not None

    def start(self, commit: Callable[[], Saved]) -> None:
        """Begins a commit; the one before must have been waited for."""
        assert self._running is None, "two commits at once"
        self._running = running = Future[Saved]()

        def run() -> None:
            try:
                running.set_result(commit())
            except BaseException as error:
                running.set_exception(error)

        threading.Thread(target=run, name=self._name, daemon=True).start()

    def wait(self) -> Saved | None:
        """The outcome of the commit that is on its way; None if there is none."""
        running, self._running = self._running, None
        return None if running is None else running.result()

    def poll(self) -> Saved | None:
        """The same without waiting: None also while it is on its way."""
        return self.wait() if self._running is not None and self._running.done() else None
