"""The store of one host: keeps the boxes of the ranks that live there and outlives them. A plain class.

It never touches the bytes of a box but to read records and, for a rank of another host without ranks of its
own, pieces of a copy: trainers of this host map the boxes and write them.
"""

import os
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import psutil

from app.baselines.gemini.decision import Copy
from app.baselines.gemini.memory import HostMemoryError, Region, check_room, create, free_bytes
from app.baselines.gemini.records import NUM_SLOTS, RECORD_BYTES, BoxShape, SlotRecord

Key = tuple[int, int]
"""(shard, keeper): the rank whose state it is, and the rank that writes it. Equal: a rank's own copy."""

_WRITER_S = 30.0


class HostCalls(Protocol):
    """What ranks ask of a host's store. Small messages alone, but for `read`."""

    def enter(self, run_id: str, attempt: bytes, pid: int) -> None:
        """A process of this host begins an attempt; all of another run of the same name is forgotten.

        Raises:
            HostMemoryError: a process of an attempt before lives on and could still write.
        """
        ...

    def copies(self, run_id: str) -> tuple[Copy, ...]:
        """All valid slots; none for another run."""
        ...

    def open(self, needs: Mapping[Key, BoxShape], slack_bytes: int) -> dict[Key, tuple[BoxShape, Region]]:
        """These boxes: one that is there and has the room as it is, the others anew, empty, with slack.

        Raises:
            ConfigError: this host has not enough memory.
        """
        ...

    def region(self, key: Key) -> tuple[BoxShape, Region]:
        """A box that exists."""
        ...

    def read(self, key: Key, begin: int, end: int) -> bytes:
        """Bytes of a box, for a rank on another host when this one has no rank to send them. Slow."""
        ...

    def keep_only(self, keys: Collection[Key]) -> None:
        """Frees all other boxes."""
        ...


@dataclass(frozen=True, slots=True)
class _Box:
    shape: BoxShape
    number: int


class HostStore:
    """Implements `HostCalls`; threads may share it.

    Args:
        host: its name, as ranks give it to `place`.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._run_id: str | None = None
        self._boxes: dict[Key, _Box] = {}
        self._writers: dict[int, tuple[bytes, float]] = {}
        """Process id -> its attempt, and when it started: ids are given out again."""
        self._lock = threading.Lock()

    def enter(self, run_id: str, attempt: bytes, pid: int) -> None:  # noqa: D102
        with self._lock:
            if run_id != self._run_id:
                self._free(set(self._boxes))
                self._run_id, self._writers = run_id, {}
            self._writers[pid] = attempt, _started_s(pid) or 0.0
        self._wait_for_others(attempt)

    def copies(self, run_id: str) -> tuple[Copy, ...]:  # noqa: D102
        with self._lock:
            if run_id != self._run_id:
                return ()
            found = [
                Copy(self._host, keeper, slot, record)
                for (shard, keeper), box in sorted(self._boxes.items())
                for slot in range(NUM_SLOTS)
                if (record := _record(box, slot)) is not None and record.shard == shard
            ]
            return tuple(found)

    def open(  # noqa: D102
        self, needs: Mapping[Key, BoxShape], slack_bytes: int
    ) -> dict[Key, tuple[BoxShape, Region]]:
        with self._lock:
            boxes = self._boxes
            self._free({key for key in needs if key in boxes and not boxes[key].shape.holds(needs[key])})
            new = {key: need.with_slack(slack_bytes) for key, need in needs.items() if key not in boxes}
            check_room(sum(shape.nbytes for shape in new.values()), free_bytes(), self._host)
            for key, shape in new.items():
                boxes[key] = _Box(shape, create(shape.nbytes))
            return {key: self._found(key) for key in needs}

    def region(self, key: Key) -> tuple[BoxShape, Region]:  # noqa: D102
        with self._lock:
            return self._found(key)

    def read(self, key: Key, begin: int, end: int) -> bytes:  # noqa: D102
        with self._lock:
            return os.pread(self._boxes[key].number, end - begin, begin)

    def keep_only(self, keys: Collection[Key]) -> None:  # noqa: D102
        with self._lock:
            self._free(set(self._boxes) - set(keys))

    def is_used(self) -> bool:
        """True while a process of this host may still write."""
        return bool(self._living({attempt for attempt, _ in self._writers.values()}))

    def _wait_for_others(self, attempt: bytes) -> None:
        """A trainer that was given up but still runs could write into what is being read."""
        deadline = time.monotonic() + _WRITER_S
        while old := self._living({other for other, _ in self._writers.values()} - {attempt}):
            if time.monotonic() > deadline:
                raise HostMemoryError(
                    f"process {old[0]} of the attempt before still runs on host {self._host} after "
                    f"{_WRITER_S:g} s and could write into its copies: end it",
                    pid=old[0],
                )
            time.sleep(0.05)

    def _living(self, attempts: Collection[bytes]) -> list[int]:
        """Processes of these attempts that still run."""
        return [
            pid
            for pid, (attempt, started_s) in list(self._writers.items())
            if attempt in attempts and _started_s(pid) == started_s
        ]

    def _found(self, key: Key) -> tuple[BoxShape, Region]:
        box = self._boxes[key]
        return box.shape, Region(os.getpid(), box.number, box.shape.nbytes)

    def _free(self, keys: Collection[Key]) -> None:
        for key in keys:
            os.close(self._boxes.pop(key).number)


def _record(box: _Box, slot: int) -> SlotRecord | None:
    return SlotRecord.parse(os.pread(box.number, RECORD_BYTES, box.shape.record_at(slot)))


def _started_s(pid: int) -> float | None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.create_time()
    return None
