"""Waiting for the nodes of a cluster, and leaving one: what is decided, without a cluster."""

import pytest

from cluster.leave import Tenants, leave, tenants
from cluster.local import main as local_main
from cluster.wait import NodesMissingError, main, wait_for_nodes
from tests.fakes import Clock


def test_nodes_are_asked_for_until_there_are_enough() -> None:
    clock, answers = Clock(), iter([ConnectionError("no"), 1, 2, 5])

    def count() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait_for_nodes(3, 60, count, clock, clock.sleep) == 5


def test_nodes_that_do_not_come_are_one_error_that_says_how_many_came() -> None:
    clock = Clock()
    with pytest.raises(NodesMissingError, match="4 Ray nodes were not up within 5 s: 3 are there"):
        wait_for_nodes(4, 5, lambda: 3, clock, clock.sleep)


def test_a_cluster_that_never_answers_is_an_error_too() -> None:
    clock = Clock()

    def count() -> int:
        raise ConnectionError("refused\nmore")

    with pytest.raises(NodesMissingError, match=r"no cluster answers \(refused\)"):
        wait_for_nodes(1, 5, count, clock, clock.sleep)


def test_without_an_address_nobody_is_asked(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["--nodes", "2"]) == 2
    assert "set RAY_ADDRESS" in capsys.readouterr().err


LINES = [
    (1, ["ray::RayTrainWorker.execute"]),
    (2, ["ray::CoordinatorActor"]),
    (3, ["/bin/sh", "-c", "python -m app --config tiny"]),
    (4, ["python", "-m", "app", "--config", "tiny"]),
    (5, ["python", "-m", "simulations.ettr"]),
    (6, []),
]


def test_workers_and_drivers_are_told_from_the_rest() -> None:
    assert tenants(LINES) == Tenants(workers=(1,), drivers=(4,))


class Node:
    """A node whose tenants end `after_s` seconds after they were told."""

    def __init__(self, found: Tenants, after_s: float) -> None:
        self.clock, self.found, self.after_s = Clock(), found, after_s
        self.clock.now = 0.0
        self.drained: list[float] = []
        self.ended: list[int] = []

    def look(self) -> Tenants:
        return self.found if self.clock() < self.after_s else Tenants((), ())

    def leave(self, deadline_s: float) -> bool:
        return leave(
            deadline_s, self.look, self.drained.append, self.ended.append, self.clock, self.clock.sleep
        )


def test_a_node_with_workers_is_drained_and_waits_until_they_are_gone() -> None:
    node = Node(Tenants(workers=(1, 2), drivers=()), after_s=40)
    assert node.leave(120)
    assert (node.drained, node.ended) == ([120], [])
    assert 40 <= node.clock() < 42


def test_a_node_with_the_driver_ends_the_run_alone() -> None:
    node = Node(Tenants(workers=(1,), drivers=(4,)), after_s=3)
    assert node.leave(120)
    assert (node.drained, node.ended) == ([], [4])


def test_an_empty_node_leaves_at_once() -> None:
    node = Node(Tenants((), ()), after_s=0)
    assert node.leave(120)
    assert (node.clock(), node.drained, node.ended) == (0.0, [], [])


def test_at_the_deadline_it_says_that_something_still_runs() -> None:
    node = Node(Tenants(workers=(1,), drivers=()), after_s=1e9)
    assert not node.leave(10)


@pytest.mark.parametrize("args", [["--nodes", "0"], ["--nodes", "two"], ["--cpus", "-1"]])
def test_a_cluster_of_no_nodes_is_refused(args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        local_main(args)
    assert caught.value.code == 2
