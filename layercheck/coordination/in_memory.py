"""[pure] Which versions in the memory of the nodes a plan may use, and where it uses them.

The rule is that of I15, with tokens in place of commit numbers: a segment counts if the attempt that made it
is in the lineage, if every later attempt was told of it before it was planned, and if it is of no step that
was undone. So what a zombie seals after its successor has asked is dead, whatever it is called.
"""

from collections.abc import Iterable, Mapping

from layercheck.coordination.facts import StoreFacts, Version, by_layer
from layercheck.coordination.lineage import Lineage
from layercheck.manifest import BadShard, Commit, EventId, PlannedSave
from layercheck.memory.held import Held


def live_events(facts: StoreFacts, lineage: Lineage) -> list[Commit]:
    """The events that all ranks of their world have sealed and that count for a chain, oldest first.

    Each is as a commit would say it. Copies of one rank's segment on several nodes are one.
    """
    ranks: dict[EventId, dict[int, Held]] = {}
    for held in facts.held:
        if _is_live(held, facts, lineage):
            ranks.setdefault(held.event, {}).setdefault(held.rank, held)
    whole = [found for found in ranks.values() if sorted(found) == list(range(_world_size(found)))]
    commits = [
        Commit(
            event=found[0].event,
            records=tuple(row for rank in sorted(found) for row in found[rank].records),
            trainer_state=found[0].trainer_state,
            lineage=(),
        )
        for found in whole
    ]
    return sorted(commits, key=lambda c: (c.event.step, c.event.attempt, c.event.part))


def newer_versions(
    facts: StoreFacts, events: Iterable[Commit], saved: dict[str, Version], t_fail: int
) -> dict[str, PlannedSave]:
    """Layer -> its newest version in memory, where that is newer than what the storage has.

    Args:
        facts: the store.
        events: as `live_events` gave them.
        saved: what would be loaded without them: the newest residual of a layer, or its version.
        t_fail: the last step that counts as done.
    """
    versions = by_layer((e for e in events if e.event.step <= t_fail), facts.run.layer_map)
    found: dict[str, PlannedSave] = {}
    for name, all_of in versions.items():
        good = [v for v in all_of if v.key not in facts.bad_saves]
        if good and good[0].event.step >= _least_step(saved[name]):
            event = good[0].event
            found[name] = PlannedSave(step=event.step, attempt=event.attempt, shards=tuple(good[0].shards))
    return found


def without(
    held: tuple[Held, ...], bad: Iterable[BadShard], facts: StoreFacts
) -> tuple[tuple[Held, ...], list[BadShard]]:
    """What is left of the memory after some shards turned out bad, and those of them that the storage has.

    What memory alone had is forgotten; of a committed version the storage was read too before it was bad.
    """
    stored = {row.file for commit in facts.commits for row in commit.records}
    gone = {shard.file for shard in bad} - stored
    return tuple(one for one in held if one.file not in gone), [one for one in bad if one.file in stored]


def _least_step(saved: Version) -> int:
    """Beside a residual of the same step the version is better: exact, and its moments are of that step."""
    return saved.event.step + (saved.base is None)


def _is_live(held: Held, facts: StoreFacts, lineage: Lineage) -> bool:
    attempt, step = held.event.attempt, held.event.step
    made_by = facts.attempts.get(attempt)
    if made_by is None or made_by.token != held.token or step > lineage.rolled_back_to(attempt):
        return False
    chain = {link.attempt for link in lineage.links}
    later = [number for number in chain if number > attempt]
    tokens = {facts.attempts[number].token if number in facts.attempts else "" for number in later}
    return attempt in chain and tokens <= set(held.offered)


def _world_size(ranks: Mapping[int, Held]) -> int:
    return max(held.world_size for held in ranks.values())
