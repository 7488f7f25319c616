"""Reads every live shard of a store and says which are not what their commit names."""

from dataclasses import dataclass

from xxhash import xxh3_128

from layercheck.coordination.facts import StoreFacts
from layercheck.errors import StorageError
from layercheck.manifest import Commit, ShardRecord
from layercheck.persistence.shard_file import read_header
from layercheck.persistence.storage import Storage

_CHUNK_BYTES = 8 * 1024 * 1024


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
    """Checks all live versions, also those that a plan of today would not use."""
    bad = [Fault(e.commit_file, "", e.step, "the commit cannot be trusted") for e in facts.damaged]
    rows: list[ShardRecord] = []
    for commit in facts.live_commits(facts.lineage):
        rows += commit.records
        bad += _check_headers(storage, commit)
    for row in rows:
        if error := _check_data(storage, row):
            bad.append(Fault(row.file, row.layer, row.step, error))
    return Audit(len(rows), sum(row.nbytes for row in rows), tuple(bad))


def _check_headers(storage: Storage, commit: Commit) -> list[Fault]:
    """The header says where each slice belongs; no checksum of the commit covers it."""
    faults = []
    for file, rank in sorted({(row.file, row.rank) for row in commit.records}):
        try:
            about = read_header(storage, file).about
            if (about.step, about.attempt, about.rank) != (commit.event.step, commit.event.attempt, rank):
                error = f"it is of step {about.step}, attempt {about.attempt}, rank {about.rank}"
            else:
                continue
        except StorageError as damage:
            error = damage.message
        faults += [Fault(file, row.layer, row.step, error) for row in commit.records if row.file == file]
    return faults


def _check_data(storage: Storage, row: ShardRecord) -> str | None:
    hasher = xxh3_128()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, row.nbytes)))
    try:
        for begin in range(row.begin, row.end, _CHUNK_BYTES):
            part = buffer[: min(_CHUNK_BYTES, row.end - begin)]
            storage.read_into(row.file, begin, part)
            hasher.update(part)
    except StorageError as error:
        return error.message
    return None if hasher.hexdigest() == row.xxh3_128 else "checksum does not match"
