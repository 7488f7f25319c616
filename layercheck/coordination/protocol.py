"""The calls that a session makes to its coordinator, whoever keeps the manifest."""

from dataclasses import dataclass
from typing import Any, Protocol

from layercheck.layers import LayerStep
from layercheck.manifest import BadShard, EventId, RecoveryPlan, RunRecord, ShardRecord, TrainerState
from layercheck.memory.held import Held


@dataclass(frozen=True, slots=True)
class AttemptGrant:
    """The answer to `begin_attempt`. `plan` is None exactly on a fresh run (then r_b is 0)."""

    attempt: int
    r_b: int
    plan: RecoveryPlan | None = None
    detect_s: float | None = None
    """Seconds from the last heartbeat to the moment the driver saw the failure, if it was told."""
    reschedule_s: float | None = None
    """Seconds from there to this grant."""
    wait_s: float = 0.0
    """Seconds for which another submission's attempt was watched before it was taken over."""
    notes: tuple[str, ...] = ()
    """What a person should read: commits counted as absent, unreadable records, changed settings."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What rank 0 learns from the coordinator. `lost_steps` are the events of this attempt declared lost.

    `demoted`: the layers whose newest version has rotted.
    """

    committed_step: int = -1
    committed_part: int = 0
    lost_steps: tuple[int, ...] = ()
    fenced: bool = False
    alerts: tuple[str, ...] = ()
    demoted: tuple[LayerStep, ...] = ()
    grace_s: float = 0.0
    """Seconds until the whole submission will be ended; 0 for not announced."""


class CoordinatorClient(Protocol):
    """What `attach(coordinator=...)` takes.

    Every call is idempotent, blocks at most a limited time, and raises `CoordinatorLostError` when the limit
    is over. Errors of the coordinator arrive as their own class. `record` and `lost` are called on every
    rank, from its writer thread; all other calls on rank 0 alone.
    """

    def open_run(self, run: RunRecord, probe: str) -> tuple[str, ...]:
        """Creates `run.json` or checks it against the store (I7); returns the settings that changed, as text.

        Args:
            run: what this submission is about to train.
            probe: path below the store of a file that rank 0 wrote; the coordinator must see it too.

        Raises:
            StoreMismatchError: model, optimizer class or layout differ; names the first difference.
            StorageError: the coordinator does not see the probe.
        """
        ...

    def begin_attempt(
        self,
        token: str,
        submission: str,
        world_size: int,
        mode: str,
        takeover: bool = False,
        held: tuple[Held, ...] = (),
    ) -> AttemptGrant:
        """Fences off all older attempts and makes the recovery plan. The same token gets the same attempt.

        `held` is what the vaults of the nodes hold; they were told of this token before they said so.

        Raises:
            RunIsLiveError: another submission's progress file changed while it was watched.
            NoPlanError: the store holds a run and yields no plan.
            RestartLoopError: three attempts in a row recovered and made no step.
        """
        ...

    def amend(self, attempt: int, bad: tuple[BadShard, ...]) -> AttemptGrant:
        """Blacklists the bad shards and makes the plan again without them."""
        ...

    def record(
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState
    ) -> None:
        """One rank's shards of one event are durable. Refused silently for a fenced attempt."""
        ...

    def lost(self, event: EventId, rank: int, reason: str) -> None:
        """One rank could not write its shards of this event: it can never commit."""
        ...

    def heartbeat(
        self, attempt: int, step: int, trainer_state: TrainerState, drift: dict[str, float]
    ) -> HeartbeatReply:
        """Says which step is complete; answers with commits, losses and the fence."""
        ...

    def note_receipt(self, attempt: int, receipt: dict[str, Any]) -> None:
        """Stores the receipt of a recovery; a later call replaces it."""
        ...

    def end_attempt(self, attempt: int, how: str, reason: str = "") -> None:
        """The attempt ended: `completed`, `failed`, `fenced` or `preempted`."""
        ...

    def status(self) -> dict[str, Any]:
        """A summary for people."""
        ...
