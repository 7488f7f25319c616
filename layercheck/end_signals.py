"""Signals that announce the end of this process: noted here, acted upon at the next step by all ranks alike.

A handler does nothing but note that its signal came: it may run between any two lines of the main thread, and
what one rank did alone would hang the others. Python runs handlers in the main thread only; the training loop
may be in another one (a Ray Train worker), so whoever starts that thread calls `listen` before.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from layercheck.errors import ConfigError

log = logging.getLogger(__name__)


class EndSignals:
    """The handler of one or several signals, and what it noted. Made by `listen`.

    Attributes:
        came: name of the first signal that came, None before.
        came_at: when, in monotonic seconds.
    """

    def __init__(self, chain: bool) -> None:
        self.came: str | None = None
        self.came_at = 0.0
        self._chain = chain
        self._previous: dict[int, Any] = {}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """The handler. Later signals change nothing: the grace time runs from the first."""
        if self.came is None:
            self.came_at, self.came = time.monotonic(), signal.Signals(signum).name
        previous = self._previous.get(signum)
        if self._chain and callable(previous):
            previous(signum, frame)

    def install(self, signum: int) -> None:
        """Takes the signal over, in the main thread."""
        self._previous[signum] = signal.signal(signum, self)

    def restore(self) -> None:
        """Gives the signals back, but for those that somebody else took over since. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) is self:
                # None: the handler before was not made by Python and cannot be put back.
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        self._previous = {}


def listen(names: Iterable[str], chain: bool = True) -> EndSignals:
    """Watches signals. In a thread that may not, returns what the main thread watches already.

    Args:
        names: such as `SIGTERM`, `SIGUSR1`.
        chain: a Python handler that was there before is called too; without it, nothing of the default
            action or of that handler happens.

    Raises:
        ConfigError: no such signal, or one that cannot be watched.
    """
    numbers = [signal_number(name) for name in names]
    if threading.current_thread() is threading.main_thread():
        fresh = EndSignals(chain)
        for number in numbers:
            fresh.install(number)
        return fresh
    watched = {number: signal.getsignal(number) for number in numbers}
    found = next((handler for handler in watched.values() if isinstance(handler, EndSignals)), None)
    missed = [signal.Signals(n).name for n, handler in watched.items() if handler is not found]
    if missed or found is None:
        log.warning(
            "%s cannot be watched from this thread: call layercheck.listen(...) in the main thread, or tell "
            "the session by session.preempt()",
            ", ".join(missed),
        )
    return found or EndSignals(chain)


def signal_number(name: str) -> int:
    """The number of a signal.

    Raises:
        ConfigError: see `listen`.
    """
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise ConfigError(f"preemption_signals: {name!r} is no signal that can be watched", signal=name)
    return int(signal.Signals[name])
