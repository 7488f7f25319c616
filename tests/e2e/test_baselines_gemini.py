"""GEMINI under Ray Train: a trainer, a node, then both nodes of a shard are killed; every state is exact."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.head import PrivateHead, PrivateNode, start_head, start_node
from cluster.witness import Notes
from tests.e2e.deaths import Deaths, kill, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

SETTINGS = {
    "checkpoint.method": "gemini",
    "checkpoint.baseline.gemini.storage_every": 12,
    "train.dtype": "fp32",
    "train.steps": 100_000,
}
STORE = "ray::HostActor"
TRAINER = "ray::RayTrainWorker"


def test_trainers_then_a_node_then_both_nodes_of_a_shard_are_lost(tmp_path):
    run = Deaths(_folder(tmp_path, "killed"), **SETTINGS, **{"faults.kill": "[{rank: 1, step: 6}]"})
    with ExitStack() as stack:
        head = stack.enter_context(start_head(num_cpus=0))
        nodes = _start(stack, head, 2)  # no spare one: the killed trainer comes back where its copy is
        run.submit(head)
        run.wait_for_step(10, attempt=2)
        assert all(len(processes_of(node, STORE)) == 1 for node in _training(nodes))
        nodes += _start(stack, head, 1)
        nodes[1].kill()
        run.wait_for_step(run.reached(2) + 8, attempt=3)
        nodes += _start(stack, head, 2)
        for node in _training(nodes):
            node.kill()
        run.wait_for_step(run.reached(3), attempt=4)
        run.end_driver()
        reference = Deaths(_folder(tmp_path, "reference"), **{**SETTINGS, "checkpoint.method": "none"})
        reference.settings["train.steps"] = run.reached(4)
        reference.submit(stack.enter_context(start_head(num_cpus=2)))
        assert reference.finish() == 0, reference.words()
    sources = [json.loads(path.read_text())["source"] for path in sorted(_receipts(run))]
    assert [source.partition(",")[0] for source in sources] == ["host memory", "host memory", "storage"]
    assert sources[0].endswith("2 shards of the own host, 0 of another")
    assert sources[1].endswith("1 shards of the own host, 1 of another")
    _check_every_state(run, reference)


def test_a_store_that_dies_alone_is_replaced_and_its_rank_pulls_from_the_peer(tmp_path):
    run = Deaths(tmp_path, **SETTINGS)
    with ExitStack() as stack:
        head = stack.enter_context(start_head(num_cpus=0))
        nodes = _start(stack, head, 2)
        run.submit(head)
        run.wait_for_step(4)
        (store,) = processes_of(nodes[0], STORE)
        kill(store)
        run.wait(lambda: processes_of(nodes[0], STORE) not in ([], [store]), "a new store")
        run.wait_for_step(run.reached(1) + 4)
        (store,) = processes_of(nodes[1], STORE)
        kill(store)  # now only the new store has copies, until the next step
        (trainer,) = processes_of(nodes[1], TRAINER)
        kill(trainer)
        run.wait_for_step(run.reached(1) + 4, attempt=2)
        run.end_driver()
    (receipt,) = _receipts(run)
    assert json.loads(receipt.read_text())["source"].startswith("host memory")


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def _start(stack: ExitStack, head: PrivateHead, count: int) -> list[PrivateNode]:
    return [stack.enter_context(start_node(head, 1)) for _ in range(count)]


def _training(nodes: list[PrivateNode]) -> list[PrivateNode]:
    found = [node for node in nodes if processes_of(node, TRAINER)]
    assert len(found) == 2, "each rank was to have a node of its own"
    return found


def _receipts(run: Deaths) -> list[Path]:
    return list((run.run / "gemini" / "attempts").glob("*.receipt.json"))


def _check_every_state(run: Deaths, reference: Deaths) -> None:
    """Each step of each life, and what each recovery installed, is that of the uninterrupted run."""
    expected = {
        (life.rank, step): hashes for life in Notes(reference.notes).lives() for step, hashes in life.steps
    }
    lives = Notes(run.notes).lives()
    assert {life.attempt for life in lives} >= {1, 2, 3, 4}
    for life in lives:
        for step, hashes in life.steps:
            assert hashes == expected.get((life.rank, step), hashes), (life.attempt, life.rank, step)
        if life.attempt > 1:
            assert life.installed == expected[life.rank, life.resume_step - 1], life.attempt
