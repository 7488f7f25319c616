"""What a killed run lives on: one node, or two of which one is lost. SIGKILL of a worker, a node, or all."""

import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from app.measure.memory.spec import What
from app.measure.waits import wait_for
from cluster.head import PrivateHead, PrivateNode, start_head, start_node
from cluster.private_run import PrivateRun

NUM_WORKERS = 2
_WORKER = "ray::RayTrainWorker"


class Place:
    """The run and the cluster under it; a context manager that ends both.

    Args:
        folder: of all files of the run.
        name: of the run.
        config: a name in `app/configs/`.
        settings: `--set` items beyond it.
        what: will be killed.
        seed: of the choice of what is hit.
    """

    def __init__(
        self, folder: Path, name: str, config: str, settings: tuple[str, ...], what: What, seed: int
    ) -> None:
        self._what, self._rng = what, random.Random(seed)
        self._args = (folder, name, config, settings)
        self._stack = ExitStack()
        self._nodes: list[PrivateNode] = []
        self._head: PrivateHead | None = None
        self._hit: set[int] = set()
        self.run = PrivateRun(*self._args)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._what == "node":
                self._head = stack.enter_context(start_head(num_cpus=0))
                self._nodes = [stack.enter_context(start_node(self._head, 1)) for _ in range(NUM_WORKERS)]
                self.run = PrivateRun(*self._args, self._head)
            stack.callback(self.run.stop)
            self.run.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self) -> None:
        """Does what the next kill needs: workers that no kill has hit; a third node, where one is lost."""
        wait_for(
            self.run, lambda: len(self._fresh()) == NUM_WORKERS, "a worker group that was not killed yet"
        )
        if self._head is not None and len(self._nodes) == NUM_WORKERS:
            self._nodes.append(self._stack.enter_context(start_node(self._head, 1)))

    def kill(self) -> None:
        """The kill itself. A cluster that is gone is started again, and the run submitted to it.

        It hits the newest group: a worker that survived the kill before may live on for seconds.
        """
        fresh = self._fresh()
        self._hit.update(fresh)
        if self._what == "worker":
            os.kill(self._rng.choice(fresh), signal.SIGKILL)
        elif self._what == "node":
            hosts = [node for node in self._nodes if not set(fresh).isdisjoint(self._workers_of(node))]
            lost = self._rng.choice(hosts)
            self._nodes.remove(lost)
            lost.kill()
        else:
            self.run.stop()
            self.run.start()

    def _fresh(self) -> list[int]:
        return [pid for pid in self._workers() if pid not in self._hit]

    def _workers(self) -> list[int]:
        if self._head is None:
            return sorted(self.run.actors(_WORKER.removeprefix("ray::")))
        return sorted(pid for node in self._nodes for pid in self._workers_of(node))

    def _workers_of(self, node: PrivateNode) -> list[int]:
        return [pid for pid in node.members() if _WORKER.encode() in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
