"""A coordinator and a vault, each in a process of its own, as under Ray: for ranks that run without it."""

import multiprocessing
from collections.abc import Mapping
from multiprocessing.managers import BaseManager
from types import TracebackType
from typing import Any, Self

from layercheck.config import LayerCheckConfig
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.memory import folders
from layercheck.memory.protocol import VaultCalls
from layercheck.memory.vault import Vault, open_vault
from layercheck.persistence.storage import open_storage

NODE, RUN = "node", "run"


class _Process(BaseManager):
    """One process that keeps something."""


def _coordinator(storage: str, config: LayerCheckConfig) -> Coordinator:
    return Coordinator(open_storage(storage, RUN), config)


def _vault(storage: str, coordinator: Any, config: LayerCheckConfig) -> Vault:
    key = folders.run_key(RUN, storage)
    return open_vault(key, NODE, open_storage(storage, RUN), coordinator, config)


def _calls(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


_Process.register("coordinator", _coordinator, exposed=_calls(CoordinatorClient))
_Process.register("vault", _vault, exposed=_calls(VaultCalls))


class OneNode:
    """`Vaults` of ranks that share one node."""

    def __init__(self, storage: str, vault: VaultCalls) -> None:
        self.run, self.node, self.own = folders.run_key(RUN, storage), NODE, vault

    def others(self) -> Mapping[str, VaultCalls]:
        """See `Vaults.others`."""
        return {}

    def close(self) -> None:
        """See `Vaults.close`."""


class Keepers:
    """Two processes for one run in `storage`; a context manager that ends them.

    Attributes:
        coordinator: to be passed to the ranks.
        vaults: the same; None without a memory tier.
    """

    def __init__(self, storage: str, config: LayerCheckConfig) -> None:
        self._key = folders.run_key(RUN, storage)
        self._processes = [_started()]
        first: Any = self._processes[0]
        self.coordinator: CoordinatorClient = first.coordinator(storage, config)
        self.vaults: OneNode | None = None
        if config.memory.enabled:
            self._processes.append(_started())
            second: Any = self._processes[1]
            self.vaults = OneNode(storage, second.vault(storage, self.coordinator, config))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.shutdown()
        folders.sweep(run=self._key)


def _started() -> _Process:
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    process.start()
    return process
