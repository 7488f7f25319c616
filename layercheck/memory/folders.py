"""Where the segments of a node's vault lie, who owns the folder, and what the dead left behind.

`/dev/shm/layercheck-<run>-<node>/`: a vault holds the lock in it while it lives. So a folder whose lock is
free belongs to nobody that lives: a vault that comes back to the node takes it over, and nobody else deletes
it before it has lain there untouched for a while.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from hashlib import blake2b

from layercheck.errors import VaultError
from layercheck.manifest import EventId

PLACE = "/dev/shm"
_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK_S = 20.0


def run_key(run: str, storage: str) -> str:
    """Tells runs apart: the same run name in another storage is another run."""
    return blake2b(f"{storage}\0{run}".encode(), digest_size=6).hexdigest()


def folder_of(run: str, node: str, place: str = PLACE) -> str:
    """The folder of one node's vault; `run` is a `run_key`."""
    return os.path.join(place, f"layercheck-{run}-{blake2b(node.encode(), digest_size=6).hexdigest()}")


class Ownership:
    """The lock of a folder, held until `release` or the end of this process."""

    def __init__(self, lock: int) -> None:
        self._lock: int | None = lock
        # A forked child (a reader of data) that outlives this process must not keep the lock.
        os.register_at_fork(after_in_child=self.release)

    @property
    def is_over(self) -> bool:
        """It was released."""
        return self._lock is None

    def release(self) -> None:
        """Gives the folder up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take(folder: str, limit_s: float = _LOCK_S) -> Ownership:
    """Makes the folder this process's own.

    A predecessor that was just killed may take a moment to be gone.

    Raises:
        VaultError: another vault that lives has it.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    deadline = time.monotonic() + limit_s
    while (lock := _try_lock(folder)) is None:
        if time.monotonic() > deadline:
            raise VaultError(f"{folder} belongs to another vault that lives: two vaults of one node?")
        time.sleep(0.05)
    return Ownership(lock)


def of_run(run: str | None = None, place: str = PLACE) -> list[str]:
    """All folders of a run on this machine, or of all runs."""
    prefix = f"layercheck-{run}-" if run else "layercheck-"
    return [os.path.join(place, name) for name in _names(place) if name.startswith(prefix)]


def sweep(
    place: str = PLACE, *, run: str | None = None, older_than_s: float = 0.0, nodes: Collection[str] = ()
) -> list[str]:
    """Deletes folders (of one run, or of all) that nobody owns and that were not touched for so long.

    Args:
        place: where shared memory lies.
        run: key of the run; None for all.
        older_than_s: see above.
        nodes: of the run, that live: a vault may be about to come back to theirs.
    """
    gone, kept = [], {folder_of(run, node, place) for node in nodes} if run else set()
    for folder in of_run(run, place):
        if folder in kept or time.time() - _touched(folder) < older_than_s:
            continue
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            gone.append(folder)
    return gone


def segment_name(event: EventId, rank: int) -> str:
    """Name of one rank's segment of an event."""
    return f"{event.folder.removeprefix('events/')}.r{rank:05d}"


def parse_name(name: str) -> tuple[EventId, int] | None:
    """(event, rank) of a segment's name, None for any other name."""
    folder, _, rank = name.rpartition(".r")
    event = EventId.parse(folder)
    if event is None or not rank.isdecimal() or segment_name(event, int(rank)) != name:
        return None
    return event, int(rank)


def segments(folder: str) -> list[str]:
    """Names of the segments in a folder, torn ones included."""
    return [name for name in _names(folder) if not name.startswith(".")]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _touched(folder: str) -> float:
    with suppress(OSError):
        return os.stat(folder).st_mtime
    return time.time()


def _try_lock(folder: str) -> int | None:
    try:
        lock = os.open(os.path.join(folder, _LOCK), _LOCK_FLAGS, 0o600)
    except OSError:
        return None  # another user's, or gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
