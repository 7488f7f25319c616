"""What may be deleted, and why (I5). Pure: the coordinator carries it out after a commit.

Collection goes by reachability, never by age: first everything that a plan could need is marked, then a whole
event goes only if nothing in it is marked.
"""

from dataclasses import dataclass

from layercheck.coordination import residuals
from layercheck.coordination.facts import State, StoreFacts, Version, by_layer, full_events
from layercheck.coordination.lineage import Lineage
from layercheck.manifest import EventId


@dataclass(frozen=True, slots=True)
class Verdict:
    """One event and what becomes of it. `committed`: its commit file has to go first."""

    event: EventId
    reason: str
    committed: bool = True


@dataclass(frozen=True, slots=True)
class Collection:
    """The events to delete, in step order, and those that stay; each with its reason."""

    delete: tuple[Verdict, ...] = ()
    keep: tuple[Verdict, ...] = ()


def collect(
    facts: StoreFacts,
    folders: list[EventId],
    keep_versions: int,
    keep_full: int,
    lost: frozenset[EventId] = frozenset(),
) -> Collection:
    """Decides about every event folder, as the newest attempt.

    Args:
        facts: what the store holds.
        folders: all event folders, committed or not.
        keep_versions: live versions kept of each layer; of a frozen layer all are kept.
        keep_full: live full events kept.
        lost: events of the newest attempt that were declared lost and can never commit.
    """
    lineage = facts.lineage
    needed = _needed(facts, lineage, keep_versions, keep_full)
    committed = {commit.event for commit in facts.commits}
    added = {commit.event for commit in facts.commits if commit.bases}
    damaged = frozenset(facts.damaged)
    oldest = min((event.step for event in needed), default=-1)
    delete, keep = [], []
    for event in folders:
        if event in needed:
            keep.append(Verdict(event, needed[event]))
        elif event.attempt > lineage.attempt:
            keep.append(Verdict(event, "of a newer attempt", event in committed))
        elif event in committed:
            live = lineage.is_live(event.step, event.attempt)
            kept_by = "saves" if event in added else "versions"
            delete.append(Verdict(event, f"newer {kept_by} of all its layers" if live else "dead branch"))
        elif event in damaged:
            old = event.step < oldest
            reason = (
                "damaged commit, older than all that is kept" if old else "damaged commit, may be repaired"
            )
            (delete if old else keep).append(Verdict(event, reason))
        elif event.attempt < lineage.attempt or event in lost:
            delete.append(Verdict(event, f"never committed by attempt {event.attempt}", committed=False))
        else:
            keep.append(Verdict(event, "being written", committed=False))
    return Collection(tuple(delete), tuple(keep))


def _needed(facts: StoreFacts, lineage: Lineage, keep_versions: int, keep_full: int) -> dict[EventId, str]:
    """Event -> why it stays. A damaged version is no version: it keeps nothing and counts as nothing.

    Each version that stays keeps its newest residual; one whose version goes, goes too.
    """
    layer_map, of_base = facts.run.layer_map, residuals.by_base(facts.live_commits(lineage))
    versions = {
        name: [version for version in all_of if version.key not in facts.bad_saves]
        for name, all_of in by_layer(facts.live_commits(lineage), layer_map).items()
    }
    needed: dict[EventId, str] = {}
    for state in full_events(versions, layer_map)[:keep_full]:
        for version in _at(versions, state):
            needed.setdefault(version.event, "full event")
    for layer in layer_map.layers:
        kept = versions[layer.name] if not layer.trainable else versions[layer.name][:keep_versions]
        for rank, version in enumerate(kept):
            needed.setdefault(version.event, f"version {rank + 1} of {layer.name}")
            if residual := residuals.newest(version, of_base, facts.bad_saves):
                needed.setdefault(residual.event, f"residual of {layer.name}")
    return needed


def _at(versions: dict[str, list[Version]], state: State) -> list[Version]:
    return [v for all_of in versions.values() for v in all_of if v.state == state]
