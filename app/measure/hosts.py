"""The stores of GEMINI's hosts, each in a process of its own, as under Ray: for ranks that run without it."""

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from app.baselines.gemini.host import HostCalls, HostStore


class _Process(BaseManager):
    """One process that is a host."""


_Process.register("store", HostStore, exposed=[name for name in vars(HostCalls) if not name.startswith("_")])


class ProcessHosts:
    """Implements `Hosts` where rank r lives on the r-th host.

    Args:
        stores: host -> its store.
        rank: of this process.
    """

    def __init__(self, stores: Mapping[str, HostCalls], rank: int) -> None:
        self._stores, self.here = stores, list(stores)[rank]

    def own(self) -> HostCalls:
        """See `Hosts.own`."""
        return self._stores[self.here]

    def living(self) -> dict[str, HostCalls]:
        """See `Hosts.living`."""
        return dict(self._stores)

    def end_all(self) -> None:
        """See `Hosts.end_all`."""
        for store in self._stores.values():
            store.keep_only(())


@contextmanager
def host_processes(names: Sequence[str]) -> Iterator[dict[str, HostCalls]]:
    """A process for each host; the memory of their stores ends with them and the ranks.

    Yields:
        Host -> its store, to be passed to the ranks.
    """
    spawning = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        stores = {}
        for name in names:
            process: Any = stack.enter_context(_Process(ctx=spawning))
            stores[name] = process.store(name)
        yield stores
