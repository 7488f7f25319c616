"""The run under a campaign: a real one on its own private head, with a handle on each part that can die."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.head import PrivateHead, start_head
from cluster.witness import Life, Notes

RUN = "campaign"
NUM_CPUS = 6
"""Offered by the head: the workers of a submission that dies and those of the next may overlap."""


@dataclass(frozen=True, slots=True)
class Death:
    """One kill that was delivered: what died, the last step then, and the newest attempt that was claimed."""

    part: str
    step: int
    attempt: int
    detail: str


class CampaignRun:
    """Starts the run, ends its parts, starts it again. Everything lies below `folder`.

    Args:
        folder: for the storage, the notes and the log; must be new or empty.
        settings: `--set` items beyond those of app/configs/campaign.yaml.
    """

    def __init__(self, folder: Path, settings: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.witness = folder / "witness"
        self.store = folder / "storage" / RUN / "layercheck"
        self.log = folder / "run.log"
        self.num_submissions = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._notes = Notes(self.witness)
        self._head: PrivateHead | None = None
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Makes sure that a head and a driver live; a driver that is gone is submitted again."""
        if self._head is None:
            self._head = start_head(num_cpus=NUM_CPUS)
        if self._driver is None:
            self._driver = self._submit(self._head)

    def _submit(self, head: PrivateHead) -> subprocess.Popen[bytes]:
        self.num_submissions += 1
        command = [sys.executable, "-m", "app", "--config", "campaign", "--run-name", RUN]
        command += ["--storage", str(self.folder / "storage")]
        # As a person does who knows that the last submission is dead; else it would be watched first.
        command += ["--takeover"] if self.num_submissions > 1 else []
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [*command, "--set", f"faults.witness={self.witness}", *self._settings],
                env={**os.environ, **head.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ends everything that belongs to the run."""
        self._end_driver()
        if self._head is not None:
            self._head.kill()
            self._head = None

    def driver_ended(self) -> int | None:
        """Exit code of a driver that ended by itself; None while it lives. The next `start` submits again."""
        if self._driver is None or (code := self._driver.poll()) is None:
            return None
        self._driver = None
        return code

    def last_words(self, num_chars: int = 600) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-num_chars:] if self.log.exists() else ""

    # ------------------------------------------------------------------ how far it is

    def lives(self) -> list[Life]:
        """What the ranks have noted so far."""
        return self._notes.lives()

    def workers(self) -> dict[int, int]:
        """Rank -> process of those that live and have built their engine."""
        members = set(self._head.members()) if self._head is not None else set()
        return {life.rank: life.pid for life in self.lives() if life.pid in members}

    def position(self) -> tuple[int, int]:
        """(attempt, step) of the newest step that rank 0 noted; zeros before the first."""
        steps = [(life.attempt, life.steps[-1][0]) for life in self.lives() if life.rank == 0 and life.steps]
        return max(steps, default=(0, 0))

    def claimed(self) -> int:
        """Number of the newest attempt that was ever claimed, 0 for none."""
        names = [path.name for path in self.store.glob("attempts/a*.json") if path.name.count(".") == 1]
        return max((int(name[1:-5]) for name in names), default=0)

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
        assert self._head is not None
        pids = [pid for pid in self._head.members() if b"ray::CoordinatorActor" in _command_line(pid)]
        return f"process {pids[0]}" if pids and _send(pids[0], signal.SIGKILL) else None

    def end_driver(self, rng: random.Random) -> str | None:
        """SIGKILL of the driver; the job is to be submitted again."""
        return "submitted again" if self._end_driver() else None

    def end_head(self, rng: random.Random) -> str | None:
        """SIGKILL of the whole cluster, driver included: what a lost machine looks like."""
        head, self._head = self._head, None
        if head is None:
            return None
        self._end_driver()
        head.kill()
        return "a new head is started"

    def _end_driver(self) -> bool:
        driver, self._driver = self._driver, None
        if driver is None:
            return False
        driver.kill()
        driver.wait()
        return True


PARTS: dict[str, Callable[[CampaignRun, random.Random], str | None]] = {
    "worker": CampaignRun.end_worker,
    "all workers": CampaignRun.end_all_workers,
    "stopped worker": CampaignRun.stop_worker,
    "coordinator": CampaignRun.end_coordinator,
    "driver": CampaignRun.end_driver,
    "head": CampaignRun.end_head,
}


def _send(pid: int, sig: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, sig)
        return True
    return False


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
