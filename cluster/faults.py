"""Ends or stops a worker at a named rank and step, once: how a failure is injected into a real run."""

import json
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from layercheck.errors import ConfigError

log = logging.getLogger(__name__)
How = Literal["kill", "raise", "stop"]
"""SIGKILL, an exception of the train function, or SIGSTOP: a process that is there and does nothing."""


class InjectedError(RuntimeError):
    """The exception of a fault `how: raise`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls `rank` after optimizer step `step`, at most `times` times in the life of the run."""

    rank: int
    step: int
    times: int = 1
    how: How = "kill"

    def marker(self, index: int) -> str:
        """Name of the file that says that kill number `index` (from 0) was carried out."""
        return f"rank-{self.rank:05d}.step-{self.step:08d}.{index:02d}.json"


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a run. Markers live in `<storage>/<run>/faults/`, which every worker must see."""

    folder: Path
    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, entries: list[dict[str, Any]], storage: str, run: str) -> Self:
        """Reads `[{rank: 1, step: 40, times: 1, how: kill}, ...]`.

        Raises:
            ConfigError: an entry is wrong, or the storage is not a local path.
        """
        if entries and "://" in storage and not storage.startswith("file://"):
            raise ConfigError(f"faults need a local storage path for their markers, not {storage!r}")
        folder = Path(storage.removeprefix("file://")) / run / "faults"
        return cls(folder, tuple(_parse_fault(entry) for entry in entries))

    def maybe_kill(self, rank: int, step: int) -> None:
        """Ends or stops this process if a fault names this rank and step and was not carried out yet.

        Raises:
            InjectedError: for a fault `how: raise`.
        """
        for fault in self.faults:
            if (fault.rank, fault.step) == (rank, step) and self._claim(fault):
                _carry_out(fault)

    def injected(self) -> list[dict[str, int]]:
        """The kills so far as `{rank, step}`, for `summary.json`."""
        return injected_faults(self.folder)

    def _claim(self, fault: Fault) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        return any(self._create(fault, index) for index in range(fault.times))

    def _create(self, fault: Fault, index: int) -> bool:
        # Durable before the kill: a marker lost with the process would make the restarted worker kill
        # itself at the same step again, and the run would never get past it.
        try:
            fd = os.open(self.folder / fault.marker(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(fd, json.dumps({"rank": fault.rank, "step": fault.step}).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        _fsync_folder(self.folder)
        return True


def _carry_out(fault: Fault) -> None:
    if fault.how == "raise":
        raise InjectedError(f"fault: rank {fault.rank} raises after step {fault.step}")
    sent = signal.SIGSTOP if fault.how == "stop" else signal.SIGKILL
    log.warning("fault: %s to rank %d after step %d", sent.name, fault.rank, fault.step)
    os.kill(os.getpid(), sent)


def injected_faults(folder: Path) -> list[dict[str, int]]:
    """The kills whose markers are in `folder`, in step order. Read from the names: a kill may cut a file."""
    found = []
    for path in folder.glob("rank-*.step-*.json"):
        rank, step, _, _ = path.name.split(".")
        found.append({"rank": int(rank.removeprefix("rank-")), "step": int(step.removeprefix("step-"))})
    return sorted(found, key=lambda kill: (kill["step"], kill["rank"]))


def _parse_fault(entry: dict[str, Any]) -> Fault:
    try:
        fault = Fault(**entry)
    except TypeError:
        raise ConfigError(f"faults: {entry!r} must have the keys rank, step and perhaps times, how") from None
    for key, least in (("rank", 0), ("step", 1), ("times", 1)):
        value = getattr(fault, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"faults: {key}={value!r} must be an integer of at least {least}")
    if fault.how not in get_args(How):
        raise ConfigError(f"faults: how={fault.how!r} is none of {', '.join(get_args(How))}")
    return fault


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
