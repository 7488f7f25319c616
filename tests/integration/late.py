"""An accelerator as a session sees it, on a CPU: reports come a step later, copies as late as is allowed."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from layercheck.errors import StorageError
from layercheck.overlap import Overlap

_LIMIT_S = 60.0


class _Mark:
    def __init__(self) -> None:
        self._made = threading.Event()
        self.set = self._made.set

    def wait(self, limit_s: float) -> None:
        if not self._made.wait(limit_s):
            raise StorageError(f"a copy was not made within {limit_s:g} s")


class LateCopier:
    """Copies in its own thread: when `hold_back` asks for it, or `patience_s` after the copy was queued.

    Without the wait in `hold_back` the copies would hold what the optimizer made of the state meanwhile.
    """

    def __init__(self, patience_s: float = 0.3) -> None:
        self._patience_s = patience_s
        self._queued: list[tuple[Tensor, Tensor] | _Mark] = []
        self._is_urgent = False
        self._changed = threading.Condition()
        self.held_back = 0
        threading.Thread(target=self._run, daemon=True).start()

    def copying(self, at_once: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._changed:
            self._queued.append((target, source))

    def mark(self) -> _Mark:
        mark = _Mark()
        with self._changed:
            self._queued.append(mark)
            self._changed.notify_all()
        return mark

    def hold_back(self) -> None:
        with self._changed:
            if self._queued:
                self.held_back += 1
                self._is_urgent = True
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: not self._queued, _LIMIT_S), "the copies were not made"

    def take_stall_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    def _run(self) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queued)
                self._changed.wait_for(lambda: self._is_urgent, self._patience_s)
                for item in self._queued:
                    if isinstance(item, _Mark):
                        item.set()
                    else:
                        item[0].copy_(item[1])
                self._queued, self._is_urgent = [], False
                self._changed.notify_all()


def make_late(session: Any) -> Any:
    """Makes a session that is not yet resumed behave as on an accelerator."""
    session._overlap = Overlap(lag=1, copier=LateCopier())
    return session
