"""Sends sealed segments to the vault of one other node, in a thread of the vault: they survive this node.

In the order in which they were sealed. What has gone meanwhile, because there is something newer, is left
out, so a slow network costs freshness and nothing else; nobody waits for a copy.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from layercheck.errors import LayerCheckError, VaultError
from layercheck.memory import segment
from layercheck.memory.held import Held
from layercheck.memory.protocol import VaultCalls

log = logging.getLogger(__name__)
FindPeer = Callable[[], VaultCalls | None]
"""The vault that keeps this node's copies; None while there is no other node."""


class Copies:
    """One background thread. `put` never waits.

    Args:
        find_peer: asked before each segment.
        path_of: where a file's segment lies, None if it is gone.
    """

    def __init__(self, find_peer: FindPeer, path_of: Callable[[str], str | None]) -> None:
        self._find_peer, self._path_of = find_peer, path_of
        self._queue: deque[Held] = deque()
        self._is_busy = self._closing = self._is_refused = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="layercheck-copies", daemon=True)
        self._thread.start()

    def put(self, held: Held) -> None:
        """Queues a segment."""
        with self._changed:
            self._queue.append(held)
            self._changed.notify_all()

    def drain(self, limit_s: float) -> bool:
        """Waits until nothing is on its way; False if the limit came first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, limit_s)

    def close(self, limit_s: float) -> None:
        """Ends the thread after the segment that it sends."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(limit_s)

    # ------------------------------------------------------------------ copy thread

    def _run(self) -> None:
        while (held := self._next()) is not None:
            try:
                self._send(held)
                self._is_refused = False
            except Exception as error:
                # Also a bug here costs this copy alone: no later one could be made if the thread ended.
                self._refused(held, error)

    def _refused(self, held: Held, error: Exception) -> None:
        """Once until it works again: it would be said at every step."""
        if not self._is_refused or not isinstance(error, LayerCheckError):
            self._is_refused = True
            log.warning("no copy of %s on another node: %s", held.file, error, exc_info=error)

    def _next(self) -> Held | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._queue)
            if self._closing:
                return None
            self._is_busy = True
            return self._queue.popleft()

    def _send(self, held: Held) -> None:
        peer, path = self._find_peer(), self._path_of(held.file)
        if peer is None or path is None:
            return
        peer.copy_begin(held)
        at = 0
        try:
            for chunk in segment.chunks(path, 0, held.nbytes):
                peer.copy_put(held.file, at, bytes(chunk))
                at += len(chunk)
        except VaultError:
            if self._path_of(held.file) is None:
                return  # superseded while it was sent; its torn copy goes with the next one
            raise
        peer.copy_end(held)
