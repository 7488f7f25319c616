"""Reads every live shard of a store and says which are not what their commit names, as a recovery would."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128

from layercheck.coordination.facts import StoreFacts
from layercheck.errors import DamagedShardError, StorageError
from layercheck.layers import LayerSpec
from layercheck.manifest import Commit, EventId, ShardRecord
from layercheck.persistence.shard_file import ShardHeader, read_header
from layercheck.persistence.storage import Storage

_CHUNK_BYTES = 8 * 1024 * 1024
Pace = Callable[[int], None]
"""Is told of each chunk that was read, in bytes; may wait."""


def _at_full_speed(_: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Fault:
    """One shard that no recovery may use; `layer` is empty where a whole commit is meant."""

    file: str
    layer: str
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Result: shards read, their bytes, what is wrong."""

    checked: int
    nbytes: int
    bad: tuple[Fault, ...]


def audit(storage: Storage, facts: StoreFacts) -> Audit:
    """Checks all live versions, also those that a plan of today would not use.

    Headers, checksums, and that the ranks' slices of a layer cover each of its parameters. An event that a
    living run collected while it was read is left out.
    """
    bad = [_damaged_commit(facts, event) for event in facts.damaged]
    checked = nbytes = 0
    for commit in facts.live_commits(facts.lineage):
        found = list(_check_commit(storage, facts, commit))
        if found and storage.size(commit.event.commit_file) is None:
            continue
        bad += found
        checked += len(commit.records)
        nbytes += sum(row.nbytes for row in commit.records)
    return Audit(checked, nbytes, tuple(bad))


def _damaged_commit(facts: StoreFacts, event: EventId) -> Fault:
    said = [note for note in facts.notes if note.startswith(event.commit_file)]
    return Fault(event.commit_file, "", event.step, said[0] if said else "the commit counts as absent")


def _check_commit(storage: Storage, facts: StoreFacts, commit: Commit) -> Iterator[Fault]:
    headers: dict[str, ShardHeader] = {}
    for layer, rows in commit.by_layer.items():
        whole = True
        for row in rows:
            try:
                check_twice(storage, row, headers)
            except StorageError as error:
                whole = False
                yield Fault(row.file, layer, row.step, error.message)
        spec = facts.run.layer_map.by_name.get(layer)
        if whole and spec is not None and (gap := _gap(spec, rows, headers)):
            yield Fault(rows[0].file, layer, rows[0].step, gap)


def check_twice(
    storage: Storage, row: ShardRecord, headers: dict[str, ShardHeader], pace: Pace = _at_full_speed
) -> None:
    """Reads one shard and its header; a failure is tried once more, as recovery does before it gives up.

    Raises:
        StorageError: it failed twice.
    """
    try:
        _check_shard(storage, row, headers, pace)
    except StorageError:
        headers.pop(row.file, None)
        _check_shard(storage, row, headers, pace)


def _check_shard(storage: Storage, row: ShardRecord, headers: dict[str, ShardHeader], pace: Pace) -> None:
    header = headers.get(row.file)
    if header is None:
        header = headers[row.file] = read_header(storage, row.file)
    about = header.about
    found = (about.step, about.attempt, about.part, about.rank, about.world_size)
    wanted = (row.step, row.attempt, row.part, row.rank, row.world_size)
    if found != wanted:
        raise DamagedShardError(f"{row.file}: (step, attempt, part, rank, world) is {found}, not {wanted}")
    tensors = header.of_layer(row.layer)
    if tensors and (tensors[0].begin, tensors[-1].end) != (row.begin, row.end):
        raise DamagedShardError(
            f"{row.file}: layer {row.layer} lies at {tensors[0].begin}..{tensors[-1].end}, "
            f"not {row.begin}..{row.end}"
        )
    digest = _digest(storage, row, pace)
    if digest != row.xxh3_128:
        raise DamagedShardError(f"{row.file}: checksum of layer {row.layer} is {digest}, not {row.xxh3_128}")


def _digest(storage: Storage, row: ShardRecord, pace: Pace) -> str:
    """In chunks: a layer may be larger than the memory of the machine that looks at it."""
    state, buffer = xxh3_128(), memoryview(bytearray(min(_CHUNK_BYTES, row.nbytes)))
    for begin in range(row.begin, row.end, _CHUNK_BYTES):
        part = buffer[: min(_CHUNK_BYTES, row.end - begin)]
        storage.read_into(row.file, begin, part)
        state.update(part)
        pace(len(part))
    return state.hexdigest()


def _gap(spec: LayerSpec, rows: Sequence[ShardRecord], headers: dict[str, ShardHeader]) -> str | None:
    """What the slices of all ranks leave out of a layer, or None if they tile every parameter."""
    for param in spec.params:
        reached = 0
        slices = [
            headers[row.file].slices[param.name] for row in rows if param.name in headers[row.file].slices
        ]
        for part in sorted(slices, key=lambda part: (part.offset, part.numel)):
            if part.numel and part.offset != reached:
                return f"parameter {param.name}: a slice begins at {part.offset}, not at {reached}"
            reached += part.numel
        if reached != param.numel:
            return f"the shards hold {reached} of {param.numel} elements of parameter {param.name}"
    return None
