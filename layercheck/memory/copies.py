"""Sends sealed segments to the vault of one other node, in a thread of the vault: they survive this node.

In the order in which they were sealed. What has gone meanwhile, because there is something newer, is left
out, so a slow network costs freshness and nothing else; nobody waits for a copy.
"""

import logging
from collections.abc import Callable

from layercheck.errors import LayerCheckError, VaultError
from layercheck.memory import segment
from layercheck.memory.background import InOrder
from layercheck.memory.held import Held
from layercheck.memory.protocol import VaultCalls

log = logging.getLogger(__name__)
FindPeer = Callable[[], VaultCalls | None]
"""The vault that keeps this node's copies; None while there is no other node."""


class Copies(InOrder[Held]):
    """One background thread. `put` never waits.

    Args:
        find_peer: asked before each segment.
        path_of: where a file's segment lies, None if it is gone.
    """

    def __init__(self, find_peer: FindPeer, path_of: Callable[[str], str | None]) -> None:
        self._find_peer, self._path_of = find_peer, path_of
        self._is_refused = False
        super().__init__("layercheck-copies")

    # ------------------------------------------------------------------ copy thread

    def _act(self, held: Held) -> None:
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
            if self._path_of(held.file) is not None:
                raise
        if self._path_of(held.file) is not None:
            peer.copy_end(held)
        # Else it was superseded, and perhaps taken over, while it was sent: its torn copy goes with the next.
