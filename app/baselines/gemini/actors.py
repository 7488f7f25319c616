"""The stores as Ray actors, one detached per node and run; how ranks find their own and all others.

An actor lives on the node of the rank that first asks for it and nowhere else, needs no CPU, is never
restarted (its memory is what it is for), and dies with its raylet. It ends itself when no trainer of its
node has lived for `keep_s`, so that a run that nobody continues does not hold memory for ever.
"""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.baselines.gemini.decision import Copy
from app.baselines.gemini.host import HostCalls, HostStore, Key
from app.baselines.gemini.memory import HostMemoryError, Region
from app.baselines.gemini.records import BoxShape
from cluster.actors import NAMESPACE
from cluster.coordinator import coordinator_name
from layercheck.errors import ConfigError, LayerCheckError

_LOOK_S = 1.0
_OWN_S = 600.0
"""Limit of a call to the own host: it starts a process, or reserves the memory of many ranks."""


class Hosts(Protocol):
    """All hosts as one rank sees them; `here` is its own."""

    here: str

    def own(self) -> HostCalls:
        """The store of this rank's host, started if it is not there."""
        ...

    def living(self) -> dict[str, HostCalls]:
        """The stores that there are now; one of them may die the next moment."""
        ...

    def end_all(self) -> None:
        """Frees all memory of the run: it is complete."""
        ...


class HostActor:
    """What runs in the actor's process."""

    def __init__(self, host: str, keep_s: float) -> None:
        self._store = HostStore(host)
        self._keep_s = keep_s
        self._used_s = time.monotonic()
        threading.Thread(target=self._end_when_unused, name="unused", daemon=True).start()

    def call(self, name: str, *args: Any) -> Any:
        """One call of `HostCalls`, arguments in its order."""
        self._used_s = time.monotonic()
        if name not in _CALLS:
            raise AttributeError(f"a host's store has no call {name!r}")
        return getattr(self._store, name)(*args)

    def _end_when_unused(self) -> None:
        while time.monotonic() - self._used_s < self._keep_s:
            time.sleep(_LOOK_S)
            if self._store.is_used():
                self._used_s = time.monotonic()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


_CALLS = frozenset(name for name in vars(HostCalls) if not name.startswith("_"))


class RayHosts:
    """Implements `Hosts` for a worker of Ray Train.

    Args:
        run: run name.
        storage: storage of the run: the same name elsewhere is another run.
        keep_s: seconds for which stores outlive the last trainer of their host.
        call_s: limit of one call to another host's store.

    Raises:
        ConfigError: this is no process of a Ray cluster.
    """

    def __init__(self, run: str, storage: str, keep_s: float, call_s: float) -> None:
        self._name = coordinator_name(run, storage).replace("layercheck:", "gemini:", 1)
        self._keep_s, self._call_s = keep_s, call_s
        if not ray.is_initialized():
            raise ConfigError("checkpoint.method=gemini keeps its copies in Ray actors: start it under Ray")
        self.here: str = ray.get_runtime_context().get_node_id()

    def own(self) -> HostCalls:  # noqa: D102
        options = {
            "name": f"{self._name}:{self.here}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 8,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.here, soft=False),
        }
        actor = ray.remote(HostActor).options(**options).remote(self.here, self._keep_s)
        return _ActorHost(self.here, actor, max(self._call_s, _OWN_S))

    def living(self) -> dict[str, HostCalls]:  # noqa: D102
        return {host: _ActorHost(host, actor, self._call_s) for host, actor in self._actors()}

    def end_all(self) -> None:  # noqa: D102
        for _, actor in self._actors():
            ray.kill(actor)

    def _actors(self) -> Iterator[tuple[str, Any]]:
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"]:
                with suppress(ValueError):  # no store on this node
                    yield node["NodeID"], ray.get_actor(f"{self._name}:{node['NodeID']}", NAMESPACE)


class _ActorHost:
    """`HostCalls` by an actor; each call has a limit."""

    def __init__(self, host: str, actor: Any, limit_s: float) -> None:
        self._host, self._actor, self._limit_s = host, actor, limit_s

    def enter(self, run_id: str, attempt: bytes, pid: int) -> None:
        self._call("enter", run_id, attempt, pid)

    def copies(self, run_id: str) -> tuple[Copy, ...]:
        return tuple(self._call("copies", run_id))

    def open(self, needs: Mapping[Key, BoxShape], slack_bytes: int) -> dict[Key, tuple[BoxShape, Region]]:
        return dict(self._call("open", dict(needs), slack_bytes))

    def region(self, key: Key) -> tuple[BoxShape, Region]:
        shape, region = self._call("region", key)
        return shape, region

    def read(self, key: Key, begin: int, end: int) -> bytes:
        return bytes(self._call("read", key, begin, end))

    def keep_only(self, keys: Collection[Key]) -> None:
        self._call("keep_only", set(keys))

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return ray.get(self._actor.call.remote(name, *args), timeout=self._limit_s)
        except RayTaskError as error:
            if isinstance(error.cause, LayerCheckError):
                raise error.cause from None
            raise
        except (RayActorError, GetTimeoutError) as error:
            raise HostMemoryError(
                f"the store of host {self._host} did not answer {name} within {self._limit_s:g} s "
                f"({type(error).__name__})",
                host=self._host,
                call=name,
            ) from error
