"""Hosts of GEMINI without Ray: one process each, reached by a socket, to be killed."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Listener
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from app.baselines.gemini.host import HostStore
from app.baselines.gemini.memory import HostMemoryError

_context = multiprocessing.get_context("forkserver")
_GONE = (ConnectionError, FileNotFoundError, EOFError)


class SocketHosts:
    """Implements `Hosts`: `<folder>/<host>` is the socket of a host. `here` is this rank's."""

    def __init__(self, folder: str, here: str) -> None:
        self._folder, self.here = Path(folder), here

    def own(self) -> Any:
        return SocketHost(self._folder / self.here)

    def living(self) -> dict[str, Any]:
        stores = {path.name: SocketHost(path) for path in sorted(self._folder.iterdir())}
        return {name: store for name, store in stores.items() if store.answers()}

    def end_own(self) -> None:
        with suppress(HostMemoryError):  # it answers by dying
            self.own().call("end")

    def end_all(self) -> None:
        for store in self.living().values():
            with suppress(HostMemoryError):
                store.call("end")


class SocketHost:
    """Calls of one host's store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return partial(self.call, name)

    def call(self, name: str, *args: Any) -> Any:
        try:
            with Client(str(self._path), "AF_UNIX") as connection:
                connection.send((name, args))
                good, value = connection.recv()
        except _GONE as error:
            raise HostMemoryError(f"host {self._path.name} is gone") from error
        if not good:
            raise value
        return value

    def answers(self) -> bool:
        with suppress(HostMemoryError):
            self.call("is_used")
            return True
        return False


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[dict[str, BaseProcess]]:
    """Starts a host process for each name; yields them to be killed."""
    folder.mkdir(exist_ok=True)
    found = {name: start_host(folder, name) for name in names}
    try:
        yield found
    finally:
        for process in found.values():
            process.kill()
            process.join()


def start_host(folder: Path, name: str) -> BaseProcess:
    ready, told = _context.Pipe(duplex=False)
    process = _context.Process(target=_serve, args=(str(folder / name), name, told), daemon=True)
    process.start()
    assert ready.poll(60), f"host {name} did not start"
    return process


def _serve(path: str, name: str, told: Any) -> None:
    Path(path).unlink(missing_ok=True)
    store, listener = HostStore(name), Listener(path, "AF_UNIX")
    told.send(True)
    while True:
        threading.Thread(target=_answer, args=(store, listener.accept()), daemon=True).start()


def _answer(store: HostStore, connection: Any) -> None:
    name, args = connection.recv()
    if name == "end":
        os._exit(0)
    try:
        connection.send((True, getattr(store, name)(*args)))
    except Exception as error:
        connection.send((False, error))
