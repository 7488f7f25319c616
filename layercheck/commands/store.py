"""Opens the STORE argument: a run folder or the `layercheck` folder inside it, local path or URI."""

import os
from dataclasses import dataclass

from layercheck.coordination import journal
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import ConfigError, StorageError
from layercheck.persistence.storage import Storage, open_run_folder, open_storage, open_store


@dataclass(frozen=True, slots=True)
class Store:
    """`layercheck` is where the versions lie; `run` the folder around it, with `metrics/` and `drift/`."""

    layercheck: Storage
    run: Storage

    def facts(self) -> StoreFacts:
        """Everything but the shards, read now.

        Raises:
            StoreMismatchError: `run.json` is damaged, or missing beside events.
        """
        return journal.load_facts(self.layercheck)


def open_both(store: str) -> Store:
    """Opens a store that holds a run.

    Raises:
        ConfigError: there is no run, or nothing that can be opened.
        StoreMismatchError: `run.json` is missing beside events.
    """
    parent, name, query = split(store)
    try:
        # The options of a URI (`?endpoint_override=...`) belong behind the folder, whichever it is.
        layercheck = open_storage(parent + query, name) if query else open_store(f"{parent}/{name}")
        opened = Store(layercheck, open_run_folder(parent + query, name))
    except StorageError as error:
        raise ConfigError(f"STORE={store!r}: {error.message}", store=store) from error
    if journal.read_run(opened.layercheck) is None:
        raise ConfigError(
            f"{opened.layercheck.root} holds no run: give the run folder or the layercheck folder inside it",
            store=store,
        )
    return opened


def split(store: str) -> tuple[str, str, str]:
    """(folder of runs, run, options of the URI) of a STORE argument; a local path becomes absolute."""
    path, mark, query = store.partition("?") if "://" in store else (store, "", "")
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
    parent, _, name = path.rstrip("/").removesuffix("/layercheck").rpartition("/")
    return parent, name, mark + query
