"""[pure] Which live shard is read again next, and how slowly.

A disk rots silently, and the versions that live longest (a full event, frozen layers, layers that hardly
move) are the last resort of a recovery. So every live byte is read once in a period, at an even rate.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

from layercheck.coordination import residuals
from layercheck.coordination.facts import StoreFacts, Version, by_layer, version_in
from layercheck.layers import LayerStep
from layercheck.manifest import Commit, ShardRecord

ShardKey = tuple[str, str]
"""(file, layer)."""


def live_shards(facts: StoreFacts) -> tuple[ShardRecord, ...]:
    """What a recovery could come to need: the shards of all live versions that nobody found damaged.

    Of each version also its newest residual.
    """
    commits, bad = facts.live_commits(facts.lineage), facts.bad_saves
    versions, of_base = by_layer(commits, facts.run.layer_map), residuals.by_base(commits)
    good = [v for all_of in versions.values() for v in all_of if v.key not in bad]
    added = (residuals.newest(version, of_base, bad) for version in good)
    return tuple(shard for save in (*good, *filter(None, added)) for shard in save.shards)


def in_turn(live: Iterable[ShardRecord], read_at: Mapping[ShardKey, float], seed: int) -> list[ShardRecord]:
    """The shards in the order to read them: those not yet read by this process, then the ones read long ago.

    Those not yet read come in an order drawn from `seed` (the attempt): a run that is restarted more often
    than once in a period would otherwise read the same few again and again.
    """
    return sorted(live, key=lambda row: (read_at.get(key_of(row), -1.0), _draw(row, seed)))


def pause_s(nbytes: int, live_bytes: int, period_s: float) -> float:
    """Seconds to wait after reading `nbytes`, so that `live_bytes` take one period."""
    return period_s * min(1.0, nbytes / max(live_bytes, 1))


def key_of(row: ShardRecord) -> ShardKey:
    """What tells one shard from another."""
    return row.file, row.layer


def demoted(facts: StoreFacts) -> tuple[LayerStep, ...]:
    """The layers whose newest live version turned out damaged, with the step of the one that counts instead.

    Step -1 where none is left.
    """
    if not facts.bad:
        return ()
    newest_first = facts.live_commits(facts.lineage)[::-1]
    layers = sorted({layer for layer, *_ in facts.bad_saves} & facts.run.layer_map.by_name.keys())
    counts = ((layer, _instead(facts, newest_first, layer)) for layer in layers)
    return tuple(LayerStep(layer, step) for layer, step in counts if step is not None)


def _instead(facts: StoreFacts, newest_first: list[Commit], layer: str) -> int | None:
    """Step of the version that counts in place of the newest one; None if nothing older has to."""
    versions = list(_until_good(facts, newest_first, layer))
    if not versions:
        return None
    step = -1 if versions[-1].key in facts.bad_saves else versions[-1].event.step
    return step if step < versions[0].event.step else None


def _until_good(facts: StoreFacts, newest_first: list[Commit], layer: str) -> Iterator[Version]:
    """Versions of a layer, newest first, up to the first that nobody found damaged."""
    for commit in newest_first:
        version = version_in(commit, layer)
        if version is not None:
            yield version
            if version.key not in facts.bad_saves:
                return


def _draw(row: ShardRecord, seed: int) -> bytes:
    return blake2b(f"{seed} {row.file} {row.layer}".encode(), digest_size=8).digest()
