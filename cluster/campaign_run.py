"""The run under a campaign: a real one on its own private head, with a handle on each part that can die."""

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.coordinator import normal_storage
from cluster.private_run import PrivateRun
from cluster.witness import Life, Notes
from layercheck.memory import folders

RUN = "campaign"


@dataclass(frozen=True, slots=True)
class Death:
    """One kill that was delivered: what died, the last step then, and the newest attempt that was claimed."""

    part: str
    step: int
    attempt: int
    detail: str


class CampaignRun(PrivateRun):
    """A run whose ranks note what they do, and whose parts can be ended.

    Args:
        folder: for the storage, the notes and the log; must be new or empty.
        settings: `--set` items beyond those of app/configs/campaign.yaml.
    """

    def __init__(self, folder: Path, settings: tuple[str, ...] = ()) -> None:
        self.witness = folder / "witness"
        super().__init__(folder, RUN, "campaign", (f"faults.witness={self.witness}", *settings))
        self._notes = Notes(self.witness)

    # ------------------------------------------------------------------ how far it is

    def lives(self) -> list[Life]:
        """What the ranks have noted so far."""
        return self._notes.lives()

    def workers(self) -> dict[int, int]:
        """Rank -> process of those that live and have built their engine."""
        members = set(self.members())
        return {life.rank: life.pid for life in self.lives() if life.pid in members}

    def position(self) -> tuple[int, int]:
        """(attempt, step) of the newest step that rank 0 noted; zeros before the first."""
        steps = [(life.attempt, life.steps[-1][0]) for life in self.lives() if life.rank == 0 and life.steps]
        return max(steps, default=(0, 0))

    def claimed(self) -> int:
        """Number of the newest attempt that was ever claimed, 0 for none."""
        names = [path.name for path in self.store.glob("attempts/a*.json") if path.name.count(".") == 1]
        return max((int(name[1:-5]) for name in names), default=0)

    def memory_left(self) -> list[str]:
        """Folders in shared memory that nobody owns any more; deletes them. For a run that was stopped."""
        return folders.sweep(run=folders.run_key(RUN, normal_storage(str(self.storage))))

    # ------------------------------------------------------------------ deaths

    def kill(self, part: str, rng: random.Random) -> Death | None:
        """Ends one part; None if it is not there at the moment."""
        _, step = self.position()
        attempt = self.claimed()
        detail = PARTS[part](self, rng)
        return None if detail is None else Death(part, step, attempt, detail)

    def end_worker(self, rng: random.Random) -> str | None:
        """SIGKILL of one worker."""
        return self._signal_one(signal.SIGKILL, rng)

    def stop_worker(self, rng: random.Random) -> str | None:
        """SIGSTOP of one worker: it is there and does nothing."""
        return self._signal_one(signal.SIGSTOP, rng)

    def _signal_one(self, sig: signal.Signals, rng: random.Random) -> str | None:
        workers = self.workers()
        if not workers:
            return None
        rank = rng.choice(sorted(workers))
        return f"rank {rank}" if _send(workers[rank], sig) else None

    def end_all_workers(self, rng: random.Random) -> str | None:
        """SIGKILL of every worker."""
        ended = [rank for rank, pid in sorted(self.workers().items()) if _send(pid, signal.SIGKILL)]
        return f"ranks {ended}" if ended else None

    def end_coordinator(self, rng: random.Random) -> str | None:
        """SIGKILL of the actor that keeps the manifest."""
        pids = self.actors("CoordinatorActor")
        return f"process {pids[0]}" if pids and _send(pids[0], signal.SIGKILL) else None

    def end_vault(self, rng: random.Random) -> str | None:
        """SIGKILL of the actor that holds the snapshots of the node."""
        pids = self.actors("VaultActor")
        return f"process {pids[0]}" if pids and _send(pids[0], signal.SIGKILL) else None

    def end_driver(self, rng: random.Random) -> str | None:
        """SIGKILL of the driver; the job is to be submitted again."""
        return "submitted again" if self.end_submission() else None

    def end_head(self, rng: random.Random) -> str | None:
        """SIGKILL of the whole cluster, driver included: what a lost machine looks like."""
        head, self._head = self._head, None
        if head is None:
            return None
        self.end_submission()
        head.kill()
        return "a new head is started"


PARTS: dict[str, Callable[[CampaignRun, random.Random], str | None]] = {
    "worker": CampaignRun.end_worker,
    "all workers": CampaignRun.end_all_workers,
    "stopped worker": CampaignRun.stop_worker,
    "coordinator": CampaignRun.end_coordinator,
    "driver": CampaignRun.end_driver,
    "head": CampaignRun.end_head,
    "vault": CampaignRun.end_vault,
}


def _send(pid: int, sig: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, sig)
        return True
    return False
