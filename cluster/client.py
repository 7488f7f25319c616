"""How a worker reaches the coordinator's actor: each call with a limit, over restarts of the actor."""

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.actors import NAMESPACE
from cluster.coordinator import Factory, coordinator_name, plain_coordinator, start_coordinator
from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination.protocol import AttemptGrant, HeartbeatReply
from layercheck.errors import CoordinatorLostError, LayerCheckError
from layercheck.manifest import BadShard, EventId, RunRecord, ShardRecord, TrainerState
from layercheck.memory.held import Held

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_BEGIN_MARGIN_S = 60.0


def connect(
    run: str,
    storage: str,
    config: LayerCheckConfig | dict[str, Any] | None = None,
    limit_s: float = 60,
    factory: Factory = plain_coordinator,
) -> "ActorClient":
    """Returns the client of a run's coordinator; nothing is called yet.

    Args:
        run: run name.
        storage: storage path or URI, as given to `start_coordinator`.
        config: settings for an actor that must be created again because somebody ended it.
        limit_s: seconds that one call may take over all its tries.
        factory: as for `start_coordinator`.
    """
    return ActorClient(run, storage, parse_config(config), limit_s, factory)


def note_failure(run: str, storage: str) -> None:
    """Tells the coordinator that the workers failed; `reschedule_s` of the next attempt counts from here.

    Waits for nothing: whoever restarts workers has no time for a coordinator that is gone as well.
    """
    with suppress(ValueError):  # nobody of this name: then nobody measures
        actor = ray.get_actor(coordinator_name(run, storage), namespace=NAMESPACE)
        actor.call.remote("note_failure")


class ActorClient:
    """Implements `layercheck.coordination.protocol.CoordinatorClient`. One per process; threads may share it.

    A call is tried again while the actor restarts or does not answer; the coordinator's calls are idempotent.
    Its errors arrive as their own class. After the limit comes `CoordinatorLostError`.
    """

    def __init__(
        self, run: str, storage: str, config: LayerCheckConfig, limit_s: float, factory: Factory
    ) -> None:
        self._run, self._storage, self._config = run, storage, config
        self._limit_s = limit_s
        self._factory = factory
        self._handle: Any = None

    def open_run(self, run: RunRecord, probe: str) -> tuple[str, ...]:  # noqa: D102
        return tuple(self._call("open_run", run, probe))

    def begin_attempt(  # noqa: D102
        self,
        token: str,
        submission: str,
        world_size: int,
        mode: str,
        takeover: bool = False,
        held: tuple[Held, ...] = (),
    ) -> AttemptGrant:
        # The coordinator may watch another submission for takeover_s; a second try beside the first would
        # only watch twice, so one try gets the whole time.
        limit_s = self._config.takeover_s + _BEGIN_MARGIN_S
        args = (self._config, token, submission, world_size, mode, takeover, held)
        grant: AttemptGrant = self._retry("begin_attempt", args, limit_s)
        return grant

    def amend(self, attempt: int, bad: tuple[BadShard, ...]) -> AttemptGrant:  # noqa: D102
        grant: AttemptGrant = self._call("amend", attempt, bad)
        return grant

    def record(  # noqa: D102
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState
    ) -> None:
        self._call("record", event, rank, records, trainer_state)

    def lost(self, event: EventId, rank: int, reason: str) -> None:  # noqa: D102
        self._call("lost", event, rank, reason)

    def heartbeat(  # noqa: D102
        self, attempt: int, step: int, trainer_state: TrainerState, drift: dict[str, float]
    ) -> HeartbeatReply:
        reply: HeartbeatReply = self._call("heartbeat", attempt, step, trainer_state, drift)
        return reply

    def note_receipt(self, attempt: int, receipt: dict[str, Any]) -> None:  # noqa: D102
        self._call("note_receipt", attempt, receipt)

    def end_attempt(self, attempt: int, how: str, reason: str = "") -> None:  # noqa: D102
        self._call("end_attempt", attempt, how, reason)

    def status(self) -> dict[str, Any]:  # noqa: D102
        return dict(self._call("status"))

    def announce_end(self, submission: str, grace_s: float) -> None:
        """The driver of `submission` will be ended in `grace_s` seconds: all ranks are to save before."""
        self._retry("announce_end", (submission, grace_s), self._limit_s)

    def health(self) -> dict[str, Any]:
        """Says that the actor's process lives (pid, alive_s, config)."""
        return dict(self._retry("health", (), self._limit_s))

    def _call(self, name: str, *args: Any) -> Any:
        return self._retry("call", (name, *args), self._limit_s)

    def _retry(self, method: str, args: tuple[Any, ...], limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                reply = getattr(self._actor(), method).remote(*args)
                return ray.get(reply, timeout=max(deadline - time.monotonic(), 0.01))
            except RayTaskError as error:
                _raise_own(error)
            except (RayActorError, GetTimeoutError) as error:
                self._handle = None
                if time.monotonic() + pause_s > deadline:
                    raise self._lost_error(args[0] if method == "call" else method, limit_s, error) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _lost_error(self, call: str, limit_s: float, error: Exception) -> CoordinatorLostError:
        return CoordinatorLostError(
            f"the coordinator of run {self._run} did not answer {call} within {limit_s:g} s "
            f"({type(error).__name__})",
            run=self._run,
            call=call,
        )

    def _actor(self) -> Any:
        if self._handle is None:
            try:
                self._handle = ray.get_actor(coordinator_name(self._run, self._storage), namespace=NAMESPACE)
            except ValueError:  # nobody of this name: it was ended; storage is enough for a new one (I12)
                self._handle = start_coordinator(self._run, self._storage, self._config, self._factory)
        return self._handle


def _raise_own(error: RayTaskError) -> None:
    """Raises the coordinator's error as its own class; one that is not ours stays as Ray wrapped it."""
    cause = error.cause
    if isinstance(cause, LayerCheckError):
        raise cause from None
    raise error
