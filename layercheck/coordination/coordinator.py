"""Keeps the manifest of one run: attempts, commits, progress, collection, plans. A plain class.

Every method may be called from any thread; one lock guards the state. Nothing here waits but the watch before
a takeover, which holds no lock. `tick()` does what is due by time; most calls do it too, so an owner without
a timer of its own loses no more than the reaction to silence. Memory is only a cache of storage plus the
half-recorded events: a coordinator built anew from the same store makes the same plans (I12).
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from threading import RLock
from typing import Any

from layercheck.config import LayerCheckConfig
from layercheck.coordination import in_memory, journal, restarts, scrub_order
from layercheck.coordination.alerts import Alerts
from layercheck.coordination.claims import Claim, Claimant, claim_next, is_ours, reclaim
from layercheck.coordination.collector import Collector
from layercheck.coordination.events import EventBook, OpenEvent
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.heart import Heart
from layercheck.coordination.lost import steps_on_their_way
from layercheck.coordination.outage import Outage
from layercheck.coordination.plan import is_fresh
from layercheck.coordination.protocol import AttemptGrant, HeartbeatReply
from layercheck.coordination.scrub import Scrubber
from layercheck.coordination.status import summarize
from layercheck.coordination.store_check import check_run
from layercheck.coordination.takeover import refuse_if_live
from layercheck.coordination.timer import Timer
from layercheck.errors import ConfigError, FencedError, StorageError
from layercheck.manifest import (
    AttemptRecord,
    BadShard,
    Commit,
    EventId,
    RecoveryPlan,
    RunRecord,
    ShardRecord,
    TrainerState,
)
from layercheck.memory.held import Held
from layercheck.persistence.storage import Storage

_MODES = ("composite", "uniform", "strict")
_MAX_CLAIMS = 20


class Coordinator:
    """The semantics of `CoordinatorClient` on a storage.

    Args:
        storage: the run's `layercheck` folder.
        config: settings of this submission.
        clock: monotonic seconds of this process.
        sleep: used while another submission is watched, or a claim settles on an object store.
        say: gets a line for a person now and then.
    """

    def __init__(
        self,
        storage: Storage,
        config: LayerCheckConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._storage, self._config = storage, config
        self._clock, self._timer, self._say = clock, Timer(clock, sleep), say
        self._lock = RLock()
        self._alerts = Alerts()
        self._scrubber: Scrubber | None = None
        self._facts: StoreFacts | None = None
        self._record: AttemptRecord | None = None
        self._book = EventBook(0, 0)
        self._heart = Heart(storage, clock)
        self._collector = Collector(storage, config, clock)
        self._fenced = self._recovered = False
        self._held: tuple[Held, ...] = ()
        self._outage = Outage(clock)
        if storage.size(journal.RUN_FILE) is not None:
            self._adopt(journal.load_facts(storage))

    # ------------------------------------------------------------ a run and its attempts

    def open_run(self, run: RunRecord, probe: str) -> tuple[str, ...]:
        """See `CoordinatorClient.open_run`."""
        with self._lock:
            return check_run(self._storage, run, probe)

    def begin_attempt(
        self,
        token: str,
        submission: str,
        world_size: int,
        mode: str,
        takeover: bool = False,
        held: tuple[Held, ...] = (),
    ) -> AttemptGrant:
        """See `CoordinatorClient.begin_attempt`.

        (1) Journal the newest heartbeat: the plan has to be the one that storage alone would give. (2) Unless
        `takeover`, watch another submission's attempt, holding no lock. (3) Read the store, plan, claim the
        next number; if somebody else got it, begin again. A crash before the claim changes nothing; after it,
        the same token gets the same attempt and plan.
        """
        if mode not in _MODES:
            raise ConfigError(f"recovery={mode!r} is none of {', '.join(_MODES)}", mode=mode)
        who, wait_s = Claimant(token, submission, world_size, mode), 0.0
        for _ in range(_MAX_CLAIMS):
            with self._lock:
                self._held = held
                self._journal_heartbeat()
                facts = self._read()
            newest = facts.newest
            if newest is not None and newest.submission != submission and not takeover:
                takeover_s = self._config.takeover_s
                name, timer = facts.run.name, self._timer
                wait_s += refuse_if_live(self._storage, newest, name, takeover_s, timer, self._say)
            with self._lock:
                self._journal_heartbeat()
                facts = self._read()
                if facts.newest != newest:
                    continue  # claimed while we watched or waited for the lock: that one is to be watched
                claim = reclaim(self._storage, facts, self._config, token, self._timer) or claim_next(
                    self._storage, facts, self._config, who, self._timer
                )
                if claim is not None:
                    return self._granted(claim, wait_s)
        raise StorageError(
            f"no attempt of {self._storage.root} could be claimed in {_MAX_CLAIMS} tries: others were first, "
            "or a listing and a PUT take over half a second there (`storage`)",
            claims=_MAX_CLAIMS,
        )

    def amend(self, attempt: int, bad: tuple[BadShard, ...]) -> AttemptGrant:
        """See `CoordinatorClient.amend`.

        The attempt in the answer can be a new one: a plan that has to roll back further than the record of
        this attempt says needs a record of its own, see `claims.reclaim`.
        """
        with self._lock:
            facts = self._read()
            record = facts.attempts.get(attempt)
            newest = facts.newest
            if record is None or newest is None or newest.token != record.token:
                raise FencedError(f"attempt {attempt} is fenced off by a newer one", attempt=attempt)
            self._held, stored = in_memory.without(self._held, bad, facts)
            for shard in stored:
                journal.blacklist_shard(self._storage, shard)
            claim = reclaim(self._storage, self._read(), self._config, record.token, self._timer)
            if claim is None:
                raise FencedError(f"attempt {attempt} is fenced off by a rival", attempt=attempt)
            return self._granted(claim)

    def end_attempt(self, attempt: int, how: str, reason: str = "") -> None:
        """See `CoordinatorClient.end_attempt`. A non-finite state freezes collection."""
        with self._lock:
            if not self._is_current(attempt) or self._record is None:
                return
            if how == "failed" and restarts.is_poison(reason):
                self._collector.freeze()
                if self._in_probation():
                    self._guarded("blacklist", lambda: journal.blacklist_plan(self._storage, attempt, reason))
            # Whoever completes a run has no successor to collect; a storage that refuses is not asked again.
            goes_on = not self._in_probation()
            while goes_on and self._collector.is_owed and not self._fenced:
                goes_on = self._guarded("collect", self._collect)
            self._guarded("journal", lambda: self._heart.end(how, reason))

    def note_receipt(self, attempt: int, receipt: dict[str, Any]) -> None:
        """See `CoordinatorClient.note_receipt`."""
        with self._lock:
            journal.write_receipt(self._storage, attempt, receipt)

    def note_failure(self) -> None:
        """Workers failed; the first word of it since the attempt began starts the clock of `reschedule_s`."""
        with self._lock:
            self._outage.note_failure()

    # ------------------------------------------------------------ events

    def record(
        self, event: EventId, rank: int, records: tuple[ShardRecord, ...], trainer_state: TrainerState
    ) -> None:
        """See `CoordinatorClient.record`."""
        with self._lock:
            if not self._is_current(event.attempt) or self._fenced:
                return
            own = (event.step, event.attempt, event.part, rank)
            if any((row.step, row.attempt, row.part, row.rank) != own for row in records):
                raise ValueError(f"rows of another event or rank in {event.folder}, rank {rank}")
            self._book.add(event, rank, records, trainer_state, self._clock())
            self.tick()

    def lost(self, event: EventId, rank: int, reason: str) -> None:
        """See `CoordinatorClient.lost`."""
        with self._lock:
            if self._is_current(event.attempt) and not self._fenced:
                self._book.rank_lost(event, rank, reason)
                self._alerts.add(f"event of step {event.step} is lost: rank {rank}: {reason}")
                self.tick()

    def heartbeat(
        self, attempt: int, step: int, trainer_state: TrainerState, drift: dict[str, float]
    ) -> HeartbeatReply:
        """See `CoordinatorClient.heartbeat`. Alerts are told once."""
        with self._lock:
            if not self._is_current(attempt) or self._fenced:
                return HeartbeatReply(fenced=True)
            self._heart.beat(step, trainer_state, drift)
            self._expect_selected(trainer_state)
            self.tick()
            return HeartbeatReply(
                committed_step=self._book.newest_committed[0],
                committed_part=self._book.newest_committed[1],
                lost_steps=self._book.lost_steps,
                fenced=self._fenced,
                alerts=self._alerts.take(),
                demoted=scrub_order.demoted(self._facts) if self._facts else (),
            )

    def status(self) -> dict[str, Any]:
        """See `CoordinatorClient.status`: the keys of `layercheck status --json` and counts of this attempt.

        From memory alone, so that it may be asked often; empty before the first attempt.
        """
        with self._lock:
            if self._facts is None:
                return {}
            facts, beat = self._facts, self._heart.progress
            if beat is not None:
                facts = replace(facts, progress=facts.progress | {beat.attempt: beat})
            return summarize(facts) | {
                "num_commits": self._book.num_committed,
                "num_lost": self._book.num_lost,
                "open_events": len(self._book.open),
                "alerts": list(self._alerts.recent),
                "committed_bytes": facts.committed_bytes,
            }

    def tick(self) -> None:
        """Does what is due: journals progress, declares late events lost, commits, collects."""
        with self._lock:
            if self._record is None or self._fenced:
                return
            if self._heart.is_due():
                self._journal_heartbeat()
            if not self._outage.is_known and (silence := self._heart.take_silence()):
                self._alerts.recent.append(silence)  # not for rank 0, whose silence it is
                self._say(silence)
            for event in self._book.expire(self._clock(), self._config.event_timeout_s):
                self._alerts.add(f"event of step {event.step} is lost: {self._book.lost[event]}")
            committed = False
            while not self._fenced and (entry := self._book.next_complete(self._clock())):
                committed |= self._commit(entry)
            if self._collector.is_due(committed) and not self._fenced and not self._in_probation():
                self._guarded("collect", self._collect)

    def close(self) -> None:
        """Journals the newest heartbeat; ends the scrubbing."""
        if self._scrubber is not None:
            self._scrubber.close()
        with self._lock:
            self._journal_heartbeat()

    # ------------------------------------------------------------ rot

    def scrub_in_background(self) -> None:
        """Reads live versions again, once in `scrub_hours`, until `close`."""
        if self._config.scrub_hours and self._scrubber is None:
            self._scrubber = Scrubber(self._storage, self, self._config.scrub_hours)
            self._scrubber.start()

    def facts(self) -> StoreFacts | None:
        """See `scrub.Manifest`."""
        with self._lock:
            return None if self._fenced else self._facts

    def rotten(self, bad: BadShard) -> None:
        """See `scrub.Manifest`. The layer counts as old as its version before, and is due at once."""
        with self._lock:
            if self._facts is None or self._fenced or not self._still_ours():
                return
            self._guarded("blacklist", lambda: journal.blacklist_shard(self._storage, bad))
            self._facts = replace(self._facts, bad=(*self._facts.bad, bad))
            self._alerts.add(f"layer {bad.layer} of step {bad.step} has rotted: {bad.error}")

    # ------------------------------------------------------------ claims

    def _read(self) -> StoreFacts:
        """The store and what the vaults hold, with the newest heartbeat if it was heard here."""
        facts = replace(journal.load_facts(self._storage), held=self._held)
        newest, beat = facts.newest, self._heart.progress
        if newest is None or beat is None or newest.attempt != beat.attempt:
            return facts
        return replace(facts, progress=facts.progress | {beat.attempt: beat}, live_attempt=beat.attempt)

    def _granted(self, claim: Claim, wait_s: float = 0.0) -> AttemptGrant:
        """Makes a claim the current attempt and says what it got."""
        notes = list(claim.facts.notes)
        if claim.plan is None:
            notes.append(f"run {claim.facts.run.name} holds no step yet: it starts afresh")
        self._outage.ends(self._heart, self._record, claim.record, wait_s)
        self._adopt(claim.facts, claim.plan)
        record, before = claim.record, asdict(self._outage.before)
        return AttemptGrant(record.attempt, record.r_b, claim.plan, notes=tuple(notes), **before)

    def _adopt(self, facts: StoreFacts, plan: RecoveryPlan | None = None) -> None:
        """Makes the newest attempt of the store the current one; all older ones are fenced off."""
        self._facts, self._record, self._fenced = facts.packed(), facts.newest, False
        if self._record is None:
            return
        self._recovered = not is_fresh(facts, self._record)
        attempt = self._record.attempt
        own = [commit.event for commit in facts.commits if commit.event.attempt == attempt]
        if self._book.attempt != attempt:
            self._book = EventBook(attempt, self._record.world_size, own)
            self._heart.follow(self._record, facts.progress.get(attempt), plan)
            self._collector.begin()
            self._outage.forget()

    # ------------------------------------------------------------ commits

    def _is_current(self, attempt: int) -> bool:
        return self._record is not None and self._record.attempt == attempt

    def _still_ours(self) -> bool:
        """A zombie may neither commit nor delete (I8)."""
        assert self._record is not None
        self._fenced = not is_ours(self._storage, self._record)
        return not self._fenced

    def _commit(self, entry: OpenEvent) -> bool:
        """Writes one commit; False if it has to be tried again, is lost, or is no longer ours to write."""
        assert self._record is not None
        assert self._facts is not None
        commit = Commit(
            event=entry.event,
            records=entry.records,
            trainer_state=entry.trainer_state,
            lineage=self._record.lineage,
        )
        try:
            if not self._still_ours():
                return False
            journal.write_commit(self._storage, commit, entry.row_texts)
        except StorageError as error:
            why = f"its commit failed: {error.message}"
            if self._book.commit_failed(entry.event, why, self._config.write_retries, self._clock()):
                self._alerts.add(f"event of step {entry.event.step} is lost: {why}")
            return False
        self._book.commit(entry.event)
        self._facts = self._facts.with_commit(commit)
        return True

    def _expect_selected(self, trainer_state: TrainerState) -> None:
        """Learns from the session's own books which events must be under way.

        One built anew never heard of them; unless they come or are lost a later commit would pass for theirs.
        """
        assert self._record is not None
        steps = (step for step in steps_on_their_way(trainer_state) if step > self._record.r_b)
        self._book.expect(steps, self._clock())

    # ------------------------------------------------------------ the rest

    def _journal_heartbeat(self) -> None:
        if self._heart.is_unsaved and not self._fenced:
            self._guarded("journal", self._save_heartbeat)

    def _save_heartbeat(self) -> None:
        if self._still_ours():
            self._heart.save()

    def _in_probation(self) -> bool:
        """True while nothing that the plan used may be deleted (I13)."""
        if self._record is None or not self._recovered:
            return False
        beat = self._heart.progress
        reached = max(beat.step if beat else 0, self._book.newest_committed[0])
        return reached < self._record.r_b + self._config.probation_steps

    def _collect(self) -> None:
        assert self._facts is not None
        if self._still_ours():
            self._facts = self._collector.run(self._facts, frozenset(self._book.lost))

    def _guarded(self, what: str, act: Callable[[], None]) -> bool:
        """A storage that refuses bookkeeping is an alert, never the end of training (I9); then False."""
        try:
            act()
        except StorageError as error:
            self._alerts.add(f"{what}: {error.message}")
            return False
        return True
