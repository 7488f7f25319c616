"""The coordinator without Ray: rank 0 holds the plain class, the other ranks reach it by a key-value store.

Where what runs: rank 0 makes its calls directly and has one thread that answers the other ranks and ticks; on
the other ranks the writer thread asks and waits. Messages are JSON in the store that the process group was
made with. No collectives in any of these threads: they would mix with those of training.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from layercheck import errors
from layercheck.config import LayerCheckConfig
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.protocol import AttemptGrant, CoordinatorClient, HeartbeatReply
from layercheck.errors import CoordinatorLostError, LayerCheckError
from layercheck.manifest import BadShard, EventId, RunRecord, ShardRecord, TrainerState
from layercheck.memory.held import Held
from layercheck.persistence.storage import Storage

log = logging.getLogger(__name__)
_POLL_S = 0.02
_TICK_S = 0.5
_ANSWER_S = 60.0
_LAST_EVENTS_S = 30.0


class KeyValueStore(Protocol):
    """What is used of `torch.distributed.Store`. `get` is called only for keys that exist."""

    def set(self, key: str, value: str) -> Any: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def delete_key(self, key: str) -> bool: ...  # noqa: D102


def in_process_client(
    storage: Storage,
    config: LayerCheckConfig,
    rank: int,
    world_size: int,
    store: KeyValueStore | None = None,
    answer_s: float = _ANSWER_S,
) -> CoordinatorClient:
    """The client of this rank. All ranks call it the same number of times.

    Args:
        storage: the run's folder.
        config: settings.
        rank: of this process.
        world_size: number of ranks.
        store: key-value store that all ranks share; default: that of the default process group.
        answer_s: seconds that a rank waits for an answer of rank 0.
    """
    if store is None and world_size > 1:
        store = default_store()
    if rank == 0:
        return RankZeroClient(Coordinator(storage, config, say=log.warning), store, world_size)
    assert store is not None
    return StoreClient(_Mailbox(store, rank), answer_s)


def default_store() -> KeyValueStore:
    """The store that the default process group was made with."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: KeyValueStore = _get_default_store()
    return store


class _Mailbox:
    """The keys of one rank's questions and answers, numbered from 0.

    The generation keeps a second session of the same processes apart from what the first one left behind.
    """

    def __init__(self, store: KeyValueStore, rank: int, generation: int | None = None) -> None:
        self.store, self.rank = store, rank
        self.generation = generation or store.add(f"layercheck/generation/{rank}", 1)
        self._next = 0

    def question(self) -> str:
        """Key of the next question."""
        return f"layercheck/{self.generation}/ask/{self.rank}/{self._next}"

    def answer(self) -> str:
        """Key of its answer."""
        return f"layercheck/{self.generation}/answer/{self.rank}/{self._next}"

    def advance(self) -> None:
        """The question is answered."""
        self._next += 1


class RankZeroClient:
    """Rank 0's own calls, and the thread that serves the others."""

    def __init__(self, coordinator: Coordinator, store: KeyValueStore | None, world_size: int) -> None:
        self._coordinator = coordinator
        self._mailboxes: list[_Mailbox] = []
        if store is not None and world_size > 1:
            generation = store.add("layercheck/generation/0", 1)
            self._mailboxes = [_Mailbox(store, rank, generation) for rank in range(1, world_size)]
        coordinator.scrub_in_background()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="layercheck-coordinator", daemon=True)
        self._thread.start()

    def open_run(self, run: RunRecord, probe: str) -> tuple[str, ...]:  # noqa: D102
        return self._coordinator.open_run(run, probe)

    def begin_attempt(  # noqa: D102
        self,
        token: str,
        submission: str,
        world_size: int,
        mode: str,
        takeover: bool = False,
        held: tuple[Held, ...] = (),
    ) -> AttemptGrant:
        return self._coordinator.begin_attempt(token, submission, world_size, mode, takeover, held)

    def amend(self, attempt: int, bad: tuple[BadShard, ...]) -> AttemptGrant:  # noqa: D102
        return self._coordinator.amend(attempt, bad)

    def record(  # noqa: D102
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState
    ) -> None:
        self._coordinator.record(event, rank, records, trainer_state)

    def lost(self, event: EventId, rank: int, reason: str) -> None:  # noqa: D102
        self._coordinator.lost(event, rank, reason)

    def heartbeat(  # noqa: D102
        self, attempt: int, step: int, trainer_state: TrainerState, drift: dict[str, float]
    ) -> HeartbeatReply:
        return self._coordinator.heartbeat(attempt, step, trainer_state, drift)

    def note_receipt(self, attempt: int, receipt: dict[str, Any]) -> None:  # noqa: D102
        self._coordinator.note_receipt(attempt, receipt)

    def status(self) -> dict[str, Any]:  # noqa: D102
        return self._coordinator.status()

    def end_attempt(self, attempt: int, how: str, reason: str = "") -> None:
        """Gives the slower ranks a limited time for the events of the last steps before it says so."""
        deadline = time.monotonic() + _LAST_EVENTS_S
        while how == "completed" and self._thread.is_alive() and time.monotonic() < deadline:
            if not self._coordinator.status().get("open_events"):
                break
            time.sleep(_POLL_S)
        self._coordinator.end_attempt(attempt, how, reason)

    def close(self) -> None:
        """Ends the thread and journals the newest heartbeat."""
        self._stop.set()
        self._thread.join(_ANSWER_S)
        self._coordinator.close()

    # ------------------------------------------------------------ coordinator thread of rank 0

    def _serve(self) -> None:
        ticked = time.monotonic()
        while not self._stop.wait(_POLL_S):
            try:
                for mailbox in self._mailboxes:
                    self._answer(mailbox)
            except (RuntimeError, OSError) as error:
                if isinstance(error, LayerCheckError):
                    raise
                # The store goes with the process group. Others can no longer ask; the journal goes on.
                log.warning("the other ranks can no longer reach the coordinator: %s", error)
                self._mailboxes = []
            if time.monotonic() - ticked >= _TICK_S:
                self._coordinator.tick()
                ticked = time.monotonic()

    def _answer(self, mailbox: _Mailbox) -> None:
        while mailbox.store.check([mailbox.question()]):
            question = json.loads(mailbox.store.get(mailbox.question()))
            try:
                self._carry_out(mailbox.rank, question)
                answer: dict[str, Any] = {}
            except LayerCheckError as error:
                answer = {"error": type(error).__name__, "message": error.message, "facts": error.facts}
            mailbox.store.delete_key(mailbox.question())
            mailbox.store.set(mailbox.answer(), json.dumps(answer, default=str))
            mailbox.advance()

    def _carry_out(self, rank: int, question: dict[str, Any]) -> None:
        event = EventId.model_validate(question["event"])
        if "lost" in question:
            self._coordinator.lost(event, rank, question["lost"])
        else:
            rows = tuple(ShardRecord.model_validate(row) for row in question["records"])
            self._coordinator.record(event, rank, rows, question["trainer_state"])


class StoreClient:
    """The calls of the other ranks: `record` and `lost`, each until rank 0 has answered."""

    def __init__(self, mailbox: _Mailbox, answer_s: float) -> None:
        self._mailbox, self._answer_s = mailbox, answer_s
        self._lock = threading.Lock()

    def record(  # noqa: D102
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState
    ) -> None:
        rows = [row.model_dump() for row in records]
        self._ask({"event": event.model_dump(), "records": rows, "trainer_state": trainer_state})

    def lost(self, event: EventId, rank: int, reason: str) -> None:  # noqa: D102
        self._ask({"event": event.model_dump(), "lost": reason})

    def close(self) -> None:
        """Nothing to end here."""

    def _ask(self, question: dict[str, Any]) -> None:
        with self._lock:
            self._reachable(lambda: self._mailbox.store.set(self._mailbox.question(), json.dumps(question)))
            deadline = time.monotonic() + self._answer_s
            while not self._reachable(lambda: self._mailbox.store.check([self._mailbox.answer()])):
                if time.monotonic() > deadline:
                    self._mailbox.advance()  # a late answer must not pass for that of the next question
                    self._lost(f"did not answer within {self._answer_s:g} s")
                time.sleep(_POLL_S)
            answer = json.loads(self._reachable(lambda: self._mailbox.store.get(self._mailbox.answer())))
            self._reachable(lambda: self._mailbox.store.delete_key(self._mailbox.answer()))
            self._mailbox.advance()
        if answer:
            raise getattr(errors, answer["error"])(answer["message"], **answer["facts"])

    def _reachable(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (RuntimeError, OSError) as error:  # the store lives in rank 0
            self._lost(f"is gone ({error})", error)

    def _lost(self, how: str, cause: Exception | None = None) -> NoReturn:
        raise CoordinatorLostError(f"the coordinator in rank 0 {how}", rank=self._mailbox.rank) from cause

    def _rank_zero_only(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("only rank 0 makes this call")

    open_run = begin_attempt = amend = heartbeat = note_receipt = end_attempt = status = _rank_zero_only
