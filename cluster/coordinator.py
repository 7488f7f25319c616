"""The coordinator as a Ray actor: the plain class, wrapped here and nowhere else.

Named, detached and restarted by Ray without limit. It holds nothing that storage does not: a restarted actor
builds itself again from there.
"""

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import detached
from cluster.metrics import Metrics
from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.protocol import AttemptGrant, CoordinatorClient
from layercheck.errors import ConfigError, LayerCheckError

CALLS = frozenset(name for name in vars(CoordinatorClient) if not name.startswith("_")) | {"note_failure"}
"""What a client may call."""

_TICK_S = 0.5
_GRACE_S = 10.0
_OBJECTS_BETWEEN_LOOKS = 50_000


class PlainCoordinator(CoordinatorClient, Protocol):
    """What the wrapped class offers. All of it may be called from several threads."""

    def note_failure(self) -> None:
        """The driver saw the workers fail."""

    def tick(self) -> None:
        """Does what is due: journal, timeouts, commits, collection."""

    def close(self) -> None:
        """Journals the newest heartbeat; ends what it does in the background."""


Factory = Callable[[str, str, LayerCheckConfig], PlainCoordinator]
"""(run, storage, config) -> plain coordinator; runs inside the actor."""


def plain_coordinator(run: str, storage: str, config: LayerCheckConfig) -> PlainCoordinator:
    """The coordinator of production."""
    from layercheck.coordination.coordinator import Coordinator
    from layercheck.persistence.storage import open_storage

    made = Coordinator(open_storage(storage, run), config, say=_say)
    made.scrub_in_background()
    return made


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - an actor's output reaches the log of the job that started it


def normal_storage(storage: str) -> str:
    """One spelling of a storage place: absolute for a local path, without a slash at the end.

    Raises:
        ConfigError: a relative path, which means another folder in every process of Ray.
    """
    if "://" in storage and not storage.startswith("file://"):
        return storage.rstrip("/")
    path = Path(storage.removeprefix("file://")).expanduser()
    if not path.is_absolute():
        raise ConfigError(
            f"storage={storage!r} is relative, and workers run in other folders: "
            "give an absolute path or a URI"
        )
    return str(path.resolve())


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
    actor = detached(CoordinatorActor, coordinator_name(run, storage), _prefer_head())
    return actor.remote(run, normal_storage(storage), parse_config(config), factory)


def collect_rarely() -> None:
    """Makes Python look for garbage cycles less often: a full look at this process takes up to 50 ms.

    Rows that come and go would cause one every few events. They form no cycles: nothing heaps up meanwhile.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, 20, 20)


class CoordinatorActor:
    """What runs in the actor's process: calls go to the plain class, a thread ticks it and ends the actor.

    The plain class is made by the first call and not by the constructor: what it raises (a storage that
    cannot be read) then reaches the caller, while Ray would only tell him that the actor died.
    """

    def __init__(self, run: str, storage: str, config: LayerCheckConfig, factory: Factory) -> None:
        self._run, self._storage, self._config, self._factory = run, storage, config, factory
        self._plain: PlainCoordinator | None = None
        self._making = threading.Lock()
        self._started_s = self._last_beat_s = time.monotonic()
        self._completed_s: float | None = None
        self._ending: tuple[str, float] | None = None
        self._metrics = Metrics(run, config.s_max)
        collect_rarely()
        threading.Thread(target=self._tick_for_ever, name="tick", daemon=True).start()

    def call(self, name: str, *args: Any) -> Any:
        """One call of the protocol, arguments in its order."""
        if name not in CALLS:
            raise AttributeError(f"a coordinator has no call {name!r}")
        if name in ("heartbeat", "begin_attempt"):
            self._last_beat_s, self._completed_s = time.monotonic(), None
        answer = getattr(self._coordinator(), name)(*args)
        if name == "end_attempt" and args[1] == "completed":
            self._completed_s = time.monotonic()
        self._metrics.saw(name, args, answer)
        if name == "heartbeat" and self._ending is not None:
            return replace(answer, grace_s=max(1.0, self._ending[1] - time.monotonic()))
        return answer

    def announce_end(self, submission: str, grace_s: float) -> None:
        """The driver of this submission will be ended; the workers learn of it by their heartbeats."""
        self._ending = (submission, time.monotonic() + grace_s)

    def begin_attempt(self, config: LayerCheckConfig, *args: Any) -> AttemptGrant:
        """Grants an attempt, and from then on works by the settings of the submission that got it.

        An actor may outlive a submission. It is not this call that tells it of new settings but the grant: a
        submission that is refused must not change those of the living one. The plain class is made again
        from storage; the new attempt has no events yet, and the same token gets the same attempt and plan.
        """
        grant: AttemptGrant = self.call("begin_attempt", *args)
        if self._ending is not None and self._ending[0] != args[1]:
            self._ending = None  # that of an earlier submission
        if config == self._config:
            return grant
        with self._making:
            if self._plain is not None:
                self._plain.close()
            self._config, self._plain = config, None
        self._metrics.limit(config.s_max)
        again: AttemptGrant = self.call("begin_attempt", *args)
        return replace(again, wait_s=grant.wait_s)  # the new one did not wait

    def health(self) -> dict[str, Any]:
        """Answers without asking the plain class: the process lives."""
        alive_s = time.monotonic() - self._started_s
        return {"run": self._run, "pid": os.getpid(), "alive_s": alive_s, "config": self._config.model_dump()}

    def _coordinator(self) -> PlainCoordinator:
        with self._making:
            if self._plain is None:
                self._plain = self._factory(self._run, self._storage, self._config)
            return self._plain

    def _tick_for_ever(self) -> None:
        """No collectives and no calls of other actors in this thread."""
        try:
            while not self._is_over():
                if self._plain is not None:
                    self._tick(self._plain)
                time.sleep(_TICK_S)
            if self._plain is not None:
                self._plain.close()
        except BaseException:
            # A half-dead coordinator would accept records and never commit. Ray starts the process again,
            # and storage alone says what was committed.
            traceback.print_exc()
            os._exit(1)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _tick(self, plain: PlainCoordinator) -> None:
        try:
            plain.tick()
        except LayerCheckError as error:
            # The storage may come back; training must not learn of it by a dead coordinator (I9).
            _say(f"coordinator of {self._run}: {type(error).__name__}: {error}")

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._completed_s is not None and now - self._completed_s > _GRACE_S:
            return True
        return now - self._last_beat_s > self._config.idle_s


def _prefer_head() -> NodeAffinitySchedulingStrategy | None:
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return None
