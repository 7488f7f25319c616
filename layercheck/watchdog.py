"""Ends a rank that makes no step, so that whoever started the group sees a death and starts it again.

A collective waits without limit for a rank that is stopped or stuck. States of one rank's watchdog:

1. started: nothing is watched, since the first step may compile and warm up for as long as it likes.
2. armed: the ranks have agreed on a first step. Each further agreement (`beat`) starts the count anew.
3. in a `phase`: something that is known to take long; its own limit comes on top.
4. fired: the count passed the limit. The stacks of all threads go to stderr and the process is gone.

What it cannot see: a process that is stopped itself, or a native call that never gives the interpreter back.
The other ranks then fire; for the only rank its launcher has to ask the process (Ray Train's health check).
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 87
"""Of a process that was ended because no step completed."""

_LONGEST_TICK_S = 1.0


class Watchdog:
    """Watches the steps of this process from a thread of its own.

    Args:
        hang_s: seconds without a step after which the process ends; 0 means never.
        end: called with the message; by default does not return.
    """

    def __init__(self, hang_s: float, end: Callable[[str], None] | None = None) -> None:
        self._hang_s = hang_s
        self._step = 0
        self._end = end or _end_process
        self._armed = False
        self._idle_s = 0.0
        self._phases: list[tuple[str, float]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self, since: int) -> None:
        """Starts the thread; a `beat` of a step after `since` will arm it."""
        self._step = since
        if self._hang_s > 0:
            threading.Thread(target=self._watch, name="layercheck-watchdog", daemon=True).start()

    def beat(self, step: int) -> None:
        """All ranks have got as far as `step`, or wait together after it."""
        with self._lock:
            self._armed = self._armed or step > self._step
            self._step, self._idle_s = max(step, self._step), 0.0

    @contextmanager
    def phase(self, what: str, limit_s: float) -> Iterator[None]:
        """Something known to take up to `limit_s` seconds without a step. Phases may be nested."""
        with self._lock:
            self._phases.append((what, limit_s))
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop()
                self._idle_s = 0.0

    def close(self) -> None:
        """Nothing is watched any more. Safe to call twice."""
        self._closed.set()

    # ------------------------------------------------------------------ watchdog thread

    def _watch(self) -> None:
        tick_s = min(_LONGEST_TICK_S, self._hang_s / 10)
        before_s = time.monotonic()
        while not self._closed.wait(tick_s):
            now_s = time.monotonic()
            # Time in which this process was stopped itself says nothing of the others: were a whole group
            # suspended and continued, every rank would otherwise end at once.
            message = self._count(min(now_s - before_s, 2 * tick_s))
            before_s = now_s
            if message:
                self._end(message)
                return

    def _count(self, passed_s: float) -> str | None:
        """Adds to the count; the message if it has passed the limit."""
        with self._lock:
            if not self._armed:
                return None
            self._idle_s += passed_s
            if self._idle_s <= self._hang_s + sum(limit_s for _, limit_s in self._phases):
                return None
            within = ", ".join(f"{what} (up to {limit_s:g} s more)" for what, limit_s in self._phases)
            return (
                f"no step was completed within hang_s={self._hang_s:g} s after step {self._step}"
                f"{f', in {within}' if within else ''}: this process ends so that the workers are started "
                "again; raise hang_s if steps take that long, 0 switches this off"
            )


def _end_process(message: str) -> None:
    # No exception, no exit handlers: the training thread is stuck, perhaps with a lock that they want.
    print(f"layercheck: {message}", file=sys.stderr, flush=True)  # noqa: T201 - the last words of a process
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CODE)
