"""One thread that takes items in the order in which they came: what uploads and copies have in common."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(ABC, Generic[T]):
    """`put` never waits. The thread starts at once: a subclass makes this one when it is ready itself.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: deque[T] = deque()
        self._now: T | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Queues one item."""
        with self._changed:
            self._queue.append(item)
            self._changed.notify_all()

    def forget(self, which: Callable[[T], bool]) -> None:
        """Takes items off the queue; not the one that is in work."""
        with self._changed:
            self._queue = deque(item for item in self._queue if not which(item))
            self._changed.notify_all()

    def drain(self, limit_s: float, which: Callable[[T], bool] = lambda _: True) -> bool:
        """Waits until none of these is queued or in work; False if the limit came first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._has(which), limit_s)

    def close(self, limit_s: float) -> None:
        """Ends the thread after the item in work; the rest stays undone."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(limit_s)

    def _has(self, which: Callable[[T], bool]) -> bool:
        busy = self._queue if self._now is None else [*self._queue, self._now]
        return any(map(which, busy))

    # ------------------------------------------------------------------ the thread

    @abstractmethod
    def _act(self, item: T) -> None:
        """Does what has to be done with one item; raises nothing."""

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._act(item)

    def _next(self) -> T | None:
        with self._changed:
            self._now = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._queue)
            if not self._closing:
                self._now = self._queue.popleft()
            return self._now
