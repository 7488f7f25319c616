"""Carries out collection: asks `collect` what may go and deletes it in an order that no crash can spoil."""

from collections.abc import Callable
from dataclasses import replace

from layercheck.config import LayerCheckConfig
from layercheck.coordination import history, journal
from layercheck.coordination.collect import Collection, Verdict, collect
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.rows import joined
from layercheck.manifest import EventId
from layercheck.persistence.storage import Storage

_SWEEP_AFTER_S = 600.0
_REST = 19
_FILES_AT_ONCE = 4096


class Collector:
    """Deletes what nothing needs, as the current attempt. The caller has just read its claim.

    Commits wait while it works, and at 1,024 ranks an event is a folder of 1,025 files: so it deletes few
    files at once, and looks for more only after nineteen times as long as it took.
    """

    def __init__(self, storage: Storage, config: LayerCheckConfig, clock: Callable[[], float]) -> None:
        self._storage, self._config, self._clock = storage, config, clock
        self._frozen = False
        self._left_behind: list[str] = []
        self._sweep_at = 0.0
        self.is_owed = False
        """Something was committed since the last run."""
        self._rests_until = clock()

    def begin(self, sweep_after_s: float = _SWEEP_AFTER_S) -> None:
        """A new attempt begins: what froze the one before has been left behind, or is under probation.

        All that is seen is made durable first: what a commit replaces goes only if that commit stays.
        Unfinished writes that are there now are swept a while later. Newer ones are not, nor these at once:
        they may be those of another submission that is just about to claim its attempt.
        """
        self._frozen = self.is_owed = False
        journal.settle(self._storage)
        self._left_behind = journal.unfinished(self._storage)
        self._sweep_at = self._clock() + sweep_after_s

    def freeze(self) -> None:
        """Nothing is deleted any more by this attempt: the state of the run is in doubt (I13)."""
        self._frozen = True

    def is_due(self, committed: bool) -> bool:
        """Whether to run now; `committed`: something has been committed since the last question."""
        self.is_owed = self.is_owed or committed
        return self.is_owed and self._clock() >= self._rests_until

    def decide(self, facts: StoreFacts, lost: frozenset[EventId] = frozenset()) -> Collection:
        """What would be deleted and kept now."""
        folders = journal.event_folders(self._storage)
        return collect(facts, folders, self._config.keep_versions, self._config.keep_full, lost)

    def run(self, facts: StoreFacts, lost: frozenset[EventId] = frozenset()) -> StoreFacts:
        """Collects and returns the facts without what is gone.

        Raises:
            StorageError: the rest stays until the next collection.
        """
        self.is_owed, begun = False, self._clock()
        try:
            return facts if self._frozen else self._run(facts, lost)
        finally:
            now = self._clock()
            # What is left goes with the next calls: garbage must not come faster than it is taken away.
            self._rests_until = now if self.is_owed else now + _REST * (now - begun)

    def _run(self, facts: StoreFacts, lost: frozenset[EventId]) -> StoreFacts:
        every = self.decide(facts, lost).delete
        ranks = facts.newest.world_size if facts.newest else 1
        doomed = every[: max(1, _FILES_AT_ONCE // (ranks + 1))]
        if doomed:
            self._keep_history(facts, doomed)
        for verdict in doomed:
            delete_event(self._storage, verdict.event)
        while self._left_behind and self._clock() >= self._sweep_at:
            self._storage.delete(self._left_behind[-1])
            self._left_behind.pop()
        self.is_owed = len(doomed) < len(every)
        gone = {verdict.event for verdict in doomed}
        return replace(facts, commits=tuple(c for c in facts.commits if c.event not in gone))

    def _keep_history(self, facts: StoreFacts, doomed: tuple[Verdict, ...]) -> None:
        """Rows outlive their events. Written first: a crash between leaves them twice, not never."""
        events = {verdict.event for verdict in doomed}
        rows = joined(commit.records for commit in facts.commits if commit.event in events)
        if rows:
            history.append_history(self._storage, facts.lineage.attempt, rows)


def delete_event(storage: Storage, event: EventId) -> None:
    """Deletes one event, its commit first: a crash leaves an orphan, never a commit without shards."""
    storage.delete(event.commit_file)
    storage.delete(event.folder)
