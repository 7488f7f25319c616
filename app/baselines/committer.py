"""Commits that all ranks make together.

The states of a commit, on all ranks, in whatever thread the method saves in:
1. each rank writes its files; they are durable.
2. each rank tells all others what it wrote, or why it could not.
3. rank 0 writes `commit.json`, unless a rank could not write: then the folder is no commit, and all go on.
4. rank 0 tells the others that the commit exists; only then it deletes older ones.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from app.baselines.commits import Commit, CommitStore, FileRecord, Tally
from layercheck.errors import StorageError
from layercheck.manifest import TrainerState

log = logging.getLogger("app")
Files = tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """How one commit went.

    Attributes:
        step: of the state.
        nbytes: bytes of all ranks; `layers` in it.
        write_s: seconds of this rank's files; `commit_s` seconds of the whole, waits for others included.
        error: why there is no commit, None if there is one.
    """

    step: int
    nbytes: int
    layers: int
    write_s: float
    commit_s: float
    error: str | None = None


class Committer:
    """Makes the commits of one method. One commit at a time; all ranks make the same ones in the same order.

    Args:
        store: where they lie.
        group: a gloo group that nobody else uses while a commit is made.
        layers: layers of one commit, for the counts.
        keep: newest commits that stay.
    """

    def __init__(self, store: CommitStore, group: Any, layers: int, keep: int) -> None:
        self.store = store
        self._group = group
        self._layers = layers
        self._keep = keep
        self._tallies: dict[str, Tally] = {}

    def goes_on_from(self, commit: Commit) -> None:
        """Later commits count on from this one."""
        self._tallies = dict(commit.tallies)

    def commit(
        self,
        step: int,
        attempt: int,
        state: TrainerState,
        write: Callable[[], Files],
        kind: str = "interval",
        keep: int | None = None,
    ) -> Saved:
        """Makes one commit; a collective over the group. No error of the storage leaves it.

        Args:
            step: of the state.
            attempt: of the run.
            state: the trainer state.
            write: writes this rank's files, durably, below `store.folder(step)`.
            kind: see `Commit`.
            keep: in place of the usual number of commits that stay.
        """
        started = time.monotonic()
        files, error = _tried(write)
        write_s = time.monotonic() - started
        told: list[tuple[Files, str | None]] = [((), None)] * dist.get_world_size()
        dist.all_gather_object(told, (files, error), group=self._group)
        error = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text), None)
        nbytes = sum(file.nbytes for each, _ in told for file in each)
        if error is None:
            tally = self._tallies.get(kind, Tally()).plus(nbytes, self._layers)
            made = Commit(
                step=step,
                attempt=attempt,
                kind=kind,
                world_size=len(told),
                state=state,
                files=tuple(files for files, _ in told),
                tallies={**self._tallies, kind: tally},
            )
            error = self._publish(made, self._keep if keep is None else keep)
        if error is not None:
            log.error("step %d was not saved, training goes on: %s", step, error)
        return Saved(step, nbytes, self._layers, write_s, time.monotonic() - started, error)

    def _publish(self, commit: Commit, keep: int) -> str | None:
        """States 3 and 4."""
        answer: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                self.store.write(commit)
            except StorageError as error:
                answer[0] = str(error)
        dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[0] is None:
            self._tallies = dict(commit.tallies)
            if dist.get_rank() == 0:
                self._delete_older(keep)
        return answer[0]

    def _delete_older(self, keep: int) -> None:
        try:
            self.store.keep_newest(keep)
        except StorageError as error:
            log.error("older commits could not be deleted: %s", error)  # the next commit tries again

    @property
    def tallies(self) -> dict[str, Tally]:
        """What was committed since the run began, by kind."""
        return dict(self._tallies)


def _tried(write: Callable[[], Files]) -> tuple[Files, str | None]:
    """The files, or what the storage said."""
    try:
        return write(), None
    except (StorageError, OSError) as error:
        return (), str(error)


def own_group(wait_s: float) -> Any:
    """A gloo group of all ranks for one thread beside the training thread. A collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
