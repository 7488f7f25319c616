"""Opens the STORE argument: a run folder or the `layercheck` folder inside it, local path or URI."""

import os
from dataclasses import dataclass

from layercheck.coordination import journal
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import ConfigError, StorageError
from layercheck.persistence.storage import Storage, open_run_folder, open_store


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
    if "://" not in store:
        store = os.path.abspath(os.path.expanduser(store))
    parent, _, name = store.rstrip("/").removesuffix("/layercheck").rpartition("/")
    try:
        opened = Store(open_store(store), open_run_folder(parent or "/", name))
    except StorageError as error:
        raise ConfigError(f"STORE={store!r}: {error.message}", store=store) from error
    if journal.read_run(opened.layercheck) is None:
        raise ConfigError(
            f"{opened.layercheck.root} holds no run: give the run folder or the layercheck folder inside it",
            store=store,
        )
    return opened
