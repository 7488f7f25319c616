"""The coordinator as a Ray actor: the plain class, wrapped here and nowhere else.

Named, detached and restarted by Ray without limit. It holds nothing that storage does not: a restarted actor
builds itself again from there.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Protocol

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.errors import LayerCheckError

NAMESPACE = "layercheck"
CALLS = frozenset(name for name in vars(CoordinatorClient) if not name.startswith("_"))
"""What a client may call."""

_TICK_S = 0.5
_GRACE_S = 10.0
_MAX_CALLS = 64
"""Calls at once. `begin_attempt` may watch another submission for `takeover_s`, and it can see that one move
only if the heartbeats of that one are served meanwhile."""


class PlainCoordinator(CoordinatorClient, Protocol):
    """What the wrapped class offers. All of it may be called from several threads."""

    def tick(self) -> None:
        """Does what is due: journal, timeouts, collection."""


Factory = Callable[[str, str, LayerCheckConfig], PlainCoordinator]
"""(run, storage, config) -> plain coordinator; runs inside the actor."""


def plain_coordinator(run: str, storage: str, config: LayerCheckConfig) -> PlainCoordinator:
    """The coordinator of production."""
    from layercheck.coordination.coordinator import Coordinator
    from layercheck.persistence.storage import open_storage

    return Coordinator(open_storage(storage, run), config)


def normal_storage(storage: str) -> str:
    """One spelling of a storage place: absolute for a local path, without a slash at the end."""
    if "://" in storage and not storage.startswith("file://"):
        return storage.rstrip("/")
    return str(Path(storage.removeprefix("file://")).expanduser().resolve())


def coordinator_name(run: str, storage: str) -> str:
    """The actor's name: the same run name in another storage is another run."""
    place = blake2b(normal_storage(storage).encode(), digest_size=8).hexdigest()
    return f"layercheck:{run}:{place}"


def start_coordinator(
    run: str,
    storage: str,
    config: LayerCheckConfig | dict[str, Any] | None = None,
    factory: Factory = plain_coordinator,
) -> Any:
    """Returns the handle of the run's actor, which is created unless it lives.

    `ray.init` was called before. The actor prefers the head node: workers' nodes come and go.
    """
    actor = ray.remote(CoordinatorActor).options(
        name=coordinator_name(run, storage),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=_MAX_CALLS,
        scheduling_strategy=_prefer_head(),
    )
    return actor.remote(run, normal_storage(storage), parse_config(config), factory)


class CoordinatorActor:
    """What runs in the actor's process: calls go to the plain class, a thread ticks it and ends the actor."""

    def __init__(self, run: str, storage: str, config: LayerCheckConfig, factory: Factory) -> None:
        self._run = run
        self._config = config
        self._plain = factory(run, storage, config)
        self._started_s = self._last_beat_s = time.monotonic()
        self._completed_s: float | None = None
        self._gauges = StatusGauges(run)
        threading.Thread(target=self._tick_for_ever, name="tick", daemon=True).start()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One call of the protocol."""
        if name not in CALLS:
            raise AttributeError(f"a coordinator has no call {name!r}")
        if name in ("heartbeat", "begin_attempt"):
            self._last_beat_s = time.monotonic()
            self._completed_s = None
        answer = getattr(self._plain, name)(*args, **kwargs)
        if name == "end_attempt" and "completed" in (*args, *kwargs.values()):
            self._completed_s = time.monotonic()
        return answer

    def health(self) -> dict[str, Any]:
        """Answers without asking the plain class: the process lives."""
        alive_s = time.monotonic() - self._started_s
        return {"run": self._run, "pid": os.getpid(), "alive_s": alive_s, "config": self._config.model_dump()}

    def _tick_for_ever(self) -> None:
        """No collectives and no calls of other actors in this thread."""
        try:
            while not self._is_over():
                self._tick()
                time.sleep(_TICK_S)
        except BaseException:
            # A half-dead coordinator would accept records and never commit. Ray starts the process again,
            # and storage alone says what was committed.
            traceback.print_exc()
            os._exit(1)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _tick(self) -> None:
        try:
            self._plain.tick()
            self._gauges.show(self._plain.status())
        except LayerCheckError as error:
            # The storage may come back; training must not learn of it by a dead coordinator (I9).
            print(f"coordinator of {self._run}: {type(error).__name__}: {error}", flush=True)  # noqa: T201

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._completed_s is not None and now - self._completed_s > _GRACE_S:
            return True
        return now - self._last_beat_s > self._config.idle_s


class StatusGauges:
    """The one observer that maps `status()` to Ray metrics (`ray_layercheck_...` in Prometheus)."""

    _SHOWN: ClassVar[dict[str, str]] = {
        "max_age": "Age of the oldest layer, in steps",
        "weighted_age": "Size-weighted mean age, in steps",
        "step": "Last complete step",
        "num_commits": "Events committed",
        "num_lost": "Events declared lost",
        "committed_bytes": "Bytes of all committed events",
    }

    def __init__(self, run: str) -> None:
        self._gauges = {
            key: Gauge(f"layercheck_{key}", description=text, tag_keys=("run",))
            for key, text in self._SHOWN.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run})

    def show(self, status: dict[str, Any]) -> None:
        """Sets each gauge whose key `status` holds; before the first attempt it holds few."""
        for key, gauge in self._gauges.items():
            value = status.get(key)
            if isinstance(value, int | float):
                gauge.set(value)


def _prefer_head() -> NodeAffinitySchedulingStrategy | None:
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return None
