"""A coordinator that only counts, with a state that storage keeps: for tests of what Ray adds around one."""

import os
import threading
from pathlib import Path
from typing import Any

from layercheck.config import LayerCheckConfig
from layercheck.coordination.protocol import AttemptGrant, HeartbeatReply
from layercheck.errors import FencedError, RunIsLiveError, StorageError
from layercheck.manifest import EventId


class LedgerCoordinator:
    """Each heartbeat step is a file; the newest one is the whole state."""

    def __init__(self, run: str, storage: str, config: LayerCheckConfig) -> None:
        self.folder = Path(storage) / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ticks = 0
        self.slow = threading.Event()
        self.config = config
        if (self.folder / "unreadable").exists():
            raise StorageError(f"cannot read {self.folder}", path=str(self.folder))

    def close(self) -> None:
        (self.folder / "closed").touch()

    def note_failure(self) -> None:
        (self.folder / "failure").touch()

    def tick(self) -> None:
        self.ticks += 1
        if (self.folder / "break-tick").exists():
            (self.folder / "break-tick").unlink()
            raise RuntimeError("a bug in tick")

    def begin_attempt(self, token: str, submission: str, world_size: int, mode: str, *_: Any) -> AttemptGrant:
        if submission == "second":
            raise RunIsLiveError("run x is live (step 812, moving); end it or pass --takeover", step=812)
        return AttemptGrant(attempt=1, r_b=0, wait_s=self.config.takeover_s)

    def heartbeat(
        self, attempt: int, step: int, trainer_state: dict[str, Any], drift: dict[str, float]
    ) -> HeartbeatReply:
        if trainer_state.get("die"):
            trainer_state_file = self.folder / "died"
            if not trainer_state_file.exists():
                trainer_state_file.touch()
                os._exit(1)
        (self.folder / f"step-{step}").touch()
        return HeartbeatReply(committed_step=step)

    def record(self, event: EventId, rank: int, records: tuple[Any, ...], trainer_state: Any) -> None:
        raise FencedError("attempt 1 was fenced off by attempt 2", attempt=1)

    def lost(self, event: EventId, rank: int, reason: str) -> None:
        raise KeyError("a bug in lost")

    def amend(self, attempt: int, bad: tuple[Any, ...]) -> AttemptGrant:
        self.slow.wait(60)
        return AttemptGrant(attempt=attempt, r_b=0)

    def open_run(self, run: Any, probe: str) -> tuple[str, ...]:
        return (probe,)

    def note_receipt(self, attempt: int, receipt: dict[str, Any]) -> None:
        self.slow.set()

    def end_attempt(self, attempt: int, how: str, reason: str = "") -> None:
        return None

    def status(self) -> dict[str, Any]:
        steps = [int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")]
        return {
            "step": max(steps, default=0),
            "pid": os.getpid(),
            "ticks": self.ticks,
            "takeover_s": self.config.takeover_s,
        }
