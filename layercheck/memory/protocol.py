"""The calls to a vault, and how a rank reaches the vaults of its run."""

from collections.abc import Collection, Mapping
from typing import Protocol

from layercheck.manifest import EventId
from layercheck.memory.held import Held


class VaultCalls(Protocol):
    """One node's vault. Every call is idempotent, blocks at most a limited time, and may raise `VaultError`.

    Segments lie in files of the node, so only small messages pass here, but for `read`.
    """

    def open(self, event: EventId, rank: int, token: str, nbytes: int) -> str:
        """Path of an empty segment, for a rank of this node to fill and seal.

        Raises:
            VaultError: the memory of this node has no room for it.
            FencedError: a later attempt has begun.
        """
        ...

    def sealed(self, file: str) -> None:
        """A segment is whole: the vault writes it to the storage (unless it is for memory alone)."""
        ...

    def drain(self, rank: int, limit_s: float) -> bool:
        """Waits until all that a rank has sealed is written or given up; False if the limit came first."""
        ...

    def settle(self, token: str, limit_s: float) -> tuple[Held, ...]:
        """What there is, for an attempt that is about to be planned.

        First finishes what its predecessor sealed, as far as the limit allows. What is sealed later the new
        attempt has not seen.
        """
        ...

    def began(self, token: str, keep: Collection[str]) -> None:
        """This attempt goes on from its plan: all others are fenced, and of their files only these stay."""
        ...

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Bytes of a segment, for a rank on another node; fewer if it ends before or is gone."""
        ...

    def copy_begin(self, held: Held) -> None:
        """Makes room for the copy of a segment of another node.

        Raises:
            VaultError: there is none.
            FencedError: a later attempt has begun.
        """
        ...

    def copy_put(self, file: str, begin: int, data: bytes) -> None:
        """Writes some of its bytes."""
        ...

    def copy_end(self, held: Held) -> None:
        """It is whole."""
        ...

    def end(self, rank: int | None) -> None:
        """The run is complete for a rank (None: for all); frees everything after the last of this node."""
        ...


class Vaults(Protocol):
    """The vaults of a run as one rank sees them."""

    @property
    def run(self) -> str:
        """Key of the run, see `folders.run_key`."""
        ...

    @property
    def node(self) -> str:
        """Name of this rank's node."""
        ...

    @property
    def own(self) -> VaultCalls:
        """That of this rank's node."""
        ...

    def others(self) -> Mapping[str, VaultCalls]:
        """Those of all other nodes that live now, by node; any of them may be gone the next moment."""
        ...

    def close(self) -> None:
        """This process ends; what its vaults hold stays."""
        ...
