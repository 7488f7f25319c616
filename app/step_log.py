"""When each optimizer step began and ended, noted by rank 0: what a run really did under any method.

One JSON line a step in `<folder>/<process>.jsonl`. Seconds are those of the monotonic clock, which all
processes of a machine share: for runs of one machine alone (`faults.step_log`).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step: optimizer and saving, up to the moment at which the next one may begin.

    Attributes:
        begin_s, end_s: on the monotonic clock of the machine.
        stall_s: seconds for which training waited for a save, as the session told.
        bytes_written: bytes that this rank handed over to be saved.
    """

    step: int
    begin_s: float
    end_s: float
    stall_s: float = 0.0
    bytes_written: int = 0


class StepLog:
    """Appends the steps of one process."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = Path(folder) / f"{os.getpid()}.jsonl"

    @classmethod
    def of(cls, folder: str | None, rank: int) -> Self | None:
        """The log of a run that has a folder for one; only rank 0 writes."""
        return None if folder is None or rank != 0 else cls(folder)

    def note(self, step: LoggedStep) -> None:
        """Adds one step."""
        row = [step.step, step.begin_s, step.end_s, step.stall_s, step.bytes_written]
        # One write: a kill leaves the line whole or not at all.
        fd = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        try:
            os.write(fd, json.dumps(row).encode() + b"\n")
        finally:
            os.close(fd)


def read_lives(folder: Path) -> list[tuple[LoggedStep, ...]]:
    """The steps of each process that made any, in the order in which the processes lived."""
    lives = []
    for path in folder.glob("*.jsonl"):
        *lines, _ = path.read_bytes().split(b"\n")  # what follows the last newline is a line being written
        if lines:
            lives.append(tuple(LoggedStep(*json.loads(line)) for line in lines))
    return sorted(lives, key=lambda life: life[0].begin_s)
