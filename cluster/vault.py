"""The vaults of a run as Ray actors: the plain class, wrapped here; how a rank reaches its own and others.

One actor for each node with ranks, bound to it, named after run and node, needing no CPU. It is detached and
restarted by Ray: workers and drivers come and go, and what it held is still in the memory of the node when it
comes back. It ends itself when the run is complete, or after `idle_s` without a call.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import NAMESPACE, detached
from cluster.client import connect
from cluster.coordinator import coordinator_name, normal_storage
from cluster.metrics import VaultMetrics
from layercheck.config import LayerCheckConfig
from layercheck.errors import LayerCheckError, VaultError
from layercheck.manifest import EventId
from layercheck.memory import folders
from layercheck.memory.held import Held
from layercheck.memory.protocol import VaultCalls
from layercheck.memory.vault import Vault, open_vault
from layercheck.persistence.storage import open_storage

_CALLS = frozenset(name for name in vars(VaultCalls) if not name.startswith("_"))
_LIMIT_S = 20.0
_FIRST_LIMIT_S = 120.0
"""Of the first call, which may have to start the process."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_LOOK_S = 1.0
_PEER_S = 2.0
"""How long a vault takes the nodes to be those that it saw."""


class VaultActor:
    """What runs in the actor's process. The plain class is made by the first call, which gets its errors."""

    def __init__(self, run: str, storage: str, node: str, config: LayerCheckConfig) -> None:
        self._run, self._storage, self._node, self._config = run, storage, node, config
        self._plain: Vault | None = None
        self._making = threading.Lock()
        self._called_s = time.monotonic()
        self._chosen: VaultCalls | None = None
        self._looked_s = -_PEER_S
        self._metrics = VaultMetrics(run)
        self.over = threading.Thread(target=self._end_when_over, name="over", daemon=True)
        self.over.start()

    def call(self, name: str, *args: Any) -> Any:
        """One call of `VaultCalls`, arguments in its order."""
        if name not in _CALLS:
            raise AttributeError(f"a vault has no call {name!r}")
        self._called_s = time.monotonic()
        return getattr(self._vault(), name)(*args)

    def _vault(self) -> Vault:
        with self._making:
            if self._plain is None:
                key = folders.run_key(self._run, self._storage)
                folders.sweep(older_than_s=self._config.idle_s)
                # What a cluster that was killed left on this machine: nobody will ever ask for it.
                folders.sweep(run=key, nodes=_living_nodes())
                client = connect(self._run, self._storage, self._config)
                store = open_storage(self._storage, self._run)
                self._plain = open_vault(key, self._node, store, client, self._config, self._peer)
            return self._plain

    def _peer(self) -> VaultCalls | None:
        """The next node of the ring of all that have a vault now."""
        now = time.monotonic()
        if now - self._looked_s > _PEER_S:
            others = RayVaults(self._run, self._storage, self._config).others()
            after = [node for node in others if node > self._node]
            self._chosen = others[min(after or others)] if others else None
            self._looked_s = now
        return self._chosen

    def _end_when_over(self) -> None:
        try:
            while not self._is_over():
                if self._plain is not None:
                    self._metrics.looked(self._plain.used_bytes)
                time.sleep(_LOOK_S)
            if self._plain is not None:
                self._plain.end(None)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # Ray starts the process again, and the memory of the node says what there is
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _is_over(self) -> bool:
        if self._plain is not None and self._plain.is_over:
            return True
        return time.monotonic() - self._called_s > self._config.idle_s


class RayVaults:
    """Implements `Vaults` for a worker of Ray Train.

    Args:
        run: run name.
        storage: storage path or URI of the run.
        config: settings for a vault that has to be made.
    """

    def __init__(self, run: str, storage: str, config: LayerCheckConfig) -> None:
        self._name, self._config = run, config
        self._storage = normal_storage(storage)
        self._prefix = coordinator_name(run, storage).replace("layercheck:", "layercheck-vault:", 1)
        self.run = folders.run_key(run, self._storage)
        self.node: str = ray.get_runtime_context().get_node_id()

    @cached_property
    def own(self) -> VaultCalls:
        """See `Vaults.own`."""
        return ActorVault(self.node, self._start)

    def others(self) -> Mapping[str, VaultCalls]:
        """See `Vaults.others`."""
        found: dict[str, VaultCalls] = {}
        for name in _living_nodes():
            if name != self.node:
                with suppress(ValueError):  # no vault on this node
                    self._find(name)
                    found[name] = ActorVault(name, partial(self._find, name))
        return found

    def _start(self) -> Any:
        """The actor of this node, made unless it lives."""
        where = NodeAffinitySchedulingStrategy(self.node, soft=False)
        actor = detached(VaultActor, f"{self._prefix}:{self.node}", where)
        return actor.remote(self._name, self._storage, self.node, self._config)

    def _find(self, node: str) -> Any:
        return ray.get_actor(f"{self._prefix}:{node}", namespace=NAMESPACE)

    def close(self) -> None:
        """See `Vaults.close`. The actors live on."""


def _living_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


class ActorVault:
    """`VaultCalls` by an actor; each call has a limit, within which the actor may be restarted.

    Args:
        node: where it lives.
        find: gives its handle; ValueError if there is none.
    """

    def __init__(self, node: str, find: Callable[[], Any]) -> None:
        self._node, self._find = node, find
        self._handle: Any = None
        self._has_answered = False

    def open(self, event: EventId, rank: int, token: str, nbytes: int) -> str:  # noqa: D102
        return str(self._call("open", event, rank, token, nbytes))

    def sealed(self, file: str) -> None:  # noqa: D102
        self._call("sealed", file)

    def drain(self, rank: int, limit_s: float) -> bool:  # noqa: D102
        return bool(self._call("drain", rank, limit_s, more_s=limit_s))

    def settle(self, token: str, limit_s: float) -> tuple[Held, ...]:  # noqa: D102
        return tuple(self._call("settle", token, limit_s, more_s=limit_s))

    def began(self, token: str, keep: Collection[str]) -> None:  # noqa: D102
        self._call("began", token, frozenset(keep))

    def read(self, file: str, begin: int, end: int) -> bytes:  # noqa: D102
        return bytes(self._call("read", file, begin, end))

    def copy_begin(self, held: Held) -> None:  # noqa: D102
        self._call("copy_begin", held)

    def copy_put(self, file: str, begin: int, data: bytes) -> None:  # noqa: D102
        self._call("copy_put", file, begin, data)

    def copy_end(self, held: Held) -> None:  # noqa: D102
        self._call("copy_end", held)

    def end(self, rank: int | None) -> None:  # noqa: D102
        self._call("end", rank)

    def _call(self, name: str, *args: Any, more_s: float = 0.0) -> Any:
        limit_s = more_s + (_LIMIT_S if self._has_answered else _FIRST_LIMIT_S)
        deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
        while True:
            try:
                self._handle = self._handle or self._find()
                answer = self._handle.call.remote(name, *args)
                value = ray.get(answer, timeout=max(deadline - time.monotonic(), 0.01))
                self._has_answered = True
                return value
            except RayTaskError as error:
                if isinstance(error.cause, LayerCheckError):
                    raise error.cause from None
                raise
            except ValueError as error:
                raise VaultError(f"node {self._node} has no vault any more", node=self._node) from error
            except (RayActorError, GetTimeoutError) as error:
                self._handle = None
                if time.monotonic() + pause_s > deadline:
                    raise VaultError(
                        f"the vault of node {self._node} did not answer {name} within {limit_s:g} s "
                        f"({type(error).__name__})",
                        node=self._node,
                        call=name,
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
