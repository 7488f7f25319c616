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
        StoreMismatchError: model, optimizer class, layout or frozen weights differ; names the first
            difference.
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
    _check_frozen(storage, stored, run)
    return tuple(_changes(stored.config, run.config))


def _difference(stored: RunRecord, run: RunRecord) -> str | None:
    if stored.format_version != FORMAT_VERSION:
        return f"format {stored.format_version}, this version writes {FORMAT_VERSION}"
    if stored.optimizer != run.optimizer:
        return f"its optimizer is {stored.optimizer}, not {run.optimizer}"
    return stored.layer_map.difference(run.layer_map)


def _check_frozen(storage: Storage, stored: RunRecord, run: RunRecord) -> None:
    """With `frozen: source` the store has no other copy of these weights than the one just loaded."""
    if stored.frozen_hashes.keys() != run.frozen_hashes.keys():
        was, now = (("source" if one.frozen_hashes else "base") for one in (stored, run))
        raise StoreMismatchError(
            f"{storage.root} holds run {stored.name} with frozen={was!r}, not {now!r}: keep that setting, or "
            "use another run name",
            difference="frozen",
        )
    for layer, digest in run.frozen_hashes.items():
        if stored.frozen_hashes[layer] != digest:
            raise StoreMismatchError(
                f"layer {layer} has other weights than run {stored.name} began with (xxh3-128 {digest}, not "
                f"{stored.frozen_hashes[layer]}), and with frozen='source' {storage.root} holds no copy of "
                "them: load the model of that time, or use another run name",
                layer=layer,
            )


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
