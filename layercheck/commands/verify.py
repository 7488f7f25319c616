"""`layercheck verify`: reads every byte that a recovery could need and checks it as a recovery would."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from layercheck.commands.answer import DAMAGE, GOOD, Answer, size, table
from layercheck.commands.store import Store
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import DamagedShardError, StorageError
from layercheck.layers import LayerSpec
from layercheck.manifest import Commit, EventId, ShardRecord
from layercheck.persistence.shard_file import ShardHeader, read_header
from layercheck.persistence.storage import Storage

_CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bad:
    """One thing that is not as it was written. A damaged commit has no layer."""

    file: str
    layer: str | None
    step: int
    error: str


def verify(store: Store) -> Answer:
    """Checks every live version: headers, checksums, and that the ranks' slices cover each parameter."""
    facts, storage = store.facts(), store.layercheck
    bad = [_damaged_commit(facts, event) for event in facts.damaged]
    checked = nbytes = 0
    for commit in facts.live_commits(facts.lineage):
        found = list(_check_commit(storage, facts, commit))
        if found and storage.size(commit.event.commit_file) is None:
            continue  # a living run collected it while it was read
        bad += found
        checked += len(commit.records)
        nbytes += sum(row.nbytes for row in commit.records)
    value = {"checked": checked, "nbytes": nbytes, "bad": [_as_json(item) for item in bad]}
    return Answer(value, _text(value, bad), DAMAGE if bad or facts.notes else GOOD, facts.notes)


def _damaged_commit(facts: StoreFacts, event: EventId) -> Bad:
    said = [note for note in facts.notes if note.startswith(event.commit_file)]
    return Bad(event.commit_file, None, event.step, said[0] if said else "the commit counts as absent")


def _check_commit(storage: Storage, facts: StoreFacts, commit: Commit) -> Iterator[Bad]:
    headers: dict[str, ShardHeader] = {}
    for layer, rows in commit.by_layer.items():
        whole = True
        for row in rows:
            try:
                _twice(storage, row, headers)
            except StorageError as error:
                whole = False
                yield Bad(row.file, layer, row.step, error.message)
        spec = facts.run.layer_map.by_name.get(layer)
        if whole and spec is not None and (gap := _gap(spec, rows, headers)):
            yield Bad(rows[0].file, layer, rows[0].step, gap)


def _twice(storage: Storage, row: ShardRecord, headers: dict[str, ShardHeader]) -> None:
    """A failed read is tried once more, as recovery does before it gives a version up."""
    try:
        _check_shard(storage, row, headers)
    except StorageError:
        headers.pop(row.file, None)
        _check_shard(storage, row, headers)


def _check_shard(storage: Storage, row: ShardRecord, headers: dict[str, ShardHeader]) -> None:
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
    digest = _digest(storage, row)
    if digest != row.xxh3_128:
        raise DamagedShardError(f"{row.file}: checksum of layer {row.layer} is {digest}, not {row.xxh3_128}")


def _digest(storage: Storage, row: ShardRecord) -> str:
    """In chunks: a layer may be larger than the memory of the machine that looks at it."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_CHUNK_BYTES, row.nbytes)))
    for begin in range(row.begin, row.end, _CHUNK_BYTES):
        part = buffer[: min(_CHUNK_BYTES, row.end - begin)]
        storage.read_into(row.file, begin, part)
        state.update(part)
    return state.hexdigest()


def _gap(spec: LayerSpec, rows: tuple[ShardRecord, ...], headers: dict[str, ShardHeader]) -> str | None:
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


def _as_json(bad: Bad) -> dict[str, Any]:
    return {"file": bad.file, "layer": bad.layer, "step": bad.step, "error": bad.error}


def _text(value: dict[str, Any], bad: list[Bad]) -> str:
    head = f"{value['checked']} shards, {size(value['nbytes'])} read and checked: {len(bad) or 'none'} bad"
    if not bad:
        return head
    rows = [(item.file, item.layer or "-", str(item.step), item.error) for item in bad]
    return head + "\n\n" + table(("file", "layer", "step", "error"), rows)
