"""`layercheck gc`: deletes by hand what the coordinator would delete after a commit, and says why."""

import time
from collections.abc import Callable
from typing import Any

from layercheck.commands.answer import Answer, size, table
from layercheck.commands.store import Store
from layercheck.config import LayerCheckConfig
from layercheck.coordination import journal, restarts
from layercheck.coordination.collect import Collection, Verdict
from layercheck.coordination.collector import Collector
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import is_fresh
from layercheck.errors import LayerCheckError, RunIsLiveError
from layercheck.manifest import Progress
from layercheck.persistence.storage import Storage

WATCH_S = 10.0
"""A living run changes its progress file at least every 5 s."""
_POLL_S = 0.5
Look = tuple[int, Progress | None]


class CollectionRefusedError(LayerCheckError):
    """Nothing may be deleted now: the state of the run is in doubt, or a recovery is on probation (I13)."""


def gc(
    store: Store,
    dry_run: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Deletes event folders that no plan can need. A dry run deletes nothing and works on a living run, too.

    Raises:
        RunIsLiveError: the progress file changed while it was watched, or a new attempt began.
        CollectionRefusedError: see there.
    """
    storage = store.layercheck
    if not dry_run:
        _refuse_if_live(storage, clock, sleep)
    before = _look(storage)
    facts = store.facts()
    collector = Collector(storage, _settings(facts), clock)
    collection = collector.decide(facts)
    value, text = _value(storage, collection), ""
    if not dry_run:
        _refuse_if_in_doubt(facts)
        if _look(storage) != before:
            raise _live(facts)
        collector.begin(sweep_after_s=0.0)
        collector.run(facts)
    text = _text(value, dry_run)
    return Answer(value, text, notes=facts.notes)


def _settings(facts: StoreFacts) -> LayerCheckConfig:
    """How much to keep, from the run itself; other settings play no part here."""
    kept = facts.run.config.get("checkpoint", {})
    return LayerCheckConfig(**{key: kept[key] for key in ("keep_versions", "keep_full") if key in kept})


# ---------------------------------------------------------------- when nothing may be deleted


def _refuse_if_live(storage: Storage, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    first = _look(storage)
    if first[1] is not None and first[1].ended is not None:
        return
    begun = clock()
    while clock() - begun < WATCH_S:
        sleep(_POLL_S)
        if _look(storage) != first:
            raise _live(journal.load_facts(storage))


def _look(storage: Storage) -> Look:
    newest = max(journal.attempt_numbers(storage), default=0)
    return newest, journal.read_progress(storage, newest) if newest else None


def _live(facts: StoreFacts) -> RunIsLiveError:
    beat = facts.progress.get(facts.newest.attempt) if facts.newest else None
    step = beat.step if beat else 0
    return RunIsLiveError(
        f"run {facts.run.name} is live (step {step}, moving) and collects by itself: end it first, or look "
        "with --dry-run",
        run=facts.run.name,
        step=step,
    )


def _refuse_if_in_doubt(facts: StoreFacts) -> None:
    newest = facts.newest
    beat = facts.progress.get(newest.attempt) if newest else None
    if newest is None:
        return
    if beat is not None and beat.ended == "failed" and restarts.is_poison(beat.reason):
        raise CollectionRefusedError(
            f"attempt {newest.attempt} of run {facts.run.name} ended in a non-finite state ({beat.reason}): "
            "nothing is deleted until a later attempt has trained on",
            attempt=newest.attempt,
        )
    reached = max(beat.step if beat else 0, facts.newest_commit_step(newest.attempt))
    until = newest.r_b + facts.run.config.get("checkpoint", {}).get("probation_steps", 0)
    if not is_fresh(facts, newest) and reached < until:
        raise CollectionRefusedError(
            f"attempt {newest.attempt} of run {facts.run.name} is on probation until step {until}: "
            "nothing that its plan used is deleted before",
            attempt=newest.attempt,
        )


# ---------------------------------------------------------------- what it says


def _value(storage: Storage, collection: Collection) -> dict[str, Any]:
    def entry(verdict: Verdict) -> dict[str, Any]:
        folder = verdict.event.folder
        nbytes = sum(storage.size(f"{folder}/{name}") or 0 for name in storage.list(folder))
        return {"event": folder, "nbytes": nbytes, "reason": verdict.reason}

    return {
        "delete": [entry(verdict) for verdict in collection.delete],
        "keep": [entry(verdict) for verdict in collection.keep],
    }


def _text(value: dict[str, Any], dry_run: bool) -> str:
    rows = [
        (row["event"], what, size(row["nbytes"]), row["reason"])
        for what, key in (("keep", "keep"), ("would delete" if dry_run else "deleted", "delete"))
        for row in value[key]
    ]
    freed, kept = (sum(row["nbytes"] for row in value[key]) for key in ("delete", "keep"))
    head = (
        f"{len(value['delete'])} events, {size(freed)} {'to free' if dry_run else 'freed'}; {size(kept)} kept"
    )
    return head + "\n\n" + table(("event", "", "size", "reason"), rows)
