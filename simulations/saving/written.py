"""What a run wrote after its warm-up, from its commits and their history."""

from collections import Counter
from dataclasses import dataclass
from statistics import median

from app.measure.regime import CHECKPOINT
from layercheck.coordination import history, journal
from layercheck.manifest import ShardRecord
from layercheck.persistence.storage import open_store


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes are those of all ranks; events of the warm-up are left out."""

    nbytes: int
    full_bytes: int
    writes_by_layer: dict[str, int]
    writes_by_reason: dict[str, int]
    median_shard_bytes: int


def written_in(store: str, last_step: int) -> Written:
    """Reads a store.

    Args:
        store: the run folder.
        last_step: newest step that counts.
    """
    rows = _all_rows(store)
    warmup = int(CHECKPOINT["warmup_steps"])
    measured = [row for row in rows if warmup < row.step <= last_step]
    first = [row for row in measured if row.rank == 0]
    files: Counter[str] = Counter()
    for row in measured:
        files[row.file] += row.nbytes
    return Written(
        nbytes=sum(row.nbytes for row in measured),
        full_bytes=sum(row.nbytes for row in rows if row.step == warmup),
        writes_by_layer={
            name: sum(row.layer == name for row in first) for name in {row.layer for row in rows}
        },
        writes_by_reason=dict(Counter(row.reason for row in first)),
        median_shard_bytes=int(median(files.values() or (0,))),
    )


def _all_rows(store: str) -> list[ShardRecord]:
    storage = open_store(store)
    kept = [row for commit in journal.load_facts(storage).commits for row in commit.records]
    gone = history.read_history(storage)
    unique = {(row.file, row.layer, row.rank): row for row in [*gone, *kept]}
    return list(unique.values())
