"""Which commit a roll-back method goes back to: the newest that is whole on every rank."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from app.baselines.commits import Commit, CommitStore
from layercheck.errors import NoPlanError, StorageError, StoreMismatchError
from layercheck.persistence.damage import is_damage
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero

log = logging.getLogger("app")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Newest(Generic[T]):
    """The newest whole commit.

    Attributes:
        content: what `read` made of it on this rank.
        passed_over: steps of newer commits, which are torn.
        plan_s: seconds until it was known; reads of torn ones are among them.
        read_s: seconds of `read` on the slowest rank.
    """

    commit: Commit
    content: T
    passed_over: tuple[int, ...]
    plan_s: float
    read_s: float


def newest_whole(
    store: CommitStore, world_size: int, device: torch.device, read: Callable[[Commit], T]
) -> Newest[T] | None:
    """Reads the newest commit that is whole on every rank. A collective on the default group.

    Args:
        store: where to look.
        world_size: number of ranks.
        device: of small collectives.
        read: reads and checks this rank's files; raises `DamagedShardError` if one is torn.

    Returns:
        None if there is no commit at all.

    Raises:
        NoPlanError: there are commits and each is torn.
        StoreMismatchError: the newest was written by another number of ranks.
        StorageError: the storage does not answer one of the ranks.
    """
    started = time.monotonic()
    passed_over: tuple[int, ...] = ()
    for step in on_rank_zero(store.committed):
        commit = on_rank_zero(lambda s=step: _record(store, s))  # type: ignore[misc]
        begun = time.monotonic()
        if commit is not None:
            _check_world(commit, world_size, store.method)
            content = read_on_all_ranks(partial(read, commit), device)
            if content is not None:
                return Newest(commit, content[0], passed_over, begun - started, time.monotonic() - begun)
        passed_over += (step,)
        if torch.distributed.get_rank() == 0:
            log.warning("commit %s is torn: going back to an older one", store.folder(step))
    if passed_over:
        raise NoPlanError(
            f"{store.method}: every commit (steps {list(passed_over)}) is damaged; give another run.name, or "
            f"delete the folder {store.method} of the run to begin anew",
            steps=list(passed_over),
        )
    return None


def _record(store: CommitStore, step: int) -> Commit | None:
    """None for a record that is damaged."""
    try:
        return store.read(step)
    except StorageError as error:
        if not is_damage(error):
            raise
        return None


def _check_world(commit: Commit, world_size: int, method: str) -> None:
    if commit.world_size != world_size:
        raise StoreMismatchError(
            f"checkpoint.method={method}: step {commit.step} was saved by {commit.world_size} ranks and "
            f"cannot be read by {world_size}; set cluster.workers={commit.world_size}",
            saved=commit.world_size,
            now=world_size,
        )


def read_on_all_ranks(read: Callable[[], T], device: torch.device) -> tuple[T] | None:
    """What `read` gives on this rank, None if it found damage on any rank. A collective.

    Raises:
        StorageError: on every rank, if the storage does not answer one: alone it would hang the others.
    """
    refused: StorageError | None = None
    content: tuple[T] | None = None
    torn: StorageError | None = None
    try:
        content = (read(),)
    except StorageError as error:
        if is_damage(error):
            torn = error
            log.warning("%s", error)
        else:
            refused = error
    if count_over_ranks(int(refused is not None), device):
        raise refused or StorageError("another rank cannot read the storage: see its error (`storage`)")
    return content if count_over_ranks(int(torn is not None), device) == 0 else None


def check_files(store: CommitStore, rank: int) -> Callable[[Commit], None]:
    """A `read` for methods whose files are read by others: checks all of this rank's, keeps nothing."""

    def check(commit: Commit) -> None:
        for file in commit.files[rank]:
            store.check_file(commit.step, file)

    return check
