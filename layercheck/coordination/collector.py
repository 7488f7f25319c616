"""Carries out collection: asks `collect` what may go and deletes it in an order that no crash can spoil."""

from collections.abc import Callable
from dataclasses import replace

from layercheck.config import LayerCheckConfig
from layercheck.coordination import journal
from layercheck.coordination.collect import Collection, Verdict, collect
from layercheck.coordination.facts import StoreFacts
from layercheck.manifest import EventId
from layercheck.persistence.storage import Storage

_SWEEP_AFTER_S = 600.0


class Collector:
    """Deletes what nothing needs, as the current attempt. The caller has just read its claim."""

    def __init__(self, storage: Storage, config: LayerCheckConfig, clock: Callable[[], float]) -> None:
        self._storage, self._config, self._clock = storage, config, clock
        self._frozen = False
        self._left_behind: list[str] = []
        self._sweep_at = 0.0

    def begin(self, sweep_after_s: float = _SWEEP_AFTER_S) -> None:
        """A new attempt begins: what froze the one before has been left behind, or is under probation.

        All that is seen is made durable first: what a commit replaces goes only if that commit stays.
        Unfinished writes that are there now are swept a while later. Newer ones are not, nor these at once:
        they may be those of another submission that is just about to claim its attempt.
        """
        self._frozen = False
        journal.settle(self._storage)
        self._left_behind = journal.unfinished(self._storage)
        self._sweep_at = self._clock() + sweep_after_s

    def freeze(self) -> None:
        """Nothing is deleted any more by this attempt: the state of the run is in doubt (I13)."""
        self._frozen = True

    def decide(self, facts: StoreFacts, lost: frozenset[EventId] = frozenset()) -> Collection:
        """What would be deleted and kept now."""
        folders = journal.event_folders(self._storage)
        return collect(facts, folders, self._config.keep_versions, self._config.keep_full, lost)

    def run(self, facts: StoreFacts, lost: frozenset[EventId] = frozenset()) -> StoreFacts:
        """Collects and returns the facts without what is gone.

        Raises:
            StorageError: the rest stays until the next collection.
        """
        if self._frozen:
            return facts
        doomed = self.decide(facts, lost).delete
        if doomed:
            self._keep_history(facts, doomed)
        for verdict in doomed:
            delete_event(self._storage, verdict.event)
        while self._left_behind and self._clock() >= self._sweep_at:
            self._storage.delete(self._left_behind[-1])
            self._left_behind.pop()
        gone = {verdict.event for verdict in doomed}
        return replace(facts, commits=tuple(c for c in facts.commits if c.event not in gone))

    def _keep_history(self, facts: StoreFacts, doomed: tuple[Verdict, ...]) -> None:
        """Rows outlive their events. Written first: a crash between leaves them twice, not never."""
        events = {verdict.event for verdict in doomed}
        rows = [row for commit in facts.commits if commit.event in events for row in commit.records]
        if rows:
            journal.append_history(self._storage, facts.lineage.attempt, rows)


def delete_event(storage: Storage, event: EventId) -> None:
    """Deletes one event, its commit first: a crash leaves an orphan, never a commit without shards."""
    storage.delete(event.commit_file)
    storage.delete(event.folder)
