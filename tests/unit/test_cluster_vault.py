"""The vault's actor and client without a cluster: calls reach the plain class, errors come as their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from cluster import vault as module
from cluster.coordinator import normal_storage
from cluster.vault import ActorVault, VaultActor
from layercheck.config import LayerCheckConfig
from layercheck.errors import FencedError, VaultError
from layercheck.memory import folders, segment
from layercheck.memory.staging import About, MemorySink
from tests.vaults import NEXT, TOKEN, Rank, Told, memory_event

CONFIG = LayerCheckConfig(memory={"enabled": True, "budget_gb": 0.01})


class Handle:
    """An actor's handle: `ray.get` runs the call, after the failures that a test wants."""

    def __init__(self, actor: VaultActor, failures: list[Exception]) -> None:
        self.call = SimpleNamespace(remote=lambda name, *args: lambda: self._run(actor, name, args))
        self._failures = failures

    def _run(self, actor: VaultActor, name: str, args: tuple[Any, ...]) -> Any:
        if self._failures:
            raise self._failures.pop(0)
        return actor.call(name, *args)


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VaultActor]:
    killed: list[Any] = []
    monkeypatch.setattr(module.ray, "get", lambda answer, timeout: answer())
    monkeypatch.setattr(
        module.ray, "nodes", lambda: [{"NodeID": "node", "Alive": True}, {"NodeID": "dead", "Alive": False}]
    )
    monkeypatch.setattr(module.ray, "kill", lambda actor, no_restart: killed.append(actor))
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="me"))
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)
    storage = normal_storage(str(tmp_path))
    made = VaultActor("run", storage, "node", CONFIG)
    yield made
    made.call("end", None)
    made.over.join(5.0)
    assert killed == ["me"], "an actor whose run is complete ends itself"
    assert not Path(folders.folder_of(folders.run_key("run", storage), "node")).exists()


def client(actor: VaultActor, *failures: Exception) -> ActorVault:
    left = list(failures)
    return ActorVault("node", lambda: Handle(actor, left))


def test_a_rank_stages_through_the_actor_and_a_recovery_asks_it(actor: VaultActor, tmp_path: Path) -> None:
    vault, told = client(actor), Told()
    key = folders.run_key("run", normal_storage(str(tmp_path)))
    sink = MemorySink(vault, None, told, About(key, "node", 0, 1, TOKEN), wait_s=1.0)  # type: ignore[arg-type]
    Rank(sink, 0).stage(memory_event(3), ("a", "b"))
    assert vault.drain(0, 1.0)
    (held,) = vault.settle(NEXT, 1.0)
    assert (held.event, held.offered) == (memory_event(3), (NEXT,))
    path = Path(folders.folder_of(key, "node"), folders.segment_name(held.event, 0))
    data = path.read_bytes()[segment.DATA_AT :]
    assert vault.read(held.file, 0, held.nbytes) == data[: held.nbytes]
    vault.began(NEXT, {held.file})
    with pytest.raises(FencedError):
        vault.open(memory_event(4), 0, TOKEN, 10)


def test_a_vault_that_begins_deletes_what_dead_nodes_of_its_run_left(
    actor: VaultActor, tmp_path: Path
) -> None:
    key = folders.run_key("run", normal_storage(str(tmp_path)))
    dead, other = folders.folder_of(key, "dead"), folders.folder_of(f"{key[:-1]}x", "dead")
    for folder in (dead, other):
        folders.take(folder).release()
    try:
        client(actor).settle(NEXT, 1.0)
        assert not Path(dead).exists()
        assert Path(other).exists(), "of another run: it may belong to another cluster"
    finally:
        folders.sweep(run=f"{key[:-1]}x")


GONE: list[Callable[[], Exception]] = [
    lambda: ActorUnavailableError("it is being restarted", b"1" * 16),
    lambda: RayActorError(),
    lambda: GetTimeoutError("no answer"),
]


@pytest.mark.parametrize("gone", GONE)
def test_an_actor_that_comes_back_is_asked_again(actor: VaultActor, gone: Callable[[], Exception]) -> None:
    assert client(actor, gone(), gone()).settle(NEXT, 1.0) == ()


@pytest.mark.parametrize("gone", GONE)
def test_one_that_does_not_is_an_error_after_a_limit(
    actor: VaultActor, gone: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_LIMIT_S", 0.02)
    with pytest.raises(VaultError, match=r"vault of node node did not answer drain within 0\.05 s"):
        client(actor, *[gone() for _ in range(1000)]).drain(0, 0.03)


def test_a_node_without_a_vault_is_not_waited_for() -> None:
    def nobody() -> Any:
        raise ValueError("no such actor")

    with pytest.raises(VaultError, match="has no vault any more"):
        ActorVault("node", nobody).read("file", 0, 1)


def test_only_the_calls_of_a_vault_are_carried_out(actor: VaultActor) -> None:
    with pytest.raises(AttributeError, match="close"):
        actor.call("close")
