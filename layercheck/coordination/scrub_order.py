"""[pure] Which live shard is read again next, and how slowly.

A disk rots silently, and the versions that live longest (a full event, frozen layers, layers that hardly
move) are the last resort of a recovery. So every live byte is read once in a period, at an even rate.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b

from layercheck.coordination.facts import StoreFacts, Version, by_layer
from layercheck.manifest import LayerAge, ShardRecord

ShardKey = tuple[str, str]
"""(file, layer)."""


def live_shards(facts: StoreFacts) -> tuple[ShardRecord, ...]:
    """What a recovery could come to need: the shards of all live versions that nobody found damaged."""
    versions = by_layer(facts.live_commits(facts.lineage), facts.run.layer_map)
    good = (v for all_of in versions.values() for v in all_of if v.key not in facts.bad_versions)
    return tuple(shard for version in good for shard in version.shards)


def next_shard(
    live: Iterable[ShardRecord], read_at: Mapping[ShardKey, float], seed: int
) -> ShardRecord | None:
    """The shard to read next: one not yet read by this process, else the one read longest ago.

    Those not yet read come in an order drawn from `seed` (the attempt): a run that is restarted more often
    than once in a period would otherwise read the same few again and again.
    """
    return min(
        live,
        key=lambda row: (read_at.get(key_of(row), -1.0), _draw(row, seed)),
        default=None,
    )


def pause_s(nbytes: int, live_bytes: int, period_s: float) -> float:
    """Seconds to wait after reading `nbytes`, so that `live_bytes` take one period."""
    return period_s * min(1.0, nbytes / max(live_bytes, 1))


def key_of(row: ShardRecord) -> ShardKey:
    """What tells one shard from another."""
    return row.file, row.layer


def demoted(facts: StoreFacts) -> tuple[LayerAge, ...]:
    """The layers whose newest live version turned out damaged, with the step of the one that counts instead.

    Step -1 where none is left.
    """
    versions = by_layer(facts.live_commits(facts.lineage), facts.run.layer_map)
    rotten = {layer for layer, _, _ in facts.bad_versions}
    found = ((layer, versions[layer]) for layer in sorted(rotten & versions.keys()))
    return tuple(
        LayerAge(layer, _newest_good(facts, all_of))
        for layer, all_of in found
        if all_of and all_of[0].key in facts.bad_versions
    )


def _newest_good(facts: StoreFacts, versions: list[Version]) -> int:
    return next((v.event.step for v in versions if v.key not in facts.bad_versions), -1)


def _draw(row: ShardRecord, seed: int) -> bytes:
    return blake2b(f"{seed} {row.file} {row.layer}".encode(), digest_size=8).digest()
