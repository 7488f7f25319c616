"""Processes that race on one storage, in a time of their own: any interleaving, the same one every time.

Each runs in a thread, but only one at a time. A call of the storage takes a given number of seconds and has
its effect at the end of them; the process whose call ends first goes on. No real second passes.
"""

import threading
from collections.abc import Callable
from itertools import chain, repeat

from layercheck.coordination.timer import Timer

_LIMIT_S = 60.0


class Race:
    """Threads that take turns by one clock. `delays`: seconds of each racer's calls, the last for ever."""

    def __init__(self, delays: dict[str, list[float]]) -> None:
        self.now = 0.0
        self._delays = {name: chain(seconds, repeat(seconds[-1])) for name, seconds in delays.items()}
        self._wakes: dict[str, float] = {}
        self._turn = {name: threading.Semaphore(0) for name in delays}
        self._over = threading.Event()
        self.errors: dict[str, BaseException] = {}

    def timer(self, name: str) -> Timer:
        """The clock of one racer."""
        return Timer(lambda: self.now, lambda seconds: self.sleep(name, seconds))

    def on_call(self, name: str) -> None:
        """One call of the storage begins and, as soon as nobody else's ends before, is over."""
        if name in self._turn:
            self.sleep(name, next(self._delays[name]))

    def sleep(self, name: str, seconds: float) -> None:
        self._wakes[name] = self.now + seconds
        self._next()
        assert self._turn[name].acquire(timeout=_LIMIT_S), f"{name} got no turn"

    def run(self, racers: dict[str, tuple[float, Callable[[], None]]]) -> None:
        """name -> (start, what it does). Returns when all are done; what they raised is in `errors`."""
        threads = [
            threading.Thread(target=self._racer, args=(name, act), daemon=True)
            for name, (_, act) in racers.items()
        ]
        self._wakes = {name: start for name, (start, _) in racers.items()}
        for thread in threads:
            thread.start()
        self._next()
        assert self._over.wait(_LIMIT_S), "the race has no end"
        for thread in threads:
            thread.join(_LIMIT_S)

    def _racer(self, name: str, act: Callable[[], None]) -> None:
        self._turn[name].acquire()
        try:
            act()
        except BaseException as error:
            self.errors[name] = error
        if self._wakes:
            self._next()
        else:
            self._over.set()

    def _next(self) -> None:
        name = min(self._wakes, key=lambda name: (self._wakes[name], name))
        self.now = max(self.now, self._wakes.pop(name))
        self._turn[name].release()
