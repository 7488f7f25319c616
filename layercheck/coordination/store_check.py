"""Whether a submission may continue the run in a store (I7)."""

from typing import Any

from layercheck.coordination import journal
from layercheck.errors import StorageError, StoreMismatchError
from layercheck.manifest import FORMAT_VERSION, RunRecord
from layercheck.persistence.storage import Storage


def check_run(storage: Storage, run: RunRecord, probe: str) -> tuple[str, ...]:
    """Creates `run.json`, or compares it with `run`.

    Returns:
        The settings that differ from those the run was begun with, as text.

    Raises:
        StorageError: the probe that rank 0 wrote is not seen from here.
        StoreMismatchError: model, optimizer class or layout differ; names the first difference.
    """
    if storage.size(probe) is None:
        raise StorageError(
            f"the coordinator does not see {probe} below {storage.root}, which rank 0 has just written: use "
            "a storage path that every node shares (`storage`)",
            path=probe,
        )
    if journal.read_run(storage) is None and journal.write_run(storage, run):
        return ()
    stored = journal.read_run(storage)
    assert stored is not None
    if difference := _difference(stored, run):
        raise StoreMismatchError(
            f"{storage.root} holds run {stored.name} of another kind: {difference}; use another run name",
            difference=difference,
        )
    return tuple(_changes(stored.config, run.config))


def _difference(stored: RunRecord, run: RunRecord) -> str | None:
    if stored.format_version != FORMAT_VERSION:
        return f"format {stored.format_version}, this version writes {FORMAT_VERSION}"
    if stored.optimizer != run.optimizer:
        return f"its optimizer is {stored.optimizer}, not {run.optimizer}"
    return stored.layer_map.difference(run.layer_map)


def _changes(stored: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for each leaf that differs."""
    changed = []
    for key in sorted(stored.keys() | now.keys()):
        old, new = stored.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append(f"{prefix}{key}: {old!r} -> {new!r}")
    return changed
