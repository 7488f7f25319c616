"""What a session makes of the vaults: whom it asks, what it tells them, and that a dead one ends nothing."""

from collections.abc import Mapping
from typing import Any

import pytest

from layercheck.errors import VaultError
from layercheck.manifest import PlannedSave, RecoveryPlan
from layercheck.memory import tier as module
from layercheck.memory.held import Held
from layercheck.memory.reader import OwnCopy, PeerCopy
from layercheck.memory.tier import MemoryTier
from tests.shards import plan_of, shelf
from tests.vaults import TOKEN, memory_event


class Told:
    """A vault that notes what it is told; `is_dead` makes it answer nothing."""

    def __init__(self, node: str, *held: Held) -> None:
        self.node, self.held, self.is_dead = node, held, False
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.is_dead:
                raise VaultError(f"node {self.node} is gone")
            self.calls.append((name, *args))
            return self.held if name == "settle" else None

        return call


class Seen:
    """The vaults as one rank sees them."""

    run = "run"

    def __init__(self, own: Told, *others: Told) -> None:
        self.own, self.node = own, own.node
        self._others, self.closed = others, 0

    def others(self) -> Mapping[str, Any]:
        return {vault.node: vault for vault in self._others}

    def close(self) -> None:
        self.closed += 1


def held(node: str, rank: int, step: int = 5) -> Held:
    return Held(
        run="run", home=node, event=memory_event(step), rank=rank, world_size=2, token=TOKEN, nbytes=7,
        records=(), trainer_state={}, node=node,
    )  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Rank 0 on n0; rank 1, on n1, says what its own vault told it; n2 has copies and no rank."""
    of_rank_1 = [held("n1", 1)]

    def gather(mine: Any) -> list[Any]:
        if isinstance(mine, str):
            return [mine, "n1"]
        return [mine, of_rank_1 if isinstance(mine, list) else mine]

    monkeypatch.setattr(module, "gather", gather)
    return Seen(Told("n0", held("n0", 0)), Told("n1"), Told("n2", held("n2", 0), held("n2", 1)))


def test_rank_0_speaks_for_nodes_without_ranks_and_each_rank_for_its_own(seen: Seen) -> None:
    tier = MemoryTier(seen, 0, 2, 9.0)  # type: ignore[arg-type]
    found = tier.settle(TOKEN)
    assert sorted((one.node, one.rank) for one in found) == [("n0", 0), ("n1", 1), ("n2", 0), ("n2", 1)]
    assert seen.own.calls == [("settle", TOKEN, 9.0)]
    first, second = seen._others
    assert (first.calls, second.calls) == ([], [("settle", TOKEN, 9.0)])


def test_a_dead_vault_is_passed_over_at_every_turn(seen: Seen) -> None:
    tier = MemoryTier(seen, 0, 2, 9.0)  # type: ignore[arg-type]
    for vault in (seen.own, *seen._others):
        vault.is_dead = True
    assert [one.node for one in tier.settle(TOKEN)] == ["n1"]
    tier.began(None)
    tier.close(completed=True)
    assert seen.closed == 1


def test_the_own_node_is_read_before_others(seen: Seen) -> None:
    tier = MemoryTier(seen, 0, 2, 9.0)  # type: ignore[arg-type]
    tier.settle(TOKEN)
    copies = tier.reader(None)._copies  # type: ignore[arg-type]
    assert [type(one) for one in copies[memory_event(5).shard_file(0)]] == [OwnCopy, PeerCopy]
    assert [type(one) for one in copies[memory_event(5).shard_file(1)]] == [PeerCopy, PeerCopy]


def _plan(tmp_path: Any) -> RecoveryPlan:
    store = shelf(tmp_path, {"a": ((4,),), "b": ((4,),)})
    first, second = (store.put(layer, 3, 1) for layer in store.run.layer_map.layers)
    rows = tuple(row.model_copy(update={"file": memory_event(5).shard_file(0)}) for row in first.shards)
    newer = first.model_copy(update={"memory": PlannedSave(step=5, attempt=1, shards=rows)})
    return plan_of((newer, second))


def test_all_vaults_are_told_what_the_plan_came_from(seen: Seen, tmp_path: Any) -> None:
    tier = MemoryTier(seen, 0, 2, 9.0)  # type: ignore[arg-type]
    tier.settle(TOKEN)
    tier.began(_plan(tmp_path))
    for vault in (seen.own, *seen._others):
        assert vault.calls[-1] == ("began", TOKEN, {memory_event(5).shard_file(0)})


def test_the_receipt_names_the_farthest_tier_of_a_layer(seen: Seen, tmp_path: Any) -> None:
    tier = MemoryTier(seen, 0, 2, 9.0)  # type: ignore[arg-type]
    tier.settle(TOKEN)
    plan, reader = _plan(tmp_path), tier.reader(None)  # type: ignore[arg-type]
    reader.tiers = {memory_event(5).shard_file(0): "peer", plan.layers[1].shards[0].file: "storage"}
    assert tier.sources(plan, reader) == {"a": "peer", "b": "storage"}
    reader.tiers = {}
    assert tier.sources(plan, reader) == {"a": "memory", "b": "memory"}


@pytest.mark.parametrize(("completed", "ended"), [(True, [("end", 0)]), (False, [])])
def test_only_a_run_that_is_complete_frees_memory(seen: Seen, completed: bool, ended: list[Any]) -> None:
    tier = MemoryTier(seen, 0, 2, 9.0)  # type: ignore[arg-type]
    tier.settle(TOKEN)
    tier.close(completed)
    first, second = seen._others
    assert seen.own.calls[1:] == ended
    assert first.calls == []
    assert second.calls[1:] == ([("end", None)] if completed else [])
