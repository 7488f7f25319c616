"""What a kill hits: the group that trains, not what is left of one that was killed before."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.measure.memory import places
from app.measure.memory.places import Place
from app.measure.memory.spec import What
from cluster.private_run import PrivateRun


class _Run:
    """A run whose living workers are a list."""

    def __init__(self) -> None:
        self.workers: list[int] = []

    def actors(self, name: str) -> list[int]:
        return self.workers

    def driver_ended(self) -> int | None:
        return None


class _Node:
    """A node with the workers that live on it, of any group."""

    def __init__(self, *workers: int) -> None:
        self.workers, self.is_lost = workers, False

    def members(self) -> list[int]:
        return list(self.workers)

    def kill(self) -> None:
        self.is_lost = True


def _place(folder: Path, what: What, seed: int) -> Any:
    place: Any = Place(folder, "run", "tiny", (), what, seed)
    assert isinstance(place.run, PrivateRun)
    place.run = _Run()
    return place


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_survived_the_kill_before_is_not_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, sig: killed.append((pid, sig)))
    place = _place(tmp_path, "worker", seed)
    for group in ([1, 2], [1, 2, 3, 4], [2, 4, 5, 6]):
        place.run.workers = group
        place.prepare()
        place.kill()
    assert [sig for _, sig in killed] == [signal.SIGKILL] * 3
    assert [(pid - 1) // 2 for pid, _ in killed] == [0, 1, 2], killed


@pytest.mark.parametrize("seed", range(8))
def test_a_node_is_lost_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(places, "_command_line", lambda pid: b"ray::RayTrainWorker")
    place = _place(tmp_path, "node", seed)
    place._head = SimpleNamespace()
    nodes = [_Node(1, 3), _Node(2), _Node(4)]
    place._nodes = list(nodes)
    place._hit = {1, 2}
    place.kill()
    assert [node.is_lost for node in nodes].count(True) == 1
    assert not nodes[1].is_lost
